"""vLLM's v1 scheduler with inputs of an encoder on the core: equal to the oracle, and to what is worked out by hand."""

import os
from dataclasses import replace
from typing import Any

import equality
import numpy as np
import pytest
from equality import RELAXED, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.encoder import Encoder

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "60"))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any deployment of one stage, with few inputs or many, alike or not."""
    case = draw(equality.cases())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share, contents = draw(st.sampled_from([0.3, 0.7])), draw(st.sampled_from([1, 6, 1000]))
    rows = [_inputs(int(prompt), rng, share, contents) for prompt in case.prompt]
    first = np.cumsum([0, *(len(row) for row in rows)])
    columns = np.array([one for row in rows for one in row], dtype=np.int64).reshape(-1, 3).T
    largest = int(columns[1].max(initial=1))
    encoder = Encoder(
        largest + draw(st.sampled_from([0, 0, 5, 100])),
        largest + draw(st.sampled_from([0, 1, 10, 100])),
        draw(st.booleans()),
    )
    return replace(case, policy=replace(case.policy, encoder=encoder), images=(first, *columns))


def _inputs(prompt: int, rng: np.random.Generator, share: float, contents: int) -> list[tuple[int, int, int]]:
    """(Place, embeddings, content) of the inputs of a prompt; content and size go together."""
    found, place = [], int(rng.choice([0, 0, 1, 7]))
    while place < prompt and rng.random() < share:
        size = int(rng.integers(1, min(prompt - place, 30) + 1))
        found.append((place, size, size * 1000 + int(rng.integers(0, contents))))
        place += size + int(rng.choice([0, 0, 1, 5]))
    return found


@IN_PLAIN_PYTHON
def test_core_and_oracle_are_equal() -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(cases())
    def compare(case: Any) -> None:
        equality.check_equal(case)

    compare()


def served(encoder: Encoder, *rows: tuple[int, list[tuple[int, int, int]]], **settings: Any) -> Record:
    """Prompts of these lengths with these inputs (place, embeddings, content) that come at once and get two tokens
    each; every step takes a second and computes 100 tokens at most."""
    n = len(rows)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=1000, num_blocks=500, block_size=4)
    times = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=100, max_num_seqs=8, max_model_len=1000)
    none, nobody = np.zeros(n), np.zeros(n, dtype=np.bool_)
    first = np.cumsum([0, *(len(images) for _, images in rows)])
    columns = np.array([one for _, images in rows for one in images], dtype=np.int64).reshape(-1, 3).T
    prompts = np.array([prompt for prompt, _ in rows])
    demand = Demand(none, prompts, np.full(n, 2), nobody, nobody, np.full(n, -1), none, 0, images=(first, *columns))
    policy = VllmV1(async_scheduling=False, encoder=encoder, **settings)
    return run(Fleet((limits,), (policy,), (times,), (1,), (1,), (False,)), demand, 0, none)


@IN_PLAIN_PYTHON
def test_a_prompt_stops_before_an_input_that_the_step_cannot_encode() -> None:
    # 30 embeddings a step: the first input at once, the second (at 40) in the next step, then the rest
    record = served(Encoder(30, 100), (90, [(0, 30, 1), (40, 30, 2)]))
    assert record.requests["first_token"].tolist() == [2.0]
    assert record.rows["chunk_tokens"].tolist() == [40, 50, 0]


@IN_PLAIN_PYTHON
def test_who_gets_no_input_lets_others_pass() -> None:
    record = served(Encoder(30, 100), (40, [(0, 30, 1)]), (40, [(0, 30, 2)]), (10, []))
    assert record.requests["first_token"].tolist() == [1.0, 2.0, 1.0]


@IN_PLAIN_PYTHON
def test_equal_inputs_are_encoded_once() -> None:
    record = served(Encoder(30, 100), (40, [(0, 30, 1)]), (40, [(0, 30, 1)]))
    assert record.requests["first_token"].tolist() == [1.0, 1.0]


@IN_PLAIN_PYTHON
def test_a_full_cache_holds_up_those_who_need_another_entry() -> None:
    # the first prompt needs two steps, and holds 30 of 50 embeddings until its input is behind it
    record = served(Encoder(60, 50), (120, [(80, 30, 1)]), (40, [(10, 30, 2)]))
    assert record.requests["first_token"].tolist() == [2.0, 3.0]


@IN_PLAIN_PYTHON
def test_a_chunk_ends_before_an_input_that_it_would_split() -> None:
    for whole, chunks in ((False, [100, 20, 0]), (True, [80, 40, 0])):
        record = served(Encoder(60, 60, whole), (120, [(80, 30, 1)]))
        assert record.rows["chunk_tokens"].tolist() == chunks


@pytest.mark.parametrize(("sizes", "name"), [((-1, 1), "compute_budget"), ((1, -1), "cache_size")])
def test_sizes_are_not_negative(sizes: tuple[int, int], name: str) -> None:
    with pytest.raises(InputError, match=f"encoder {name}=-1: must be ≥ 0"):
        Encoder(*sizes)


@WITH_THE_COMPILER
def test_small_cases_in_plain_python() -> None:
    in_plain_python(6, __file__)
