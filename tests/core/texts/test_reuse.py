"""What a prefix cache finds, by its memory: against a cache of single blocks, and an independent replay of traces."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.core.texts.kinds import computed_again, reuse_by_kind, why_again
from windtunnel.core.texts.reuse import MEMORIES, reuse, service_order, summary_of_reuse
from windtunnel.workload import Workload, load_trace, with_lanes
from windtunnel.workload.texts import tree

SHARED = Path(__file__).parents[4] / "shared"
SIZE = 4


@st.composite
def talks(draw: st.DrawFn) -> Workload:
    """Sessions whose prompts begin with earlier texts, their own session's answers among them."""
    rows = draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(1, 40), st.integers(1, 40)), min_size=1)
    )
    session, prompts, outputs = list[int](), list[int](), list[int]()
    begins: list[tuple[int, int] | None] = []
    for row, (own, pick, fresh, output) in enumerate(rows):
        other = pick % row if row else None
        longest = 0 if other is None else prompts[other] + (outputs[other] if session[other] == own else 0)
        begins.append(None if other is None else (other, longest))
        session.append(own)
        prompts.append(fresh + longest)
        outputs.append(output)
    return Workload.from_columns(
        session=session,
        prompt_tokens=prompts,
        output_tokens=outputs,
        begins=begins,
        lanes=draw(st.sampled_from([0, 1, 2])),
    )


def by_single_blocks(workload: Workload, blocks: int) -> int:
    assert workload.begins is not None
    above, begins = tree(workload.begins)
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for row in service_order(workload).tolist():
        names = []
        for block in range(int(workload.prompt_tokens[row] + workload.output_tokens[row] - 1) // SIZE):
            owner = row
            while (block + 1) * SIZE - 1 < begins[owner]:
                owner = int(above[owner])
            names.append((owner, block))
        for name in names[: int(workload.prompt_tokens[row] - 1) // SIZE]:
            if name not in cache:
                break
            hits += 1
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits * SIZE


@given(talks())
@settings(deadline=None)  # the first one compiles
def test_every_memory_as_a_cache_of_single_blocks(workload: Workload) -> None:
    sizes = (1, 3, 8, 20, 10**6)
    found = reuse(workload, [blocks * SIZE for blocks in sizes], SIZE)
    if workload.begins is None:
        assert found is None
        return
    assert found is not None
    assert list(found.hits_by_memory) == [by_single_blocks(workload, blocks) for blocks in sizes]
    assert int(found.hits.sum()) == found.hits_by_memory[-1]


def test_turns_find_the_answer_too() -> None:
    talk = Workload.from_columns(session=[0, 0], prompt_tokens=[1024, 1600], output_tokens=[512, 16], begins=[None, 0])
    found = summary_of_reuse(talk)
    assert found is not None
    assert found["hit_tokens"] == 1520
    assert found["computed_per_prompt"] == {"mean": 552.0, "p50": 552.0}
    assert found["knee_tokens"] == MEMORIES[0]
    few = summary_of_reuse(talk, (64, 1600))
    assert few is not None and few["knee_tokens"] == 1600
    less = summary_of_reuse(talk, (64,))
    assert less is not None and less["knee_tokens"] is None


@pytest.mark.parametrize("answers", ["recorded", "live"])
@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
def test_public_agent_traces_as_replayed_independently(answers: str) -> None:
    rows = json.loads((SHARED / "prototypes" / "sessions" / "acceptance_shared_lru.json").read_text())["rows"]
    wanted = {
        row["memory_tokens"]: row["hit_tokens"]
        for row in rows
        if row["lanes"] == 1 and row["answers_cached"] == (answers == "live")
    }
    found = reuse(with_lanes(load_trace(SHARED / "traces" / "agent_sessions", answers=answers), 1))
    assert found is not None
    assert dict(zip(MEMORIES, found.hits_by_memory, strict=True)) == {size: wanted[size] for size in MEMORIES}
    assert int(np.sum(found.hits)) == wanted[10**12]


def test_found_tokens_by_kind() -> None:
    """Two turns of session 0 (100 + 50, then 200 + 20 tokens). Session 1 begins with 80 tokens of the first prompt;
    its second turn with 190 of session 0's second, of which 100 are that prompt, 50 an answer and 40 a later turn; a
    request without session with 120 of session 1's first one, and another with 100 of that one's."""
    demand = SimpleNamespace(
        begins=(np.array([-1, 0, 0, 1, 2, 4]), np.array([0, 150, 80, 190, 120, 100])),
        prompt_tokens=np.array([100, 200, 130, 300, 400, 150]),
        output_tokens=np.array([50, 20, 30, 5, 5, 5]),
        sessions=np.array([0, 0, 1, 1, -1, -1]),
    )

    def found(*cached: int) -> dict[str, int]:
        return reuse_by_kind(demand, np.array(cached))

    assert found(0, 150, 0, 0, 0, 0) == {"history": 100, "answers": 50, "system": 0, "others": 0}
    assert found(0, 0, 80, 0, 0, 0) == {"history": 0, "answers": 0, "system": 80, "others": 0}
    assert found(0, 0, 0, 190, 0, 0) == {"history": 0, "answers": 0, "system": 100, "others": 50 + 40}
    assert found(0, 0, 0, 0, 112, 0) == {"history": 0, "answers": 0, "system": 112, "others": 0}
    assert found(0, 0, 0, 0, 0, 96) == {"history": 0, "answers": 0, "system": 96, "others": 0}
    assert reuse_by_kind(SimpleNamespace(begins=None), np.zeros(6, dtype=np.int64)) == {}


def test_what_is_computed_again() -> None:
    """The second prompt begins with all of the first and its answer, but for the token that is never computed: 144
    tokens in blocks of 16, of which it found none. The third shares 160 with the second and found 64."""
    demand = SimpleNamespace(
        begins=(np.array([-1, 0, 1]), np.array([0, 150, 170])),
        prompt_tokens=np.array([100, 160, 400]),
        output_tokens=np.array([50, 10, 5]),
    )
    cached, ran = np.array([0, 0, 64]), np.array([True, True, True])
    assert computed_again(demand, cached, ran, 16) == 144 + 96
    assert computed_again(demand, cached, ran & [True, False, True], 16) == 96
    assert computed_again(SimpleNamespace(begins=None), cached, ran, 16) == 0


def test_why_it_is_computed_again() -> None:
    """Six prompts begin with 64 tokens of the first, which lane 0 has computed at 1 s, and find nothing: one comes
    before that; one asks lane 1, which has computed them for nobody; the next one there comes when that one has its
    first token, so that they are gone again; one asks lane 0. One begins with an answer that ends at 9 s, before
    that; the last one ran nowhere."""
    demand = SimpleNamespace(
        begins=(np.array([-1, 0, 0, 0, 0, 0, 0]), np.array([0, 64, 64, 64, 64, 112, 64])),
        prompt_tokens=np.array([100, 80, 80, 80, 80, 160, 80]),
        output_tokens=np.full(7, 50),
    )
    requests = {
        "cached_tokens": np.zeros(7, dtype=np.int64),
        "lane": np.array([0, 0, 1, 1, 0, 0, -1]),
        "scheduled": np.array([0.0, 0.5, 2.0, 4.0, 5.0, 8.0, np.nan]),
        "first_token": np.array([1.0, 1.5, 3.0, 5.0, 6.0, 8.5, np.nan]),
        "finish": np.array([9.0, 2.0, 3.5, 5.5, 6.5, 9.5, np.nan]),
    }
    ran = ~np.isnan(requests["scheduled"])
    found = why_again(demand, requests, ran, 16)
    assert found == {"evicted": 128, "elsewhere": 64, "early": 64 + 112}
    assert sum(found.values()) == computed_again(demand, requests["cached_tokens"], ran, 16)
    assert why_again(SimpleNamespace(begins=None), requests, ran, 16) == {}
