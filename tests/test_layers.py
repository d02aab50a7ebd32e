"""Imports only point down: every module is parsed and each of its imports compared with the order of the layers."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE, CONTRIBUTING = ROOT / "src" / "windtunnel", ROOT / "CONTRIBUTING.md"
INTRODUCTION = """
Imports only point to lower numbers (`tests/test_layers.py`, which this drawing is made from); data flows up.

"""
LAYERS = (
    ("dataclass", "errors", "files", "hardware", "version"),
    ("model", "workload", "policy"),
    ("deployment",),
    ("launch", "perf"),
    ("core",),
    ("replay", "simulate"),
    ("metrics",),
    ("plan", "optimum"),
    ("report", "validation", "profiling"),
    ("scenario",),
    ("serve",),
    ("ui",),
    ("cli",),
    ("__main__",),
)
"""The rooms from the bottom up. A module imports from its own room and from lower levels; those of the lowest level may
import each other."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path) for path in PACKAGE.rglob("*.py")}


def imports(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "windtunnel")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are written from the package's name"
            if (node.module or "").split(".")[0] == "windtunnel":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in NAMES else str(node.module)


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_imports_point_down(path: Path) -> None:
    own = dotted(path).split(".")[1]
    assert own in LEVEL, f"{own} has no place among the layers: add it to LAYERS where it belongs"
    for target in imports(path):
        assert "." in target, f"{dotted(path)} imports the package itself, which stands above everything"
        other = target.split(".")[1]
        assert other == own or LEVEL[other] < LEVEL[own] or LEVEL[own] == 0, (
            f"{dotted(path)} imports {target}, which is not below it"
        )


def drawing() -> str:
    """The levels as CONTRIBUTING.md shows them, the highest first, with the first sentence of each room's docstring."""
    lines = []
    for name, level in sorted(LEVEL.items(), key=lambda item: -item[1]):
        if name == "__main__":
            continue
        path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        sentence = re.split(r"\.\s", f"{text}\n")[0].replace("\n", " ").replace("``", "`")
        said = re.sub(f"(?i)^{name}s?: (.)", lambda match: match[1].upper(), sentence)
        lines.append(f"{level:2} {name:<10}  {said}\n")
    return "".join(lines)


def contributing() -> str:
    """CONTRIBUTING.md with the drawing of these layers."""
    page = CONTRIBUTING.read_text(encoding="utf-8")
    return re.sub(
        r"(?<=## Layers\n).*?```\n.*?```", lambda _: f"{INTRODUCTION}```\n{drawing()}```", page, flags=re.DOTALL
    )


def test_contributing_shows_these_layers() -> None:
    assert CONTRIBUTING.read_text(encoding="utf-8") == contributing(), "python -m tests.test_layers writes it again"


def test_every_layer_exists() -> None:
    assert set(LEVEL) == {dotted(path).split(".")[1] for path in FILES}


def test_no_two_modules_import_each_other() -> None:
    graph = {dotted(path): {name for name in imports(path) if name != dotted(path)} for path in FILES}
    order = list(TopologicalSorter(graph).static_order())
    assert set(graph) <= set(order)


if __name__ == "__main__":
    CONTRIBUTING.write_text(contributing(), encoding="utf-8")
