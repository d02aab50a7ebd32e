"""Timeline: running, waiting, cache use and throughput over equal bins of time, integrated exactly."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.metrics.steps import InFlight, Steps, blocks_in_use, held_between, in_flight, sums
from windtunnel.metrics.window import span
from windtunnel.simulate.run import FINISHED, REJECTED

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Means over each bin; ``edges`` has one entry more than the others. The integral over all bins is exact."""

    edges: Floats
    running: Floats
    """Requests in the steps in flight, all replicas."""
    waiting: Floats
    """Requests that have arrived and not ended, and are in no step: queued, evicted or paused; all replicas."""
    kv: Floats
    """Share of all KV blocks in use."""
    output_throughput: Floats
    """Output tokens per second."""
    request_throughput: Floats
    """Finished requests per second."""
    arrivals: Floats
    """Arriving requests per second."""

    @property
    def centres(self) -> Floats:
        """Middle of each bin."""
        return (self.edges[:-1] + self.edges[1:]) / 2


def timeline(steps: Steps, bins: int = 500, between: tuple[float, float] | None = None) -> Timeline:
    """The timeline of a run from its first arrival to its last event, or ``between`` two times (s)."""
    steps = steps.unfolded
    run, requests = steps.run, steps.run.requests
    first, last = between or span(requests, steps.ends)
    edges = np.linspace(first, last if last > first else first + 1.0, bins + 1)
    served = requests.status != REJECTED
    held = _held(steps, edges[1] - edges[0])
    pools, replicas = run.manifest["pools"], run.manifest["replicas"]
    capacity = np.array([pools[replica["pool"]]["kv_blocks"] for replica in replicas], dtype=np.float64)
    idle = held_between(steps, capacity)
    blocks = float(sum(pools[replica["pool"]]["kv_blocks"] * replica["lanes"] for replica in replicas))
    last_token = np.where(requests.status == FINISHED, requests.finish, np.nan)
    emitted = np.concatenate((steps.ends, requests.first_token, run.stalls.resumed_token))
    ones = np.ones(len(emitted) - len(steps.ends))
    here = mean_level(edges, requests.arrival[served], requests.finish[served])
    running = mean_level(
        edges, run.iterations.start[steps.heads], steps.row_end[steps.heads], steps.batch.astype(np.float64)
    )
    return Timeline(
        edges=edges,
        running=running,
        waiting=np.maximum(here - running, 0.0),
        kv=mean_level(
            edges,
            np.append(held.begin, idle.begin),
            np.append(held.end, idle.end),
            np.append(held.blocks, idle.blocks) / blocks,
        ),
        output_throughput=_rate(edges, emitted, np.concatenate((steps.emitted * steps.tokens_of_decode, ones))),
        request_throughput=_rate(edges, last_token),
        arrivals=_rate(edges, requests.arrival),
    )


def _held(steps: Steps, width: float) -> InFlight:
    """Spans with the blocks in use; a row of the log that is longer than a bin is cut, as its blocks grow meanwhile."""
    if steps.run.piped:
        return in_flight(steps, blocks_in_use(steps))
    log, heads = steps.run.iterations, steps.heads
    begin, seconds = log.start[heads], steps.row_end[heads] - log.start[heads]
    cuts = np.ceil(seconds / width).clip(1).astype(np.int64)
    rows = np.repeat(np.arange(len(cuts)), cuts)
    part = np.arange(len(rows)) - (np.cumsum(cuts) - cuts)[rows]
    first, last = (begin[rows] + seconds[rows] * (part + end) / cuts[rows] for end in (0, 1))
    blocks = blocks_in_use(steps, (part + 0.5) / cuts[rows], rows)
    return InFlight(log.replica[heads][rows], first, last, blocks)


def mean_level(edges: Floats, begin: Floats, end: Floats, height: Floats | None = None) -> Floats:
    """Mean over each bin of a sum of boxes from ``begin`` to ``end`` (NaN: the last edge), ``height`` (1) high."""
    real = ~np.isnan(begin)
    begin, end = begin[real], end[real]
    weights = np.ones(len(begin)) if height is None else np.asarray(height, dtype=np.float64)[real]
    until = np.where(np.isnan(end), edges[-1], end)
    times = np.clip(np.concatenate((begin, until)), edges[0], edges[-1])
    deltas = np.concatenate((weights, -weights))
    width = edges[1] - edges[0]
    bins = len(edges) - 1
    index = np.clip(((times - edges[0]) / width).astype(np.int64), 0, bins - 1)
    inside = sums(index, deltas * (edges[index + 1] - times), bins) / width
    before = np.concatenate(([0.0], np.cumsum(sums(index, deltas, bins))[:-1]))
    level: Floats = np.maximum(before + inside, 0.0)
    return level


def _rate(edges: Floats, times: Floats, weights: Floats | None = None) -> Floats:
    """Events per second in each bin."""
    real = (times >= edges[0]) & (times <= edges[-1])
    counts = np.ones(len(times))[real] if weights is None else weights[real]
    bins = len(edges) - 1
    width = float(edges[1] - edges[0])
    index = np.clip(((times[real] - edges[0]) / width).astype(np.int64), 0, bins - 1)
    rates: Floats = sums(index, counts, bins) / width
    return rates
