"""A decode lane's requests of other lanes: those that ask for memory, and those with memory that wait for a seat."""

from collections import deque
from typing import Protocol

from oracle.vllm_v1.batch import StepScheduler
from oracle.vllm_v1.request import Request
from windtunnel.deployment.handover import Handover

FEW = 32
"""Seats up to which SGLang takes three times as many requests (disaggregation/decode.py)."""


class Receiver(StepScheduler, Protocol):
    """A scheduler whose requests may come with their KV."""

    most_running: int
    """Its seats."""

    def may_stage(self, request: Request, reserved: int, staged: int) -> bool:
        """Whether there is memory for a request, besides so many tokens for each of those that run or are staged."""

    def stage(self, request: Request) -> None:
        """Give it memory."""

    def join(self, request: Request) -> None:
        """Let it decode from the next step on."""


class Reservation:
    """In front of one scheduler."""

    def __init__(self, scheduler: Receiver, rules: Handover) -> None:
        self.scheduler, self.rules = scheduler, rules
        self.asking: deque[Request] = deque()
        self.ready: deque[Request] = deque()
        self.staged = 0

    def ask(self, request: Request) -> None:
        """A request asks for memory."""
        self.asking.append(request)
        self.scheduler.coming += 1

    def withdraw(self, request: Request) -> None:
        """A request asks no longer."""
        self.asking.remove(request)
        self.scheduler.coming -= 1

    def _has_place(self) -> bool:
        running, most = self.scheduler.num_running, self.scheduler.most_running
        if self.rules.reservation == "memory":
            return running < most
        if self.rules.reservation == "seats_and_few" and most <= FEW:
            most *= 3
        return running + self.staged < most

    def give_memory(self) -> list[Request]:
        """Those that get memory now, first come first served."""
        given = []
        while self.asking and self._has_place():
            if not self.scheduler.may_stage(self.asking[0], self.rules.reserved_decode_tokens, self.staged):
                break
            request = self.asking.popleft()
            self.scheduler.stage(request)
            self.staged += 1
            given.append(request)
        return given

    def give_seats(self) -> list[Request]:
        """Those that run from now on."""
        seated = []
        while self.ready and self.scheduler.num_running < self.scheduler.most_running:
            request = self.ready.popleft()
            self.staged -= 1
            self.scheduler.coming -= 1
            self.scheduler.join(request)
            seated.append(request)
        return seated
