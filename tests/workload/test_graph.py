"""Who waits for whom, and what prompts begin with: lists of a file against columns, rules, other orders."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.workload import Workload, json_traces, load_trace, repeat, save, with_recorded_answers
from windtunnel.workload.texts import from_earlier, of_hashes, taken, tree

FORK: dict[str, Any] = {
    # two agents of turn 1, which turn 4 joins; another session begins with the first one's answer of turn 1
    "session": [0, 0, 0, 0, 0, 1],
    "arrival": [0.0, 0.0, 0.0, 0.0, 0.0, 50.0],
    "think_time": [0, 5, 1, 1, 2, 0],
    "after": [None, None, None, [1], [2, 3], None],
    "prompt_tokens": [100, 150, 80, 90, 300, 60],
    "output_tokens": [20, 30, 10, 10, 10, 5],
    "begins": [None, 0, None, [2, 40], [1, 170], [0, 60]],
}
TREES = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30)


def texts_of(workload: Workload) -> list[list[int]]:
    """Every text by its tokens, prompt and answer."""
    fresh = iter(range(10**9))
    others, tokens = workload.begins or (np.full(len(workload), -1), np.zeros(len(workload)))
    found: dict[int, list[int]] = {}

    def text(row: int) -> list[int]:
        if row not in found:
            shared = text(int(others[row]))[: int(tokens[row])] if others[row] >= 0 else []
            own = int(workload.prompt_tokens[row] + workload.output_tokens[row]) - len(shared)
            found[row] = shared + [next(fresh) for _ in range(own)]
        return found[row]

    return [text(row) for row in range(len(workload))]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_fork_and_a_join() -> None:
    workload = Workload.from_columns(**FORK)
    assert np.isnan(workload.arrival).tolist() == [False, False, True, True, True, True]
    assert workload.after is not None
    assert workload.begins is not None
    offsets, parents = workload.after
    lists = [parents[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert lists == [[], [], [0], [2], [2], [3, 4]]
    assert workload.begins[0].tolist() == [-1, 0, 0, -1, 3, 2]
    assert workload.begins[1].tolist() == [0, 60, 120, 0, 40, 170]


def test_what_is_usual_is_left_out() -> None:
    usual: dict[str, Any] = {
        "session": [0, 0, 1],
        "prompt_tokens": 10,
        "output_tokens": [5, 5, 5],
        "arrival": [0, 0, 3],
    }
    plain = Workload.from_columns(**usual)
    said = Workload.from_columns(**usual, after=[[], [0], None], begins=[None, None, None])
    assert said.after is None
    assert said.begins is None
    assert said.equals(plain)


@pytest.mark.parametrize(("name", "large"), [("load.jsonl", 2**20), ("load.jsonl", 0), ("load.parquet", 0)])
def test_files_keep_it(tmp_path: Path, name: str, large: int) -> None:
    workload = Workload.from_columns(**FORK, lanes=3)
    save(workload, tmp_path / name)
    with patch.object(json_traces, "LARGE", large):
        assert load_trace(tmp_path / name).equals(workload)


def test_a_row_of_the_clock_that_begins_with_an_answer_keeps_its_place_in_the_file(tmp_path: Path) -> None:
    workload = Workload.from_columns(
        session=[0, 0, 1], arrival=[0, 0, 9], prompt_tokens=[5, 20, 20], output_tokens=[5, 5, 5],
        begins=[None, 0, [1, 20]],
    )  # fmt: skip
    save(workload, tmp_path / "load.jsonl")
    again = load_trace(tmp_path / "load.jsonl")
    assert again.equals(workload)
    assert again.begins is not None
    assert again.begins[0].tolist() == [-1, 2, 0]
    twice = repeat(workload, 2)
    pairs = ((0, 2), (0, 4), (2, 5), (1, 4), (4, 5))
    assert [common(texts_of(twice)[a], texts_of(twice)[b]) for a, b in pairs] == [0, 10, 10, 20, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"after": [None, [2], None, None, None, None]}, r"row 2: after=2: must name earlier requests"),
        ({"after": [None, None, None, None, None, [0]]}, r"row 6: after=0: must be of the same session"),
        ({"after": [None, None, [0, 0], None, None, None]}, r"row 3: after=0: must be named once"),
        ({"after": [None, None, ["0"], None, None, None]}, r"row 3: after=\['0'\]: must be a list of numbers"),
        ({"begins": [None, 1, None, None, None, None]}, r"row 2: begins=1: must be the number of an earlier request"),
        ({"begins": [None, [0, 121], None, None, None, None]}, r"row 2: begins with 121 tokens of request 0, whose"),
        ({"begins": [None, [0, 151], None, None, None, None]}, r"row 2: begins with 151 tokens: must be ≥ 1 and ≤ its"),
        ({"begins": [None, None, [0, 110], None, None, None]}, r"row 3: begins with 110 tokens: must be ≥ 1"),
        ({"begins": [None, None, None, None, None, [3, 100]]}, r"row 6: begins with 100 tokens: must be ≥ 1"),
        ({"begins": [None] * 5 + [[2, 60]], "prompt_tokens": [1, 1, 55, 1, 300, 60]}, r"begins with the answer of"),
        ({"hash_ids": [[1]] * 6, "hash_block_size": 16}, r"begins and hash_ids: both say"),
        ({"lanes": -1}, r"lanes=-1: must be ≥ 1"),
    ],
)
def test_rules(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload.from_columns(**FORK | changes)


def test_a_row_that_others_wait_for_cannot_be_left_out() -> None:
    with pytest.raises(InputError, match="waits for row 3, which is left out"):
        Workload.from_columns(**FORK).take(np.array([0, 1, 3, 4]))


@st.composite
def chats(draw: st.DrawFn) -> Workload:
    """Prompts that begin with texts of any earlier request, which the one after waits for."""
    rows = draw(TREES)
    begins: list[Any] = []
    prompts: list[int] = []
    for row, (pick, own, output) in enumerate(rows):
        other = pick % row if row else None
        longest = 0 if other is None else prompts[other] + rows[other][2]
        shared = min(own + output, longest)
        begins.append([other, shared] if shared else None)
        prompts.append(own + shared)
    return Workload.from_columns(
        session=[0] * len(rows), prompt_tokens=prompts, output_tokens=[output for *_, output in rows], begins=begins
    )


@given(chats())
def test_the_tree_shares_the_same(workload: Workload) -> None:
    texts = texts_of(workload)
    assert all(
        len(text) == p + o for text, p, o in zip(texts, workload.prompt_tokens, workload.output_tokens, strict=True)
    )
    if workload.begins is None:
        return
    others, tokens = tree(workload.begins)
    for row, (other, count) in enumerate(zip(others.tolist(), tokens.tolist(), strict=True)):
        if other >= 0:
            assert common(texts[row], texts[other]) >= count
            assert others[other] < 0 or tokens[other] < count


@given(chats(), st.integers(0, 2**32 - 1))
def test_what_is_left_shares_as_before(workload: Workload, seed: int) -> None:
    texts = texts_of(workload)
    kept = np.arange(int(np.random.default_rng(seed).integers(1, len(workload) + 1)))
    part = with_recorded_answers(workload).take(kept)
    again = texts_of(part)
    whole = texts_of(with_recorded_answers(workload))
    assert len(texts) == len(whole)
    for a in range(len(kept)):
        for b in range(a):
            assert common(again[a], again[b]) == common(whole[a], whole[b])


@given(chats(), st.sampled_from([1, 4, 16]))
def test_hash_ids_say_the_same_of_prompts(workload: Workload, size: int) -> None:
    texts = [
        text[:prompt]
        for text, prompt in zip(texts_of(with_recorded_answers(workload)), workload.prompt_tokens, strict=True)
    ]
    numbers: dict[tuple[int, ...], int] = {}
    ids = [
        [numbers.setdefault(tuple(text[:end]), len(numbers)) for end in range(size, len(text) + 1, size)]
        for text in texts
    ]
    hashed = Workload.from_columns(
        prompt_tokens=workload.prompt_tokens, output_tokens=1, hash_ids=ids, hash_block_size=size
    )
    found = Workload.from_columns(
        prompt_tokens=workload.prompt_tokens, output_tokens=1,
        begins=of_hashes(hashed.hash_ids, size, hashed.prompt_tokens),  # type: ignore[arg-type]
    )  # fmt: skip
    again = texts_of(found)
    for a in range(len(texts)):
        for b in range(a):
            assert common(again[a], again[b]) // size == common(texts[a], texts[b]) // size


@given(chats(), st.randoms())
def test_beginnings_after_rows_have_moved_are_of_rows_before(workload: Workload, random: Random) -> None:
    """Prompts alone, in any order: whatever two of them share, they share still."""
    alone = with_recorded_answers(workload)
    order = list(range(len(alone)))
    random.shuffle(order)
    rows = np.array(order)
    texts = texts_of(alone)
    moved = taken(alone.begins, rows) or (np.full(len(rows), -1), np.zeros(len(rows), np.int64))
    prompts, outputs = alone.prompt_tokens[rows], alone.output_tokens[rows]
    others, tokens = from_earlier(moved, prompts, outputs)
    assert (others < np.arange(len(rows))).all()
    for place, row in enumerate(order):
        before = [common(texts[row][: prompts[place]], texts[other]) for other in order[:place]]
        assert tokens[place] == max(before, default=0)
        if tokens[place]:
            assert before[others[place]] == tokens[place]
