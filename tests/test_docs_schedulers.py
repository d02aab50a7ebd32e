"""The tables of docs/schedulers.md are those of the values.

``python -m tests.test_docs_schedulers`` writes them again.
"""

import ast
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from windtunnel.policy import Policy, unified
from windtunnel.policy.unified import POLICIES
from windtunnel.policy.vllm_v1 import VERSIONS

PAGE = Path(__file__).parents[1] / "docs" / "schedulers.md"
PART = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def shown(value: Any, default: Any) -> str:
    """A value as the table shows it."""
    if value == default:
        return "·"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "1/64" if value == 1 / 64 else str(value)


def table(values: dict[str, Any], default: Any, first: str) -> str:
    """Fields in which any value differs from the default, by value."""
    names = [
        field.name
        for field in fields(default)
        if any(getattr(value, field.name) != getattr(default, field.name) for value in values.values())
    ]
    lines = [f"| | {first} | {' | '.join(f'`{name}`' for name in values)} |", f"|---|---|{'---|' * len(values)}"]
    for name in names:
        usual = getattr(default, name)
        word = ("yes" if usual else "no") if isinstance(usual, bool) else str(usual)
        cells = [shown(getattr(value, name), usual) for value in values.values()]
        lines.append(f"| `{name}` | {word} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def docstrings() -> dict[str, str]:
    """The text below each preset."""
    body = ast.parse(Path(unified.__file__).read_text(encoding="utf-8")).body
    found = {}
    for assignment, text in pairwise(body):
        if isinstance(assignment, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            target = assignment.targets[0]
            assert isinstance(target, ast.Name)
            found[target.id] = " ".join(str(text.value.value).split())
    return found


def sources() -> str:
    """One line for each preset."""
    texts = docstrings()
    named = {name: next(k for k, v in vars(unified).items() if v is value) for name, value in POLICIES.items()}
    return "".join(f"- `{name}`: {texts[variable]}\n" for name, variable in named.items())


def page() -> str:
    """The page with its tables written again."""
    newest, *older = VERSIONS.items()
    parts = {
        "policies": table(POLICIES, Policy(), "default"),
        "sources": sources(),
        "versions": table(dict(older), newest[1], f"`{newest[0]}`"),
    }
    return PART.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n{match[3]}", PAGE.read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_values() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "python -m tests.test_docs_schedulers writes them again"


def test_every_preset_says_where_it_comes_from() -> None:
    assert all(len(line) > 60 for line in sources().splitlines())
    assert len(sources().splitlines()) == len(POLICIES)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
