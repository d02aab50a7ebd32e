"""A deployment of pools with unlike schedulers: each replica runs as it would alone with the requests that it gets."""

import os
from dataclasses import dataclass, fields, replace
from typing import Any

import equality
import equality_unified
import numpy as np
import pytest
from equality import _contents, _sessions
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config

from core.schedulers.sglang_cases import small_case, small_pipeline
from core.schedulers.vllm_v0 import cases as vllm_v0_cases
from windtunnel.core.dispatch import SCHEDULERS, fields_of, kinds_of
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.rebuild import iteration_times
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import (
    Limits,
    Policy,
    Settings,
    Sglang,
    Trtllm,
    UserScheduler,
    VllmV0,
    VllmV1,
    WholeBatches,
    can_ever_run,
)
from windtunnel.policy.routing import ROUTE_SCORE
from windtunnel.simulate.run import Iterations

pytestmark = pytest.mark.plain_python

POOL = ("limits", "policies", "times", "replicas", "lanes", "lockstep")
CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
REQUESTS = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens", "generated", "state")
STAGES = ("v1 stages", "unified stages", "sglang stages")
ALL = ("v1", "v1 cached", "v0", "v0 cached", "unified", "sglang", "sglang radix", *STAGES)
LOOPS = ("open", "open", "concurrency", "sessions")
COMPILED = ("v1 cached", "sglang radix")
"""Those that are tried with the compiler, in an open loop: each further set of schedulers is compiled anew."""


@dataclass(frozen=True)
class Case:
    """One simulation."""

    fleet: Fleet
    demand: Demand
    router: int
    uniforms: Any


def by_prompt(replica: int, outstanding: int, prompt_tokens: int, arrival: float) -> float:  # noqa: ARG001
    """A fixed rule."""
    return float((prompt_tokens + replica) % 5)


@st.composite
def pools(draw: st.DrawFn, kind: str) -> tuple[Limits, Settings, Any, int, int, bool]:
    """Limits, policy, times, replicas, lanes and lockstep of a pool."""
    case: Any
    if kind in STAGES:
        in_stages = {
            "v1 stages": equality.pipeline_cases(),
            "unified stages": equality_unified.pipeline_cases(),
            "sglang stages": st.builds(small_pipeline, st.integers(0, 2**32 - 1)),
        }
        case = draw(in_stages[kind])
        policy: Any = case.policy
    elif kind.startswith("sglang"):
        case = small_case(draw(st.integers(0, 2**32 - 1)))
        radix = kind == "sglang radix"
        needs = case.policy.schedule_policy == "shortest-prefill-first" and not radix
        order = "fcfs" if needs else case.policy.schedule_policy
        policy = replace(case.policy.with_drafts(None), radix_cache=radix, schedule_policy=order)
    elif kind == "unified":
        case = draw(equality_unified.cases())
        policy = case.policy
    elif kind.startswith("v0"):
        case = draw(vllm_v0_cases.cases())
        return case.limits, replace(case.policy, prefix_caching=kind == "v0 cached"), case.times, 1, 1, False
    else:
        case = draw(equality.cases())
        policy = replace(case.policy, prefix_caching=kind == "v1 cached")
    return case.limits, policy, case.times, min(case.replicas, 2), case.lanes, case.lockstep


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...], loops: tuple[str, ...] = LOOPS) -> Case:
    """Pools of these kinds in any order, and requests that any of them could run."""
    chosen = draw(st.permutations(kinds))
    columns: Any = zip(*[draw(pools(kind)) for kind in chosen], strict=True)
    fleet = Fleet(route_score=by_prompt, **dict(zip(POOL, columns, strict=True)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, gap = draw(st.integers(1, 60)), draw(st.sampled_from([0.0, 1.0, 4.0]))
    longest = min(p.longest_request(limits) for p, limits in zip(fleet.policies, fleet.limits, strict=True))
    prompt = rng.integers(1, draw(st.sampled_from([3, 30, longest])) + 1, n)
    output = rng.integers(1, draw(st.sampled_from([2, 20, longest])) + 1, n)
    output = np.minimum(output, longest - prompt)
    think_time: Any = rng.integers(0, 3, n) * gap
    loop = draw(st.sampled_from(loops))
    size = draw(st.sampled_from([1, 4, 6]))
    demand = Demand(
        arrival=np.cumsum(rng.integers(0, 3, n) * gap if draw(st.booleans()) else rng.exponential(gap + 1e-9, n)),
        prompt_tokens=prompt,
        output_tokens=np.maximum(output, 0),
        overruns=np.zeros(n, dtype=bool),
        refused=np.array([refuses(fleet, int(p), int(o)) for p, o in zip(prompt, output, strict=True)]),
        follow=_sessions(rng, n) if loop == "sessions" else np.full(n, -1),
        think_time=think_time if loop == "sessions" else np.zeros(n),
        max_concurrency=draw(st.integers(1, 12)) if loop == "concurrency" else 0,
        max_tokens=np.maximum(output, 0),
        priority=rng.integers(0, draw(st.sampled_from([1, 3])), n),
        hash_ids=_contents(rng, prompt, size, draw(st.sampled_from([0.3, 0.9]))),
        hash_block_size=size,
    )
    return Case(fleet, demand, draw(st.integers(0, ROUTE_SCORE)), rng.random(n))


def refuses(fleet: Fleet, prompt: int, output: int) -> bool:
    """Whether some pool could never run a request."""
    rows = zip(fleet.policies, fleet.limits, strict=True)
    return any(prompt > p.longest_prompt(limits) or not can_ever_run(prompt, output, limits) for p, limits in rows)


def result(case: Case, jumps: bool = True) -> Record | str:
    """What the case gives; the message if an engine dies."""
    try:
        return run(case.fleet, case.demand, case.router, case.uniforms, jumps)
    except InputError as error:
        return str(error)


def steps(case: Case, record: Record) -> list[Any]:
    """Every step of every lane: where, start, duration, decodes, tokens of a chunk."""
    columns = tuple(np.ascontiguousarray(record.rows[entry.name]) for entry in fields(Iterations))
    pool = np.repeat(np.arange(len(case.fleet.replicas)), case.fleet.replicas)
    lanes = np.where(case.fleet.lockstep, case.fleet.lanes, 1)[pool]
    found = iteration_times(columns, case.fleet.times, pool, lanes)
    names = ("replica", "lane", "decodes", "chunk_tokens", "discarded")
    order = np.lexsort((found.start, *(record.rows[name][found.row] for name in ("lane", "replica"))))
    return [found.start[order], found.duration[order], *(record.rows[name][found.row][order] for name in names)]


def assert_equal(record: Record, other: Record, some: Any = slice(None)) -> None:
    """What happened to ``some`` of the record's requests is what happened to the other's."""
    for name in REQUESTS:
        assert np.array_equal(record.requests[name][some], other.requests[name], equal_nan=True), name


def alone(case: Case, pool: int, some: Any) -> Case:
    """One replica of a pool, with these requests."""
    columns: Any = {name: (getattr(case.fleet, name)[pool],) for name in POOL} | {"replicas": (1,)}
    fleet = Fleet(**columns)
    assert case.demand.hash_ids is not None
    offsets, values = case.demand.hash_ids
    kept = [values[offsets[r] : offsets[r + 1]] for r in some]
    arrays = {entry.name: getattr(case.demand, entry.name) for entry in fields(Demand)}
    some_of = {name: array[some] for name, array in arrays.items() if name != "hash_ids" and np.ndim(array) == 1}
    ids = (np.cumsum([0, *map(len, kept)]), np.concatenate([values[:0], *kept]))
    demand = replace(case.demand, **some_of, hash_ids=ids)
    return Case(fleet, demand, 0, case.uniforms[some])


def by_lane(rows: Any) -> list[Any]:
    """The rows of each lane in their order: those of lanes that do not wait for each other may come in any."""
    ordered: list[Any] = rows[np.argsort(rows["lane"], kind="stable")].tolist()
    return ordered


def check_parts(case: Case, whole: Record, jumps: bool) -> None:
    """Each replica alone, with the requests that it got."""
    replica = whole.replica_of_lane[whole.requests["lane"]]
    pool = np.repeat(np.arange(len(case.fleet.replicas)), case.fleet.replicas)
    for j in range(len(pool)):
        some = np.nonzero((replica == j) & (whole.requests["lane"] >= 0))[0]
        part = alone(case, int(pool[j]), some)
        found = result(part, jumps)
        assert isinstance(found, Record)
        assert_equal(whole, found, some)
        if not jumps:  # how steps are joined to rows depends on the arrivals elsewhere
            rows = whole.rows[whole.rows["replica"] == j].copy()
            rows["replica"] = 0
            assert by_lane(rows) == by_lane(found.rows)
        stalls = whole.stalls[np.isin(whole.stalls["request"], some)].copy()
        stalls["request"] = np.searchsorted(some, stalls["request"])
        assert sorted(stalls.tolist()) == sorted(found.stalls.tolist())


def check_equal(case: Case) -> None:
    """Jumps change nothing, nor do pools beside a pool."""
    jumping, stepping = result(case), result(case, jumps=False)
    if isinstance(jumping, str) or isinstance(stepping, str):
        assert jumping == stepping
        return
    assert_equal(jumping, stepping)
    for expected, found in zip(steps(case, stepping), steps(case, jumping), strict=True):
        assert np.array_equal(expected, found)
    if not case.demand.closed:
        check_parts(case, stepping, jumps=False)
        check_parts(case, jumping, jumps=True)


@st.composite
def any_kinds(draw: st.DrawFn) -> Case:
    """Pools of two or three kinds."""
    kinds = draw(st.lists(st.sampled_from(ALL), min_size=2, max_size=3, unique=True))
    return draw(cases(tuple(kinds)))


@settings(max_examples=CASES, deadline=None, suppress_health_check=equality.RELAXED)
@given(any_kinds() if config.DISABLE_JIT else cases(COMPILED, ("open",)))  # type: ignore[attr-defined]
def test_unlike_pools_are_equal_to_each_alone(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("v0", "unified"), ("v1", "v1 cached"), ("v0 cached", "v1"), ("sglang", "unified")])
@settings(max_examples=1000, deadline=None, suppress_health_check=equality.RELAXED)
@given(st.data())
def test_any_two_are_equal_to_each_alone(kinds: tuple[str, ...], data: st.DataObject) -> None:
    check_equal(data.draw(cases(kinds)))


def test_round_robin_gives_every_other_request_to_each_of_two_pools() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=20, block_size=4)
    times = linear(1, 0, 0, 0, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
    fleet = Fleet((limits,) * 2, (VllmV1(prefix_caching=True), Sglang()), (times,) * 2, (1, 1), (1, 1), (False,) * 2)
    ones, zeros = np.ones(4, dtype=np.int64), np.zeros(4)
    record = run(fleet, Demand(10 * np.arange(4.0), ones, ones, zeros > 0, zeros > 0, -ones, zeros, 0), 0, zeros)
    assert record.requests["lane"].tolist() == [0, 1, 0, 1]
    assert record.requests["finish"].tolist() == [1, 11, 21, 31]


def test_fields_that_schedulers_share_are_of_one_type() -> None:
    every = (VllmV1(), VllmV0(), Policy(), Sglang(), Trtllm(), UserScheduler(object, VllmV1()), WholeBatches())
    assert [type(policy).__name__ for policy in every] == list(SCHEDULERS)
    for name in ("POOL_FIELDS", "LANE_FIELDS", "REQUEST_FIELDS"):
        names = [entry[0] for entry in fields_of(every, name)]
        assert len(names) == len(set(names))
    assert fields_of((VllmV1(), VllmV1()), "POOL_FIELDS") == fields_of((VllmV1(),), "POOL_FIELDS")


def test_pools_are_of_one_kind_where_the_same_code_serves_them() -> None:
    policies = (VllmV1(), VllmV1(watermark=0.1), VllmV1(prefix_caching=True), VllmV0(), Policy(), VllmV1())
    assert kinds_of(policies)[1].tolist() == [1, 1, 2, 3, 0, 1]  # unified, v1, v1 with a cache, v0
