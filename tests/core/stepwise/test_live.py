"""A live fleet gives what a run of the same arrivals gives, to the bit, whatever its clock does between them."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numba import config

from core.schedulers.test_mixed import Case, cases
from windtunnel.core.engine import run
from windtunnel.core.records import IGNORED
from windtunnel.core.stepwise import live
from windtunnel.errors import InputError
from windtunnel.policy.routing import LEAST_OUTSTANDING, RANDOM, ROUND_ROBIN, ROUTE_SCORE, VLLM_DP

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "40"))
KINDS = ("v1", "v1 cached", "unified", "sglang", "sglang radix")
COMPILED = ("v1 cached",)
"""Those that are tried with the compiler: each is compiled anew."""
SEEN = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens")
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


class Client:
    """Sends the requests of a case one by one, and remembers what it gets."""

    def __init__(self, case: Case, slots: int) -> None:
        assert case.demand.hash_ids is not None
        caching = any(policy.prefix_caching for policy in case.fleet.policies)
        uniforms = np.random.default_rng(3)
        self.stream = uniforms.random(1000)
        live.SLOTS, before = slots, live.SLOTS
        try:
            self.live = live.Live(
                case.fleet, case.router, lambda n: self.stream[:n], case.demand.hash_block_size if caching else 0
            )
        finally:
            live.SLOTS = before
        self.case, self.caching = case, caching
        self.slot_of: dict[int, int] = {}
        self.records: dict[int, dict[str, float]] = {}
        self.times: dict[int, list[float]] = {}

    def arrival(self, i: int) -> live.Arrival:
        demand = self.case.demand
        assert demand.hash_ids is not None and demand.max_tokens is not None and demand.priority is not None
        offsets, values = demand.hash_ids
        full = int(demand.prompt_tokens[i]) // demand.hash_block_size
        names = values[offsets[i] : offsets[i + 1]][:full].tolist() if self.caching else ()
        return live.Arrival(
            int(demand.prompt_tokens[i]), int(demand.output_tokens[i]), int(demand.max_tokens[i]),
            int(demand.priority[i]), tuple(names),
        )  # fmt: skip

    def send(self, i: int, time: float) -> float:
        slot, arrived, rows = self.live.arrive(self.arrival(i), time)
        self.note(rows)
        assert slot not in self.slot_of
        self.slot_of[slot] = i
        self.times[i] = []
        return arrived

    def read(self, until: float) -> None:
        self.note(self.live.advance(until))

    def note(self, rows: Any) -> None:
        for row in rows:
            i = self.slot_of[int(row["slot"])]
            if int(row["tokens"]) > len(self.times[i]):
                self.times[i].append(float(row["time"]))
                assert len(self.times[i]) == int(row["tokens"]), "each step gives a request one token"
            if row["gone"]:
                found = self.live.state.requests[row["slot"]]
                self.records[i] = {name: float(found[name]) for name in (*SEEN, "prompt", "output")}
                del self.slot_of[int(row["slot"])]
                self.live.forget(int(row["slot"]))


def check(case: Case, slots: int, leave: float, seed: int) -> None:
    """Send everything; some clients of decodes leave; then run what was sent."""
    rng = np.random.default_rng(seed)
    kept = np.flatnonzero(~case.demand.refused).tolist()
    assume(kept)
    client, arrived, left = Client(case, slots), [], set[int]()
    for i in kept:
        time = float(case.demand.arrival[i])
        while rng.random() < 0.5:
            client.read(float(rng.uniform(client.live.now, max(time, client.live.now))))
            decoding = [(slot, j) for slot, j in client.slot_of.items() if client.times[j]]
            if decoding and rng.random() < leave:
                slot, j = decoding[int(rng.integers(len(decoding)))]
                if client.live.state.requests[slot]["preemptions"] == 0:
                    client.live.end_early(slot)
                    left.add(j)
        client.read(max(time, client.live.now))
        arrived.append(client.send(int(i), time))
    client.read(np.inf)
    if client.slot_of:  # requests that preempt each other for ever, or that an engine ignores
        return
    assert case.demand.hash_ids is not None and case.demand.max_tokens is not None
    names = [client.arrival(int(i)).hash_ids for i in kept]
    output = np.array([int(client.records[i]["output"]) for i in kept])
    demand = replace(
        case.demand,
        arrival=np.array(arrived),
        output_tokens=output,
        overruns=output < case.demand.max_tokens[kept],
        hash_ids=(np.cumsum([0, *map(len, names)]), np.array([one for row in names for one in row], dtype=np.int64)),
        **{name: getattr(case.demand, name)[kept] for name in ("prompt_tokens", "refused", "follow", "think_time")},
        **{name: getattr(case.demand, name)[kept] for name in ("max_tokens", "priority")},
    )
    record = run(case.fleet, demand, case.router, client.stream)
    for name in SEEN:
        found = [client.records[i][name] for i in kept]
        assert np.array_equal(record.requests[name].astype(float), found, equal_nan=True), name
    for i, row in zip(kept, record.requests, strict=True):
        times = client.times[i]
        if row["state"] == IGNORED:
            assert times == []
            continue
        assert (times[0], times[-1], len(times)) == (row["first_token"], row["finish"], row["output"])
    for stall in record.stalls:
        times = client.times[kept[stall["request"]]]
        assert times[times.index(stall["last_token"]) + 1] == stall["resumed_token"]
    lanes = client.live.state.lanes
    assert (lanes["outstanding"] == 0).all() and (lanes["waiting"] == 0).all()


@pytest.mark.parametrize("kind", KINDS if config.DISABLE_JIT else COMPILED)  # type: ignore[attr-defined]
def test_what_a_run_of_the_same_arrivals_gives(kind: str) -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(cases((kind,), ("open",)), st.sampled_from([2, 64]), st.sampled_from([0.0, 0.5]), st.integers(0, 2**32 - 1))
    def compared(case: Case, slots: int, leave: float, seed: int) -> None:
        assume(case.router in (ROUND_ROBIN, RANDOM, LEAST_OUTSTANDING, VLLM_DP, ROUTE_SCORE))
        with contextlib.suppress(InputError):  # SGLang may die, as in a run
            check(case, slots, leave, seed)

    compared()


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="is that run")  # type: ignore[attr-defined]
def test_every_scheduler_without_the_compiler() -> None:
    some = os.environ | {"NUMBA_DISABLE_JIT": "1", "WINDTUNNEL_EQUALITY_CASES": "10"}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    done = subprocess.run(command, env=some, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
