"""A live fleet gives what a run of the same arrivals gives, to the bit, whatever its clock does between them."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.fleet.test_service import KINDS, failing_case, services
from core.loop_cases import merged, mixed_case
from core.schedulers import test_mixed, test_user
from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.core.fleet import service
from windtunnel.core.live.live import Arrival, Live
from windtunnel.core.live.tokens import FAILED, STAYS
from windtunnel.core.records import IGNORED, REFUSED, ROWS
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Policy, Trtllm, VllmV0, VllmV1
from windtunnel.policy.routing import SESSION_AFFINITY
from windtunnel.policy.scaling import Foresight

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "40"))
SEEN = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens", "state")
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
MIXED = (*test_mixed.ALL,)


class Again:
    """Random numbers that come again from the first, as in a run."""

    def __init__(self, uniforms: Any) -> None:
        self.uniforms = uniforms

    def random(self, size: int) -> Any:
        return np.resize(self.uniforms, size)


class Kept(Live):
    """With the whole log."""

    def _forget_log(self) -> int:
        self.logs = [*getattr(self, "logs", ()), self.state.rows[: self.state.counters[ROWS]].copy()]
        return 0


class Client:
    """Sends the requests of a demand one by one, and remembers what it gets."""

    def __init__(self, fleet: Fleet, demand: Demand, router: int, uniforms: Any, slots: int) -> None:
        size = demand.hash_block_size if demand.hash_ids is not None else 0
        self.live = Kept(fleet, router, Again(uniforms), size, slots)
        self.demand, self.fleet = demand, fleet
        self.slot_of: dict[int, int] = {}
        self.records: dict[int, dict[str, float]] = {}
        self.times: dict[int, list[float]] = {}
        self.lost: list[int] = []

    def arrival(self, i: int) -> Arrival:
        demand, names = self.demand, ()
        if demand.hash_ids is not None:
            offsets, values = demand.hash_ids
            full = int(demand.prompt_tokens[i]) // demand.hash_block_size
            names = tuple(values[offsets[i] : offsets[i + 1]][:full].tolist())
        most = demand.output_tokens + demand.overruns if demand.max_tokens is None else demand.max_tokens
        priority = 0 if demand.priority is None else int(demand.priority[i])
        return Arrival(int(demand.prompt_tokens[i]), int(demand.output_tokens[i]), int(most[i]), priority, names)

    def send(self, i: int, time: float) -> float:
        slot, arrived, rows = self.live.arrive(self.arrival(i), time)
        assert slot not in self.slot_of
        before = [row for row in rows if int(row["slot"]) != slot]
        self.note(before)
        self.slot_of[slot] = i
        self.times[i] = []
        self.note([row for row in rows if int(row["slot"]) == slot])
        return arrived

    def read(self, until: float) -> None:
        self.note(self.live.advance(until))

    def note(self, rows: Any) -> None:
        again: dict[int, float] = {}
        for slot, time in self.live.withdrawn:
            i = self.slot_of[slot]
            had = [one for one in self.times[i] if one <= time]
            self.times[i] = had if self.fleet.on_failure != "retry" else []
            again[slot] = time if self.fleet.on_failure == "retry" else -1.0
        self.live.withdrawn.clear()
        for row in rows:
            if row["time"] <= again.get(int(row["slot"]), -1.0):
                continue  # of a try that counts no longer
            i = self.slot_of[int(row["slot"])]
            if int(row["tokens"]) > len(self.times[i]):
                self.times[i].append(float(row["time"]))
                assert len(self.times[i]) == int(row["tokens"]), "each step gives a request one token"
            if row["gone"] != STAYS:
                self.end(i, int(row["slot"]), float(row["time"]), int(row["gone"]))

    def end(self, i: int, slot: int, time: float, gone: int) -> None:
        """A request has left; what its slot says is read when that is certain."""
        if time >= self.live.certain:
            self.late = [*getattr(self, "late", ()), (i, slot, time, gone)]
            return
        found = self.live.state.requests[slot]
        self.records[i] = {name: float(found[name]) for name in (*SEEN, "prompt", "output")}
        if gone == FAILED and found["state"] != REFUSED:
            self.lost.append(i)
        del self.slot_of[slot]
        self.live.forget(slot)


def opened(demand: Demand) -> tuple[Demand, Any]:
    """(The requests that are not refused, as if nobody waited for anybody, which they are)."""
    kept = np.flatnonzero(~demand.refused & (demand.output_tokens > 0))
    some: dict[str, Any] = {}
    for name in ("arrival", "prompt_tokens", "output_tokens", "overruns", "refused", "max_tokens", "priority"):
        column = getattr(demand, name)
        some[name] = None if column is None else column[kept]
    if demand.hash_ids is not None:
        offsets, values = demand.hash_ids
        full = demand.prompt_tokens // demand.hash_block_size
        names = [values[offsets[i] : offsets[i + 1]][: full[i]].tolist() for i in kept]
        flat = np.array([one for row in names for one in row], dtype=np.int64)
        some["hash_ids"] = np.cumsum([0, *map(len, names)]), flat
    none = np.full(len(kept), -1)
    return replace(
        demand, **some, follow=none, think_time=np.zeros(len(kept)), max_concurrency=0, begins=None, turnaround=None
    ), kept


def check(
    fleet: Fleet, demand: Demand, router: int, uniforms: Any, *, slots: int = 2, leave: float = 0.0, seed: int = 0
) -> None:
    """Send everything; some clients of decodes leave; then run what was sent."""
    rng = np.random.default_rng(seed)
    demand, kept = opened(demand)
    if not len(kept):
        return
    uniforms = uniforms[: len(kept)]
    if demand.max_tokens is not None:  # as servers cut them, so that only those overrun which end before
        longest = min(limits.max_model_len for limits in fleet.limits)
        demand = replace(demand, max_tokens=np.minimum(demand.max_tokens, longest - demand.prompt_tokens))
    client, arrived = Client(fleet, demand, router, uniforms, slots), []
    for i in np.argsort(demand.arrival, kind="stable").tolist():
        time = float(demand.arrival[i])
        while rng.random() < 0.5:
            client.read(float(rng.uniform(client.live.now, max(time, client.live.now))))
            decoding = [(slot, j) for slot, j in client.slot_of.items() if client.times[j]]
            if decoding and rng.random() < leave:
                slot, _ = decoding[int(rng.integers(len(decoding)))]
                if client.live.state.requests[slot]["preemptions"] == client.live.again["retries"][slot] == 0:
                    client.live.end_early(slot)
        client.read(max(time, client.live.now))
        arrived.append((i, client.send(i, time)))
    for _ in range(400):  # autoscalers go on for ever
        if not client.slot_of:
            break
        client.read(float(np.nextafter(client.live.next_decision(), np.inf)) if client.live.events else 1e6)
    if client.slot_of:  # requests that preempt each other for ever, or that no replica is there for
        return
    order = [i for i, _ in arrived]
    output = np.array([int(client.records[i]["output"]) for i in range(len(kept))])
    most = demand.output_tokens + demand.overruns if demand.max_tokens is None else demand.max_tokens
    times = np.zeros(len(kept))
    times[order] = [time for _, time in arrived]
    changed = output < demand.output_tokens
    demand = replace(
        demand,
        arrival=times,
        output_tokens=output,
        max_tokens=most,
        overruns=np.where(changed, True, demand.overruns) if demand.overruns.any() else output < most,
    )
    record = service.run(fleet, demand, router, uniforms, jumps=False)
    compare(client, record, leave == 0.0)


def compare(client: Client, record: Record, whole: bool) -> None:
    """What the client was told is what the record says."""
    n = len(record.requests)
    lost = set(record.lives.lost) if record.lives else set()
    assert sorted(client.lost) == sorted(lost)
    for name in SEEN:
        skip = lost if name == "state" else set()
        found = [client.records[i][name] for i in range(n) if i not in skip]
        expected = [float(record.requests[name][i]) for i in range(n) if i not in skip]
        assert np.array_equal(expected, found, equal_nan=True), name
    for i, row in enumerate(record.requests):
        times = client.times[i]
        if i in lost:
            continue
        if row["state"] in (IGNORED, REFUSED):
            assert times == [] or row["preemptions"], "vLLM v0 ignores what it cannot compute again"
            continue
        assert (times[0], times[-1], len(times)) == (row["first_token"], row["finish"], row["output"])
    for stall in record.stalls:
        times = client.times[int(stall["request"])]
        if stall["request"] not in lost and stall["last_token"] in times:
            assert times[times.index(stall["last_token"]) + 1] == stall["resumed_token"]
    live = client.live
    if whole and not hasattr(live, "logs"):
        rows = live.state.rows[: live.state.counters[ROWS]]
        assert merged(rows[rows["replica"] >= 0]) == merged(record.rows)
    lanes = live.state.lanes
    assert (lanes["outstanding"] == 0).all()
    assert (lanes["waiting"] == 0).all()


def told(fleet: Fleet, demand: Demand, router: int, uniforms: Any, seed: int) -> None:
    """A case by a number; engines may die, as in a run."""
    with contextlib.suppress(InputError):
        check(fleet, demand, router, uniforms, slots=[2, 64][seed % 2], leave=[0.0, 0.5][seed // 2 % 2], seed=seed)


def short(demand: Demand, seed: int) -> Demand:
    """With answers of a few tokens, since each is looked at."""
    most = np.random.default_rng(seed).integers(1, 60, len(demand.arrival))
    return replace(demand, output_tokens=np.minimum(demand.output_tokens, most), max_tokens=None)


def on_cases(strategy: Any, one: Callable[..., None]) -> None:
    """Try them."""

    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(strategy, st.integers(0, 2**32 - 1))
    def compared(case: Any, seed: int) -> None:
        one(case, seed)

    compared()


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("kind", test_mixed.ALL)
def test_what_a_run_of_the_same_arrivals_gives(kind: str) -> None:
    def one(case: test_mixed.Case, seed: int) -> None:
        assume(case.demand.follow is not None)
        told(case.fleet, case.demand, case.router, case.uniforms, seed)

    on_cases(test_mixed.cases((kind,), ("open",)), one)


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("kind", ["vllm", "vllm in pipelines", "unified"])
def test_replicas_that_come_and_go(kind: str) -> None:
    def one(case: tuple[Fleet, Demand, int, Any], seed: int) -> None:
        fleet, demand, router, uniforms = case
        assume(not any(each and isinstance(each.rule, Foresight) for each in fleet.scaling))
        changes = {time for each in fleet.failures for time in (each.time, each.time + each.down)}
        assume(not changes & set(demand.arrival.tolist()))  # live, requests of one instant differ in the last bit
        told(fleet, demand, router, uniforms, seed)

    on_cases(services(*KINDS[kind]), one)


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("kind", ["cache", "sglang", "radix", "v0", "engines"])
def test_every_router_and_replicas_that_fail(kind: str) -> None:
    for seed in range(CASES):
        for case in (mixed_case(seed, 16, (kind,)), failing_case(seed, kind)):
            told(case.fleet, short(case.demand, seed), case.routers[0], case.uniforms, seed)


@IN_PLAIN_PYTHON
def test_schedulers_in_python() -> None:
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        chunking = partial(test_user.Chunking, bool(rng.integers(2)), bool(rng.integers(2)), seed)
        fleet = test_user.fleet_of(rng, (chunking, test_user.ShortestFirst, test_user.ByColumns)[seed % 3])
        demand = test_user.demand_of(rng)
        told(fleet, demand, (0, 2)[seed % 2], rng.random(len(demand.arrival)), 4 * seed)


def test_a_session_stays_with_its_replica_and_slots_are_used_again() -> None:
    pool = Limits(4, 64, 256, 64, 16)
    times = linear(0.5, 0.01, 0.001, 1e-5, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=256)
    fleet = Fleet((pool,), (VllmV1(),), (times,), (3,), (1,), (False,))
    live = Live(fleet, SESSION_AFFINITY, np.random.default_rng(0), slots=4)
    places: dict[str, set[int]] = {"a": set(), "b": set(), "": set()}
    for k in range(40):
        for session, replicas in places.items():
            slot, _, rows = live.arrive(Arrival(10, 3, 3, session=session), 2.0 * k)
            replicas.add(int(live.state.requests["lane"][slot]))
            for row in rows[rows["gone"] != STAYS]:
                live.forget(int(row["slot"]))
    assert len(places["a"]) == len(places["b"]) == 1
    assert len(live.told.given) <= 32
    assert live.advance(1e6)["gone"].any()


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("policy", [VllmV1(), VllmV0(), Trtllm(), Policy()], ids=["v1", "v0", "trtllm", "unified"])
def test_blocks_come_back_whatever_slot_a_request_has(policy: Any) -> None:
    pool = Limits(4, 256, 256, 64, 16)
    times = linear(0.5, 0.01, 0.001, 1e-5, max_num_batched_tokens=256, max_num_seqs=4, max_model_len=256)
    live = Live(Fleet((pool,), (policy,), (times,), (1,), (1,), (False,)), 0, np.random.default_rng(0))
    ended = 0
    for k, output in enumerate((1, 4, 1, 1, 2)):
        _, _, rows = live.arrive(Arrival(20 + k, output, output), 0.1 * k)
        ended += int((rows["gone"] != STAYS).sum())
    ended += int((live.advance(1e6)["gone"] != STAYS).sum())
    assert ended == 5
    assert live.state.lanes["free"][0] == pool.num_blocks


@WITH_THE_COMPILER
def test_every_scheduler_without_the_compiler() -> None:
    in_plain_python(1, __file__)
