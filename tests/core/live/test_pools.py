"""Live prefill and decode pools give what a run of the same arrivals gives, to the bit."""

import contextlib
import os
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.fleet.test_pools import RULES, failing_case
from core.live.test_live import Again, opened, short
from core.loop_cases import Case, handing_case
from windtunnel.core.disaggregation import handover
from windtunnel.core.fleet import pools
from windtunnel.core.live.live import Arrival
from windtunnel.core.live.pools import Between, LivePools
from windtunnel.core.live.tokens import FAILED, STAYS
from windtunnel.errors import InputError
from windtunnel.policy.scaling import Autoscale

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "12"))


def work(prompts: Any) -> Any:
    """Seconds of the link."""
    return 1e-4 * prompts.astype(np.float64)


class Noting(LivePools):
    """Notes whose replica has failed: (slot, time, tokens that are kept)."""

    def _make_anew(self, anew: list[tuple[int, int]], time: float) -> None:
        super()._make_anew(anew, time)
        self.begun_anew += [(r, time, int(self._had[r])) for r, _ in anew]

    @cached_property
    def begun_anew(self) -> list[tuple[int, float, int]]:
        return []


class Client:
    """Sends the requests of a case one by one, and remembers what it gets."""

    def __init__(self, case: Case, slots: int) -> None:
        demand, self.fleet = case.demand, case.fleet
        assert case.crossing is not None
        size = demand.hash_block_size if demand.hash_ids is not None else 0
        if case.fleet.failures and any(policy.prefix_caching for policy in case.fleet.policies):
            size = size or case.fleet.limits[0].block_size
        first, second = (Again(row) for row in case.uniforms)
        route = case.fleet.route_score, case.fleet.routing
        crossing = replace(case.crossing, work=np.zeros(0))
        between = Between(case.routers, (first, second), crossing, work, route)
        self.live = Noting(case.fleet, between, size, slots)
        self.demand = demand
        self.slot_of: dict[int, int] = {}
        self.times: dict[int, list[float]] = {}
        self.accounts: dict[int, tuple[Any, int]] = {}
        self.lost: list[int] = []
        self.late: list[tuple[int, int, float]] = []

    def send(self, i: int, time: float) -> float:
        demand, names = self.demand, ()
        if demand.hash_ids is not None:
            offsets, values = demand.hash_ids
            names = tuple(values[offsets[i] : offsets[i + 1]].tolist())
        most = demand.max_tokens
        assert most is not None
        priority = 0 if demand.priority is None else int(demand.priority[i])
        arrival = Arrival(int(demand.prompt_tokens[i]), int(demand.output_tokens[i]), int(most[i]), priority, names)
        slot, arrived, rows = self.live.arrive(arrival, time)
        assert slot not in self.slot_of
        self.note(rows[rows["slot"] != slot])
        self.slot_of[slot], self.times[i] = i, []
        self.note(rows[rows["slot"] == slot])
        return arrived

    def note(self, rows: Any) -> None:
        """What was withdrawn, and what comes: by time, since a request that goes on counts from what it keeps."""
        told = [(float(row["time"]), 0, int(row["slot"]), int(row["tokens"]), int(row["gone"])) for row in rows]
        told += [(time, 1, slot, 1 << 30, STAYS) for slot, time in self.live.withdrawn]
        told += [(time, 1, slot, kept, STAYS) for slot, time, kept in self.live.begun_anew]
        self.live.begun_anew.clear()
        self.live.withdrawn.clear()
        for time, again, slot, tokens, gone in sorted(told, key=lambda one: one[:2]):
            i, times = self.slot_of[slot], self.times[self.slot_of[slot]]
            if again:
                times[:] = [one for one in times if one <= time][:tokens]
                self.late = [one for one in self.late if one[0] != i or one[2] <= time]
            elif tokens > len(times):
                times.append(time)
                assert len(times) == tokens, "each step gives a request one token"
            if gone != STAYS:
                self.lost += [i] * (gone == FAILED)
                self.late.append((i, slot, time))
        self.forget(self.live.certain)

    def forget(self, until: float) -> None:
        """Those who have left before a time at which it could turn out that they have not."""
        for i, slot, time in self.late:
            if time < until:
                self.accounts[i] = self.live.account(slot), self.live.lane_of(slot)
                del self.slot_of[slot]
                self.live.forget(slot)
        self.late = [one for one in self.late if one[2] >= until]


def tried(case: Case, seed: int, leave: float = 0.0) -> int:
    """Send everything; some clients leave; then run what was sent. How often slots were used again."""
    rng = np.random.default_rng(seed)
    demand, kept = opened(case.demand)
    if not len(kept) or case.crossing is None:
        return 0
    most = demand.output_tokens + demand.overruns if demand.max_tokens is None else demand.max_tokens
    demand, crossing = (
        replace(demand, max_tokens=most),
        replace(case.crossing, kv_bytes=np.zeros(0), work=work(demand.prompt_tokens)),
    )
    case = replace(case, demand=demand, uniforms=case.uniforms[:, : len(kept)], crossing=crossing)
    slots = max(len(kept) - 8 * (seed % 2), 1)
    client, arrived = Client(case, slots), {}
    changes = bool(case.fleet.failures) or any(case.fleet.scaling)
    for i in np.argsort(demand.arrival, kind="stable").tolist():
        time = max(float(demand.arrival[i]), client.live.now)
        while rng.random() < 0.5:
            client.note(client.live.advance(float(rng.uniform(client.live.now, time))))
            decoding = [slot for slot, j in client.slot_of.items() if len(client.times[j]) > 1]
            if decoding and rng.random() < leave:
                slot = decoding[int(rng.integers(len(decoding)))]
                if client.live.account(slot).preemptions == 0:
                    i_left, output = client.slot_of[slot], client.live.end_early(slot)
                    demand.overruns[i_left] |= output < demand.output_tokens[i_left]
                    demand.output_tokens[i_left] = output
        client.note(client.live.advance(time))
        arrived[i] = client.send(i, time)
    for _ in range(400):  # autoscalers go on for ever
        if not client.slot_of:
            break
        live = client.live
        client.note(live.advance(float(np.nextafter(live.next_decision(), np.inf)) if live.events else 1e6))
    if (client.slot_of and client.live.events) or not len(client.live.roster.takes("decode")):
        return 0  # no replica is there for them
    assert not client.slot_of
    assert changes or client.live.at_rest
    times = np.array([arrived[i] for i in range(len(kept))])
    demand, router = replace(demand, arrival=times), (case.fleet.route_score, case.fleet.routing)
    arguments = case.fleet, demand, case.routers, case.uniforms, crossing
    if changes:
        record = pools.run(*arguments, lambda prompts: (np.zeros(len(prompts)), work(prompts)), False, router)
    else:
        record = handover.run(*arguments, jumps=False, decode_router=router)
    compare(client, record)
    return len(kept) - slots


def compare(client: Client, record: handover.Handed) -> None:
    """What the client was told is what the record says."""
    assert sorted(client.lost) == record.lost.tolist()
    for i, row in enumerate(record.requests):
        if i in client.lost:
            continue
        times, (account, _) = client.times[i], client.accounts[i]
        assert (times[0], times[-1], len(times)) == (row["first_token"], row["finish"], row["output"])
        assert (account.scheduled, account.cached_tokens) == (row["scheduled"], row["cached_tokens"])
        assert account.preemptions == row["preemptions"]
    for stall in record.stalls:
        times = client.times[int(stall["request"])]
        if stall["last_token"] in times:
            assert times[times.index(stall["last_token"]) + 1] == stall["resumed_token"]


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("leave", [0.0, 0.5])
def test_what_a_run_of_the_same_arrivals_gives(leave: float) -> None:
    again = 0
    for seed in range(CASES):
        case = handing_case(seed)
        with contextlib.suppress(InputError):  # more requests at once than slots
            again += tried(replace(case, demand=short(case.demand, seed)), seed, leave)
    assert again > 0


def coming_and_going(seed: int, kind: str) -> Case:
    """Pools that fail, and in every other case scale; waits run out in some."""
    rng, case = np.random.default_rng(seed), failing_case(seed, kind)
    assert case.crossing is not None
    rules = case.crossing.rules
    if seed % 3 == 0 and rules.on_expiry == "wait":
        then: Any = "fail" if rules.first_token == "relayed" or kind == "sglang" else rng.choice(["fail", "recompute"])
        rules = replace(rules, lease=float(rng.choice([0.2, 2.0])), timeout=4.0, on_expiry=then)
    scaling: Any = ()
    if seed % 2:
        each = [Autoscale(RULES[int(rng.integers(4))], 1, most, 1.37, 0.5) for most in case.fleet.replicas]
        scaling = tuple(one if rng.random() < 0.7 else None for one in each)
    fleet = replace(case.fleet, scaling=scaling)
    found: Case = replace(case, fleet=fleet, crossing=replace(case.crossing, rules=rules))
    return found


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("kind", ["vllm", "cache", "sglang", "trtllm-max-utilization"])
def test_replicas_and_links_that_come_and_go(kind: str) -> None:
    for seed in range(max(CASES // 16, 2)):
        case = coming_and_going(seed, kind)
        with contextlib.suppress(InputError):
            tried(replace(case, demand=short(case.demand, seed)), seed)


@WITH_THE_COMPILER
def test_every_hand_over_without_the_compiler() -> None:
    in_plain_python(40, __file__)


def test_more_at_once_than_there_is_room_for() -> None:
    case = handing_case(0)
    live = LivePools(case.fleet, Between((0, 0), (Again(np.zeros(8)), Again(np.zeros(8)))), slots=4)
    for _ in range(4):
        live.arrive(Arrival(100, 5, 5), 0.0)
    with pytest.raises(InputError, match="4 requests at once: here there is room for no more"):
        live.arrive(Arrival(100, 5, 5), 0.0)
