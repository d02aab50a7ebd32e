"""A recording's requests in the compiled core: columns and contents on their way in, linked lists on the way out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.engine import Demand
from windtunnel.core.records import NONE
from windtunnel.replay.recording import RecordedRequest


def demand(
    rows: Sequence[RecordedRequest],
    arrival: Sequence[float],
    output: Sequence[int],
    block_size: int,
    max_tokens: Sequence[int],
) -> Demand:
    """The columns of these requests, in this order.

    Args:
        rows: prompts and priorities.
        arrival: when each arrives, in any unit.
        output: tokens that each really generates.
        block_size: tokens that are hashed together.
        max_tokens: what each declares.
    """
    n = len(rows)
    return Demand(
        arrival=np.array(arrival, dtype=np.float64),
        prompt_tokens=np.array([row.prompt_tokens for row in rows], dtype=np.int64),
        output_tokens=np.array(output, dtype=np.int64),
        overruns=np.zeros(n, dtype=np.bool_),
        refused=np.zeros(n, dtype=np.bool_),
        follow=np.full(n, -1, dtype=np.int64),
        think_time=np.zeros(n),
        max_concurrency=0,
        max_tokens=np.array(max_tokens, dtype=np.int64),
        priority=np.array([row.priority for row in rows], dtype=np.int64),
        hash_ids=hash_ids([row.tokens for row in rows], block_size),
        hash_block_size=block_size,
    )


def hash_ids(prompts: Sequence[tuple[int, ...]], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(offsets, values) of the prompts' full blocks: equal values are equal blocks with equal blocks before them."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    values: list[int] = []
    offsets = [0]
    for tokens in prompts:
        before = -1
        for end in range(block_size, len(tokens) + 1, block_size):
            before = numbers.setdefault((before, tokens[end - block_size : end]), len(numbers))
            values.append(before)
        offsets.append(len(values))
    return np.array(offsets, dtype=np.int64), np.array(values, dtype=np.int64)


def linked(requests: Any, first: int, link: str = "next", most: int | None = None) -> list[int]:
    """The numbers of the core's ``requests`` from ``first`` on, at most so many."""
    found: list[int] = []
    while first != NONE and len(found) != most:
        found.append(int(first))
        first = requests[first][link]
    return found
