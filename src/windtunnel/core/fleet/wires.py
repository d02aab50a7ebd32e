"""The link between prefill and decode pools when it fails: transfers that are under way, and what is to happen to them,
in plain Python on the records of ``core.disaggregation.link``."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.disaggregation.link import DOWN, EVENTS, TRANSFER_END, Transfers
from windtunnel.core.engine import Integers

Ends = tuple[int, int]
"""The replicas that send and that receive."""


def events_of(transfers: Transfers) -> NDArray[Any]:
    """What is known to happen."""
    found: NDArray[Any] = np.asarray(transfers.events[: transfers.counts[EVENTS]])
    return found


def set_events(transfers: Transfers, events: NDArray[Any]) -> None:
    """In their order, which is one of a heap."""
    handed: Any = transfers.handed
    side, r = np.divmod(events["request"], len(handed))
    order = np.lexsort((handed["number"][r], side, events["kind"], events["time"]))
    transfers.events[: len(events)] = events[order]
    transfers.counts[EVENTS] = len(events)


def add_events(transfers: Transfers, time: float, kind: int, requests: Integers) -> None:
    """Something is to happen to these requests."""
    more = np.zeros(len(requests), dtype=transfers.events.dtype)
    more["time"], more["kind"], more["request"] = time, kind, requests
    set_events(transfers, np.concatenate([events_of(transfers), more]))


def drop_events(transfers: Transfers, requests: list[int] | Integers, kinds: tuple[int, ...]) -> None:
    """These kinds of events do not happen to these requests."""
    events = events_of(transfers)
    gone = np.isin(events["request"], requests) & np.isin(events["kind"], kinds)
    if gone.any():
        set_events(transfers, events[~gone])


def under_way(transfers: Transfers) -> Integers:
    """Requests whose KV is on its way, in the order in which that was asked for."""
    found = np.flatnonzero(_are_under_way(transfers.handed))
    return found[np.argsort(transfers.handed["sent"][found], kind="stable")]


def is_under_way(transfers: Transfers, r: int) -> bool:
    """Whether the KV of a request is on its way."""
    return bool(_are_under_way(transfers.handed[r : r + 1])[0])


def _are_under_way(handed: Any) -> NDArray[np.bool_]:
    begun: NDArray[np.bool_] = (handed["transfer_start"] >= 0) & np.isnan(handed["transfer_end"])
    return begun & (handed["lost"] == 0) & (handed["stuck"] == 0)


def ends_of(transfers: Transfers, r: int) -> Ends:
    """The replicas between which the KV of a request goes."""
    handed: Any = transfers.handed
    return int(handed["source"][r]), int(handed["destination"][r])


def carries(transfers: Transfers, ends: Ends) -> bool:
    """Whether nothing between two replicas is down."""
    return bool(transfers.counts[DOWN] + transfers.nics["down"][list(ends)].sum() == 0)


def plan_anew(transfers: Transfers, gone: list[int], time: float) -> None:
    """Some transfers are no more: of those in turn that have not begun, each begins when its NICs are free."""
    rules, handed, nics = transfers.rules[0], transfers.handed, transfers.nics
    nics["free_at"][:] = 0.0
    for r in under_way(transfers).tolist():
        if r in gone:
            continue
        source, destination = ends_of(transfers, r)
        busy = [source] * bool(rules["at_source"]) + [destination] * bool(rules["at_destination"])
        work, begin = float(transfers.work[r]), float(handed["transfer_start"][r])
        if rules["fair"] and busy and work > 0:
            continue  # it shares its NICs, or is through them
        if begin > time:
            free = max([time, *nics["free_at"][busy].tolist()])
            if free != begin:
                begin = handed["transfer_start"][r] = free
                drop_events(transfers, [r], (TRANSFER_END,))
                add_events(transfers, begin + work + float(rules["latency"]), TRANSFER_END, np.array([r]))
        nics["free_at"][busy] = np.maximum(nics["free_at"][busy], begin + work)
