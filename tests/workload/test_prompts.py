from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.workload import (
    AllAtOnce,
    Both,
    Constant,
    Fixed,
    Lognormal,
    Poisson,
    Uniform,
    Workload,
    describe,
    prefix_repetition,
    sessions,
)

LENGTHS = Both(Uniform(1, 90), Fixed(25))


def blocks(workload: Workload) -> list[list[int]]:
    assert workload.hash_ids is not None
    offsets, values = workload.hash_ids
    return [values[a:b].tolist() for a, b in pairwise(offsets)]


def test_prefixes_are_used_equally_and_shared() -> None:
    workload = prefix_repetition(Poisson(2.0), LENGTHS, 103, num_prefixes=10, prefix_tokens=40, hash_block_size=16)
    ids = blocks(workload)
    assert [len(row) for row in ids] == (workload.prompt_tokens // 16).tolist()
    uses = np.unique([row[0] for row in ids], return_counts=True)[1]
    assert sorted(uses.tolist()) == [10] * 7 + [11] * 3
    for row in ids:
        assert row[1] == row[0] + 1
    tails = [block for row in ids for block in row[2:]]  # the third block holds text of its own
    assert len(set(tails)) == len(tails)
    assert not set(tails) & {block for row in ids for block in row[:2]}


def test_every_turn_repeats_the_conversation() -> None:
    workload = sessions(Poisson(1.0), LENGTHS, 50, turns=Uniform(1, 6), system_tokens=35, think_time=8.0)
    assert workload.begins is not None
    others, tokens = workload.begins
    starts = np.flatnonzero(~np.isnan(workload.arrival))
    assert len(starts) == 50
    for start in starts.tolist():
        assert workload.prompt_tokens[start] > 35
        assert workload.think_time[start] == 0
        row = start
        while (later := int(workload.follow[row])) >= 0:
            grown = workload.prompt_tokens[later] - workload.prompt_tokens[row]
            assert 26 <= grown <= 115  # the answer of 25 tokens and a new message
            assert (others[later], tokens[later]) == (row, workload.prompt_tokens[row] + 25)
            row = later
    assert set(zip(others[starts[1:]].tolist(), tokens[starts[1:]].tolist(), strict=True)) == {(0, 35)}
    assert (others[0], tokens[0]) == (-1, 0)


def test_think_times_have_their_mean_and_a_stream_of_their_own() -> None:
    base = sessions(Poisson(1.0), LENGTHS, 5_000, turns=4, think_time=8.0)
    assert describe(base)["mean_think_time"] == pytest.approx(8, rel=0.03)
    hasty = sessions(Poisson(1.0), LENGTHS, 5_000, turns=4, think_time=0.0)
    assert (hasty.think_time == 0).all()
    assert (hasty.prompt_tokens == base.prompt_tokens).all()
    np.testing.assert_array_equal(hasty.arrival, base.arrival)


def test_single_turn_sessions_without_system_prompt_share_nothing() -> None:
    workload = sessions(AllAtOnce(), Both(Lognormal(100, 1), Fixed(5)), 40, turns=1)
    assert workload.begins is None
    assert (workload.follow == -1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: prefix_repetition(Poisson(1.0), LENGTHS, 0), "num_requests=0"),
        (lambda: prefix_repetition(Poisson(1.0), LENGTHS, 5, num_prefixes=0), "num_prefixes=0"),
        (lambda: prefix_repetition(Poisson(1.0), LENGTHS, 5, prefix_tokens=0), "prefix_tokens=0"),
        (lambda: prefix_repetition(Poisson(1.0), LENGTHS, 5, hash_block_size=0), "hash_block_size=0"),
        (lambda: sessions(Poisson(1.0), LENGTHS, 0), "num_sessions=0"),
        (lambda: sessions(Poisson(1.0), LENGTHS, 1, turns=0), "tokens=0|turns=0"),
        (lambda: sessions(Poisson(1.0), LENGTHS, 1, think_time=-1.0), "think_time=-1"),
        (lambda: sessions(Poisson(1.0), LENGTHS, 1, think_time=float("nan")), "think_time=nan"),
        (lambda: sessions(Poisson(1.0), LENGTHS, 1, system_tokens=-1), "system_tokens=-1"),
    ],
)
def test_impossible_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_two_sessions_of_two_turns_by_hand() -> None:
    """Forty tokens of system prompt, messages of 10, answers of 14: prompts of 50 and 74 tokens."""
    made = sessions(Constant(0.5), Both(Fixed(10), Fixed(14)), 2, turns=2, system_tokens=40, max_concurrency=7)
    assert made.arrival[:2].tolist() == [0.0, 2.0]
    assert np.isnan(made.arrival[2:]).all()
    assert made.prompt_tokens.tolist() == [50, 50, 74, 74]
    assert made.session.tolist() == [0, 1, 0, 1]
    assert made.begins is not None
    assert [part.tolist() for part in made.begins] == [[-1, 0, 0, 1], [0, 40, 64, 64]]
    assert (made.hash_block_size, made.max_concurrency, made.name) == (0, 7, "sessions")
    assert made.think_time[:2].tolist() == [0.0, 0.0]
    assert (made.think_time[2:] > 0).all()


def test_prefixes_by_hand() -> None:
    """Two prefixes of 32 tokens, suffixes of 20: three blocks each, the last of their own."""
    made = prefix_repetition(AllAtOnce(), Both(Fixed(20), Fixed(3)), 4, num_prefixes=2, prefix_tokens=32)
    assert made.prompt_tokens.tolist() == [52] * 4
    ids = blocks(made)
    assert sorted(row[:2] for row in ids) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [row[2] for row in ids] == [4 + 2, 4 + 3 + 2, 4 + 6 + 2, 4 + 9 + 2]
    assert (made.hash_block_size, made.max_concurrency, made.name) == (16, 0, "prefix_repetition")
    other = prefix_repetition(AllAtOnce(), Both(Fixed(20), Fixed(3)), 40, 1, num_prefixes=2, prefix_tokens=32)
    same = prefix_repetition(AllAtOnce(), Both(Fixed(20), Fixed(3)), 40, 2, num_prefixes=2, prefix_tokens=32)
    assert [row[0] for row in blocks(other)] != [row[0] for row in blocks(same)]


def test_what_is_not_said_of_prompts() -> None:
    """Ten prefixes of 256 tokens; four turns, ten seconds apart, without a system prompt."""
    made = prefix_repetition(AllAtOnce(), Both(Fixed(16), Fixed(3)), 30)
    assert len({row[0] for row in blocks(made)}) == 10
    assert set(made.prompt_tokens.tolist()) == {272}
    talk = sessions(AllAtOnce(), Both(Fixed(16), Fixed(16)), 2_000)
    assert describe(talk)["turns_per_session"] == 4.0
    assert describe(talk)["mean_think_time"] == pytest.approx(10.0, rel=0.05)
    assert talk.prompt_tokens[:2].tolist() == [16, 16]
