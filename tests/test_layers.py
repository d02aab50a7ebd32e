"""Imports only point down: every module is parsed and each of its imports compared with the order of the layers."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "windtunnel"
LAYERS = (
    ("errors",),
    ("model", "hardware"),
    ("workload", "policy"),
    ("deployment",),
    ("memory", "perf", "footprint"),
    ("reference", "core", "routing"),
    ("journal",),
    ("run", "replay", "custom", "pipelines", "schedulers"),
    ("overheads",),
    ("simulate",),
    ("metrics",),
    ("plan",),
    ("report",),
    ("bands", "strict"),
    ("validation",),
    ("outputs",),
    ("load",),
    ("scenario",),
    ("compare",),
    ("terminal",),
    ("cli",),
    ("__main__",),
)
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
        other = target.split(".")[1] if "." in target else "__init__"
        if other == "__init__":
            assert own == "cli" or target == "windtunnel", target
        elif other != own:
            assert LEVEL[other] < LEVEL[own], f"{dotted(path)} imports {target}, which is not below it"


def test_no_two_modules_import_each_other() -> None:
    graph = {dotted(path): {name for name in imports(path) if name != dotted(path)} for path in FILES}
    order = list(TopologicalSorter(graph).static_order())
    assert set(graph) <= set(order)
