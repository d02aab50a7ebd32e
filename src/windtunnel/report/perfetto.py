"""A trace for ui.perfetto.dev and chrome://tracing: steps on a track per lane, requests as async spans, counters."""

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment.title import device_name
from windtunnel.errors import InputError
from windtunnel.metrics import Steps, timeline
from windtunnel.metrics.handed import parts_in_order

Floats = NDArray[np.float64]
Event = dict[str, Any]

MICROSECONDS = 1e6
COUNTER_SAMPLES = 1000
REQUEST_EVENTS, HANDED_EVENTS = 8, 18
"""Begin and end of the request and of its three phases; with prefill and decode apart of seven, and of the transfer on
the link's track."""


def perfetto(steps: Steps, max_events: int = 200_000) -> dict[str, Any]:
    """The trace document, of at most about ``max_events`` events.

    Half of the events are for steps: one each, or one for as many neighbouring steps of a lane as needed. The rest is
    for requests: all of them, or every k-th. ``otherData`` says how many were merged or left out.

    Raises:
        InputError: max_events too small to hold anything.
    """
    if max_events < 100:
        raise InputError(f"max_events={max_events}: must be ≥ 100")
    steps = steps.unfolded
    merged = max(1, -(-len(steps.row) // (max_events // 2)))
    number, apart = len(steps.run.requests.id), steps.run.handovers is not None
    stride = max(1, -(-number * (HANDED_EVENTS if apart else REQUEST_EVENTS) // (max_events // 2)))
    spans = [*_requests(steps, stride), *_transfers(steps, stride)]
    events = [*_names(steps), *_steps(steps, merged), *spans, *_states(steps), *_counters(steps)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": f"windtunnel {steps.run.manifest.get('windtunnel', '')}".strip(),
            "steps": len(steps.row),
            "steps_per_event": merged,
            "requests": number,
            "requests_shown": len(range(0, number, stride)),
        },
    }


def trace_text(document: dict[str, Any]) -> Iterator[str]:
    """One event a line: a quarter of the memory of one string, and readable by eye."""
    rest = {key: value for key, value in document.items() if key != "traceEvents"}
    yield json.dumps(rest, allow_nan=False)[:-1] + ', "traceEvents": [\n'
    encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
    for index, event in enumerate(document["traceEvents"]):
        yield (",\n" if index else "") + encode(event)
    yield "\n]}\n"


def _names(steps: Steps) -> Iterator[Event]:
    """Titles of the tracks; process 0 is the deployment, process r + 1 replica r."""
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "deployment"}}
    for index, replica in enumerate(steps.run.manifest["replicas"]):
        pool = steps.run.manifest["pools"][replica["pool"]]
        role = "" if pool.get("role", "mixed") == "mixed" else f"{pool['name']} · "
        title = f"replica {index} · {role}{pool.get('gpus_per_replica', 1)} × {device_name(pool.get('device', 'GPU'))}"
        yield {"ph": "M", "name": "process_name", "pid": index + 1, "args": {"name": title}}
        stages = replica.get("stages", 1)
        for lane in range(replica["lanes"] * stages):
            rank = "" if replica["lanes"] == 1 else f" of rank {lane // stages}"
            name = f"steps{rank}" if stages == 1 else f"steps{rank}, lane {lane % stages} of the pipeline"
            yield {"ph": "M", "name": "thread_name", "pid": index + 1, "tid": lane, "args": {"name": name}}
    if steps.run.handovers is not None:
        yield {"ph": "M", "name": "process_name", "pid": _link(steps), "args": {"name": "link · KV on its way"}}


def _steps(steps: Steps, merged: int) -> Iterator[Event]:
    """Complete events, in order of time on each lane; ``merged`` neighbouring steps share one."""
    log = steps.run.iterations
    replica, lane = log.replica[steps.row], log.lane[steps.row]
    order = np.lexsort((steps.start, lane, replica))
    starts, ends = steps.start[order], steps.end[order]
    keys = replica[order] * (int(lane.max(initial=0)) + 1) + lane[order]
    first = _group_starts(keys, merged)
    last = np.append(first[1:], len(order))[: len(first)] - 1
    head = steps.head_of_row[steps.row[order]]
    prefill = np.add.reduceat(steps.chunk_tokens[head], first) if len(first) else first
    decode = np.add.reduceat(steps.decodes[order], first) if len(first) else first
    columns = (
        replica[order][first], lane[order][first], starts[first], ends[last], last - first + 1, prefill, decode,
        log.used_blocks[steps.row[order]][first], log.waiting[steps.row[order]][first],
    )  # fmt: skip
    for owner, thread, start, end, count, chunk, decodes, blocks, waiting in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        yield {
            "ph": "X",
            "name": _title(chunk, decodes),
            "cat": "step",
            "pid": owner + 1,
            "tid": thread,
            "ts": start * MICROSECONDS,
            "dur": (end - start) * MICROSECONDS,
            "args": {
                "steps": count,
                "prefill_tokens": chunk,
                "decode_tokens": decodes,
                "used_blocks": blocks,
                "waiting": waiting,
            },
        }


def _group_starts(keys: NDArray[np.int64], merged: int) -> NDArray[np.int64]:
    """First index of each group of up to ``merged`` neighbours with the same key."""
    if len(keys) == 0:
        return np.zeros(0, dtype=np.int64)
    new = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
    position = np.arange(len(keys)) - np.repeat(new, np.diff(np.append(new, len(keys))))
    return np.flatnonzero(position % merged == 0)


def _title(chunk: int, decodes: int) -> str:
    if chunk and decodes:
        return "prefill + decode"
    return "prefill" if chunk else "decode" if decodes else "idle"


def _requests(steps: Steps, stride: int) -> Iterator[Event]:
    """Async spans: the request from arrival to last token, in it queued, prefill and decode; with prefill and decode
    apart, at the replica that decodes it, the parts of its time to first token instead of the first two."""
    requests, apart = steps.run.requests, steps.run.handovers is not None
    alone = {"queued": (requests.arrival, requests.scheduled), "prefill": (requests.scheduled, requests.first_token)}
    phases = (parts_in_order(steps.run) or alone) | {"decode": (requests.first_token, requests.finish)}
    spans = np.stack([np.stack(both) for both in phases.values()], axis=-1)[:, ::stride].transpose(1, 2, 0).tolist()
    names = ("id", "replica", "prompt_tokens", "output_tokens", "preemptions", "arrival")
    columns = [getattr(requests, name)[::stride].tolist() for name in names]
    for identity, replica, prompt, output, preemptions, arrival, times in zip(*columns, spans, strict=True):
        ends = [end for _, end in times if not math.isnan(end)]
        if not ends:
            continue
        track = {"cat": "request", "id": str(identity), "pid": replica + 1 if replica >= 0 else 0, "tid": 0}
        details = {"prompt_tokens": prompt, "output_tokens": output, "preemptions": preemptions}
        whole = {**track, "name": f"request {identity}"}
        yield {**whole, "ph": "b", "ts": arrival * MICROSECONDS, "args": details}
        for phase, (begin, end) in zip(phases, times, strict=True):
            if end > begin or (end == begin and not apart):
                yield {**track, "name": phase, "ph": "b", "ts": begin * MICROSECONDS}
                yield {**track, "name": phase, "ph": "e", "ts": end * MICROSECONDS}
        yield {**whole, "ph": "e", "ts": ends[-1] * MICROSECONDS}


def _link(steps: Steps) -> int:
    """The process of the link: the one after the replicas'."""
    return len(steps.run.manifest["replicas"]) + 1


def _transfers(steps: Steps, stride: int) -> Iterator[Event]:
    """Async spans on the link's track: the KV of each request on its way."""
    run, apart = steps.run, steps.run.handovers
    if apart is None:
        return
    begins, finishes = parts_in_order(run)["transfer"]
    columns = (run.requests.id, begins, finishes, apart.kv_bytes, apart.prefill_replica, run.requests.replica)
    for identity, begin, end, size, source, target in zip(
        *(column[::stride].tolist() for column in columns), strict=True
    ):
        if end > begin:
            track = {"cat": "transfer", "id": f"transfer {identity}", "pid": _link(steps), "tid": 0}
            slice_ = {**track, "name": f"KV of request {identity}"}
            details = {"bytes": size, "from_replica": source, "to_replica": target}
            yield {**slice_, "ph": "b", "ts": begin * MICROSECONDS, "args": details}
            yield {**slice_, "ph": "e", "ts": end * MICROSECONDS}


def _states(steps: Steps) -> Iterator[Event]:
    """When replicas were starting, draining or failed, on a track of theirs; when the whole link was, on the link's."""
    replicas = steps.run.manifest["replicas"]
    told = set()
    for replica, state, begin, end in (steps.run.manifest.get("lives") or {}).get("states", ()):
        whole = replica < 0
        track = {
            "pid": _link(steps) if whole else replica + 1,
            "tid": 0 if whole else replicas[replica]["lanes"] * replicas[replica].get("stages", 1),
        }
        if replica not in told and not whole:
            told.add(replica)
            yield {"ph": "M", "name": "thread_name", **track, "args": {"name": "there or not"}}
        yield {**track, "ph": "X", "name": state, "cat": "state", "ts": begin * MICROSECONDS,
               "dur": (end - begin) * MICROSECONDS}  # fmt: skip


def _counters(steps: Steps) -> Iterator[Event]:
    """Requests running and waiting, cache use and output rate, as means over equal bins."""
    lines = timeline(steps, COUNTER_SAMPLES)
    for name, key, values in (
        ("running", "requests", lines.running),
        ("waiting", "requests", lines.waiting),
        ("KV cache used", "percent", lines.kv * 100),
        ("output tokens", "per second", lines.output_throughput),
    ):
        for time, value in zip((lines.edges[:-1] * MICROSECONDS).tolist(), values.tolist(), strict=True):
            yield {"ph": "C", "name": name, "pid": 0, "ts": time, "args": {key: round(value, 3)}}
