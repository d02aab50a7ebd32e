"""A window after a warm-up: when it opens, who comes, and gaps in which nothing is in flight. A step takes a second."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from core.loop_cases import handing_case, merged, times
from windtunnel.core.disaggregation import handover
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.fleet import pools, service
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.scaling import Autoscale, Failure, Thresholds
from windtunnel.workload.agents.measured import Measured

STEP = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256)
FLEET = Fleet((Limits(8, 64, 256, 100, 16),), (VllmV1(async_scheduling=False),), (STEP,), (1,), (1,), (False,))


def record(
    outputs: list[int], after: list[list[int]], think: list[float], sessions: list[int], **measured: float
) -> Record:
    """Two requests of a warm-up, and what comes then: the first three wait for one of these each."""
    n = len(outputs)
    opening = np.array([r for r in range(2, n) if set(after[r]) <= {0, 1} and after[r]])
    demand = Demand(
        arrival=np.array([0.0 if not waits else np.nan for waits in after]),
        prompt_tokens=np.full(n, 8),
        output_tokens=np.array(outputs),
        overruns=np.zeros(n, bool),
        refused=np.zeros(n, bool),
        follow=np.full(n, -1),
        think_time=np.array(think),
        max_concurrency=0,
        after=(np.cumsum([0, *map(len, after)]), np.array([p for waits in after for p in waits])),
        sessions=np.array(sessions),
        lanes=2,
        measured=Measured(np.array([0, 1]), opening, **measured),
    )
    return run(FLEET, demand, 0, np.zeros(n))


def test_it_opens_when_the_warm_up_has_drained_and_nobody_comes_after_its_end() -> None:
    after = [[], [], [0], [2], [3], [1], []]
    found = record([1, 3, 2, 1, 1, 1, 1], after, [0, 0, 0.5, 4.0, 15.0, 2.0, 0], [0, 1, 0, 0, 0, 1, 2], seconds=20.0)
    # the warm-up takes 1 s and 3 s; session 2 takes the place of session 1, whose last request comes at 5 s
    came = found.requests["scheduled"]
    np.testing.assert_allclose(came[:4], [0.0, 0.0, 3.5, 9.5])
    assert np.isnan(came[4])  # 10.5 + 15 s is after 3 + 20 s
    assert came[5] == 5.5  # it waits for the step that runs at 5 s
    assert came[6] == 6.5
    np.testing.assert_allclose(found.requests["finish"][:4], [1.0, 3.0, 5.5, 10.5])


def test_where_nothing_is_in_flight_everything_comes_as_much_earlier() -> None:
    after = [[], [], [0], [2], [3], [1]]
    found = record(
        [1, 3, 2, 1, 1, 1], after, [0, 0, 0.5, 100.0, 20.0, 60.0], [0, 1, 0, 0, 0, 1], seconds=1000.0, idle_gap=10.0
    )
    # at 5.5 s the next ones come at 63 and 105.5 s: at 15.5 and 58; at 16.5 s the latter at 26.5
    np.testing.assert_allclose(found.requests["scheduled"], [0.0, 0.0, 3.5, 26.5, 37.5, 15.5])


def test_a_warm_up_without_a_limit_of_gaps_moves_nothing() -> None:
    found = record([1, 3, 2, 1], [[], [], [0], [2]], [0, 0, 0.5, 100.0], [0, 1, 0, 0], seconds=1000.0)
    np.testing.assert_allclose(found.requests["scheduled"], [0.0, 0.0, 3.5, 105.5])


def test_of_a_session_in_which_nothing_is_in_flight_all_comes_as_much_earlier() -> None:
    """Requests 3 and 4 wait for 2: at 5.5 s they are to come at 25.5 and 45.5 s, so at 15.5 and 35.5 s; 3 ends at 17 s,
    as session 1's decode makes steps from 12 s on, and 4 comes 10 s later."""
    after = [[], [], [0], [2], [2], [1]]
    think = [0, 0, 0.5, 20.0, 40.0, 9.0]
    found = record([1, 3, 2, 1, 1, 6], after, think, [0, 1, 0, 0, 0, 1], seconds=1000.0, tree_gap=10.0)
    np.testing.assert_allclose(found.requests["arrival"][2:], [3.5, 15.5, 27.0, 12.0])


def test_a_session_starts_its_window_with_no_longer_gap() -> None:
    after, think = [[], [], [0], [0], [1]], [0, 0, 300.0, 320.0, 7.0]
    found = record([1, 3, 1, 1, 1], after, think, [0, 1, 0, 0, 1], seconds=1000.0, tree_gap=10.0)
    np.testing.assert_allclose(found.requests["arrival"][2:], [13.0, 24.0, 10.0])  # 33 s, but 10 s after the end at 14


# By the rule, in plain Python, from when requests ended.


def trees(seed: int, **limits: float) -> Demand:
    """Sessions with forks, joins and children in the background, half of which wait for a lane."""
    rng = np.random.default_rng(seed)
    after, session, warm_up, opening = list[list[int]](), list[int](), list[int](), list[int]()
    for s in range(10):
        first, rows = len(after), int(rng.integers(4, 12))
        for k in range(rows):
            known = range(first, first + k)
            count = min(k, int(rng.choice([1, 1, 1, 2, 3])))
            after.append(sorted(rng.choice(known, count, replace=False).tolist()) if k else [])
            session.append(s)
        if s < 5:
            warm_up.append(first)
            opening += [r for r in range(first, first + rows) if after[r] == [first]]
    n = len(after)
    none = np.zeros(n)
    return Demand(
        arrival=np.where([bool(waits) for waits in after], np.nan, 0.0),
        prompt_tokens=rng.integers(8, 400, n),
        output_tokens=np.where(np.isin(np.arange(n), warm_up), 1, rng.integers(1, 60, n)),
        overruns=none.astype(bool),
        refused=none.astype(bool),
        follow=np.full(n, -1),
        think_time=np.where([bool(waits) for waits in after], rng.exponential(rng.choice([1.0, 30.0], n)), 0.0),
        max_concurrency=0,
        after=(np.cumsum([0, *map(len, after)]), np.array([p for waits in after for p in waits])),
        sessions=np.array(session),
        lanes=5,
        measured=Measured(np.array(warm_up), np.array(opening), **limits),
    )


class Client:
    """Who sends requests by the rule; all that it is told is when they end."""

    def __init__(self, demand: Demand, measured: Measured) -> None:
        (offsets, parents), n = demand.waits, len(demand.arrival)
        self.measured, self.think = measured, demand.think_time.tolist()
        self.session = np.array(demand.sessions).tolist()
        self.waits = [set(parents[offsets[r] : offsets[r + 1]].tolist()) for r in range(n)]
        self.flying, self.pending = set(measured.warm_up.tolist()), dict[int, float]()
        self.queue = [r for r in range(n) if not self.waits[r] and r not in self.flying]
        self.left = {s: self.session.count(s) for s in self.session}
        self.opened = False

    def cut(self, rows: list[int], latest: float) -> None:
        early = min((self.pending[r] for r in rows), default=0.0) - latest
        for r in rows if early > 0 else ():
            self.pending[r] -= early

    def of(self, session: int) -> list[int]:
        return [r for r in self.pending if self.session[r] == session]

    def ended(self, r: int, now: float) -> None:
        self.flying.discard(r)
        self.left[self.session[r]] -= 1
        for q, waits in enumerate(self.waits):
            if r in waits:
                waits.discard(r)
                if self.opened and not waits:
                    self.pending[q] = now + self.think[q]
        if not self.opened and not self.flying:
            self.opened = True
            self.pending = {q: now + self.think[q] for q in self.measured.opening.tolist()}
            for session in set(self.session):
                self.cut(self.of(session), now + self.measured.tree_gap)
        elif self.opened and not any(self.session[q] == self.session[r] for q in self.flying):
            self.cut(self.of(self.session[r]), now + self.measured.tree_gap)
        if not self.left[self.session[r]] and self.queue:
            self.pending[self.queue.pop(0)] = now
        if self.opened and not self.flying:
            self.cut(list(self.pending), now + self.measured.idle_gap)


def expected(demand: Demand, finish: Any) -> Any:
    """When each request comes, if they end then."""
    assert demand.measured is not None
    client, came = Client(demand, demand.measured), np.full(len(finish), np.nan)
    warm_up = demand.measured.warm_up
    came[warm_up], closes = 0.0, finish[warm_up].max() + demand.measured.seconds
    while client.flying or client.pending:
        ends = min(((float(finish[r]), r) for r in client.flying), default=(inf, -1))
        comes = min(((time, r) for r, time in client.pending.items() if time <= closes), default=(inf, -1))
        if comes[0] < ends[0]:
            came[comes[1]] = client.pending.pop(comes[1])
            client.flying.add(comes[1])
        elif ends[1] >= 0:
            client.ended(ends[1], ends[0])
        else:
            break
    return came


def fleet_of(kind: str) -> Fleet:
    limits = Limits(64, 2048, 24576, 9000, 16)
    roles = ("prefill", "decode") if kind == "apart" else ()
    count = len(roles) or 1
    return Fleet((limits,) * count, (VllmV1(),) * count, (times(2048),) * count, (2,) * count, (1,) * count,
                 (False,) * count, roles=roles)  # fmt: skip


STILL = Autoscale(Thresholds(), 2, 2, 3.0, 1.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["mixed", "apart"])
def test_everybody_comes_as_the_rule_says_whatever_serves(kind: str, seed: int) -> None:
    demand = trees(seed, seconds=150.0, idle_gap=[3.0, inf][seed % 2], tree_gap=[8.0, 20.0][seed // 2])
    n, fleet = len(demand.arrival), fleet_of(kind)
    uniforms = np.random.default_rng(seed).random((2, n))
    scaled = replace(fleet, scaling=(STILL,) * len(fleet.replicas))
    if kind == "mixed":
        found, same = run(fleet, demand, 0, uniforms[0]), service.run(scaled, demand, 0, uniforms[0])
    else:
        crossing = handing_case(seed).crossing
        assert crossing is not None
        crossing = replace(crossing, work=np.zeros(0))
        found = handover.run(fleet, demand, (0, 0), uniforms, crossing)
        same = pools.run(scaled, demand, (0, 0), uniforms, crossing)
    came = expected(demand, found.requests["finish"])
    ended = ~np.isnan(found.requests["finish"])
    assert ended.sum() < n or demand.measured.seconds > found.requests["finish"][ended].max()  # type: ignore[union-attr]
    np.testing.assert_array_equal(ended, ~np.isnan(came))
    np.testing.assert_allclose(found.requests["arrival"][ended], came[ended], rtol=0, atol=1e-9)
    for name in ("scheduled", "first_token", "finish"):
        assert np.array_equal(found.requests[name], same.requests[name], equal_nan=True)
    assert merged(found.rows) == merged(same.rows)


@pytest.mark.parametrize("kind", ["mixed", "apart"])
def test_a_window_closes_where_replicas_fail(kind: str) -> None:
    demand = trees(3, seconds=40.0, tree_gap=5.0)
    failures = tuple(Failure(at, k % (2 if kind == "mixed" else 4), 4.0) for k, at in enumerate((0.01, 9.0, 30.0)))
    fleet = replace(fleet_of(kind), failures=failures)
    uniforms = np.random.default_rng(0).random((2, len(demand.arrival)))
    if kind == "mixed":
        found: Any = service.run(fleet, demand, 0, uniforms[0])
    else:
        crossing = handing_case(3).crossing
        assert crossing is not None
        found = pools.run(fleet, demand, (0, 0), uniforms, replace(crossing, work=np.zeros(0)))
    rows = found.requests
    ended = ~np.isnan(rows["finish"])
    opened = float(rows["finish"][demand.measured.warm_up].max())  # type: ignore[union-attr]
    assert found.lives.retries > 0
    assert 10 < ended.sum() < len(ended)
    assert rows["arrival"][ended].max() <= opened + 40.0
