"""Wires that fail: what goes over them breaks, and what would go over them waits."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from oracle.link import Wires
from windtunnel.deployment.links import Link
from windtunnel.policy.scaling import WHOLE_LINK

Ends = tuple[int, int]
"""Prefill and decode replica of a transfer."""


@dataclass
class Booking:
    """A transfer on its way."""

    ends: Ends
    work: float
    begin: float
    due: float = -1.0
    """When its KV will be there, as far as that is known."""


class FailingWires(Wires):
    """Wires whose NICs may be down. ``begins(request, time)`` is called when a transfer that waited for others in front
    of it will begin sooner, because they are gone."""

    def __init__(
        self,
        link: Link,
        leaves: Callable[[float, int], None],
        arrives: Callable[[float, int], None],
        begins: Callable[[int, float], None],
    ) -> None:
        super().__init__(link, leaves, self._note(arrives))
        self.begins = begins
        self.bookings: dict[int, Booking] = {}
        self.down: Counter[tuple[int, int]] = Counter()
        """(Stage, replica) whose NICs are down, or WHOLE_LINK twice, and how often."""
        self.stuck: dict[int, tuple[Ends, float]] = {}
        """Transfers that wait for the link, in their order: their ends, and their work."""

    def _note(self, arrives: Callable[[float, int], None]) -> Callable[[float, int], None]:
        def noted(time: float, request: int) -> None:
            self.bookings[request].due = time
            arrives(time, request)

        return noted

    def carries(self, ends: Ends) -> bool:
        """Whether nothing between two replicas is down."""
        parts = [(WHOLE_LINK, WHOLE_LINK), (0, ends[0]), (1, ends[1])]
        return not any(self.down[part] for part in parts)

    def start(self, request: int, source: int, destination: int, work: float, time: float) -> float:
        """See Wires."""
        self.bookings[request] = Booking((source, destination), work, time)
        self.bookings[request].begin = super().start(request, source, destination, work, time)
        return self.bookings[request].begin

    def is_due(self, request: int, time: float) -> bool:
        """Whether a transfer ends now, which has been announced for this time; it is over then."""
        if request not in self.bookings or self.bookings[request].due != time:
            return False
        del self.bookings[request]
        return True

    def touching(self, part: tuple[int, int]) -> list[int]:
        """Transfers on their way that something which fails takes part in."""
        whole = part == (WHOLE_LINK, WHOLE_LINK)
        return [r for r, one in self.bookings.items() if whole or one.ends[part[0]] == part[1]]

    def cut(self, requests: list[int], time: float) -> None:
        """These transfers are no more; those behind them begin sooner."""
        gone = [self.bookings.pop(r) for r in requests if r in self.bookings]
        for r in requests:
            self.stuck.pop(r, None)
            self.active.pop(r, None)
        for one in gone:
            if self.active:
                self._share_anew(self._nics(*one.ends), time)
        if gone:
            self._plan_anew(time)

    def _plan_anew(self, time: float) -> None:
        """Transfers in turn: those that have not begun, in the order in which they asked."""
        self.free_at = {}
        for r, one in self.bookings.items():
            if r in self.active:
                continue
            nics = self._nics(*one.ends)
            if self._shares(nics, one.work):
                continue  # through its NICs, and on its way
            if one.begin > time:
                begin = self._turn(nics, time)
                if begin != one.begin:
                    one.begin = begin
                    self.begins(r, begin)
                    self.arrives(begin + one.work + self.link.latency, r)
            end = one.begin + one.work
            self.free_at |= {nic: max(self.free_at.get(nic, 0.0), end) for nic in nics}
