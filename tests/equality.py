"""Random cases for the comparison of the oracle with the compiled core, and what has to be equal."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st
from oracle.loop import Loop, Replica
from oracle.mixed_records import record_of, router_of
from oracle.pipeline import Pipeline, table_passage
from oracle.replica import Group, table_time
from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.encoder import EncoderLimits
from oracle.vllm_v1.request import Image, Request
from oracle.vllm_v1.scheduler import Scheduler
from oracle.vllm_v1.speculation import Speculation

from windtunnel.core import engine
from windtunnel.core.dispatch import check
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.rebuild import iteration_times
from windtunnel.core.records import GONE, REFUSED, ROWS, State
from windtunnel.perf.batch_times import BatchTimes, StageTimes, Times, linear
from windtunnel.policy import Limits, VllmV1, can_ever_run, generated
from windtunnel.policy.routing import RankBalancer, Routing
from windtunnel.policy.vllm_v1 import AdmissionOrder, Victim

ORDERS, VICTIMS = get_args(AdmissionOrder), get_args(Victim)
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
REQUEST_FIELDS = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens")


class StuckError(Exception):
    """A scheduler that never goes on: requests of equal priority and arrival preempt each other for ever."""


class Impatience:
    """Mixed into a reference scheduler, raises StuckError instead of letting it try for ever."""

    silent = 0

    def schedule(self: Any, now: float = 0.0) -> Batch:
        self.silent = self.silent + 1 if self.num_waiting or self.num_running else 0
        if self.silent > 2 * (4 * self.limits.max_model_len + 1000):
            raise StuckError
        batch: Batch = super().schedule(now)  # type: ignore[misc]
        return batch

    def update(self: Any, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        emitted, finished = super().update(batch, time)  # type: ignore[misc]
        self.silent = 0 if emitted else self.silent
        return emitted, finished


class Impatient(Impatience, Scheduler):
    """vLLM v1's scheduler, with little patience."""


@dataclass(frozen=True)
class Case:
    """One simulation, small enough for the reference."""

    limits: Limits
    policy: VllmV1
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
    follow: Any
    think_time: Any
    turnaround: Any
    max_concurrency: int
    priority: Any
    hash_ids: tuple[Any, Any]
    hash_block_size: int
    routing: Routing | None = None
    images: tuple[Any, ...] | None = None
    balancer: RankBalancer = field(default_factory=RankBalancer)


@st.composite
def policies(draw: st.DrawFn, chunked: bool) -> VllmV1:
    """Any value of every field, the plain ones more often."""
    order: tuple[AdmissionOrder, Victim] = draw(
        st.sampled_from(
            [("fcfs", "newest"), ("fcfs", "newest"), ("priority", "lowest_priority"), *product(ORDERS, VICTIMS)]
        )
    )
    return VllmV1(
        chunked_prefill=chunked,
        skip_unfit_prompts=draw(st.booleans()),
        reserve_full_prompt=draw(st.booleans()),
        reserve_for_loads=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.01, 0.1])),
        max_num_active_seqs=draw(st.sampled_from([0, 0, 1])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 7, 40])),
        adaptive_threshold=draw(st.booleans()),
        threshold_when_alone=draw(st.booleans()),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        plain_blocks_first=draw(st.booleans()),
        admission_order=order[0],
        victim=order[1],
        return_victim_tokens=draw(st.booleans()),
        track_place=draw(st.booleans()),
        go_on_after_own_preemption=draw(st.booleans()),
        prefill_schedule_interval=draw(st.sampled_from([1, 1, 1, 2, 5])),
        interval_when_alone=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        stop_at_last_token=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tiny block pools, tied times, overload, closed loops, sessions, ranks in lockstep or not."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    pressed = draw(st.booleans())  # many requests for blocks that hold about two of the longest
    block_size = draw(st.sampled_from([1, 4, 16]))
    max_num_seqs = draw(st.sampled_from([4, 8, 16] if pressed else [1, 2, 4, 8, 16]))
    budget = max_num_seqs + draw(st.sampled_from([0, 1, 5, 16, 64, 200]))
    max_model_len = draw(st.sampled_from([32, 100] if pressed else [32, 100, 400]))
    chunked = draw(st.booleans())
    if not chunked:
        budget = max(budget, max_model_len)
    blocks = -(-max_model_len // block_size) * 2 + 1 if pressed else draw(st.integers(4, 120))
    limits = Limits(max_num_seqs, budget, max_model_len, blocks, block_size)
    policy = draw(policies(chunked))
    lanes = draw(st.sampled_from([1, 1, 1, 2, 3]))
    lockstep = lanes > 1 and draw(st.booleans())
    n = draw(st.integers(1, 60))
    times = draw(st.sampled_from([_integer_times, _linear_times, _random_times]))(limits, lanes, rng)
    gap = draw(st.sampled_from([0.0, 1.0] if pressed else [0.0, 1.0, 4.0, 30.0]))
    arrival: Any = (
        np.cumsum(rng.integers(0, 3, n) * gap) if draw(st.booleans()) else np.cumsum(rng.exponential(gap + 1e-9, n))
    )
    longest = draw(st.sampled_from([3, 30, max_model_len // 2 if pressed else max_model_len]))
    prompt = rng.integers(1, longest + 1, n)
    output = rng.integers(1, draw(st.sampled_from([max_model_len] if pressed else [2, 20, max_model_len])) + 1, n)
    follow = np.full(n, -1)
    think_time: Any = np.zeros(n)
    loop = draw(st.sampled_from(["open", "open", "concurrency", "sessions", "both"]))
    if loop in ("sessions", "both"):
        follow = _sessions(rng, n)
        think_time = rng.integers(0, 3, n) * float(gap)
    hash_block_size = draw(st.sampled_from([1, 4, 6, 16, 32]))
    return Case(
        limits=limits,
        policy=policy,
        times=times,
        replicas=draw(st.sampled_from([1, 1, 2, 4, 8])),
        lanes=lanes,
        lockstep=lockstep,
        router=draw(st.integers(0, 3)),
        uniforms=rng.random(n),
        arrival=arrival,
        prompt=prompt,
        output=output,
        max_tokens=output + (rng.integers(0, 2, n) * rng.integers(0, 9, n) if draw(st.booleans()) else 0),
        follow=follow,
        think_time=think_time,
        turnaround=rng.integers(0, 3, n) * float(gap),
        max_concurrency=draw(st.integers(1, 12)) if loop in ("concurrency", "both") else 0,
        priority=rng.integers(0, draw(st.sampled_from([1, 3, 100])), n),
        hash_ids=_contents(rng, prompt, hash_block_size, draw(st.sampled_from([0.0, 0.3, 0.9]))),
        hash_block_size=hash_block_size,
        balancer=RankBalancer(draw(st.sampled_from([1, 1, 2, 3])), draw(st.booleans()), draw(st.booleans())),
    )


def _contents(rng: np.random.Generator, prompt: Any, size: int, shared: float) -> tuple[Any, Any]:
    """A tree of prompts: each next block is the common one with probability ``shared``, else one of few or its own."""
    numbers: dict[tuple[int, int], int] = {}
    offsets, values = [0], []
    for i, tokens in enumerate(prompt):
        parent = -1
        for _ in range(int(rng.integers(0, -(-tokens // size) + 1))):
            drawn = rng.random()
            branch = 0 if drawn < shared else int(rng.integers(1, 4)) if drawn < (1 + shared) / 2 else 10 + i
            parent = numbers.setdefault((parent, branch), len(numbers))
            values.append(parent)
        offsets.append(len(values))
    return np.array(offsets), np.array(values, dtype=np.int64)


def _sessions(rng: np.random.Generator, n: int) -> Any:
    follow = np.full(n, -1)
    session = rng.integers(0, max(n // 3, 1), n)
    last: dict[int, int] = {}
    for i in range(n):
        if session[i] in last:
            follow[last[session[i]]] = i
        last[session[i]] = i
    return follow


def _integer_times(limits: Limits, lanes: int, _: np.random.Generator) -> BatchTimes:
    return _linear(limits, lanes, 1.0, 0.0, 0.0, 0.0)


def _linear_times(limits: Limits, lanes: int, _: np.random.Generator) -> BatchTimes:
    return _linear(limits, lanes, 0.5, 0.01, 0.001, 1e-5)


def _linear(limits: Limits, lanes: int, base: float, token: float, kv: float, pair: float) -> BatchTimes:
    return linear(
        base,
        token,
        kv,
        pair,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        ranks=lanes,
        per_expert_token=token,
    )


def _random_times(limits: Limits, lanes: int, rng: np.random.Generator) -> BatchTimes:
    """Tables without any order: nothing in the engines may rely on a monotone batch time."""
    tokens, seqs = limits.max_num_batched_tokens + 1, limits.max_num_seqs + 1
    contexts = np.array([0, 16, 48, 128, 512])
    chunks = np.unique(np.array([0, 1, 7, limits.max_num_batched_tokens, limits.max_num_batched_tokens + 5]))
    decode = rng.random((seqs, len(contexts)))
    decode[0] = 0
    mixed = rng.random((seqs, len(contexts)))
    mixed[0] = 0
    prefill = rng.random((len(chunks), len(contexts)))
    prefill[0] = 0
    graph = int(rng.integers(0, tokens))
    return BatchTimes(
        decode_tokens=0.1 + rng.random(tokens),
        mixed_tokens=0.1 + rng.random(tokens),
        sequences=rng.random(seqs),
        host_overlapped=2 * rng.random(seqs),
        host_serial=rng.random(seqs),
        context_knots=contexts,
        decode_attention=decode,
        chunk_knots=chunks,
        prefill_attention=prefill,
        prefill_base=float(rng.random()),
        expert_tokens=rng.random(lanes * (tokens - 1) + 1) if lanes > 1 else np.zeros(1),
        padded=np.where(
            np.arange(tokens) <= graph, np.minimum(-(-np.arange(tokens) // 8) * 8, graph), np.arange(tokens)
        ),
        graph_tokens=graph,
        mixed_attention=mixed,
    )


def demand_of(case: Case) -> Demand:
    """The requests of a case, for the compiled core."""
    lengths = zip(case.prompt, case.output, case.max_tokens, strict=True)
    rows = [(int(p), int(o), int(m)) for p, o, m in lengths]
    real = [generated(p, o, case.limits) for p, o, _ in rows]
    return Demand(
        arrival=np.array(case.arrival, dtype=np.float64),
        prompt_tokens=np.array(case.prompt),
        output_tokens=np.array(real),
        overruns=np.array([r < min(m, case.limits.max_model_len - p) for r, (p, _, m) in zip(real, rows, strict=True)]),
        refused=np.array([not can_ever_run(p, o, case.limits) for p, o, _ in rows]),
        follow=case.follow,
        think_time=case.think_time,
        max_concurrency=case.max_concurrency,
        max_tokens=np.array(case.max_tokens),
        priority=case.priority,
        hash_ids=case.hash_ids,
        hash_block_size=case.hash_block_size,
        turnaround=case.turnaround,
        images=case.images,
    )


@st.composite
def stages_of(draw: st.DrawFn, limits: Limits) -> StageTimes:
    """Tables of two to four stages that take equal or different times, with sends or without."""
    count = draw(st.sampled_from([2, 2, 2, 3, 4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from([_integer_times, _linear_times, _random_times]))
    stages: list[BatchTimes] = []
    for _ in range(count):
        table = kind(limits, 1, rng)
        times = 1 if kind is _random_times else int(rng.integers(1, 4))
        tokens = {name: getattr(table, name) * times for name in ("decode_tokens", "mixed_tokens")}
        stages.append(replace(table, **tokens))
    sends: Any = np.zeros((count - 1, limits.max_num_batched_tokens + 1))
    if draw(st.booleans()):
        sends = rng.random(sends.shape) if kind is _random_times else sends + 1
    return StageTimes(tuple(stages), sends)


@st.composite
def pipeline_cases(draw: st.DrawFn) -> Case:
    """Two to four stages."""
    case = draw(cases().filter(lambda case: not case.lockstep))
    times = draw(stages_of(case.limits))
    policy = replace(case.policy, prefill_schedule_interval=1, pipeline_parallel_size=len(times.stages))
    return replace(case, policy=policy, times=times)


def fleet_of(case: Case) -> Fleet:
    """The replicas of a case, for the compiled core."""
    one = ((case.limits,), (case.policy,), (case.times,), (case.replicas,), (case.lanes,), (case.lockstep,))
    return Fleet(*one, routing=case.routing, balancers=(case.balancer,))


def by_core(case: Case, jumps: bool = True) -> Record:
    """The case on the compiled core."""
    with patch.object(engine, "check", balanced):
        return run(fleet_of(case), demand_of(case), case.router, case.uniforms, jumps)


def balanced(state: State) -> None:
    """At the end of a run, in place of ``dispatch.check``, as well: no step uses fewer blocks than none or more than
    all, and when nobody holds any, all are free."""
    check(state)
    groups, lanes, rows = state.groups, state.lanes, state.rows[: state.counters[ROWS]]
    pool_of_replica = np.zeros(int(groups["replica"].max()) + 1, dtype=np.int64)
    pool_of_replica[groups["replica"]] = groups["pool"]
    assert (rows["used_blocks"] >= 0).all()
    assert (rows["used_blocks"] <= state.pools["num_blocks"][pool_of_replica[rows["replica"]]]).all()
    if len(lanes) > 1 and not lanes["outstanding"].any():
        assert not lanes["in_flight"].any()
    if not lanes["outstanding"].any() and not state.requests["holds"].any():
        assert (lanes["free"] == state.pools["num_blocks"][groups["pool"][lanes["group"]]]).all()


def requests_of(case: Case) -> list[Request]:
    """The requests of a case, for the oracle."""
    offsets, values = case.hash_ids
    requests = []
    for i, (arrival, prompt, output) in enumerate(zip(case.arrival, case.prompt, case.output, strict=True)):
        ids = values[offsets[i] : offsets[i + 1]]
        contents = (ids[:, None] * case.hash_block_size + np.arange(case.hash_block_size)).ravel()[:prompt]
        requests.append(
            Request(
                id=i,
                arrival=float(arrival),
                prompt_tokens=int(prompt),
                output_tokens=generated(int(prompt), int(output), case.limits),
                max_tokens=int(case.max_tokens[i]),
                refused=not can_ever_run(int(prompt), int(output), case.limits),
                priority=int(case.priority[i]),
                tokens=tuple(contents.tolist()),
                images=images_of(case, i),
            )
        )
    return requests


def images_of(case: Case, i: int) -> tuple[Image, ...]:
    """The inputs of one request."""
    if case.images is None:
        return ()
    first, *columns = case.images
    rows = zip(*(column[first[i] : first[i + 1]].tolist() for column in columns), strict=True)
    return tuple(Image(offset, size, str(content)) for offset, size, content in rows)


def encoder_of(policy: VllmV1) -> EncoderLimits:
    """What inputs may take, for the oracle."""
    encoder, drafts = policy.encoder, policy.drafts
    if encoder is None:
        return EncoderLimits()
    shift = int(drafts is not None and drafts.drops_last_hit)
    return EncoderLimits(encoder.compute_budget, encoder.cache_size, encoder.disable_chunked_mm_input, shift)


def speculation_of(policy: VllmV1) -> Speculation:
    """What is drafted, for the oracle: which drafts are right is drawn as in the core."""
    drafts = policy.drafts
    if drafts is None:
        return Speculation()

    def accepted(request: Request, count: int) -> int:
        drawn = mixed(mixed(request.id) ^ mixed(request.generated + 1)) / 2**32
        return sum(drawn < rate for rate in drafts.rates[:count])

    most = drafts.num_speculative_tokens
    return Speculation(most, "eagle" if drafts.method == "mtp" else drafts.method, accepted, lambda _: most)


def mixed(x: int) -> int:
    """The core's random numbers, of 32 bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x ^ (x >> 16)


def replica_of(case: Case) -> Replica:
    """One replica of a case, for the oracle."""
    given = (case.limits, case.policy, speculation_of(case.policy), encoder_of(case.policy))
    ranks = [Impatient(*given) for _ in range(case.lanes)]
    if isinstance(case.times, StageTimes):
        passage = table_passage(case.times)
        return Replica([Pipeline(rank, case.policy, passage) for rank in ranks])
    time, depth = table_time(case.times), 2 if case.policy.async_scheduling else 1
    if case.lockstep:
        return Replica([Group(ranks, time, depth)])
    return Replica([Group([rank], time, depth) for rank in ranks])


def by_reference(case: Case) -> tuple[list[Request], list[Replica]]:
    """The case on the oracle.

    Raises:
        StuckError: requests preempt each other for ever.
    """
    requests, replicas = requests_of(case), [replica_of(case) for _ in range(case.replicas)]
    router = router_of(fleet_of(case), demand_of(case), case.router, list(case.uniforms))
    follow = {i: int(f) for i, f in enumerate(case.follow) if f >= 0}
    clients = (list(case.think_time), case.max_concurrency, list(case.turnaround))
    Loop(replicas, router, requests, follow, *clients, case.balancer, list(case.uniforms)).run()
    return requests, replicas


def check_equal(case: Case) -> None:
    """The core makes the reference's schedule, whether it makes equal steps at once or singly."""
    records = [by_core(case, jumps) for jumps in (True, False)]
    try:
        requests, replicas = by_reference(case)
    except StuckError:
        assert all((~np.isin(record.requests["state"], (GONE, REFUSED))).any() for record in records)
        return
    stalls = record_of(requests, replicas).stalls.tolist()
    for record in records:
        check_requests(record, requests)
        assert sorted(record.stalls.tolist()) == sorted(stalls)
        check_log(case, record, replicas)
        check_tokens(record)


def check_requests(record: Record, requests: list[Request]) -> None:
    """Every request's times and counts."""
    for name in REQUEST_FIELDS:
        expected = np.array([getattr(request, name) for request in requests], dtype=np.float64)
        assert np.array_equal(record.requests[name].astype(np.float64), expected, equal_nan=True), name


def check_tokens(record: Record, drafts: int = 0) -> None:
    """Every token is emitted once: the first by a prefill, the others by a decode, with the drafts that are right, or
    after a stall."""
    requests, rows = record.requests, record.rows
    finished = requests["state"] == GONE
    decoded = int((rows["decodes"].astype(np.int64) * rows["steps"] - rows["discarded"]).sum())
    later = int((requests["output"][finished] - 1).sum()) - len(record.stalls)
    assert decoded <= later <= decoded * (1 + drafts)


def check_log(case: Any, record: Record, replicas: list[Replica]) -> None:
    """Every step of the reference's journal, rebuilt from the core's rows."""
    rows, stages = record.rows, len(case.times.stages) if isinstance(case.times, StageTimes) else 1
    steps = {
        (j, k * stages + step.rank, step.start): step
        for j, replica in enumerate(replicas)
        for k, group in enumerate(replica.groups)
        for step in group.journal
    }
    for row in rows[rows["steps"] > 0]:
        step = steps[int(row["replica"]), int(row["lane"]), float(row["start"])]
        assert (step.used_blocks, step.waiting) == (row["used_blocks"], row["waiting"])
        assert sum(part.start for part in step.batch.decodes) == row["kv_tokens"]
    lanes = np.full(case.replicas, case.lanes if case.lockstep else 1)
    found = iteration_times(rows, (case.times,), np.zeros(case.replicas, np.int64), lanes)
    assert len(found.row) == len(steps)
    ends = []
    for number, start in zip(found.row.tolist(), found.start.tolist(), strict=True):
        row = rows[number]
        step = steps[int(row["replica"]), int(row["lane"]), start]
        assert len(step.batch.decodes) == row["decodes"]
        ends.append(step.end)
        if stages > 1:
            busy = sum(table_passage(case.times)(step.batch).stages) / stages
            assert np.isclose(found.busy[len(ends) - 1], busy, rtol=1e-12, atol=0)
    np.testing.assert_allclose(found.start + found.duration, ends, rtol=1e-12)
