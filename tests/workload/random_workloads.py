"""Random workloads for property tests: tied times, sessions, limits, priorities, shared blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from windtunnel.workload import Workload


@st.composite
def workloads(draw: st.DrawFn, most: int = 12) -> Workload:
    """Any valid workload of at most so many requests."""
    n = draw(st.integers(1, most))

    def column(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=n, max_size=n))

    prompt = np.array(column(st.integers(1, 100)))
    output = np.array(column(st.integers(1, 50)))
    size = draw(st.sampled_from([0, 4, 16]))
    return Workload.from_columns(
        arrival=np.cumsum(column(st.floats(0, 1e6) | st.sampled_from([0.0, 1.0]))),
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output + np.array(column(st.sampled_from([0, 0, 7]))),
        priority=column(st.integers(-3, 3)),
        session=column(st.integers(-1, 3)),
        think_time=column(st.floats(0, 1e3) | st.just(0.0)),
        hash_ids=draw(hash_ids([-(-tokens // size) for tokens in prompt.tolist()])) if size else None,
        hash_block_size=size,
        max_concurrency=draw(st.sampled_from([0, 1, 5])),
        name=draw(st.text(max_size=8)),
    )


@st.composite
def hash_ids(draw: st.DrawFn, most: list[int]) -> list[list[int]]:
    """At most so many ids for each prompt, any numbers, each of which stands for a beginning."""
    contents = [draw(st.lists(st.integers(0, 2), max_size=blocks)) for blocks in most]
    beginnings = sorted({tuple(row[: k + 1]) for row in contents for k in range(len(row))})
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers = range(len(beginnings)) if draw(st.booleans()) else rng.integers(-(2**63), 2**63 - 1, len(beginnings))
    number = dict(zip(beginnings, map(int, numbers), strict=True))
    return [[number[tuple(row[: k + 1])] for k in range(len(row))] for row in contents]
