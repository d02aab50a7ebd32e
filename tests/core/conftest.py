"""Files of small cases run without the compiler, by test_plain_python: seconds, where their kernels take minutes to
compile."""

from pathlib import Path

import pytest
from plainly import PLAIN

HERE = Path(__file__).parent
PLAINLY = (
    "schedulers/test_sglang_order.py",
    "schedulers/test_sglang_overlap.py",
    "schedulers/test_sglang_radix.py",
    "schedulers/test_sglang_rules.py",
    "schedulers/test_vllm_v0_caching.py",
    "schedulers/test_vllm_v0_chunked.py",
    "test_theory_pipelines.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where they would be compiled."""
    if PLAIN:
        return
    files = {HERE / name for name in PLAINLY}
    for item in items:
        if item.path in files:
            item.add_marker(pytest.mark.skip(reason="runs without the compiler, by test_plain_python"))
