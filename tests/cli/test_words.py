"""Plain English: phrases that nobody but us would write stand in no help, message, output or page."""

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from test_docs import APP, PAGES, help_of

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "scenario", "metrics", "plan", "report", "simulate", "deployment", "ui", "serve", "validation")
"""Rooms whose messages and docstrings users read."""
OF_DEVELOPERS = (r"\bbeside\b", r"of (its|your|their|our) own\b", r"handed over", r"so many (?!that)")
"""Good English in a few places that only developers read."""
BANNED = (
    r"so many (?!that)", r"in the mean\b", r"share of (the )?capacity", r"at an unchanged rate", r"known bad\b",
    r"kept up with", r"to be had", r"\bbeside\b", r", too[.;:)]", r"(?<!each )of (its|your|their|our) own\b(?! accord)",
    r"at both ends, of", r"the evidence does not tell", r"for which it is too much", r"more than are tried",
    r"nine of ten", r"half of the servers", r"at 90 %; half", r"all limits at once", r"ruled out by their bound",
    r"nothing to route", r"the limits are used to", r"too little for the rate", r"one step further", r"load draws",
    r"leave room to others", r"are told apart", r"until their place is needed", r"What is not said", r"handed over",
    r"Stand before a server", r"those in brackets may be none", r"first ones foremost", r"behind the wall's",
    r"the client's affair", r"prompts begin alike", r"errs alike", r"its requests are others",
    r"paid in the mean", r"keep every limit", r"of servers, at the same",
)  # fmt: skip
"""What a native engineer would not say."""


def said(file: Path) -> Iterator[tuple[int, str]]:
    """Texts of a module: strings and docstrings, with their lines."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, " ".join(node.value.split())


def found(text: str) -> list[str]:
    return [phrase for phrase in BANNED if re.search(phrase, text)]


@pytest.mark.parametrize("room", ROOMS)
def test_messages_and_docstrings_are_plain(room: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {phrase}"
        for file in sorted((ROOT / "src" / "windtunnel" / room).rglob("*.py"))
        for line, text in said(file)
        for phrase in found(text)
    ]
    assert wrong == []


def test_docstrings_of_all_rooms_are_plain() -> None:
    rooms = [room for room in sorted((ROOT / "src" / "windtunnel").iterdir()) if room.name not in ROOMS]
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {phrase}"
        for room in rooms
        for file in sorted(room.rglob("*.py"))
        for line, text in said(file)
        for phrase in found(text)
        if not any(spared in phrase for spared in OF_DEVELOPERS)
    ]
    assert wrong == []


def test_help_is_plain() -> None:
    wrong = []
    for words in help_of(APP):
        page = io.StringIO()
        APP.help_print(words, console=Console(file=page, width=400))
        wrong += [f"{' '.join(words)}: {phrase}" for phrase in found(" ".join(page.getvalue().split()))]
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_pages_are_plain(page: Path) -> None:
    assert found(" ".join(page.read_text(encoding="utf-8").split())) == []
