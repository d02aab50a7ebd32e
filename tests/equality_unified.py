"""Random cases of the unified scheduler, for the comparison of the oracle with the compiled core."""

from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

import numpy as np
from equality import (
    Impatience,
    StuckError,
    _integer_times,
    _linear_times,
    _random_times,
    _sessions,
    check_log,
    check_tokens,
    stages_of,
)
from hypothesis import HealthCheck
from hypothesis import strategies as st
from oracle.loop import Loop, Replica, Router, least_outstanding, random_choice, round_robin, vllm_dp
from oracle.pipeline import EagerPipeline, Pipeline, table_passage
from oracle.replica import Group, table_time
from oracle.schedulers.unified import Scheduler
from oracle.vllm_v1.request import Request

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.records import GONE, REFUSED
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes, Times
from windtunnel.policy import Limits, Policy, can_ever_run, generated
from windtunnel.policy.unified import POLICIES, infermax_grid

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
HINTS = get_type_hints(Policy)
VALUES: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (0, 0, 24),
    "max_num_prefill_tokens": (0, 0, 10),
    "max_num_seqs": (0, 0, 3),
    "long_prefill_token_threshold": (0, 0, 1, 7, 40),
    "max_num_partial_prefills": (0, 0, 1, 2),
    "max_long_partial_prefills": (0, 0, 1),
    "look_ahead_margin": (0, 6),
    "watermark": (0.0, 0.0, 0.01, 0.2),
    "host_blocks": (0, 3, 50),
    "swap_time_per_block": (0.0, 0.25),
    "max_queue_delay": (0.0, 0.5, 20.0),
    "reschedule_interval": (1, 1, 2, 16),
    "queue_ratio": (0.0, 0.0, 0.3, 1.2),
    "delay_factor": (0.0, 0.0, 0.5, 3.0),
    "prefill_batch": (0, 0, 2),
    "prefill_batch_share": (0.0, 0.0, 0.4),
    "prefill_batch_max": (0, 0, 3),
    "balance_timeout": (0, 1, 3, 20),
    "pipeline_parallel_size": (1,),
    "queue_look_time": (0.0, 0.0, 0.5),
}
"""What is drawn for each field; all values of a choice, and True and False, for those that are not here."""


class Impatient(Impatience, Scheduler):
    """The unified scheduler, with little patience."""


@dataclass(frozen=True)
class Case:
    """One simulation, small enough for the reference."""

    limits: Limits
    policy: Policy
    times: Times
    replicas: int
    lanes: int
    lockstep: bool
    router: int
    uniforms: Any
    arrival: Any
    prompt: Any
    output: Any
    max_tokens: Any
    priority: Any
    follow: Any
    think_time: Any
    max_concurrency: int


def admission_key(a: int, b: int, c: int, d: int, e: float) -> float:
    """Many ties."""
    return float((a + b + c + d + int(e)) * 7 % 5)


def victim_key(a: int, b: int, c: int, d: int, e: int, f: float) -> float:
    """Many ties."""
    return float((a + b + c + d + e + int(f)) * 7 % 5)


def token_budget(decodes: int, kv_tokens: int, free_blocks: int, waiting: int, most: int) -> int:
    """A budget that changes from step to step."""
    return max(decodes, 1) + (kv_tokens + free_blocks + waiting) % (most - max(decodes, 1) + 1)


HOOKS = {"admission_key": admission_key, "victim_key": victim_key, "token_budget": token_budget}


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """A preset, a variant of InferMax's grid, or random values of some fields; contradictions are taken out."""
    kind = draw(st.sampled_from(["preset", "grid", "random", "random", "random"]))
    if kind == "preset":
        return draw(st.sampled_from(list(POLICIES.values())))
    if kind == "grid":
        return draw(st.sampled_from(list(infermax_grid().values())))
    names = draw(st.lists(st.sampled_from([field.name for field in fields(Policy)]), max_size=10, unique=True))
    if draw(st.booleans()):
        names += ["group_order", "mixed", "chunked_prefill", "allocation"]
    values: dict[str, Any] = {}
    for name in names:
        value = HOOKS[name] if name in HOOKS else draw(st.sampled_from(choices(name)))
        values = settled(values, name, value)
    return Policy(**values)


def choices(name: str) -> tuple[Any, ...]:
    """Values of a field."""
    return VALUES.get(name) or ((False, True) if HINTS[name] is bool else get_args(HINTS[name]))


def settled(values: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The values with one more, and what it needs; without it where that contradicts the others."""
    needs: dict[tuple[str, Any], dict[str, Any]] = {
        ("preemption", "none"): {"allocation": "prompt_and_output"},
        ("preemption", "swap"): {"host_blocks": 20, "swap_time_per_block": 0.125},
    }
    more = {name: value} | needs.get((name, value), {})
    if name in {"max_num_partial_prefills", "long_prefill_token_threshold", "token_budget"}:
        more["chunked_prefill"] = True
    try:
        Policy(**(values | more))
    except InputError:
        return values
    return values | more


def fitting(policy: Policy, limits: Limits) -> Limits | None:
    """The limits, if the policy can run within them."""
    try:
        policy.check(limits)
    except InputError:
        return None
    return limits


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tiny block pools, tied times, overload, closed loops, sessions, ranks in lockstep or not."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    policy = draw(policies())
    pressed = draw(st.booleans())  # many requests for blocks that hold one or two of the longest
    max_model_len = draw(st.sampled_from([10, 32, 100, 400]))
    seqs = draw(st.sampled_from([4, 8, 16] if pressed else [1, 2, 4, 8, 16]))
    budget = seqs + draw(st.sampled_from([0, 1, 5, 16, 64, 200]))
    size = draw(st.sampled_from([1, 4, 16]))
    pool = -(-max_model_len // size) * draw(st.integers(1, 2)) + 1 if pressed else draw(st.integers(4, 120))
    limits = fitting(policy, Limits(seqs, budget, max_model_len, pool, size))
    if limits is None:
        limits = fitting(policy, Limits(8, 600, 10, pool, size))
    assert limits is not None
    lanes = draw(st.sampled_from([1, 1, 1, 2, 3]))
    n = draw(st.integers(1, 60))
    gap = draw(st.sampled_from([0.0, 1.0] if pressed else [0.0, 1.0, 4.0, 30.0]))
    steady = draw(st.booleans())
    arrival: Any = np.cumsum(rng.integers(0, 3, n) * gap) if steady else np.cumsum(rng.exponential(gap + 1e-9, n))
    longest = min(draw(st.sampled_from([3, 30, 400])), limits.max_model_len)
    output = rng.integers(
        1, min(draw(st.sampled_from([400] if pressed else [2, 20, 400])), limits.max_model_len) + 1, n
    )
    loop = draw(st.sampled_from(["open", "open", "concurrency", "sessions", "both"]))
    sessions = loop in {"sessions", "both"}
    return Case(
        limits=limits,
        policy=policy,
        times=draw(st.sampled_from([_integer_times, _linear_times, _random_times]))(limits, lanes, rng),
        replicas=draw(st.sampled_from([1, 1, 2, 4])),
        lanes=lanes,
        lockstep=lanes > 1 and draw(st.booleans()),
        router=draw(st.integers(0, 3)),
        uniforms=rng.random(n),
        arrival=arrival,
        prompt=rng.integers(1, longest + 1, n),
        output=output,
        max_tokens=output + (rng.integers(0, 2, n) * rng.integers(0, 30, n) if draw(st.booleans()) else 0),
        priority=rng.integers(0, draw(st.sampled_from([1, 3, 100])), n),
        follow=_sessions(rng, n) if sessions else np.full(n, -1),
        think_time=rng.integers(0, 3, n) * float(gap) if sessions else np.zeros(n),
        max_concurrency=draw(st.integers(1, 12)) if loop in {"concurrency", "both"} else 0,
    )


VIDUR = (
    Policy(
        group_order="prefill_first",
        mixed=False,
        padded_prefills=True,
        allocation="prompt",
        watermark=0.01,
        decodes_ask_for_a_block=True,
        running_order="arrival",
        places_per_step=True,
    ),
    Policy(
        chunked_prefill=True,
        allocation="prompt",
        watermark=0.01,
        decodes_ask_for_a_block=True,
        admit_after_eviction=True,
        places_per_step=True,
    ),
)
"""Its vllm and its sarathi."""


@st.composite
def vidur_cases(draw: st.DrawFn) -> Case:
    """Vidur's rules, with places for few requests in a step."""
    case = draw(cases().filter(lambda case: not case.lockstep))
    policy = replace(draw(st.sampled_from(VIDUR)), max_num_seqs=draw(st.sampled_from([0, 1, 2, 3])))
    limits = fitting(policy, case.limits) or fitting(policy, Limits(8, 600, 10, case.limits.num_blocks, 4))
    assert limits is not None
    return replace(case, policy=policy, limits=limits)


@st.composite
def pipeline_cases(draw: st.DrawFn) -> Case:
    """The rules that there are in a pipeline, with two to four stages that take equal or different times."""
    case = draw(st.one_of(cases().filter(lambda case: not case.lockstep), vidur_cases()))
    times = draw(stages_of(case.limits))
    plain: dict[str, Any] = {"reschedule_interval": 1, "queue_ratio": 0.0, "delay_factor": 0.0, "balance_timeout": 0}
    if case.policy.preemption == "swap":
        plain |= {"preemption": "recompute", "host_blocks": 0, "swap_time_per_block": 0.0}
    if case.policy.allocation == "look_ahead":
        plain |= {"allocation": "on_demand", "look_ahead_margin": 0}
    if case.policy.batching != "continuous" and case.policy.chunked_prefill:
        plain |= {"batching": "continuous", "max_queue_delay": 0.0}
    if case.policy.mixed and case.policy.group_order != "decode_first":
        plain |= {"places_per_step": False}
    plain["decide_on_arrival"] = draw(st.booleans())
    count = len(times.stages)
    own = draw(st.sampled_from([None, None, in_halves]))
    policy = replace(case.policy, **plain, pipeline_parallel_size=count, stage_end=own)
    return replace(case, policy=policy, times=replace(times, end=own))


def in_halves(stage: int, decodes: int, chunk_tokens: int, arrival: float, free: float, seconds: float) -> float:
    """A user's third tier: steps with prompts go through later stages in parts, the first of which came earlier."""
    begin = max(arrival, free)
    if stage > 0 and chunk_tokens > 0 and decodes + chunk_tokens > 1:
        return max(begin, begin - 0.25 * seconds + seconds)
    return begin + seconds


def never_runs(case: Case, prompt: int, output: int) -> bool:
    """Whether a request is refused: too long for the memory, or its prompt for a step."""
    return prompt > case.policy.longest_prompt(case.limits) or not can_ever_run(prompt, output, case.limits)


def demand_of(case: Case) -> Demand:
    """The requests of a case, for the compiled core."""
    rows = [(int(p), int(o)) for p, o in zip(case.prompt, case.output, strict=True)]
    return Demand(
        arrival=np.array(case.arrival, dtype=np.float64),
        prompt_tokens=np.array(case.prompt),
        output_tokens=np.array([generated(p, o, case.limits) for p, o in rows]),
        overruns=np.zeros(len(rows), dtype=bool),
        refused=np.array([never_runs(case, p, o) for p, o in rows]),
        follow=case.follow,
        think_time=case.think_time,
        max_concurrency=case.max_concurrency,
        max_tokens=np.minimum(case.max_tokens, case.limits.max_model_len - case.prompt),
        priority=case.priority,
    )


def fleet_of(case: Case) -> Fleet:
    """The replicas of a case, for the compiled core."""
    return Fleet((case.limits,), (case.policy,), (case.times,), (case.replicas,), (case.lanes,), (case.lockstep,))


def by_core(case: Case, jumps: bool = True) -> Record:
    """The case on the compiled core, which makes equal steps at once where it ``jumps``."""
    return run(fleet_of(case), demand_of(case), case.router, case.uniforms, jumps)


def by_reference(case: Case) -> tuple[list[Request], list[Replica]]:
    """The case on the oracle.

    Raises:
        StuckError: requests of a pipeline evict each other for ever.
    """
    columns = zip(case.arrival, case.prompt, case.output, case.max_tokens, case.priority, strict=True)
    requests = []
    for i, (arrival, *numbers) in enumerate(columns):
        prompt, output, declared, priority = map(int, numbers)
        real, refused = generated(prompt, output, case.limits), never_runs(case, prompt, output)
        requests.append(Request(i, float(arrival), prompt, real, declared, refused, priority))

    def replica() -> Replica:
        ranks = [Impatient(case.limits, case.policy) for _ in range(case.lanes)]
        if isinstance(case.times, StageTimes):
            passage = table_passage(case.times)
            kind = EagerPipeline if case.policy.decide_on_arrival else Pipeline
            return Replica([kind(rank, case.policy, passage) for rank in ranks])
        time = table_time(case.times)
        return Replica([Group(ranks, time)] if case.lockstep else [Group([rank], time) for rank in ranks])

    replicas = [replica() for _ in range(case.replicas)]
    routers: list[Router] = [round_robin, random_choice(list(case.uniforms)), least_outstanding, vllm_dp]
    follow = {i: int(f) for i, f in enumerate(case.follow) if f >= 0}
    Loop(replicas, routers[case.router], requests, follow, list(case.think_time), case.max_concurrency).run()
    return requests, replicas


def check_equal(case: Case, jumps: bool = True) -> None:
    """The core does what the reference does, request by request and step by step."""
    record = by_core(case, jumps)
    try:
        requests, replicas = by_reference(case)
    except StuckError:
        assert (~np.isin(record.requests["state"], (GONE, REFUSED))).any()
        return
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions"):
        expected = np.array([getattr(request, name) for request in requests], dtype=np.float64)
        assert np.array_equal(record.requests[name].astype(np.float64), expected, equal_nan=True), name
    stalls = sorted((r.id, *stall) for r in requests for stall in r.stalls)
    found = [(int(s["request"]), float(s["last_token"]), float(s["resumed_token"])) for s in record.stalls]
    assert sorted(found) == stalls
    assert all(request.finished or request.refused for request in requests)
    if isinstance(case.times, StageTimes):
        check_log(case, record, replicas)
    else:
        check_steps(case, record, replicas)
    check_tokens(record)


def check_steps(case: Case, record: Record, replicas: list[Replica]) -> None:
    """Each row of the log says what its steps were in the reference's journal."""
    rows = record.rows
    for j, replica in enumerate(replicas):
        for k, group in enumerate(replica.groups):
            for rank in range(len(group.schedulers)):
                lane = rank if case.lockstep else k
                mine = rows[(rows["replica"] == j) & (rows["lane"] == lane)]
                assert mine["steps"].sum() == sum(step.rank == rank for step in group.journal)
                steps = iter([step for step in group.journal if step.rank == rank])
                for first in np.nonzero(mine["steps"])[0]:
                    row, chunks = mine[first], [mine[first]]
                    while first + len(chunks) < len(mine) and mine[first + len(chunks)]["steps"] == 0:
                        chunks.append(mine[first + len(chunks)])
                    for i in range(row["steps"]):
                        step = next(steps)
                        if i == 0:
                            blocks, transfer = step.used_blocks, step.batch.transfer_time
                            assert (row["start"], row["transfer"]) == (step.start, transfer)
                            assert (row["used_blocks"], row["waiting"]) == (blocks, step.waiting)
                        decodes = step.batch.decodes
                        cached = sum(part.start for part in decodes)
                        assert (row["decodes"], row["kv_tokens"] + i * row["decodes"]) == (len(decodes), cached)
                        logged = [(c["chunk_tokens"], c["chunk_context"] + i * c["chunk_tokens"]) for c in chunks]
                        assert [pair for pair in logged if pair[0] > 0] == step.batch.chunks
