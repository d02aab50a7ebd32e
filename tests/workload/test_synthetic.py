from __future__ import annotations

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.workload import (
    AllAtOnce,
    Both,
    Fixed,
    Lognormal,
    Poisson,
    Uniform,
    builtin,
    generate,
    prefix_repetition,
    sessions,
)
from windtunnel.workload.synthetic import check_count, stream

LENGTHS = Both(Uniform(1, 100), Lognormal(50, 0.5))


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    first, again, other = (generate(Poisson(2.0), LENGTHS, 300, seed) for seed in (7, 7, 8))
    assert first.equals(again)
    assert not (first.arrival == other.arrival).any()
    assert (first.prompt_tokens != other.prompt_tokens).any()


def test_arrivals_and_lengths_draw_from_streams_of_their_own() -> None:
    base = generate(Poisson(2.0), LENGTHS, 300, 7)
    other_lengths = generate(Poisson(2.0), Both(Lognormal(9, 1), Fixed(3)), 300, 7)
    other_arrivals = generate(AllAtOnce(), LENGTHS, 300, 7)
    assert (other_lengths.arrival == base.arrival).all()
    assert (other_arrivals.prompt_tokens == base.prompt_tokens).all()
    assert (other_arrivals.output_tokens == base.output_tokens).all()


def test_streams_are_known_by_seed_and_purpose() -> None:
    draws = {(seed, purpose): stream(seed, purpose).random() for seed in (0, 1) for purpose in ("a", "b")}
    assert len(set(draws.values())) == 4
    assert stream(1, "a").random() == draws[1, "a"]


def test_neighbouring_seeds_are_uncorrelated() -> None:
    columns = np.array([generate(Poisson(1.0), LENGTHS, 20_000, seed).prompt_tokens for seed in (0, 1)])
    assert abs(np.corrcoef(columns)[0, 1]) < 0.03


def test_a_closed_loop_is_a_setting_of_the_workload() -> None:
    workload = generate(AllAtOnce(), LENGTHS, 10, max_concurrency=4, name="loop")
    assert (workload.max_concurrency, workload.name) == (4, "loop")


@pytest.mark.parametrize(
    ("count", "seed", "message"), [(0, 0, "num_requests=0"), (-5, 0, "num_requests=-5"), (1, -1, "seed=-1")]
)
def test_impossible_settings_are_refused(count: int, seed: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(Poisson(1.0), LENGTHS, count, seed)


def test_without_a_seed_it_is_zero_and_the_loop_open() -> None:
    for made, same in (
        (generate(Poisson(2.0), LENGTHS, 50), generate(Poisson(2.0), LENGTHS, 50, 0)),
        (prefix_repetition(Poisson(2.0), LENGTHS, 50), prefix_repetition(Poisson(2.0), LENGTHS, 50, 0)),
        (sessions(Poisson(2.0), LENGTHS, 50), sessions(Poisson(2.0), LENGTHS, 50, 0)),
        (builtin("azure-conv", num_requests=50), builtin("azure-conv", num_requests=50, seed=0)),
    ):
        assert made.equals(same)
        assert made.max_concurrency == 0
    assert generate(Poisson(2.0), LENGTHS, 5).name == "synthetic"


def test_more_requests_than_fit_into_memory_are_refused() -> None:
    check_count("num_prompts", 50_000_000)
    check_count("num_prompts", 1)
    with pytest.raises(InputError, match="num_prompts=50000001: must be ≤ 50,000,000: more do not fit into memory"):
        check_count("num_prompts", 50_000_001)
