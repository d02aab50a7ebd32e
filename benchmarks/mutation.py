"""Do the tests notice? Plant one careless mistake at a time in a copy of the package, and run the room's own tests.

``python -m benchmarks.mutation metrics --sample 20 --seed 1`` prints each mistake with whether a test failed, and the
share that was noticed. The mistakes are those that people make: off by one, a bound that is none, a dropped factor, a
wrong sign, a switch or a choice the other way round, an argument left to its default, two arguments in each other's
place, a statement left out. The tests run on a copy, so that
sources can be edited meanwhile; tests of the documentation take no part. A mistake is tried on those tests that run its
line, the quickest file first; where none does, as for constants and in worker processes, on all of the room.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "windtunnel"
SLOWER, SECONDS = 10.0, 60.0
"""A mistake that makes the tests run so many times as long, and so much more, is noticed."""

ROOMS = {
    "metrics": ("metrics/*.py",),
    "plan": ("plan/*.py",),
    "workload": ("workload/*.py",),
    "memory": ("deployment/memory*.py",),
    "report": ("report/*.py",),
    "serve": ("serve/*.py", "serve/kv/*.py", "serve/openai/*.py"),
    "presets": ("deployment/presets.py",),
    "handover": ("deployment/handover.py", "deployment/links.py", "report/handover_flags.py"),
    "deploy": (
        "launch/*.py",
        "report/launch_files.py",
        "report/serve_line.py",
        "report/manifests/*.py",
    ),
    "bounds": ("optimum/bounds.py", "optimum/relaxation.py", "optimum/certificate.py", "optimum/schedule.py"),
    "perf": (
        "perf/kernel.py",
        "perf/explain.py",
        "perf/kinds/gemm.py",
        "perf/tabulate/operators.py",
        "perf/tabulate/host.py",
    ),
}
"""Room: its files in the package, and so of its tests. Of perf the roofline, operators and host parts."""

TESTED_BESIDES = {
    "perf": ("tests/perf/tabulate/test_micro_batches.py",),
    "handover": (
        "tests/report/test_launch_files.py",
        "tests/report/test_serve_line.py",
        "tests/scenario/test_pools.py",
    ),
    "bounds": ("tests/optimum/test_bounds_plainly.py", "tests/optimum/test_search.py"),
}
"""Room: tests of its files that are named after another one, of which they need the same set-up."""

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Div,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor"}

OF_NO_EFFECT = {"dtype", "copy", "strict", "kind", "out", "encoding", "errors", "name", "daemon"}
"""Arguments without which the result is mostly equal."""


LOOKS = {
    *("bargap", "dash", "dtick", "hoverinfo", "hovertemplate", "line", "marker", "minsize", "nticks", "opacity"),
    *("shape", "size", "textangle", "thickness", "width", "xshift"),
}
"""Names of what a drawing looks like, not of what it says: numbers that these are set to are left as they are."""


@dataclass(frozen=True)
class Mistake:
    """One changed expression of one file."""

    path: Path
    tree: ast.Module
    parent: ast.AST
    field: str
    index: int | None
    """Where the expression stands in a field that is a list."""
    before: ast.AST
    after: ast.AST
    lines: range
    """Of its statement, without those that the statement holds."""

    def __str__(self) -> str:
        texts = f"{ast.unparse(self.before)}  ->  {ast.unparse(self.after)}"
        return f"{self.path.relative_to(PACKAGE)}:{getattr(self.before, 'lineno', 0)}: {texts}"

    def source(self) -> str:
        """The whole file with the mistake in it."""
        held = getattr(self.parent, self.field)
        after = self.after
        setattr(self.parent, self.field, after if self.index is None else _with(held, self.index, after))
        try:
            return ast.unparse(self.tree)
        finally:
            setattr(self.parent, self.field, held)


def _with(items: list[ast.AST], index: int, item: ast.AST) -> list[ast.AST]:
    return [*items[:index], item, *items[index + 1 :]]


def wrong(node: ast.AST) -> Iterator[ast.AST]:
    """The careless versions of an expression."""
    match node:
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield ast.Constant(value * 2 or 1.0)
        case ast.BinOp(op=ast.Mult() | ast.Div(), left=left, right=right):
            yield left
            yield right
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)  # type: ignore[arg-type]
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(OPERATORS[type(op)](), values)  # type: ignore[arg-type]
        case ast.Compare(ops=[op], left=left, comparators=comparators) if type(op) in OPERATORS:
            yield ast.Compare(left, [OPERATORS[type(op)]()], comparators)  # type: ignore[list-item]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Call():
            yield from wrong_calls(node)
        case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom()) | ast.AugAssign():
            yield ast.Pass()


def wrong_calls(call: ast.Call) -> Iterator[ast.AST]:
    """The call with an argument left to its default, or of the opposite function."""
    match call.args:
        case [ast.AST() as first, ast.AST() as second, *others] if not isinstance(second, ast.Starred):
            yield ast.Call(call.func, [second, first, *others], call.keywords)
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in OF_NO_EFFECT | LOOKS:
            yield ast.Call(call.func, call.args, [other for other in call.keywords if other is not keyword])
    match call.func:
        case ast.Name(id=name) if name in CALLS:
            yield ast.Call(ast.Name(CALLS[name]), call.args, call.keywords)
        case ast.Attribute(value=value, attr=name) if name in CALLS:
            yield ast.Call(ast.Attribute(value, CALLS[name]), call.args, call.keywords)


def places(node: ast.AST, within: range = range(0)) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, range]]:
    """(Parent, field, index, expression, lines) of all that runs: no annotations, decorators, messages or texts."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params") or isinstance(node, ast.Raise):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr) and not _looks(node, index, child):
                lines = _header(child) if isinstance(child, ast.stmt) else within
                yield node, field, index, child, lines
                yield from places(child, lines)


def _looks(node: ast.AST, index: int | None, child: ast.AST) -> bool:
    """Whether this is a value that only says what a drawing looks like, or that is mostly of no effect."""
    if not isinstance(child, ast.Constant):
        return False
    if isinstance(node, ast.Dict) and index is not None and child is node.values[index]:
        key = node.keys[index]
        return isinstance(key, ast.Constant) and key.value in LOOKS
    return isinstance(node, ast.keyword) and node.arg in LOOKS | OF_NO_EFFECT


def _header(statement: ast.stmt) -> range:
    body = getattr(statement, "body", None)
    return range(statement.lineno, body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1)


def mistakes(path: Path) -> Iterator[Mistake]:
    """Every mistake that can be planted in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for parent, field, index, child, lines in places(tree):
        for other in wrong(child):
            yield Mistake(path, tree, parent, field, index, child, other, lines)


def tests_of(room: str) -> list[str]:
    """The test files that mirror the files of a room, and those that test them besides."""
    mirrored = [Path("tests", pattern) for pattern in ROOMS[room]]
    found = {path for entry in mirrored for path in ROOT.glob(str(entry.with_name(f"test_{entry.name}")))}
    return sorted([*(str(path.relative_to(ROOT)) for path in found), *TESTED_BESIDES.get(room, ())])


Reached = dict[str, tuple[float, dict[str, set[int]]]]
"""Test → its seconds, and the lines of each file of the package that it runs."""


def reached_by(tests: list[str], folder: Path) -> Reached:
    """What the tests run, which must all pass."""
    path = folder / "reached.json"
    done = _pytest(tests, ROOT / "src", {"REACHED": str(path)})
    if done is None or done.returncode:
        raise SystemExit(f"the tests fail as it is: {done.stdout.decode()[-2000:] if done else 'no end'}")
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: (s, {file: set(lines) for file, lines in files.items()}) for name, (s, files) in found.items()}


def _pytest(
    tests: list[str], package: Path, more: dict[str, str], seconds: float | None = None
) -> subprocess.CompletedProcess[bytes] | None:
    """Run tests on a copy of the package up to the first failure; None: no end within these seconds."""
    environment = os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"} | more
    plugins = ("-p", "no:cacheprovider", "-p", "benchmarks.reached")
    command = (sys.executable, "-m", "pytest", "-x", "-q", *plugins, *tests)
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None


def reaching(mistake: Mistake, reached: Reached) -> list[str]:
    """The tests that run the mistake's statement, file by file, the quickest first; all if none does."""
    name = str(mistake.path.relative_to(PACKAGE))
    chosen = [test for test, (_, files) in reached.items() if not files.get(name, set()).isdisjoint(mistake.lines)]
    chosen = chosen or list(reached)
    files: dict[str, float] = {}
    for test in chosen:
        files[test.partition("::")[0]] = files.get(test.partition("::")[0], 0.0) + reached[test][0]
    return sorted(chosen, key=lambda test: (files[test.partition("::")[0]], test.partition("::")[0], reached[test][0]))


def noticed(mistake: Mistake, reached: Reached, copied: Path) -> bool:
    """Whether a test that runs it fails, or takes for ever."""
    tests = reaching(mistake, reached)
    target = copied / mistake.path.relative_to(ROOT / "src")
    target.write_text(mistake.source(), encoding="utf-8")
    try:
        done = _pytest(tests, copied, {}, SECONDS + SLOWER * sum(reached[test][0] for test in tests))
    finally:
        shutil.copy(mistake.path, target)
    if done is not None and done.returncode not in (0, 1, 2) and b"ERROR collecting" not in done.stdout:
        raise SystemExit(f"the tests did not run: {done.stdout.decode()[-2000:]}")
    return done is None or done.returncode != 0


def main() -> None:
    """Plant a sample of mistakes in one room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--sample", type=int, default=20, help="mistakes to plant")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    asked = parser.parse_args()
    patterns = ROOMS[asked.room]
    paths = sorted(path for pattern in patterns for path in PACKAGE.glob(pattern))
    found = [mistake for path in paths for mistake in mistakes(path)]
    sample = random.Random(asked.seed).sample(found, min(asked.sample, len(found)))
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder)
        reached = reached_by(tests_of(asked.room), copied)
        shutil.copytree(PACKAGE, copied / "windtunnel", ignore=shutil.ignore_patterns("__pycache__"))
        for mistake in sample:
            seen = noticed(mistake, reached, copied)
            caught += seen
            print("noticed " if seen else "SURVIVED", mistake, flush=True)
    print(f"{asked.room}: {caught} of {len(sample)} noticed ({caught / len(sample):.0%}), out of {len(found)} possible")


if __name__ == "__main__":
    main()
