"""Closeup: a stretch of a run's time, with its batches, its requests and what is in use."""

from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.metrics import Steps, clean, timeline
from windtunnel.metrics.window import span
from windtunnel.simulate.run import STATUSES
from windtunnel.ui.figures import BINS, lines_over_time

MOST_BATCHES, MOST_REQUESTS = 1500, 300
"""More are not shown: batches none at all, of the requests those with the longest time to first token."""


def closeup(steps: Steps, start: float | None, end: float | None) -> dict[str, Any]:
    """Between two times (s) of a run; without them, from its beginning to its end.

    ``batches`` is null where there are more than can be told apart; ``count`` says how many there are.

    Raises:
        InputError: times that are none, or in the wrong order.
    """
    steps = steps.unfolded
    first, last = span(steps.run.requests, steps.ends)
    begin, until = first if start is None else start, last if end is None else end
    if not (np.isfinite(begin) and np.isfinite(until) and begin < until):
        raise InputError(f"between {begin:g} and {until:g}: must be two times in seconds, the first one earlier")
    found: dict[str, Any] = clean(
        {
            "first": first,
            "last": last,
            "lines": lines_over_time(timeline(steps, BINS, (begin, until))),
            **_batches(steps, begin, until),
            **_requests(steps, begin, until),
        }
    )
    return found


def _batches(steps: Steps, begin: float, until: float) -> dict[str, Any]:
    """Every single step that lies in the time, by column."""
    inside = np.flatnonzero((steps.end >= begin) & (steps.start <= until))
    if len(inside) > MOST_BATCHES:
        return {"batches": None, "batch_count": len(inside)}
    log, row = steps.run.iterations, steps.row[inside]
    head = steps.head_of_row[row]
    columns = {
        "replica": log.replica[row],
        "lane": log.lane[row],
        "start": steps.start[inside],
        "end": steps.end[inside],
        "decodes": steps.decodes[inside],
        "chunks": steps.chunks[head],
        "chunk_tokens": steps.chunk_tokens[head],
        "kv_tokens": log.kv_tokens[row],
        "used_blocks": log.used_blocks[row],
        "waiting": log.waiting[row],
    }
    return {"batches": {name: values.tolist() for name, values in columns.items()}, "batch_count": len(inside)}


def _requests(steps: Steps, begin: float, until: float) -> dict[str, Any]:
    """The requests that were there in the time, those with the longest time to first token where there are many."""
    requests = steps.run.requests
    ended = np.where(np.isnan(requests.finish), np.inf, requests.finish)
    inside = np.flatnonzero((requests.arrival <= until) & (ended >= begin))
    count = len(inside)
    if count > MOST_REQUESTS:
        waited = np.nan_to_num((requests.first_token - requests.arrival)[inside], nan=np.inf)
        inside = np.sort(inside[np.argsort(-waited, kind="stable")[:MOST_REQUESTS]])
    names = ("id", "arrival", "scheduled", "first_token", "finish", "prompt_tokens", "output_tokens", "cached_tokens")
    columns = {name: getattr(requests, name)[inside].tolist() for name in (*names, "preemptions", "replica")}
    return {
        "requests": columns | {"status": [STATUSES[number] for number in requests.status[inside].tolist()]},
        "request_count": count,
    }
