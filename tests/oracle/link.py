"""Link: transfers between replicas as plain objects, in turn at their NICs or sharing them (``deployment.links``)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from windtunnel.deployment.links import Link


@dataclass
class Transfer:
    """The KV of one request on its way between two replicas."""

    request: int
    source: int
    destination: int
    left: float
    """Seconds of work that are left at ``since``."""
    since: float
    sharers: int = 0
    """Transfers at the busier of its NICs, this one included; 0 before it began."""
    end: float = inf


class Wires:
    """All NICs. ``leaves(time, request)`` is called to announce when a transfer is through, as things are; ``arrives``
    when its KV will be there."""

    def __init__(self, link: Link, leaves: Callable[[float, int], None], arrives: Callable[[float, int], None]) -> None:
        self.link, self.leaves, self.arrives = link, leaves, arrives
        self.free_at: dict[tuple[str, int], float] = {}
        self.active: dict[int, Transfer] = {}

    def _nics(self, source: int, destination: int) -> list[tuple[str, int]]:
        """The ends at which transfers contend."""
        ends = [("source", source), ("destination", destination)]
        return [nic for nic in ends if self.link.contention in (nic[0], "both")]

    def start(self, request: int, source: int, destination: int, work: float, time: float) -> float:
        """A transfer may begin; returns when it does."""
        nics = self._nics(source, destination)
        if self._shares(nics, work):
            self.active[request] = Transfer(request, source, destination, work, time)
            self._share_anew(nics, time)
            return time
        begin = self._turn(nics, time)
        self.free_at |= dict.fromkeys(nics, begin + work)
        self.arrives(begin + work + self.link.latency, request)
        return begin

    def _shares(self, nics: list[tuple[str, int]], work: float) -> bool:
        """Whether a transfer shares its NICs with others, instead of taking its turn."""
        return self.link.sharing == "fair" and bool(nics) and work > 0

    def _turn(self, nics: list[tuple[str, int]], time: float) -> float:
        """When all these NICs are free."""
        return max([time, *(self.free_at.get(nic, 0.0) for nic in nics)])

    def leave(self, request: int, time: float) -> None:
        """A transfer is through its NICs, unless others came meanwhile: then it was announced for a later time."""
        if request in self.active and self.active[request].end == time:
            gone = self.active.pop(request)
            self._share_anew(self._nics(gone.source, gone.destination), time)
            self.arrives(time + self.link.latency, request)

    def _share_anew(self, nics: list[tuple[str, int]], time: float) -> None:
        busy = [self._nics(one.source, one.destination) for one in self.active.values()]
        for one, ends in zip(self.active.values(), busy, strict=True):
            if not set(ends) & set(nics):
                continue
            if one.sharers:
                one.left -= (time - one.since) / one.sharers
            one.sharers = max(sum(nic in others for others in busy) for nic in ends)
            one.since, one.end = time, time + max(one.left, 0.0) * one.sharers
            self.leaves(one.end, one.request)
