"""The documentation: every example runs and prints what the page shows; every link leads somewhere.

``python -m tests.test_docs`` writes the outputs again, ``python -m tests.test_docs docs/plan.md`` those of some pages.
"""

import ast
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_origin

import pytest
from cyclopts import App
from rich.console import Console

import windtunnel
from windtunnel.cli import COMMANDS, DONE, application, main
from windtunnel.perf.database import find_systems
from windtunnel.scenario.scenario import types

ROOT = Path(__file__).parents[1]
GENERATED = ("cli.md", "api.md", "estimators.md", "infermax.md", "experiments", "appendix")
"""Pages and folders of docs/ that commands write."""
WORDS = 25_000
"""Most words of the other pages."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
APP = application([name for commands in COMMANDS.values() for name in commands])
REFERENCE, API = ROOT / "docs" / "cli.md", ROOT / "docs" / "api.md"
MISSED = 1
BLOCK = re.compile(r"^```(console|shell|python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`((?:python -m )?(benchmarks(?:\.[a-z_]+)+)[^`]*)`")
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")
WIDTH = "110"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """An empty folder to be in, and a width of the output that does not depend on the terminal."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ.update(COLUMNS=WIDTH, NO_COLOR="1")
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


PROGRESS = re.compile(r"^windtunnel: .* candidates decided")
"""What a search says every 15 seconds: on a quick machine never."""


def output(words: list[str]) -> str:
    """What a command prints, on standard output and error."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(words)
    lines = printed.getvalue().splitlines()
    return "".join(line.rstrip() + "\n" for line in lines if not PROGRESS.search(line))


def run_shell(command: str) -> str:
    """What a command prints whose output no page shows; it ends well, or with a goal that is missed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = main(shlex.split(command)[1:])
    assert code in (DONE, MISSED), (command, code)
    return printed.getvalue()


def bold_below(block: re.Match[str]) -> list[str]:
    """What the paragraph below a block says in bold: words of its output."""
    paragraph = block.string[block.end() :].strip().partition("\n\n")[0]
    return [" ".join(said.casefold().split()) for said in re.findall(r"\*\*(.+?)\*\*", paragraph, re.DOTALL)]


def rendered(page: Path) -> str:
    """The page with every example run, and the outputs as they are now."""
    names: dict[str, object] = {}

    def run(match: re.Match[str]) -> str:
        kind, text = match[1], match[2]
        if kind == "yaml":
            first, _, rest = text.partition("\n")
            Path(first.removeprefix("# ")).write_text(rest, encoding="utf-8")
        elif kind == "python":
            first, _, rest = text.partition("\n")
            if first.startswith("# ") and first.endswith(".py"):
                Path(first.removeprefix("# ")).write_text(rest, encoding="utf-8")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, str(page), "exec"), names)
        elif kind == "shell" and "$ windtunnel " in text:
            printed = "".join(run_shell(command) for command in commands(text))
            missing = [said for said in bold_below(match) if said not in " ".join(printed.casefold().split())]
            assert not missing or find_systems() is None, f"{name(page)}: says {missing}, which is not in:\n{printed}"
        elif "$ windtunnel " in text:
            text = "".join(f"$ {command}\n" + output(shlex.split(command)[1:]) for command in commands(text))
        return f"```{kind}\n{text}```"

    with workplace():
        return BLOCK.sub(run, page.read_text(encoding="utf-8"))


def commands(text: str) -> list[str]:
    found = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    assert all(command.startswith("windtunnel ") for command in found), found
    return found


def reference() -> str:
    """The page of the command line: every command's help."""
    lines = ["# Command line", "", "Written by `python -m tests.test_docs` from `windtunnel --help`.", ""]
    for words in ([], *help_of(APP)):
        lines += [
            f"## {' '.join(['windtunnel', *words])}",
            "",
            "```text",
            help_text(words),
            "```",
            "",
        ]
    return "\n".join(lines)


def api() -> str:
    """The page of the Python interface: every public name with its signature and docstring."""
    lines = [
        "# Python",
        "",
        "Written by `python -m tests.test_docs` from the docstrings of `windtunnel`: `import windtunnel as wt`.",
        "",
    ]
    for word in sorted(windtunnel.__all__):
        thing = getattr(windtunnel, word)
        if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
            continue
        text = (inspect.getdoc(thing) or "").replace("``", "`")
        lines += [f"## {word}", "", "```text", f"wt.{word}{signature(thing)}", "```", "", text, ""]
    return "\n".join(lines).rstrip() + "\n"


def signature(thing: Any) -> str:
    """Its arguments, a line each where they are many."""
    parameters = list(inspect.signature(thing).parameters.values())
    if len(parameters) >= len(types()):  # the words of the command line, which have a page of their own
        word = inspect.Parameter("words", inspect.Parameter.VAR_KEYWORD, annotation=Any)
        parameters = [*(one for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY), word]
    bare = [
        one.replace(annotation=getattr(one.annotation, "__origin__", one.annotation)) if _is_annotated(one) else one
        for one in parameters
    ]
    found = [str(one).replace("windtunnel.", "") for one in bare]
    found = [re.sub(r"<class '([^']*)'>", r"\1", one.replace("<factory>", "…")) for one in found]
    return f"({', '.join(found)})" if sum(map(len, found)) < 90 else "(\n    " + ",\n    ".join(found) + "\n)"


def _is_annotated(parameter: inspect.Parameter) -> bool:
    """Whether its type carries remarks for the command line, which nobody reads here."""
    return get_origin(parameter.annotation) is Annotated


def help_text(words: list[str], app: App = APP) -> str:
    """The help of a command, at the documentation's width."""
    page = io.StringIO()
    app.help_print(words, console=Console(file=page, width=int(WIDTH)))
    return "\n".join(line.rstrip() for line in page.getvalue().strip("\n").splitlines())


def help_of(parent: object, path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for child in sorted(word for word in parent if not word.startswith("-")):  # type: ignore[attr-defined]
        yield [*path, child]
        yield from help_of(parent[child], (*path, child))  # type: ignore[index]


def test_there_are_commands_to_document() -> None:
    assert ["run"] in list(help_of(APP))
    assert ["trace", "convert"] in list(help_of(APP))
    assert main(["--version"]) == DONE


def test_the_help_says_of_commands_what_they_say_themselves() -> None:
    assert help_text([], application(())) == help_text([])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_examples_print_what_the_page_shows(page: Path) -> None:
    now = rendered(page)
    if (
        find_systems() is not None
    ):  # without the kernel database, times are modelled: the examples run, with other numbers
        assert now == page.read_text(encoding="utf-8"), "python -m tests.test_docs writes it again"


AGENTS = ROOT / "docs" / "agents.md"
SESSIONS = ROOT.parent / "shared" / "traces" / "agent_sessions"


@pytest.mark.long
@pytest.mark.skipif(find_systems() is None, reason="the kernel database is not here")
def test_as_many_agents_fit_with_a_store() -> None:
    page = AGENTS.read_text(encoding="utf-8")
    block, axis = BLOCK.search(page), re.search(r"as many with `(--axis [^`]*)`", page)
    assert block is not None and axis is not None
    found = " ".join(run_shell(f"{commands(block[2])[0]} {axis[1]}").split())
    (lanes,) = re.findall(r": (up to \d+) lanes of sessions", found)
    assert lanes in bold_below(block)
    assert len(re.findall(rf" 8 28\.72 {lanes.split()[-1]}\.0 ", found)) == 2  # without and with


@pytest.mark.long
@pytest.mark.skipif(not SESSIONS.is_dir(), reason="the public traces are not here")
def test_what_is_said_of_recorded_agents() -> None:
    page = " ".join(AGENTS.read_text(encoding="utf-8").split())
    command = re.search(r"`(windtunnel trace describe FOLDER [^`]*)`", page)
    said = re.search(r"(\d+), ([\d.]+ %) of prompts can be found, but ([\d.]+ %) with 32 in play", page)
    assert command is not None and said is not None
    printed = " ".join(run_shell(command[1].replace("FOLDER", str(SESSIONS))).split())
    assert f"sessions {said[1]} of" in printed and f"reuse {said[2]} of prompt tokens are found" in printed
    assert f"{said[3]} with memory for 1,048,576 tokens" in printed


def test_the_reference_is_the_help() -> None:
    with workplace():
        assert REFERENCE.read_text(encoding="utf-8") == reference(), "python -m tests.test_docs writes it again"


def test_the_python_page_is_what_the_docstrings_say() -> None:
    assert API.read_text(encoding="utf-8") == api(), "python -m tests.test_docs writes it again"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_benchmarks_that_a_page_names_are_there(page: Path) -> None:
    for command, module in NAMED.findall(" ".join(BLOCK.sub("", page.read_text(encoding="utf-8")).split())):
        found = find_spec(module)
        assert found is not None and found.origin is not None, command
        place = Path(found.origin)
        sources = [*place.parent.glob("*.py")] if found.submodule_search_locations else [place]
        text = "".join(source.read_text(encoding="utf-8") for source in sources)
        assert "__main__" in text, command
        for flag in re.findall(r"--([a-z-]+)", command):
            assert f'"--{flag}"' in text or flag.replace("-", "_") in text, command


def test_every_claim_has_a_verdict() -> None:
    rows = [row for page in PAGES for row in claims(page)]
    assert len(rows) > 40
    assert [row for row in rows if not all(row.values())] == []


def claims(page: Path) -> Iterator[dict[str, str]]:
    """Rows of tables with a column of claims."""
    columns: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if "claim" in columns and cells and not cells[-1].startswith("---"):
            yield {column: cell for column, cell in zip(columns, cells, strict=True) if column}
        columns = columns if columns and cells else cells


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match[1] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert [
        target for target in targets if not target.startswith("https://") and not (page.parent / target).exists()
    ] == []


def test_the_documentation_is_short() -> None:
    written = [page for page in PAGES[3:] if page.relative_to(ROOT / "docs").parts[0] not in GENERATED]
    counts = {name(page): len(page.read_text(encoding="utf-8").split()) for page in written}
    assert sum(counts.values()) <= WORDS, counts


def test_every_page_can_be_reached() -> None:
    linked = {
        (page.parent / match[1]).resolve()
        for page in PAGES
        for match in LINK.finditer(page.read_text(encoding="utf-8"))
    }
    assert [name(page) for page in PAGES[1:] if page.resolve() not in linked] == []


if __name__ == "__main__":
    with workplace():
        REFERENCE.write_text(reference(), encoding="utf-8")
        API.write_text(api(), encoding="utf-8")
    for changed in [Path(word).resolve() for word in sys.argv[1:]] or PAGES:
        changed.write_text(rendered(changed), encoding="utf-8")


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def shown(code: str, names: dict[str, Any]) -> object:
    """Run a cell; the value of its last line, which a notebook shows."""
    *lines, last = ast.parse(code).body
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    exec(compile(ast.Module([last], []), "cell", "exec"), names)
    return None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, tmp_path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    assert cells
    with contextlib.chdir(tmp_path):
        values = [shown(cell, names) for cell in cells]
    assert all(len(repr(value)) < 600 for value in values)
    assert any(value is not None for value in values)
    assert all(not cell.get("outputs") for cell in document["cells"]), "clear the outputs before committing"
