"""Gaps between tokens: pooled over all requests from the log's sums, and request by request.

A decoding request takes part in every step of its lane that has decodes. So between two of its tokens lies the time
between the ends of two such steps next to each other: mostly the later one's duration, and more where prefills ran
alone between them. Its first decode follows the end of the request's prefill instead.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.metrics.distribution import Distribution
from windtunnel.metrics.steps import Counts, Steps
from windtunnel.metrics.window import Window
from windtunnel.perf.batch_times import whole
from windtunnel.simulate.run import FINISHED, Run

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NOTHING: Floats = np.zeros(0)
LANES = 1 << 20
"""More than a replica has."""
TOLERANCE = 1e-9
"""A step's end and a token's time are the same event, rounded apart (s)."""


@dataclass(frozen=True, eq=False)
class DecodeSteps:
    """The steps with decodes, lane by lane and in order of time in each."""

    lanes: Integers
    """Replica and rank of each lane as one number, ascending."""
    first: Integers
    """[lanes + 1] where each begins in the columns."""
    start: Floats
    end: Floats
    decodes: Counts

    def lane_bounds(self, lane: int) -> tuple[int, int]:
        """First entry of a lane, and the one after its last."""
        low, high = np.searchsorted(self.lanes, lane), np.searchsorted(self.lanes, lane, side="right")
        return int(self.first[low]), int(self.first[high])

    def paused(self) -> NDArray[np.bool_]:
        """Which do not begin when the one before them in their lane ends; the first of each lane."""
        found = np.empty(len(self.start), dtype=np.bool_)
        np.greater(self.start[1:], self.end[:-1] + TOLERANCE, out=found[1:])
        found[self.first[:-1]] = True
        return found


def decode_steps(steps: Steps) -> DecodeSteps:
    """The steps with decodes of a run."""
    log = steps.run.iterations
    lane_of_row = lane_number(log.replica, log.lane)
    some = (log.decodes > 0)[steps.row]
    if some.any() and (lane_of_row == lane_of_row[0]).all():
        first = np.array([0, np.count_nonzero(some)])
        start = steps.start[some]
        return DecodeSteps(lane_of_row[:1], first, start, start + steps.duration[some], steps.decodes[some])
    lane = lane_of_row[steps.row[some]]
    order = np.argsort(lane, kind="stable")  # each lane wrote its steps in order of time
    lanes, counts = np.unique(lane, return_counts=True)
    place = np.flatnonzero(some)[order]
    first = np.concatenate([[0], np.cumsum(counts)])
    return DecodeSteps(lanes, first, steps.start[place], steps.end[place], steps.decodes[place])


def lane_number(replica: Integers, rank: Integers) -> Integers:
    """One number for a replica and a rank of it."""
    found = replica.astype(np.int64)
    found *= LANES
    found += rank
    return found


def pooled_gaps(steps: Steps, more: Floats = NOTHING) -> tuple[Floats, Counts, Sequence[Floats]]:
    """All gaps that end with a decode, as (seconds, how many of them, when they end in one or more parts), and behind
    them ``more``, of one token each, without their ends."""
    if not steps.run.piped:
        return gaps_of_groups(steps, *_joins(steps), Earlier(), more)[:3]
    gaps, counts, ends = _gaps_of_stages(steps)
    return np.append(gaps, more), np.append(counts, np.ones(len(more), dtype=counts.dtype)), ends


def _gaps_of_stages(steps: Steps) -> tuple[Floats, Counts, Sequence[Floats]]:
    """Of single steps, where replicas have several stages."""
    found = decode_steps(steps)
    is_paused = found.paused()
    lane, joined = _joins(steps)
    at = _first_after(found, is_paused, lane, joined)
    joined, at = joined[at >= 0], at[at >= 0]
    np.subtract.at(found.decodes, at, 1)
    gap = found.end - found.start
    is_paused[found.first[:-1]] = False
    after = np.flatnonzero(is_paused)
    gap[after] = found.end[after] - found.end[after - 1]
    counts = np.append(found.decodes, np.ones_like(at))
    return np.concatenate([gap, found.end[at] - joined]), counts, (found.end, found.end[at])


class Earlier(NamedTuple):
    """What the steps before these left open; nothing where these are all."""

    ends: Floats = NOTHING
    """[lanes] when the last row with decodes ended, NaN where none has."""
    lane: Integers = np.zeros(0, dtype=np.int64)
    """Of joins that no decodes have followed yet."""
    time: Floats = NOTHING


def gaps_of_groups(
    steps: Steps, lane: Integers, time: Floats, earlier: Earlier, more: Floats = NOTHING
) -> tuple[Floats, Counts, Sequence[Floats], Earlier]:
    """Where no replica has several stages: steps of a group have one duration, with which all of its tokens come; but
    for those of rows that follow a pause of their lane, whose first step ends a longer gap.

    ``lane``, ``time``: of the prefills after which requests decode, see ``_joins``; ``more``: gaps of one token each
    that come after these. Returns what ``pooled_gaps`` does, and what is open at the end.
    """
    from windtunnel.core.log import gaps_of_rows
    from windtunnel.core.records import attributes

    if len(earlier.lane):
        lane, time = np.concatenate([earlier.lane, lane]), np.concatenate([earlier.time, time])
    log, ends, replicas = steps.run.iterations, steps.ends, steps.run.manifest["replicas"]
    if len(ends) == 0:
        return more, np.ones(len(more), dtype=np.int32), (NOTHING,), Earlier(earlier.ends, lane, time)
    width = max(entry["lanes"] for entry in replicas)
    place = lane // LANES * width + lane % LANES
    order = np.lexsort((time, place))
    lane, time = lane[order], time[order]
    bounds = np.searchsorted(place[order], np.arange(len(replicas) * width + 1))
    del place, order  # what follows has an entry for each step
    last, later = np.full((len(bounds) - 1, 2), -np.inf), np.ones(len(time), dtype=np.bool_)
    last[:, 0] = earlier.ends if len(earlier.ends) else np.nan
    n, room = len(ends), len(log.steps) + len(time)  # what is not used takes no memory
    values, counts, when = np.empty(n + room + len(more)), np.empty(n + room + len(more), np.int32), np.empty(room)
    np.subtract(ends[1:], ends[:-1], out=values[1:n])
    counts[:n] = steps.emitted
    joins = np.ascontiguousarray(np.stack([bounds[:-1], bounds[1:]], axis=1))
    first, rows = steps.grouped.first, attributes(log.rows)
    found = gaps_of_rows(rows, first, ends, width, time, joins, last, later, values, counts, when, TOLERANCE)
    until = n + found + len(more)
    values[n + found : until], counts[n + found : until] = more, 1
    return values[:until], counts[:until], (ends, when[:found]), Earlier(last[:, 0], lane[later], time[later])


def token_gaps(steps: Steps, window: Window) -> Distribution:
    """Inter-token latencies of all requests pooled, those of stalls included; in a trimmed window those that end
    inside. Where an event has several tokens, because the server waits for them or because a step that verifies drafts
    yields them together, there is one for each event, as clients see it."""
    if (tokens := streamed(steps.run)) > 1:
        return Distribution(_event_gaps(steps, window, tokens))
    stalls = steps.run.stalls
    waited = stalls.resumed_token - stalls.last_token
    gaps, counts, ends = pooled_gaps(steps, waited)
    if not window.trimmed:
        return Distribution(gaps, counts)
    inside = window.holds(np.concatenate([*ends, stalls.resumed_token]))
    return Distribution(gaps[inside], counts[inside])


def streamed(run: Run) -> float:
    """Gaps between the events that the client gets, in gaps of the log, of the servers that decode. An event has the
    tokens of a step with drafts: these are one gap where such steps are simulated, else as many as they are on
    average."""
    found = [1.0]
    for pool, times in zip(run.manifest.get("deployment", {}).get("pools", ()), run.times, strict=False):
        engine = pool.get("engine", {})
        interval, accepted = engine.get("stream_interval", 1), engine.get("acceptance_length") or 1.0
        if pool.get("role") != "prefill":
            found.append(max(interval, accepted) / (accepted if whole(times).decode_width > 1 else 1.0))
    return float(max(found))


def _event_gaps(steps: Steps, window: Window, tokens: float) -> Floats:
    """Seconds between the events of each request: the first has its first token, others ``tokens`` and the last what is
    left (``RequestState.make_request_output`` in vllm/v1/engine/output_processor.py).

    The run gains a token at a time, each after a step's time over the tokens that it yields, and a step ends between
    two of them: so the time in between is a line.
    """
    found = []
    for gaps, first in zip(token_gaps_by_request(steps), steps.run.requests.first_token, strict=True):
        ends = (tokens * np.arange(1, ceil(len(gaps) / tokens) + 1)).clip(max=len(gaps))
        at = np.interp(ends, np.arange(len(gaps) + 1), np.concatenate([[0.0], np.cumsum(gaps)]))
        between = np.diff(at, prepend=0.0)
        found.append(between[window.holds(first + at)] if window.trimmed else between)
    return np.concatenate([np.zeros(0), *found])


def lanes_at(steps: Steps, who: Integers, time: Floats) -> Integers:
    """The lane in which each request decodes once its prefill ends at ``time``: its rank's, or in a pipeline that of
    the step which ends then."""
    run = steps.run
    replica, rank = run.requests.replica[who], run.requests.lane[who]
    stages = np.array([entry.get("stages", 1) for entry in run.manifest["replicas"]], dtype=np.int64)
    if not (stages > 1).any():
        return lane_number(replica, rank)
    log = run.iterations
    of_step = lane_number(log.replica, log.lane // stages[log.replica])[steps.row]
    order = np.lexsort((steps.end, of_step))
    wanted = lane_number(replica, rank)
    found = np.full(len(who), -1, dtype=np.int64)
    for number in np.unique(wanted[~np.isnan(time)]):
        mine = np.flatnonzero((wanted == number) & ~np.isnan(time))
        steps_of_rank = order[of_step[order] == number]
        at = np.searchsorted(steps.end[steps_of_rank], time[mine] - TOLERANCE)
        row = steps.row[steps_of_rank[np.minimum(at, len(steps_of_rank) - 1)]]
        found[mine] = lane_number(log.replica[row], log.lane[row])
    return found


def _joins(steps: Steps) -> tuple[Integers, Floats]:
    """(lane, time) of every prefill after which a request decodes: its first one, and those after a preemption."""
    requests, stalls = steps.run.requests, steps.run.stalls
    who = np.concatenate([np.arange(len(requests.id)), stalls.request])
    time = np.concatenate([requests.first_token, stalls.resumed_token])
    decodes = time + TOLERANCE < requests.finish[who]
    stalled = np.zeros(len(requests.id), dtype=np.bool_)
    stalled[stalls.request] = True
    some = np.flatnonzero(stalled[who])
    if len(some):
        decodes[some] &= ~np.isin(who[some] + 1j * time[some], stalls.request + 1j * stalls.last_token)
    return lanes_at(steps, who[decodes], time[decodes]), time[decodes]


def _first_after(found: DecodeSteps, is_paused: NDArray[np.bool_], lane: Integers, time: Floats) -> Integers:
    """For each join the decode step that comes next in its lane, if there was a pause before it; otherwise −1."""
    at = np.full(len(lane), -1, dtype=np.int64)
    for number, low, high in zip(found.lanes, found.first[:-1], found.first[1:], strict=True):
        mine = np.flatnonzero(lane == number)
        at[mine] = low + np.searchsorted(found.start[low:high], time[mine] - TOLERANCE)
        at[mine[at[mine] >= high]] = -1
    return np.where(np.append(is_paused, np.False_)[at], at, -1)


def token_gaps_by_request(steps: Steps) -> list[Floats]:
    """For each request the gaps between its tokens (s): output_tokens − 1 of them, none unless it finished."""
    requests, stalls = steps.run.requests, steps.run.stalls
    found = decode_steps(steps)
    who = np.concatenate([np.arange(len(requests.id)), stalls.request])
    lanes = lanes_at(steps, who, np.concatenate([requests.first_token, stalls.resumed_token]))
    bounds = {int(lane): found.lane_bounds(int(lane)) for lane in np.unique(lanes)}
    stalled: dict[int, list[tuple[float, float, int]]] = {}
    ends = zip(
        stalls.last_token.tolist(), stalls.resumed_token.tolist(), lanes[len(requests.id) :].tolist(), strict=True
    )
    for request, stall in zip(stalls.request.tolist(), ends, strict=True):
        stalled.setdefault(request, []).append(stall)
    gaps = []
    for request in range(len(requests.id)):
        if requests.status[request] != FINISHED:
            gaps.append(np.zeros(0))
            continue
        begin, lane = float(requests.first_token[request]), int(lanes[request])
        parts = []
        for after, until, following in sorted(stalled.get(request, [])):
            parts.append(_tokens(found, bounds[lane], begin, after))
            begin, lane = until, following
        parts.append(_tokens(found, bounds[lane], begin, float(requests.finish[request])))
        gaps.append(np.diff(np.concatenate(parts)))
    return gaps


def _tokens(found: DecodeSteps, bounds: tuple[int, int], begin: float, last: float) -> Floats:
    """When a request got its tokens: at ``begin``, then with every decode step of its lane until ``last``."""
    ends = found.end[bounds[0] : bounds[1]]
    inside = ends[np.searchsorted(ends, begin + TOLERANCE) : np.searchsorted(ends, last + TOLERANCE)]
    return np.concatenate([[begin], inside])
