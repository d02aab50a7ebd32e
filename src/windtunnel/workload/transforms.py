"""Workloads from workloads: faster, longer, shorter, closed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.errors import InputError
from windtunnel.workload import graph, texts
from windtunnel.workload.columns import Workload
from windtunnel.workload.graph import Edges
from windtunnel.workload.rules import Floats, Integers
from windtunnel.workload.synthetic import check_count, stream
from windtunnel.workload.texts import Begins


def scale_time(workload: Workload, factor: float) -> Workload:
    """Arrivals × factor: 0.5 doubles the rate. Think times are people's and stay.

    Raises InputError unless factor is finite and > 0.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(f"time scale {factor:g}: must be finite and > 0 (0.5 doubles the rate)")
    return replace(workload, arrival=workload.arrival * factor, asked_rate=workload.asked_rate / factor)


def at_rate(workload: Workload, request_rate: float) -> Workload:
    """Scale time so that releases by the clock come at ``request_rate`` per second; infinite: all at 0.

    The pattern (bursts, drifts) stays. Raises InputError for rates ≤ 0 and for workloads that arrive all at once.
    """
    if not request_rate > 0:
        raise InputError(f"request_rate={request_rate:g}: must be > 0 (inf: all at once)")
    if math.isinf(request_rate):
        return replace(workload, arrival=workload.arrival * 0.0, asked_rate=0.0)
    if not workload.duration > 0:
        raise InputError("all requests arrive at once: there is no rate to scale; give an arrival process")
    return scale_time(workload, workload.request_rate / request_rate)


def cut_to(workload: Workload, most: int) -> Workload:
    """Requests of more than ``most`` tokens cut to it, prompt and output in proportion, at least one token each.

    As Vidur's ``max_tokens`` does with a trace of lengths (trace_request_length_generator.py): both give up their share
    of what is too much, rounded up. A note says how many were cut. Raises InputError below 2 tokens, and where prompts
    share text, which would no longer be the same.
    """
    if most < 2:
        raise InputError(f"max_request_tokens={most}: must be ≥ 2, one token of prompt and one of output")
    if workload.begins is not None or workload.hash_ids is not None:
        raise InputError("max_request_tokens: prompts of this load share text, and cut ones would not: leave it out")
    prompt, output = workload.prompt_tokens, workload.output_tokens
    total = prompt + output
    excess = np.maximum(total - most, 0)
    shorter = [np.maximum(tokens - -(-excess * tokens // total), 1) for tokens in (prompt, output)]
    cut = int(np.count_nonzero(excess))
    if not cut:
        return workload
    declared = np.maximum(np.minimum(workload.max_tokens, most - shorter[0]), shorter[1])
    limits = np.where(excess > 0, declared, workload.max_tokens)
    note = f"{cut:,} of {len(workload):,} requests are cut to {most:,} tokens"
    return replace(
        workload,
        prompt_tokens=shorter[0],
        output_tokens=shorter[1],
        max_tokens=limits,
        notes=(*workload.notes, note),
    )


def repeat(workload: Workload, times: int) -> Workload:
    """The workload ``times`` times back to back, one mean gap between the copies, so that the rate stays.

    Every copy is new content: sessions and texts are numbered on, so that copies share no prefix. What hash ids say is
    kept as ``begins``, two numbers a request.
    """
    if times < 1:
        raise InputError(f"repeat={times}: must be ≥ 1")
    check_count(f"repeat={times}: number of requests", times * len(workload))
    if times == 1:
        return workload
    rate = workload.request_rate
    period = workload.duration + (1 / rate if math.isfinite(rate) else 0.0)
    return _copied(workload, np.arange(times)[:, None] * period, times)


def copies(workload: Workload, times: int, max_shift: float = 0.0, seed: int = 0) -> Workload:
    """The workload ``times`` times at once, as that many users with the same habits would ask: the rate is ``times``
    that of one.

    Each session of each copy, and each request that belongs to none, is moved by up to ``max_shift`` seconds, earlier
    or later, but not beyond the ends of the trace. Copies share no prefix. Raises InputError for less than one copy
    and for a shift that is no time.
    """
    if times < 1:
        raise InputError(f"copies={times}: must be ≥ 1")
    if not (math.isfinite(max_shift) and max_shift >= 0):
        raise InputError(f"max_shift={max_shift:g}: must be finite seconds ≥ 0")
    check_count(f"copies={times}: number of requests", times * len(workload))
    if times == 1 and not max_shift:
        return workload
    drawn = stream(seed, "copies").uniform(-max_shift, max_shift, (times, len(workload)))[:, _first_turns(workload)]
    arrival = workload.arrival
    room = np.minimum(arrival - np.nanmin(arrival), np.nanmax(arrival) - arrival)
    found = _copied(workload, np.clip(drawn, -room, room), times)
    if found.begins is None:
        return found
    return replace(found, begins=texts.from_earlier(found.begins, found.prompt_tokens, found.output_tokens))


def _copied(workload: Workload, later: npt.NDArray[Any], times: int) -> Workload:
    """So many copies, whose rows come this much later: [times, rows], or [times, 1] for all rows of a copy."""
    order = texts.earlier_first(workload.texts, workload.waits)
    later = np.broadcast_to(later, (times, len(workload)))[:, order].ravel()
    columns: dict[str, Any] = {name: np.tile(column[order], times) for name, column in workload.columns().items()}
    columns["arrival"] += later
    members = columns["session"][: len(workload)] >= 0
    columns["session"][np.tile(members, times)] = _numbered_on(columns["session"][: len(workload)][members], times)
    found = Workload.from_columns(
        **columns,
        after=_repeat_edges(graph.taken(workload.after, order), times),
        begins=_repeat_begins(texts.taken(workload.texts, order), times),
        lanes=workload.lanes,
        max_concurrency=workload.max_concurrency,
        name=workload.name,
        notes=workload.notes,
        sort=True,
    )
    return replace(found, images=workload.images)


def _repeat_edges(after: Edges | None, times: int) -> Edges | None:
    if after is None:
        return None
    offsets, parents = after
    starts = [offsets[:-1] + copy * len(parents) for copy in range(times)]
    numbered = np.tile(parents, times) + np.repeat(np.arange(times) * (len(offsets) - 1), len(parents))
    return np.concatenate([*starts, np.array([times * len(parents)])]), numbered


def _repeat_begins(begins: Begins | None, times: int) -> Begins | None:
    if begins is None:
        return None
    others = np.tile(begins[0], times)
    shifts = np.repeat(np.arange(times) * len(begins[0]), len(begins[0]))
    return np.where(others >= 0, others + shifts, -1), np.tile(begins[1], times)


def _numbered_on(numbers: Integers, times: int) -> Integers:
    """The numbers ``times`` times, every copy's different from all others'; renumbered where they would overflow."""
    if not len(numbers):
        return numbers
    span = int(numbers.max()) - int(numbers.min()) + 1
    if int(numbers.max()) + (times - 1) * span >= 2**63:
        numbers = np.unique(numbers, return_inverse=True)[1].astype(np.int64)
        span = int(numbers.max()) + 1
    return np.tile(numbers, times) + np.repeat(np.arange(times) * span, len(numbers))


def head(workload: Workload, count: int) -> Workload:
    """The first ``count`` requests; a session whose turns wait for each other counts where its first one stands,
    followed by its other turns.
    """
    if count < 1:
        raise InputError(f"num_prompts={count}: must be ≥ 1")
    if count >= len(workload):
        return workload
    all_by_clock = not np.isnan(workload.arrival).any() and not workload.lanes
    order = np.arange(len(workload)) if all_by_clock else np.argsort(_first_turns(workload), kind="stable")
    return workload.take(np.sort(order[:count]))


def _first_turns(workload: Workload) -> Integers:
    """For each request the row of the first turn of its session (its own row where it is alone)."""
    firsts = np.arange(len(workload))
    members = np.flatnonzero(workload.session >= 0)
    _, start, group = np.unique(workload.session[members], return_index=True, return_inverse=True)
    firsts[members] = members[start][group]
    return firsts


def with_sessions(workload: Workload, count: int) -> Workload:
    """Its first ``count`` sessions, in the order of their first turns; requests of no session count as one each."""
    firsts = _first_turns(workload)
    heads = np.flatnonzero(firsts == np.arange(len(workload)))
    if count >= len(heads):
        return workload
    return workload.take(np.flatnonzero(firsts <= heads[count - 1]))


def with_concurrency(workload: Workload, max_concurrency: int) -> Workload:
    """These requests with at most this many in flight; 0 opens the loop again."""
    return replace(workload, max_concurrency=max_concurrency)


def with_lanes(workload: Workload, lanes: int) -> Workload:
    """These requests with at most this many sessions in play; 0: any number.

    Raises InputError where no request belongs to a session.
    """
    if lanes and not (workload.session >= 0).any():
        raise InputError(f"lanes={lanes}: are places of sessions, and this workload has none: use max_concurrency")
    return replace(workload, lanes=lanes)


def with_recorded_answers(workload: Workload) -> Workload:
    """These requests where what the server answers never comes back: later prompts hold answers that were recorded, as
    AgentX replays them."""
    if workload.begins is None:
        return workload
    return replace(workload, begins=texts.without_answers(workload.begins, workload.prompt_tokens))


def with_longer_prompts(workload: Workload, factor: float) -> Workload:
    """These requests with ``factor`` times the tokens in each prompt, 1 at least.

    Raises InputError unless the factor is finite and > 0, and where prompts share text, which has a length of its own.
    """
    if factor == 1:
        return workload
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(f"prompts*{factor:g}: must be a finite number > 0")
    if workload.hash_ids is not None or workload.begins is not None:
        raise InputError(f"prompts*{factor:g}: the prompts of {workload.name} share text: take a load where none do")
    longer = np.maximum(np.rint(factor * workload.prompt_tokens), 1).astype(np.int64)
    return replace(workload, prompt_tokens=longer, name=f"{workload.name}, prompts × {factor:g}")


def with_think_time_at_most(workload: Workload, seconds: float) -> Workload:
    """These requests with no think time longer than that. Raises InputError unless it is finite and ≥ 0."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InputError(f"max_think_time={seconds:g}: must be finite seconds ≥ 0")
    return replace(workload, think_time=np.minimum(workload.think_time, seconds))


def spread(arrival: Floats, quantum: float, rng: np.random.Generator) -> Floats:
    """Spread requests that share a time uniformly over ``quantum`` seconds, at most to the next time; keeps the order.

    For traces whose clock ticks coarsely (Mooncake's conversation trace: about 3 s), which would arrive in bursts.
    """
    if not quantum > 0:
        raise InputError(f"jitter={quantum:g}: must be seconds > 0, or 0 for none")
    times, group = np.unique(arrival, return_inverse=True)
    room = np.minimum(np.diff(times, append=np.inf), quantum)
    offset = rng.random(len(arrival))
    offset = offset[np.lexsort((offset, group))]
    placed: Floats = np.empty(len(arrival))
    placed[np.argsort(group, kind="stable")] = offset
    return np.asarray(arrival + placed * room[group])
