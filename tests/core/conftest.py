"""With the compiler, the files of small cases are left to test_plain_python."""

from pathlib import Path

import pytest
from numba.core import config

from core.plainly import PLAINLY

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where they would be compiled."""
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return
    files = {HERE / name for name in PLAINLY}
    for item in items:
        if item.path in files:
            item.add_marker(pytest.mark.skip(reason="runs without the compiler, by test_plain_python"))
