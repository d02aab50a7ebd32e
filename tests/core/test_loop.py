"""The one loop makes what three loops made before it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle.disaggregated_records import run_disaggregated
from oracle.old_loops import run as old

from core.loop_cases import HANDING, MIXED, Case, handing_case, merged, mixed_case, unlike, with_contents
from windtunnel.core.disaggregation import handover
from windtunnel.core.disaggregation.handover import Crossing
from windtunnel.core.engine import Record, run
from windtunnel.errors import InputError
from windtunnel.policy.named import Router
from windtunnel.policy.routing import (
    LEAST_OUTSTANDING,
    POWER_OF_TWO,
    SCORED,
    SESSION_AFFINITY,
    DynamoKv,
    PrefixAware,
)

TESTS = Path(__file__).parents[1]
QUICK, MANY = 12, 2000


def outcome(case: Case, before: bool, jumps: bool = True) -> Record | str:
    """What a case gives on the old loops or the new one, or the words of the error that ends it."""
    try:
        if case.crossing is None:
            return (old.run if before else run)(case.fleet, case.demand, case.routers[0], case.uniforms, jumps)
        simulate = old.run_disaggregated if before else handover.run
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


STATEFUL = (
    Router(LEAST_OUTSTANDING),
    Router(POWER_OF_TWO),
    Router(SESSION_AFFINITY),
    Router(SCORED, routing=PrefixAware()),
    Router(SCORED, routing=DynamoKv()),
)


def unlike_reference(seed: int) -> list[str]:
    """What is not as in the reference where routers of prefill and decode pools remember what they have sent, and (in
    every other case) requests end that wait too long."""
    rng = np.random.default_rng(seed)
    case = handing_case(seed, 25, ("vllm", "cache", "trtllm-max-utilization"))
    kinds = 3 if case.fleet.lanes[0] > 1 else len(STATEFUL)  # the others and ranks: on the reference
    first, second = (STATEFUL[k] for k in rng.integers(kinds, size=2))
    fleet, demand = replace(case.fleet, routing=first.routing), with_contents(rng, case.demand)
    crossing = case.crossing or Crossing()
    if seed % 2:
        limits = replace(fleet.limits[1], num_blocks=fleet.limits[1].num_blocks // 3)
        fleet = replace(fleet, limits=(fleet.limits[0], limits))
        too_long = demand.prompt_tokens + demand.output_tokens > limits.num_blocks * limits.block_size - 64
        demand = replace(demand, refused=demand.refused | too_long)
        waits: Any = {"lease": float(rng.choice([0.05, 0.3, 1.0])), "timeout": float(rng.choice([0.1, 0.5, 2.0]))}
        rules: Any = replace(crossing.rules, on_expiry="fail", **waits)
        crossing = replace(crossing, rules=rules)
    known: Any = {"decode_router": (None, second.routing)}
    numbers = first.number, second.number
    x: Any = run_disaggregated(fleet, demand, (first, second), case.uniforms, crossing)
    y = handover.run(fleet, demand, numbers, case.uniforms, crossing, **known)
    found = [name for name in UNLIKE if not np.array_equal(x.requests[name], y.requests[name], equal_nan=True)]
    found += [name for name in WAYS if not np.array_equal(x.handovers[name], y.handovers[name], equal_nan=True)]
    for one in (x, y):
        one.rows["used_blocks"] = 0  # the reference writes them down before memory is given
    if merged(x.rows) != merged(y.rows):
        found.append("rows")
    if x.lost.tolist() != y.lost.tolist():
        found.append("lost")
    return found


UNLIKE = ("scheduled", "first_token", "finish", "preemptions", "cached_tokens", "lane")
WAYS = ("asked", "admitted", "transfer_start", "transfer_end", "joined", "prefill_lane")


def stateful_routers(first: int, last: int) -> str:
    """The seeds that are not equal, and how many are."""
    found = {seed: unlike_reference(seed) for seed in range(first, last)}
    wrong = [f"{seed}: {names}" for seed, names in found.items() if names]
    return "\n".join([*wrong, f"{len(found) - len(wrong)} equal"])


def in_plain_python(first: int, last: int, what: str = "compare_many") -> str:
    """``compare_many``, say, without the compiler, in a process of its own."""
    program = f"import sys; sys.path[:0] = [{str(TESTS)!r}]; from core.test_loop import {what}; "
    program += f"print({what}({first}, {last}))"
    some = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=some, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_one_loop_makes_what_three_made() -> None:
    assert in_plain_python(0, QUICK) == f"{2 * QUICK} equal"


def test_stateful_routers_of_pools_choose_as_in_the_reference() -> None:
    assert in_plain_python(0, QUICK, "stateful_routers") == f"{QUICK} equal"


@pytest.mark.long
def test_stateful_routers_of_pools_choose_as_in_the_reference_at_length() -> None:
    assert in_plain_python(QUICK, 500, "stateful_routers") == f"{500 - QUICK} equal"


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
