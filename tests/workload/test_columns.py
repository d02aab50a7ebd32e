from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.workload import Workload
from windtunnel.workload.rules import integers


def small(**changes: Any) -> Workload:
    columns: dict[str, Any] = {"arrival": [0.0, 1.0, 1.0], "prompt_tokens": [5, 6, 7], "output_tokens": [1, 2, 3]}
    return Workload.from_columns(**{**columns, **changes})


def test_defaults_are_filled_in() -> None:
    workload = small()
    assert len(workload) == 3
    assert workload.max_tokens.tolist() == [1, 2, 3]
    assert workload.session.tolist() == [-1, -1, -1]
    assert workload.think_time.tolist() == [0, 0, 0]
    assert workload.follow.tolist() == [-1, -1, -1]
    assert (workload.max_concurrency, workload.hash_ids, workload.hash_block_size) == (0, None, 0)


def test_a_number_fills_a_column_and_the_source_is_copied() -> None:
    prompt = np.array([1, 2])
    workload = Workload.from_columns(prompt_tokens=prompt, output_tokens=9)
    prompt[0] = 77
    assert workload.prompt_tokens.tolist() == [1, 2]
    assert workload.output_tokens.tolist() == [9, 9]
    assert workload.max_tokens is not workload.output_tokens
    assert workload.arrival.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrival": [0, -1, 2]}, "row 2: arrival=-1.0: must be finite seconds ≥ 0"),
        ({"arrival": [0, 1, np.nan]}, "row 3: arrival=nan"),
        ({"arrival": [0, 1, np.inf]}, "row 3: arrival=inf"),
        ({"arrival": [0, 5, 2]}, "row 3: arrival=2 comes after 5: .*--sort"),
        ({"arrival": [0, 1]}, r"arrival has shape \(2,\): must be \(3,\)"),
        ({"arrival": ["a", "b", "c"]}, "arrival='a': must be numbers"),
        ({"prompt_tokens": [1, 0, 1]}, "row 2: prompt_tokens=0: must be ≥ 1"),
        ({"prompt_tokens": [1, 2.5, 1]}, "row 2: prompt_tokens=2.5: must be a whole number"),
        ({"prompt_tokens": [1, np.nan, 1]}, "row 2: prompt_tokens=nan: must be a whole number"),
        ({"prompt_tokens": [1, 2**41, 1]}, "row 2: prompt_tokens=.*≤ 2"),
        ({"prompt_tokens": ["x", "y", "z"]}, "prompt_tokens='x': must be whole numbers"),
        ({"output_tokens": [0, 1, 1]}, "row 1: output_tokens=0: must be ≥ 1 .*--drop-empty"),
        ({"max_tokens": [1, 2, 2]}, "row 3: max_tokens=2: must be ≥ output_tokens=3"),
        ({"max_tokens": [1, 2, 2**41]}, "row 3: max_tokens"),
        ({"session": [-2, 0, 0]}, "row 1: session=-2"),
        ({"think_time": [0, 0, -1]}, "row 3: think_time=-1.0"),
        ({"think_time": [0, np.nan, 0]}, "row 2: think_time=nan"),
        ({"max_concurrency": -1}, "max_concurrency=-1"),
        ({"hash_block_size": 16}, "hash_block_size=16: goes with hash_ids"),
        ({"hash_ids": [[1], [2], [3]]}, "hash_block_size=0: hash_ids need"),
        ({"hash_ids": [[1], [2]], "hash_block_size": 4}, "hash_ids has 2 rows: must have 3"),
        (
            {"hash_ids": [[1], [2, 3, 4], [3]], "hash_block_size": 4},
            "row 2: 3 hash_ids for a prompt of 6 tokens: .* 2 b",
        ),
        ({"hash_ids": (np.array([0, 1]), np.array([4])), "hash_block_size": 4}, "hash_ids offsets"),
        ({"hash_ids": (np.array([0, 2, 1, 1]), np.array([4])), "hash_block_size": 4}, "hash_ids offsets"),
        (
            {"hash_ids": [[1, 2], [3, 2], []], "hash_block_size": 3},
            "row 2: hash id 2 stands behind 3, but behind 1 in row 1: an id names a block and all before it",
        ),
        (
            {"hash_ids": [[1, 2], [], [2]], "hash_block_size": 3},
            "row 3: .* 2 stands behind nothing, but behind 1 in row 1",
        ),
        (
            {"hash_ids": [[], [1, 1], []], "hash_block_size": 3},
            "row 2: .* 1 stands behind 1, but behind nothing in row 2",
        ),
    ],
)
def test_bad_columns_are_refused_by_row_value_and_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


def test_an_empty_workload_is_an_error() -> None:
    with pytest.raises(InputError, match="no requests"):
        Workload.from_columns(arrival=[], prompt_tokens=[], output_tokens=[])


def test_the_constructor_itself_checks_too() -> None:
    workload = small()
    with pytest.raises(InputError, match="arrival has 3 rows: must have 2"):
        replace(workload, prompt_tokens=workload.prompt_tokens[:2])
    with pytest.raises(InputError, match="arrival: must be a float64 array"):
        replace(workload, arrival=np.array([0, 1, 2]))
    with pytest.raises(InputError, match="no requests"):
        workload.take(np.array([], np.int64))
    turns = small(session=[4, 4, -1])
    with pytest.raises(InputError, match=r"row 3: arrival=2\.0 of a later turn: must be NaN"):
        replace(turns, arrival=np.array([0.0, 1.0, 2.0]))
    with pytest.raises(InputError, match="behind later turns"):
        replace(turns, arrival=np.array([0.0, np.nan, 2.0]), session=np.array([4, 4, -1]))


def test_later_turns_lose_their_arrival_and_go_last() -> None:
    workload = Workload.from_columns(
        arrival=[0, 0.5, 3, 1, 4, 2],  # rows 3 and 5 are later turns: out of order is fine there
        prompt_tokens=[10, 11, 12, 13, 14, 15],
        output_tokens=1,
        session=[7, -1, 8, 7, -1, 7],
        think_time=[0, 0, 0, 2, 0, 3],
        hash_ids=[[0], [1], [2], [0, 3], [], [0, 5]],
        hash_block_size=8,
    )
    assert workload.prompt_tokens.tolist() == [10, 11, 12, 14, 13, 15]
    assert np.isnan(workload.arrival).tolist() == [False] * 4 + [True] * 2
    assert workload.follow.tolist() == [4, -1, -1, -1, 5, -1]
    assert workload.hash_ids is not None
    assert workload.hash_ids[0].tolist() == [0, 1, 2, 3, 3, 5, 7]
    assert workload.hash_ids[1].tolist() == [0, 1, 2, 0, 3, 0, 5]


def test_sorting_is_stable() -> None:
    workload = Workload.from_columns(arrival=[2, 1, 2, 1], prompt_tokens=[1, 2, 3, 4], output_tokens=1, sort=True)
    assert workload.prompt_tokens.tolist() == [2, 4, 1, 3]


def test_sorting_puts_turns_in_the_order_of_their_times() -> None:
    workload = Workload.from_columns(
        arrival=[9, 1, 5], prompt_tokens=[1, 2, 3], output_tokens=1, session=[0, 0, -1], sort=True
    )
    assert workload.prompt_tokens.tolist() == [2, 3, 1]
    assert workload.follow.tolist() == [2, -1, -1]


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=30))
def test_follow_chains_visit_every_turn_of_a_session_once_in_order(session: Sequence[int]) -> None:
    workload = Workload.from_columns(
        arrival=np.arange(len(session)), prompt_tokens=1, output_tokens=np.arange(1, len(session) + 1), session=session
    )
    starts = np.flatnonzero(~np.isnan(workload.arrival))
    seen = []
    for row in starts:
        chain = [int(row)]
        while workload.follow[chain[-1]] >= 0:
            chain.append(int(workload.follow[chain[-1]]))
        assert len({int(workload.session[turn]) for turn in chain}) == 1
        assert [int(workload.output_tokens[turn]) for turn in chain] == sorted(
            int(workload.output_tokens[turn]) for turn in chain
        )
        assert chain[1:] == [] or workload.session[row] >= 0
        seen += chain
    assert sorted(seen) == list(range(len(workload)))
    assert len(starts) == sum(1 for s in session if s == -1) + len({s for s in session if s >= 0})


def test_rate_duration_and_spec() -> None:
    workload = small(arrival=[1.0, 2.0, 5.0], name="three")
    assert workload.duration == 4
    assert workload.request_rate == pytest.approx(0.5)
    spec = workload.spec()
    assert (spec["name"], spec["requests"], spec["total_prompt_tokens"], spec["total_output_tokens"]) == (
        "three",
        3,
        18,
        6,
    )
    at_once = small(arrival=[0, 0, 0])
    assert at_once.request_rate == np.inf
    assert at_once.spec()["request_rate"] is None


def test_the_digest_sees_everything_but_the_name() -> None:
    workload = small()
    assert workload.equals(replace(workload, name="other", notes=("a note",)))
    for changed in (
        small(arrival=[0, 1, 1.5]),
        small(prompt_tokens=[5, 6, 8]),
        small(output_tokens=[1, 2, 4]),
        small(max_tokens=9),
        small(priority=1),
        small(session=[0, 1, 2]),
        small(think_time=1.0),
        small(max_concurrency=2),
        small(hash_ids=[[1], [2], [3]], hash_block_size=16),
    ):
        assert not workload.equals(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hash_ids": [[1, 2, 3], [4], [5]], "hash_block_size": 4}, "row 1: 3 hash_ids for a prompt of 5 tokens"),
        ({"arrival": [5, 2, 9]}, "row 2: arrival=2 comes after 5"),
        ({"prompt_tokens": [1.5, 2, 3]}, "row 1: prompt_tokens=1.5: must be a whole number"),
        ({"max_tokens": [0, 9, 9]}, "row 1: max_tokens=0: must be ≥ output_tokens=1"),
        ({"arrival": [-1, 0, 0]}, "row 1: arrival=-1.0"),
        ({"hash_ids": [[1], [], [1]], "hash_block_size": 0}, "hash_block_size=0: hash_ids need"),
    ],
)
def test_the_first_row_is_checked_as_the_others_are(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**changes)
    assert small(hash_ids=[[1, 2], [3], [4]], hash_block_size=4).hash_block_size == 4  # five tokens are two blocks


def test_whole_numbers_up_to_two_to_the_sixty_third() -> None:
    """Larger ones would overflow; the first row counts as the others do."""
    most = np.array([2**63 - 1, 1], np.uint64)
    assert integers("session", most, 2).tolist() == [2**63 - 1, 1]
    with pytest.raises(InputError, match=r"session=9223372036854775808: must be whole numbers"):
        integers("session", np.array([2**63, 1], np.uint64), 2)
    assert integers("session", np.array([2.0**61, 1.0]), 2).tolist() == [2**61, 1]
    for value in (2.0**62, 0.5, np.inf):
        with pytest.raises(InputError, match=r"row 1: session=.*: must be a whole number"):
            integers("session", np.array([value, 1.0]), 2)


def test_columns_alone_make_a_workload() -> None:
    """Without shared blocks, an open loop, with no rate but its own."""
    columns: dict[str, Any] = small().columns()
    made = Workload(**columns)
    assert (made.hash_ids, made.hash_block_size, made.max_concurrency, made.name) == (None, 0, 0, "workload")
    assert (made.asked_rate, made.burstiness, made.notes) == (0.0, 0.0, ())
    assert made.equals(small())
