"""The core's functions without the compiler, through which a debugger steps, make the same schedules."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import equality
import equality_unified
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from core.conftest import PLAINLY, in_plain_python
from core.schedulers import sglang_cases
from core.schedulers.vllm_v0 import cases as vllm_v0_cases
from windtunnel.core.engine import Record
from windtunnel.errors import InputError

TESTS = Path(__file__).parents[1]
CASES = 8
SEEDS = st.integers(0, 2**32 - 1)
SEEN = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens", "generated", "state")
FAMILIES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "vLLM v1": (equality.by_core, equality.cases()),
    "vLLM v1 in pipelines": (equality.by_core, equality.pipeline_cases()),
    "vLLM v0": (vllm_v0_cases.by_core, vllm_v0_cases.cases()),
    "unified": (equality_unified.by_core, equality_unified.cases()),
    "unified in pipelines": (equality_unified.by_core, equality_unified.pipeline_cases()),
    "SGLang": (sglang_cases.by_core, SEEDS.map(sglang_cases.small_case)),
    "SGLang in pipelines": (sglang_cases.by_core, SEEDS.map(sglang_cases.small_pipeline)),
}


def outcome(family: str, case: Any) -> tuple[Any, ...]:
    """Everything that a case gives, or the words of the error that ends it."""
    try:
        record: Record = FAMILIES[family][0](case, True)
    except InputError as error:
        return (str(error),)
    return tuple(repr(column.tolist()) for column in (record.requests[list(SEEN)], record.rows, record.stalls))


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_python_gives_the_same(family: str, tmp_path: Path) -> None:
    cases: list[Any] = []

    @seed(0)
    @settings(
        max_examples=CASES, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(FAMILIES[family][1])
    def collect(case: Any) -> None:
        cases.append(case)

    collect()
    given_cases, found = tmp_path / "cases", tmp_path / "found"
    given_cases.write_bytes(pickle.dumps(cases))
    program = (
        f"import sys, pickle; from pathlib import Path; sys.path[:0] = [{str(TESTS)!r}]; "
        "from core.test_plain_python import outcome; "
        f"cases = pickle.loads(Path({str(given_cases)!r}).read_bytes()); "
        f"Path({str(found)!r}).write_bytes(pickle.dumps([outcome({family!r}, case) for case in cases]))"
    )
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, check=True)
    assert pickle.loads(found.read_bytes()) == [outcome(family, case) for case in cases]


@pytest.mark.parametrize(
    ("files", "some"),
    [
        (("schedulers/test_mixed.py",), ""),
        (("test_handover.py",), "until_it_is_due"),
        (("../replay/test_sglang_sessions.py",), "02 or 04 or 05"),
        (PLAINLY, ""),
    ],
    ids=["mixed", "handover", "sessions", "small cases"],
)
def test_files_run_without_the_compiler(files: tuple[str, ...], some: str) -> None:
    said = in_plain_python(10, *(TESTS / "core" / name for name in files), some=some)
    assert " passed" in said and " skipped" not in said


def test_marked_tests_run_without_the_compiler() -> None:
    others = (TESTS / name for name in ("metrics/test_bands.py", "launch/test_capabilities.py"))
    places = (TESTS / "core" / "test_routing.py", *others, TESTS / "oracle", TESTS / "simulate")
    said = in_plain_python(8, *places, marked="plain_python and not long")
    assert " passed" in said and " skipped" not in said
