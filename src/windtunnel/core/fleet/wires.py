"""The link between prefill and decode pools when it fails: transfers that are under way, and what is to happen to them,
in plain Python on the records of ``core.apart.link``."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.apart.link import DOWN, EVENT, EVENTS, TRANSFER_END, Apart
from windtunnel.core.engine import Integers

Ends = tuple[int, int]
"""The replicas that send and that receive."""


def events_of(apart: Apart) -> NDArray[Any]:
    """What is known to happen."""
    found: NDArray[Any] = np.asarray(apart.events[: apart.counts[EVENTS]])
    return found


def set_events(apart: Apart, events: NDArray[Any]) -> None:
    """In their order, which is one of a heap."""
    order = np.lexsort((events["request"], events["kind"], events["time"]))
    apart.events[: len(events)] = events[order]
    apart.counts[EVENTS] = len(events)


def add_event(apart: Apart, time: float, kind: int, request: int) -> None:
    """Something is to happen."""
    one = np.array([(time, kind, request)], dtype=np.dtype(EVENT, align=True))
    set_events(apart, np.concatenate([events_of(apart), one.astype(apart.events.dtype)]))


def drop_events(apart: Apart, requests: list[int], kinds: tuple[int, ...]) -> None:
    """These kinds of events do not happen to these requests."""
    events = events_of(apart).copy()
    gone = np.isin(events["request"], requests) & np.isin(events["kind"], kinds)
    if gone.any():
        set_events(apart, events[~gone])


def under_way(apart: Apart) -> Integers:
    """Requests whose KV is on its way, in the order in which that was asked for."""
    handed: Any = apart.handed
    some = (handed["transfer_start"] >= 0) & np.isnan(handed["transfer_end"])
    found = np.flatnonzero(some & (handed["lost"] == 0) & (handed["stuck"] == 0))
    return found[np.argsort(handed["sent"][found], kind="stable")]


def ends_of(apart: Apart, r: int) -> Ends:
    """The replicas between which the KV of a request goes."""
    handed: Any = apart.handed
    return int(handed["source"][r]), int(handed["destination"][r])


def carries(apart: Apart, ends: Ends) -> bool:
    """Whether nothing between two replicas is down."""
    return bool(apart.counts[DOWN] + apart.nics["down"][list(ends)].sum() == 0)


def plan_anew(apart: Apart, gone: list[int], time: float) -> None:
    """Some transfers are no more: of those in turn that have not begun, each begins when its NICs are free."""
    rules, handed, nics = apart.rules[0], apart.handed, apart.nics
    nics["free_at"][:] = 0.0
    for r in under_way(apart).tolist():
        if r in gone:
            continue
        source, destination = ends_of(apart, r)
        busy = [source] * bool(rules["at_source"]) + [destination] * bool(rules["at_destination"])
        work, begin = float(apart.work[r]), float(handed["transfer_start"][r])
        if rules["fair"] and busy and work > 0:
            continue  # it shares its NICs, or is through them
        if begin > time:
            free = max([time, *nics["free_at"][busy].tolist()])
            if free != begin:
                begin = handed["transfer_start"][r] = free
                drop_events(apart, [r], (TRANSFER_END,))
                add_event(apart, begin + work + float(rules["latency"]), TRANSFER_END, r)
        nics["free_at"][busy] = np.maximum(nics["free_at"][busy], begin + work)
