"""Turns: what one half of a step computes while the tokens of the other are exchanged, and how long that lasts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from windtunnel.perf.batch_times import Floats

BEFORE, CORE, AFTER = "before", "core", "after"
"""Attention in three: up to its kernel, the kernel, and from there to the choice of experts."""
EXPERTS, SHARED, DISPATCH, COMBINE = "experts", "shared", "dispatch", "combine"

Parts = Mapping[str, Floats]


@dataclass(frozen=True)
class Slot:
    """A stretch of a layer: what is computed for one half, and beside it exchanged for the other."""

    computed: tuple[str, ...]
    exchanged: str | None = None


ALTERNATING = (
    Slot((BEFORE, CORE, AFTER), DISPATCH),
    Slot((EXPERTS,), DISPATCH),
    Slot((EXPERTS, SHARED), COMBINE),
    Slot((SHARED, BEFORE, CORE, AFTER), COMBINE),
)
"""A layer of both halves in vLLM, and of prompts in SGLang and DeepSeek's own engine."""

FIVE_STAGES = 2 * (Slot((BEFORE, SHARED), DISPATCH), Slot((EXPERTS,)), Slot((CORE, AFTER), COMBINE))
"""A layer of both halves of decodes in SGLang and DeepSeek's own engine, where attention is longer than experts."""


def lasting(schedule: Sequence[Slot], parts: Parts) -> Floats:
    """Seconds of a schedule: in every slot the longer of what is computed and what is exchanged."""
    total: Floats = np.zeros(1)
    for slot in schedule:
        computed = sum((parts[name] for name in slot.computed), np.zeros(1))
        total = total + (computed if slot.exchanged is None else np.maximum(computed, parts[slot.exchanged]))
    return total


def rooms(schedule: Sequence[Slot], parts: Parts) -> list[Floats]:
    """Seconds for which the exchange outlasts everything but the attention kernel, in each slot that has the kernel."""
    found = []
    for slot in schedule:
        if CORE in slot.computed and slot.exchanged is not None:
            others = sum((parts[name] for name in slot.computed if name != CORE), np.zeros(1))
            found.append(np.maximum(parts[slot.exchanged] - others, 0.0))
    return found


def shared_out(room: Floats) -> Floats:
    """The room that a chunk of each size has for sure: its share, by tokens, in that batch around it where the share is
    least; so that the chunks of no batch hide more together than the batch has room for."""
    tokens = np.maximum(np.arange(len(room)), 1)
    return tokens * np.minimum.accumulate((room / tokens)[::-1])[::-1]
