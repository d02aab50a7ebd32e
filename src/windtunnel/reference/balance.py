"""Ranks in lockstep that admit together (TensorRT-LLM: ``_balance_adp_requests`` of pyexecutor/py_executor.py)."""

from collections.abc import Sequence
from typing import Protocol


class Balanced(Protocol):
    """A rank's scheduler, as far as the others look at it."""

    held: bool
    """Admits nothing in the next step."""

    @property
    def has_prompts(self) -> bool:
        """A request waits that holds nothing yet."""

    @property
    def has_decodes(self) -> bool:
        """A request decodes."""


class Balance:
    """Counts the steps in which not every rank had a request to admit."""

    def __init__(self, timeout: int) -> None:
        self.timeout = timeout
        self.steps = 0

    def begin_step(self, ranks: Sequence[Balanced]) -> None:
        """While all ranks decode, none admits before each has one waiting, or ``timeout`` steps have passed.

        The steps are counted without a pause, also while nothing waits at all.
        """
        together = all(rank.has_prompts for rank in ranks)
        self.steps = 0 if together else self.steps + 1
        due = self.steps >= self.timeout or not all(rank.has_decodes for rank in ranks)
        if due:
            self.steps = 0
        for rank in ranks:
            rank.held = not (together or due)
