"""The one loop makes what three loops made before it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracle.old_loops import run as old

from core.loop_cases import HANDING, MIXED, Case, handing_case, mixed_case, unlike
from windtunnel.core.apart import handover
from windtunnel.core.engine import Record, run
from windtunnel.errors import InputError

TESTS = Path(__file__).parents[1]
QUICK, MANY = 20, 2000


def outcome(case: Case, before: bool, jumps: bool = True) -> Record | str:
    """What a case gives on the old loops or the new one, or the words of the error that ends it."""
    try:
        if case.crossing is None:
            return (old.run if before else run)(case.fleet, case.demand, case.routers[0], case.uniforms, jumps)
        simulate = old.run_apart if before else handover.run
        return simulate(case.fleet, case.demand, case.routers, case.uniforms, case.crossing, jumps)
    except InputError as error:
        return str(error)


def compare(case: Case, jumps: bool = True) -> list[str]:
    """What is not equal."""
    x, y = outcome(case, True, jumps), outcome(case, False, jumps)
    if isinstance(x, str) or isinstance(y, str):
        return [] if x == y else [f"{x} / {y}"]
    return unlike(x, y)


def compare_many(first: int, last: int, n: int = 40) -> str:
    """The seeds of cases that are not equal, and how many are."""
    equal, wrong = 0, []
    for seed in range(first, last):
        for make in (mixed_case, handing_case):
            found = compare(make(seed, n), jumps=seed % 5 > 0)
            equal += not found
            if found:
                wrong.append(f"{make.__name__}({seed}): {found}")
    return "\n".join([*wrong, f"{equal} equal"])


def in_plain_python(first: int, last: int) -> str:
    """``compare_many`` without the compiler, in a process of its own."""
    program = f"import sys; sys.path[:0] = [{str(TESTS)!r}]; from core.test_loop import compare_many; "
    program += f"print(compare_many({first}, {last}))"
    some = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=some, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_one_loop_makes_what_three_made() -> None:
    assert in_plain_python(0, QUICK) == f"{2 * QUICK} equal"


@pytest.mark.long
def test_one_loop_makes_what_three_made_at_length() -> None:
    assert in_plain_python(QUICK, MANY) == f"{2 * (MANY - QUICK)} equal"


@pytest.mark.long
@pytest.mark.parametrize("kind", MIXED)
def test_many_requests_on_mixed_pools(kind: str) -> None:
    for seed in range(20):
        assert not compare(mixed_case(seed, 3000, (kind,))), seed


@pytest.mark.long
@pytest.mark.parametrize("kind", HANDING)
def test_many_requests_on_prefill_and_decode_pools(kind: str) -> None:
    for seed in range(20):
        assert not compare(handing_case(seed, 3000, (kind,))), seed
