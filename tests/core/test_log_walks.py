"""Walks over the log against simple writings: steps of lanes, gaps between tokens of requests followed one by one, and
what steps do, added up."""

from dataclasses import dataclass, field, replace
from typing import Any

import equality
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.test_log import in_lockstep
from windtunnel.core.engine import folding_of, new_state
from windtunnel.core.log import CONSTANTS, SUMS, add_up, count_steps, gaps_of_rows, no_gains
from windtunnel.core.records import ROW, attributes, records

SLACK = 1e-9
WIDTH = 2
SEEDS = st.integers(0, 2**32 - 1)


@dataclass
class Lane:
    """A lane whose requests all decode in every step that has decodes; what it logs, and what each of them sees."""

    rows: list[dict[str, float]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    """When each request that decodes got its latest token."""

    def go_on(self, rng: np.random.Generator) -> None:
        """A pause, prompts alone, prompts beside decodes, or several steps of decodes."""
        now = (self.ends[-1] if self.ends else 0.0) + float(rng.choice([0.0, 0.0, 0.5]))
        decodes = len(self.last) if rng.random() < 0.7 else 0
        steps = int(rng.integers(1, 5)) if decodes else 1
        discarded = int(rng.integers(0, 2)) if decodes and steps == 1 else 0
        self.rows.append({"start": now, "steps": steps, "decodes": decodes + discarded, "discarded": discarded})
        self.first.append(len(self.ends))
        for _ in range(steps):
            now += float(rng.uniform(0.01, 0.1))
            self.ends.append(now)
            self.emitted.append(decodes)
            if decodes:
                self.gaps += [now - last for last in self.last]
                self.last = [now] * decodes
        if decodes and rng.random() < 0.3:
            self.last.pop()
        if steps == 1:
            come = int(rng.integers(0, 3))
            self.joins += [now] * come
            self.last += [now] * come


def log_of(lanes: list[Lane]) -> tuple[Any, Any]:
    """(The rows of lanes of two ranks a replica, in order of time; the first step of each)."""
    found = []
    offset = 0
    for place, lane in enumerate(lanes):
        named = {"replica": place // WIDTH, "lane": place % WIDTH}
        found += [(row | named, offset + first) for row, first in zip(lane.rows, lane.first, strict=True)]
        offset += len(lane.ends)
    found.sort(key=lambda each: each[0]["start"])
    rows = records(len(found), ROW)
    for i, (row, _) in enumerate(found):
        for name, value in row.items():
            rows[name][i] = value
    return rows, np.array([first for _, first in found], dtype=np.int32)


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 12))
def test_gaps_are_those_of_requests_followed_one_by_one(seed: int, lanes: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    made = [Lane() for _ in range(lanes)]
    for lane in made:
        for _ in range(rows):
            lane.go_on(rng)
    log, first = log_of(made)
    ends = np.concatenate([lane.ends for lane in made])
    times = np.concatenate([lane.joins for lane in made])
    bounds = np.cumsum([0, *(len(lane.joins) for lane in made)])
    joins = np.stack([bounds[:-1], bounds[1:]], axis=1)
    last = np.tile([np.nan, -np.inf], (lanes, 1))
    room = len(log) + len(times)
    gaps, counts, when = np.zeros(len(ends) + room), np.zeros(len(ends) + room, dtype=np.int32), np.zeros(room)
    gaps[1 : len(ends)] = np.diff(ends)
    counts[: len(ends)] = np.concatenate([lane.emitted for lane in made])
    later = np.ones(len(times), dtype=np.bool_)
    rows_of_log = attributes(log)
    found = gaps_of_rows(rows_of_log, first, ends, WIDTH, times, joins, last, later, gaps, counts, when, SLACK)
    until = len(ends) + found
    assert counts.min() >= 0
    expected = np.sort(np.concatenate([lane.gaps for lane in made]))
    assert np.sort(np.repeat(gaps[:until], counts[:until])) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    decoded = [max(np.array(lane.ends)[np.array(lane.emitted) > 0], default=-1.0) for lane in made]
    open_joins = [time > ended for lane, ended in zip(made, decoded, strict=True) for time in lane.joins]
    assert (later | ~np.array(open_joins, dtype=np.bool_)).all()


def random_log(rng: np.random.Generator, count: int, replicas: int, ranks: int) -> Any:
    """Steps of any lane with further chunks behind some, and what idle lanes hold in front."""
    rows = records(count, ROW)
    rows["steps"] = rng.choice([0, 1, 1, 3], count)
    heads = np.maximum.accumulate(np.where(rows["steps"] > 0, np.arange(count), 0))
    rows["replica"], rows["lane"] = rng.integers(0, replicas, count)[heads], rng.integers(0, ranks, count)[heads]
    return rows


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(0, 40), st.booleans())
def test_steps_of_lanes_are_counted(seed: int, count: int, lockstep: bool) -> None:
    """Of ranks in lockstep those of the first; the most rows of a step are the room for its chunks."""
    rows = random_log(np.random.default_rng(seed), count, replicas=3, ranks=2)
    ranks, steps = np.array([2 if lockstep else 1, 1, 2]), np.zeros((3, 2), dtype=np.int64)
    most = count_steps(attributes(rows), ranks, steps)
    expected = np.zeros((3, 2), dtype=np.int64)
    np.add.at(expected, (rows["replica"], rows["lane"]), rows["steps"])
    expected[ranks > 1, 1] = 0
    assert steps.tolist() == expected.tolist()
    lengths = np.diff([0, *np.flatnonzero(rows["steps"]), count])
    assert most == max([1, *lengths])


def sums_of(rows: Any, ends: Any, kinds: Any) -> Any:
    """What ``add_up`` says of rows of steps that begin a row each, or run on."""
    first = (np.cumsum(rows["steps"]) - rows["steps"]).astype(np.int32)
    begins = np.zeros(len(ends), dtype=np.bool_)
    begins[first] = True
    layout, found = np.array([[0, 1, 16, 1000]]), np.zeros((1, len(SUMS)))
    constants = np.array([[3.0, 5.0, 7.0, 11.0, 0.25, 2.0]])
    assert constants.shape[1] == len(CONSTANTS)
    add_up(attributes(rows), no_gains(), first, ends, begins, None, -np.inf, np.inf, layout, constants, kinds, found)
    return dict(zip(SUMS, found[0], strict=True))


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 12))
def test_equal_steps_do_what_single_ones_do(seed: int, count: int) -> None:
    """Work is linear in the context where no window cuts: a row of n steps is n rows of one."""
    rng = np.random.default_rng(seed)
    rows = records(count, ROW)
    rows["steps"], rows["decodes"] = rng.integers(1, 6, count), rng.integers(0, 9, count)
    rows["kv_tokens"] = rows["decodes"] * rng.integers(1, 500, count)
    rows["chunk_tokens"] = rng.choice([0, 0, 32], count)
    rows["chunk_context"] = np.where(rows["chunk_tokens"] > 0, 64, 0)
    rows["used_blocks"] = rng.integers(1, 50, count)
    ends = np.cumsum(rng.uniform(0.01, 0.1, int(rows["steps"].sum())))
    begin = np.append(0.0, ends)
    rows["start"] = begin[np.cumsum(rows["steps"]) - rows["steps"]]
    of = np.repeat(np.arange(count), rows["steps"])
    at = np.arange(len(of)) - (np.cumsum(rows["steps"]) - rows["steps"])[of]
    single = rows[of]
    single["steps"], single["start"] = 1, begin[:-1]
    single["kv_tokens"] += at * single["decodes"]
    single["chunk_context"] += (at * single["chunk_tokens"]).astype(np.int32)
    kinds = np.array([[[0.0, 13.0, 17.0]]])
    many, each = sums_of(rows, ends, kinds), sums_of(single, ends, kinds)
    for name in set(SUMS) - {"held", "peak"}:
        assert many[name] == pytest.approx(each[name], rel=1e-12), name
    busy = (single["decodes"] > 0) | (single["chunk_tokens"] > 0)
    batch = single["decodes"] + (single["chunk_tokens"] > 0)
    assert each["seconds"] == pytest.approx(ends[-1])
    assert (each["iterations"], each["batches"]) == (busy.sum(), batch.sum())
    assert each["peak"] == rows["used_blocks"].max()


@settings(max_examples=10, deadline=None)
@given(equality.cases())
def test_a_log_that_will_be_folded_begins_with_half_the_room(case: equality.Case) -> None:
    for each, part in ((replace(case, lockstep=False), 1), (in_lockstep(case), 2)):
        fleet = equality.fleet_of(each)
        state = new_state(fleet, equality.demand_of(each), each.uniforms)
        less = folding_of(fleet).in_less_room(state)
        assert len(less.rows) == len(state.rows) // part
        assert less._replace(rows=state.rows) == state
