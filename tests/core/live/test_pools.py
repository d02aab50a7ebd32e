"""Live prefill and decode pools give what a run of the same arrivals gives, to the bit."""

import contextlib
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.live.test_live import Again, opened, short
from core.loop_cases import Case, handing_case
from windtunnel.core.disaggregation import handover
from windtunnel.core.live.live import Arrival
from windtunnel.core.live.pools import Between, LivePools
from windtunnel.core.live.tokens import FAILED, STAYS
from windtunnel.errors import InputError

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "12"))


def work(prompts: Any) -> Any:
    """Seconds of the link."""
    return 1e-4 * prompts.astype(np.float64)


class Client:
    """Sends the requests of a case one by one, and remembers what it gets."""

    def __init__(self, case: Case, slots: int) -> None:
        demand = case.demand
        assert case.crossing is not None
        size = demand.hash_block_size if demand.hash_ids is not None else 0
        first, second = (Again(row) for row in case.uniforms)
        route = case.fleet.route_score, case.fleet.routing
        crossing = replace(case.crossing, work=np.zeros(0))
        between = Between(case.routers, (first, second), crossing, work, route)
        self.live = LivePools(case.fleet, between, size, slots)
        self.demand = demand
        self.slot_of: dict[int, int] = {}
        self.times: dict[int, list[float]] = {}
        self.accounts: dict[int, tuple[Any, int]] = {}
        self.lost: list[int] = []
        self.reused = 0

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
        for row in rows:
            slot = int(row["slot"])
            i, times = self.slot_of[slot], self.times[self.slot_of[slot]]
            if int(row["tokens"]) > len(times):
                times.append(float(row["time"]))
                assert len(times) == int(row["tokens"]), "each step gives a request one token"
            if row["gone"] != STAYS:
                self.lost += [i] * (int(row["gone"]) == FAILED)
                self.accounts[i] = self.live.account(slot), self.live.lane_of(slot)
                del self.slot_of[slot]
                self.live.forget(slot)


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
    client.note(client.live.advance(1e6))
    assert not client.slot_of
    assert client.live.at_rest
    times = np.array([arrived[i] for i in range(len(kept))])
    demand = replace(demand, arrival=times)
    record = handover.run(case.fleet, demand, case.routers, case.uniforms, crossing, jumps=False,
                          decode_router=(case.fleet.route_score, case.fleet.routing))  # fmt: skip
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
