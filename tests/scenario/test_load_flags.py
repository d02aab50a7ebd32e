"""Loads: the flags' words become the workload they say, and contradictions are refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.scenario.load_flags import Load
from windtunnel.workload import Both, Gamma, Uniform, Workload, at_rate, builtin, prefix_repetition, save


@pytest.fixture
def trace(tmp_path: Path) -> str:
    workload = Workload.from_columns(
        arrival=[0.0, 1.0, 3.0, 4.0], prompt_tokens=[10, 20, 30, 40], output_tokens=[1, 2, 3, 4]
    )
    save(workload, tmp_path / "trace.jsonl")
    return str(tmp_path / "trace.jsonl")


def test_by_default_an_hour_of_conversations() -> None:
    assert Load().workload().equals(builtin("azure-conv"))


def test_a_seed_makes_the_workload() -> None:
    assert Load(seed=3).workload().equals(Load().workload(3))
    assert not Load(seed=3).workload().equals(Load().workload())


def test_long_requests_are_cut(trace: str) -> None:
    found = Load(trace=trace, max_request_tokens=30).workload()
    assert (found.prompt_tokens + found.output_tokens).tolist() == [11, 22, 29, 29]
    assert found.notes == ("2 of 4 requests are cut to 30 tokens",)


def test_outputs_are_predicted(trace: str, tmp_path: Path) -> None:
    """Priority is prompt plus prediction; the declared limit is never below the real output."""
    found = Load(trace=trace, predict_outputs="classes:2").workload()
    assert found.max_tokens.tolist() == [1, 2, 4, 4]
    assert found.priority.tolist() == [11, 22, 34, 44]
    own = tmp_path / "mine.py"
    own.write_text(
        "def two(prompt, output, rng):\n    return 0 * output + 2\ndef bad(prompt, output, rng):\n    return 0\n"
    )
    found = Load(trace=trace, predict_outputs=f"{own}:two").workload()
    assert (found.max_tokens.tolist(), found.priority.tolist()) == ([2, 2, 3, 4], [12, 22, 32, 42])
    again = Load(trace=trace, predict_outputs="noisy:0.5", seed=3).workload()
    assert again.equals(Load(trace=trace, predict_outputs="noisy:0.5", seed=3).workload())
    for text, words in (
        ("orakel", "did you mean 'oracle'"),
        ("noisy:x", "'x' is no number"),
        ("noisy:-1", "must be ≥ 0"),
        (f"{own}:bad", "must return 4 numbers ≥ 1"),
    ):
        with pytest.raises(InputError, match=words):
            Load(trace=trace, predict_outputs=text).workload()


def test_a_file_is_replayed(trace: str) -> None:
    workload = Load(trace=trace).workload()
    assert workload.arrival.tolist() == [0.0, 1.0, 3.0, 4.0]
    assert workload.prompt_tokens.tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("words", "arrival"),
    [
        ({"time_scale": 0.5}, [0.0, 0.5, 1.5, 2.0]),
        ({"num_prompts": 2}, [0.0, 1.0]),
        ({"request_rate": math.inf}, [0.0, 0.0, 0.0, 0.0]),
        ({"num_prompts": 1, "repeat": 1}, [0.0]),
    ],
)
def test_what_is_done_to_a_trace(trace: str, words: dict[str, Any], arrival: list[float]) -> None:
    assert Load(trace=trace, **words).workload().arrival.tolist() == arrival


def test_repeat_plays_it_again(trace: str) -> None:
    workload = Load(trace=trace, repeat=3).workload()
    assert workload.prompt_tokens.tolist() == [10, 20, 30, 40] * 3
    assert (np.diff(workload.arrival) > 0).all()


def test_a_rate_draws_new_arrivals_and_keeps_the_lengths(trace: str) -> None:
    drawn = Load(trace=trace, request_rate=2.0).workload()
    assert drawn.prompt_tokens.tolist() == [10, 20, 30, 40]
    assert drawn.arrival.tolist() != Load(trace=trace).workload().arrival.tolist()
    assert drawn.equals(Load(trace=trace, request_rate=2.0).workload())


def test_max_concurrency_closes_the_loop(trace: str) -> None:
    assert Load(trace=trace, max_concurrency=3).workload().max_concurrency == 3
    assert Load(random_input_len=5, max_concurrency=3).workload().max_concurrency == 3


@given(
    prompt=st.integers(1, 5000),
    output=st.integers(1, 500),
    ratio=st.floats(0, 0.9),
    count=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_random_lengths_keep_their_range(prompt: int, output: int, ratio: float, count: int, seed: int) -> None:
    load = Load(random_input_len=prompt, random_output_len=output, random_range_ratio=ratio, num_prompts=count)
    workload = replace(load, seed=seed).workload()
    assert len(workload) == count
    assert (workload.arrival == 0).all()
    for column, length in ((workload.prompt_tokens, prompt), (workload.output_tokens, output)):
        assert column.min() >= max(math.floor(length * (1 - ratio)), 1)
        assert column.max() <= math.ceil(length * (1 + ratio))


def test_random_requests_default_to_those_of_vllm_bench() -> None:
    workload = Load(random_input_len=7).workload()
    assert (len(workload), int(workload.output_tokens[0])) == (1000, 128)
    assert int(Load(random_output_len=7).workload().prompt_tokens[0]) == 1024


@given(rate=st.floats(0.1, 100), seed=st.integers(0, 20))
def test_the_rate_is_kept(rate: float, seed: int) -> None:
    workload = Load(random_input_len=1, request_rate=rate, num_prompts=2000, seed=seed).workload()
    assert workload.request_rate == pytest.approx(rate, rel=0.15)


def test_a_ramp_grows() -> None:
    ramp = Load(random_input_len=1, ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=9).workload()
    gaps = np.diff(ramp.arrival)
    assert gaps[:300].mean() > 2 * gaps[-300:].mean()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_prompts": 0}, "num_prompts=0: must be ≥ 1"),
        ({"max_concurrency": 0}, "max_concurrency=0: must be ≥ 1"),
        ({"random_output_len": 0}, "random_output_len=0: must be ≥ 1"),
        ({"repeat": 0}, "repeat=0: must be ≥ 1"),
        ({"seed": -1}, "seed=-1: must be ≥ 0"),
        ({"trace": "azure-conv", "random_input_len": 5}, "has its own lengths"),
        ({"random_input_len": 5, "time_scale": 2.0}, "are for traces"),
        ({"random_range_ratio": 0.5}, "needs random_input_len"),
        ({"request_rate": 1.0, "time_scale": 2.0}, "leave out one"),
        ({"burstiness": 2.0}, "add request_rate"),
        ({"ramp_up_strategy": "linear"}, "together"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 2, "request_rate": 1},
            "the ramp sets",
        ),
    ],
)
def test_contradictions_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Load(**words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"trace": "azure-conf"}, "did you mean 'azure-conv'"),
        ({"trace": "none.csv"}, "no such file"),
        ({"request_rate": 0.0}, "request_rate=0"),
        ({"request_rate": -math.inf}, "request_rate=-inf"),
        ({"request_rate": math.nan}, "request_rate=nan"),
        ({"time_scale": 0.0}, "must be finite and > 0"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "burstiness=0"),
    ],
)
def test_what_cannot_be_read_or_drawn_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Load(**words).workload()


def test_more_prompts_than_a_file_has(trace: str) -> None:
    with pytest.raises(InputError, match="has 4 requests"):
        Load(trace=trace, num_prompts=5).workload()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, float("inf")])
def test_the_asked_rate_is_exact_and_recorded(burstiness: float) -> None:
    """As `vllm bench serve` stretches its gaps (vllm/benchmarks/serve.py, get_request): the last of n requests arrives
    at n / rate."""
    load = Load(random_input_len=9, num_prompts=200, request_rate=5.0, burstiness=burstiness)
    said = "inf" if math.isinf(burstiness) else burstiness  # JSON has no infinity
    for seed in (0, 1):
        workload = load.workload(seed)
        assert workload.arrival[-1] == pytest.approx(40.0)
        assert (workload.spec()["request_rate"], workload.spec()["burstiness"]) == (5.0, said)
    assert at_rate(workload, 10.0).spec()["request_rate"] == pytest.approx(10.0, rel=0.01)
    assert Load(random_input_len=9).workload().spec()["request_rate"] is None


def test_a_trace_with_its_own_times_has_its_own_rate() -> None:
    spec = Load(trace="azure-conv", num_prompts=100).workload().spec()
    assert spec["burstiness"] is None
    assert spec["request_rate"] > 0


def test_shared_beginnings_sessions_and_other_lengths_by_flags() -> None:
    base: dict[str, Any] = {"random_input_len": 100, "random_output_len": 20, "num_prompts": 60, "request_rate": 5.0}
    prefixed = Load(**base, random_prefix_len=64, random_num_prefixes=3).workload()
    own = prefix_repetition(
        Gamma(5.0, exact_duration=True), Both(Uniform(100, 100), Uniform(20, 20)), 60, num_prefixes=3, prefix_tokens=64
    )
    assert prefixed.equals(own)
    talks = Load(**base, random_turns=4, think_time=2.0, random_prefix_len=32).workload()
    assert (len(talks), len(set(talks.session.tolist()))) == (60, 15)
    assert talks.prompt_tokens.max() == 32 + 4 * 100 + 3 * 20
    skewed = Load(**base, random_lengths="lognormal:0.8").workload()
    assert skewed.prompt_tokens.std() / skewed.prompt_tokens.mean() > 0.4
    short = Load(**base, random_lengths="zipf:1.2").workload()
    assert 1 <= short.prompt_tokens.min() <= short.prompt_tokens.max() <= 100
    assert np.median(short.prompt_tokens) < 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"random_turns": 3}, "random_turns=3: needs random_input_len"),
        ({"random_input_len": 9, "random_lengths": "zipf"}, "must be uniform, lognormal:SIGMA or zipf:THETA"),
        (
            {"random_input_len": 9, "random_lengths": "normal:1"},
            "distribution 'normal': did you mean 'lognormal'",
        ),
        ({"random_input_len": 9, "random_lengths": "uniform:1"}, "must be uniform, lognormal:SIGMA or zipf:THETA"),
        ({"random_input_len": 9, "random_lengths": "zipf:1", "random_range_ratio": 0.5}, "is of uniform lengths"),
        ({"random_input_len": 9, "random_num_prefixes": 3}, "needs random_prefix_len"),
        ({"random_input_len": 9, "think_time": 3.0}, "add random_turns"),
        ({"random_input_len": 9, "random_turns": 0}, "random_turns=0: must be ≥ 1"),
    ],
)
def test_words_of_random_requests_that_go_wrong(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Load(**words)
