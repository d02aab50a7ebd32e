"""Which requests wait for which, and which sessions are in play: what a client knows beside its requests."""

from collections import deque
from collections.abc import Mapping, Sequence

from oracle.vllm_v1.request import Request


class Sessions:
    """Requests that come when others have ended, and sessions that wait for a place in play."""

    def __init__(self, after: Mapping[int, Sequence[int]], session: Sequence[int] = (), lanes: int = 0) -> None:
        """``after``: those that a request waits for; ``session``: its number, -1 for none, where at most ``lanes`` of
        them are in play."""
        self.waits = {request: set(others) for request, others in after.items() if others}
        self.children: dict[int, list[int]] = {}
        for request in sorted(self.waits):
            for other in self.waits[request]:
                self.children.setdefault(other, []).append(request)
        self.session, self.lanes = session, lanes
        self.left: dict[int, int] = {}
        """Requests of each session that have not ended."""
        for number in session if lanes else ():
            self.left[number] = self.left.get(number, 0) + 1
        self.later: dict[int, list[tuple[float, int]]] = {}
        """(Seconds after its session's first, request) of the others that come by the clock."""
        self.heads: dict[int, int] = {}
        self.playing: set[int] = set()
        self.queue: deque[int] = deque()

    @classmethod
    def chains(cls, follow: Mapping[int, int]) -> "Sessions":
        """Each request is followed by at most one."""
        return cls({following: (request,) for request, following in follow.items()})

    def by_the_clock(self, requests: Sequence[Request]) -> list[Request]:
        """Those that come by themselves; with lanes, of each session the first."""
        found = [request for request in requests if request.id not in self.waits]
        if not self.lanes:
            return found
        firsts = []
        for request in sorted(found, key=lambda request: (request.arrival, request.id)):
            number = self.session[request.id]
            if number < 0 or number not in self.heads:
                firsts.append(request)
                self.heads.setdefault(number, request.id)
            else:
                delay = request.arrival - requests[self.heads[number]].arrival
                self.later.setdefault(number, []).append((delay, request.id))
        return firsts

    def come(self, r: int, time: float) -> list[tuple[float, int]] | None:
        """(Time, request) of those that come with a request's session; None: it waits for a place in play."""
        number = self.session[r] if self.lanes else -1
        if number < 0 or number in self.playing:
            return []
        if len(self.playing) >= self.lanes:
            self.queue.append(number)
            return None
        return self._begin(number, time)

    def _begin(self, number: int, time: float) -> list[tuple[float, int]]:
        self.playing.add(number)
        return [(time + delay, r) for delay, r in self.later.get(number, ())]

    def end(self, r: int, time: float, think_time: Sequence[float]) -> list[tuple[float, int]]:
        """A request has ended: (time, request) of those that come for that reason."""
        found = []
        for child in self.children.get(r, ()):
            self.waits[child].discard(r)
            if not self.waits[child]:
                found.append((time + think_time[child], child))
        number = self.session[r] if self.lanes else -1
        if number < 0:
            return found
        self.left[number] -= 1
        if self.left[number] == 0:
            self.playing.discard(number)
            if self.queue:
                following = self.queue.popleft()
                found += [*self._begin(following, time), (time, self.heads[following])]
        return found
