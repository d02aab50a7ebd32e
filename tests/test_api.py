"""The public names: all there, typed, lazily imported, and not shadowed by the modules they live in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import windtunnel as wt

SOURCE = Path(wt.__file__).read_text(encoding="utf-8")


def test_every_public_name_exists() -> None:
    for name in wt.__all__:
        assert getattr(wt, name) is not None
    assert set(wt.__all__) <= set(dir(wt))


def test_type_checkers_and_python_see_the_same_names() -> None:
    branch = next(node for node in ast.parse(SOURCE).body if isinstance(node, ast.If))
    typed = {alias.name for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == set(wt.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="simulat"):
        wt.simulat  # noqa: B018


@pytest.mark.parametrize("first", ["windtunnel.simulate", "windtunnel.cli.run", "windtunnel"])
def test_simulate_is_the_function_whatever_was_imported_first(first: str) -> None:
    code = f"import {first}\nimport windtunnel.simulate\nassert type(windtunnel.simulate).__name__ == 'function'"
    subprocess.run((sys.executable, "-c", code), check=True)
