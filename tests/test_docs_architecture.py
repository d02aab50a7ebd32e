"""docs/architecture.md: its drawing of the rooms is that of the imports, its example what the core does, and it names
every room and every file of the engine room.

``python tests/test_docs_architecture.py`` writes drawing and example again.
"""

import os
import re
import subprocess
import sys
from functools import cache

from test_layers import FILES, LEVEL, PACKAGE, ROOT, dotted, imports

PAGE, EXAMPLE = ROOT / "docs" / "architecture.md", ROOT / "tests" / "one_lane.py"
PART = re.compile(r"(<!-- (\w+)[^>]* -->\n).*?(<!-- end -->)", re.DOTALL)
BASE = {name for name, level in LEVEL.items() if level == 0} | {"__main__"}
"""Modules that every room may import; the drawing leaves them out."""


def arrows() -> dict[str, set[str]]:
    """Room → the rooms that it imports."""
    found: dict[str, set[str]] = {name: set() for name in LEVEL if name not in BASE}
    for path in FILES:
        own = dotted(path).split(".")[1]
        if own not in BASE:
            found[own] |= {target.split(".")[1] for target in imports(path)} - BASE - {own}
    return found


def drawing() -> str:
    """The rooms as a graph, without the arrows that follow from others."""
    graph = arrows()

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(graph[room].union(*(below(other) for other in graph[room])))

    lines = ["```mermaid", "graph TD"]
    for room in sorted(graph, key=lambda name: -LEVEL[name]):
        needed = sorted(other for other in graph[room] if not any(other in below(via) for via in graph[room]))
        if needed:
            lines.append(f"    {room} --> {' & '.join(needed)}")
    return "\n".join([*lines, "```", ""])


def example() -> str:
    """The table of the worked example, made by the core as plain Python."""
    command, surroundings = (sys.executable, str(EXAMPLE)), os.environ | {"NUMBA_DISABLE_JIT": "1"}
    return subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True).stdout


def page() -> str:
    """The page with its drawing and its example written again."""
    parts = {"rooms": drawing(), "example": example()}
    return PART.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n{match[3]}", PAGE.read_text(encoding="utf-8"))


def test_drawing_and_example_are_those_of_the_code() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "python tests/test_docs_architecture.py writes them again"


def test_every_room_and_every_file_of_the_engine_room_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = {path.name for path in (PACKAGE / "core").rglob("*.py")} - {"__init__.py"}
    assert files - set(re.findall(r"`(\w+\.py)`", text)) == set()
    assert [room for room in LEVEL if not re.search(rf"\b{room}\b", text)] == ["__main__"]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
