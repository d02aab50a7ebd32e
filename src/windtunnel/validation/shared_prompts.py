"""Prompts of a measured run that begin alike: as recorded, as a hit rate implies, or as their lengths betray."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError

Integers = NDArray[np.int64]

HASH_BLOCK = 16
"""Tokens that a hash id stands for where a run does not say."""

REPEATED = 0.9
"""Share of prompts that are as long as the one a fixed number of requests before, from which they look repeated."""

FEWEST_LENGTHS, FEWEST_REPEATED = 8, 20
"""Fewer different lengths, or fewer prompts at such a lag, betray nothing."""


def of_hit_rate(prompt_tokens: Integers, rate: float) -> list[list[int]]:
    """Hash ids with which a prefix cache that forgets nothing finds this share of all prompt tokens.

    All prompts begin with the same text, each for its share of its length, and end on their own: which of them really
    share what is not known. The first finds nothing, and the longest prompt so far adds to what is known, so that the
    others' shares are raised until the whole is met.

    Raises InputError for a rate that is no share, or that no such prompts can have.
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise InputError(f"prefix_cache_hit_rate={rate!r}: must be a share, ≥ 0 and < 1")
    blocks = prompt_tokens // HASH_BLOCK
    wanted = rate * float(prompt_tokens.sum())
    low, high = 0.0, 1.0
    for _ in range(30):
        share = 0.5 * (low + high)
        low, high = (share, high) if _found(blocks, share) * HASH_BLOCK < wanted else (low, share)
    if _found(blocks, 1.0) * HASH_BLOCK < wanted * (1 - 0.02):
        raise InputError(f"prefix_cache_hit_rate={rate}: more than prompts of these lengths can find; is it a share?")
    own, found = int(blocks.max(initial=0)), []
    for count, alike in zip(blocks.tolist(), _alike(blocks, high).tolist(), strict=True):
        found.append([*range(alike), *range(own, own + count - alike)])
        own += count - alike
    return found


def _alike(blocks: Integers, share: float) -> Integers:
    return np.asarray(np.floor(share * blocks), dtype=np.int64)


def _found(blocks: Integers, share: float) -> int:
    """Blocks that are known when their prompt comes."""
    alike = _alike(blocks, share)
    known = np.concatenate(([0], np.maximum.accumulate(alike)[:-1]))
    return int(np.minimum(alike, known).sum())


def repeated_after(prompt_tokens: Sequence[int] | Integers) -> int:
    """The number of requests after which the lengths of prompts come again; 0 where they do not."""
    lengths = np.asarray(prompt_tokens)
    if len(np.unique(lengths)) < FEWEST_LENGTHS:
        return 0
    for lag in range(1, len(lengths) - FEWEST_REPEATED + 1):
        if float(np.mean(lengths[lag:] == lengths[:-lag])) >= REPEATED:
            return lag
    return 0


def of_repeats(prompt_tokens: Integers, lag: int) -> list[list[int]]:
    """Hash ids where a prompt is that of ``lag`` requests before if it is as long, and shares nothing otherwise."""
    found: list[list[int]] = []
    own = 0
    for number, tokens in enumerate(prompt_tokens.tolist()):
        if number >= lag and tokens == prompt_tokens[number - lag]:
            found.append(found[number - lag])
        else:
            found.append([*range(own, own + tokens // HASH_BLOCK)])
            own += tokens // HASH_BLOCK
    return found
