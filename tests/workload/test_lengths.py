from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.workload import Banded, Both, Empirical, Fixed, Lengths, Lognormal, RangeRatio, Split, Uniform, Zipf
from windtunnel.workload.lengths import OneLength
from windtunnel.workload.quantiles import Quantiles
from windtunnel.workload.synthetic import stream

N = 100_000


def draw(distribution: OneLength, n: int = N) -> np.ndarray[Any, np.dtype[np.int64]]:
    return distribution.draw(n, stream(3, "test"))


def test_uniform_covers_both_ends_evenly() -> None:
    counts = np.bincount(draw(Uniform(3, 7)))
    assert counts[:3].sum() == 0
    assert counts[3:] / N == pytest.approx([0.2] * 5, abs=0.005)


@pytest.mark.parametrize(
    ("tokens", "ratio", "low", "high"),
    [(1024, 0.0, 1024, 1024), (1000, 0.5, 500, 1500), (5, 0.9, 1, 10), (3, 0.1, 2, 4)],
)
def test_range_ratio_is_vllms(tokens: int, ratio: float, low: int, high: int) -> None:
    assert RangeRatio(tokens, ratio) == Uniform(low, high)


@pytest.mark.parametrize(("mean", "sigma"), [(512.0, 0.8), (161.31, 1.0), (40.0, 0.0)])
def test_lognormal_has_its_mean_and_median(mean: float, sigma: float) -> None:
    found = draw(Lognormal(mean, sigma))
    spread = mean * np.sqrt(np.expm1(sigma**2)) / np.sqrt(N)
    assert found.mean() == pytest.approx(mean + (0.5 if sigma else 0), abs=4 * spread + 0.1)  # rounding up adds a half
    assert np.median(found) == pytest.approx(mean * np.exp(-(sigma**2) / 2), rel=0.02, abs=1)


def test_lognormal_draws_again_outside_its_bounds_instead_of_piling_up_there() -> None:
    found = draw(Lognormal(500, 1.0, high=1000, low=100))
    assert found.min() >= 100
    assert found.max() <= 1000
    assert (found == 1000).mean() < 0.002


def test_zipf_probabilities_fall_as_a_power_of_the_rank() -> None:
    counts = np.bincount(draw(Zipf(1.5, 10, 500)))
    assert counts[:10].sum() == 0
    assert len(counts) <= 501
    assert counts[10] / counts[13] == pytest.approx(4**1.5, rel=0.05)
    assert np.bincount(draw(Zipf(0.0, 1, 4)))[1:] / N == pytest.approx([0.25] * 4, abs=0.006)


def test_split_divides_totals_at_the_ratio() -> None:
    prompt, output = Split(Fixed(100), 9.0).sample(3, stream(0, "x"))
    assert (prompt.tolist(), output.tolist()) == ([90] * 3, [10] * 3)
    prompt, output = Split(Uniform(2, 50), 0.001).sample(N, stream(0, "x"))
    assert prompt.min() >= 1
    with pytest.raises(InputError, match="total=1: must be ≥ 2"):
        Split(Fixed(1), 1.0).sample(3, stream(0, "x"))


def test_empirical_pairs_stay_together() -> None:
    pairs = Empirical(np.array([1, 2, 3]), np.array([10, 20, 30]))
    prompt, output = pairs.sample(N, stream(0, "x"))
    assert (output == 10 * prompt).all()
    assert np.bincount(prompt)[1:] / N == pytest.approx([1 / 3] * 3, abs=0.01)
    ordered = Empirical(np.array([1, 2, 3]), np.array([10, 20, 30]), in_order=True)
    assert ordered.sample(5, stream(0, "x"))[0].tolist() == [1, 2, 3, 1, 2]


def test_banded_outputs_depend_on_the_prompt() -> None:
    lengths = Banded(Quantiles((0, 1), (10, 1000)), (Quantiles((0, 1), (1, 5)), Quantiles((0, 1), (100, 500))))
    prompt, output = lengths.sample(N, stream(0, "x"))
    assert (output[prompt < 99] <= 5).all()
    assert (output[prompt > 101] >= 100).all()
    assert np.median(prompt) == pytest.approx(100, rel=0.03)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(0), "tokens=0: must be from 1"),
        (lambda: Uniform(0, 4), "low=0"),
        (lambda: Uniform(5, 4), "low=5, high=4: low ≤ high must hold"),
        (lambda: RangeRatio(10, 1.0), "random_range_ratio=1: must be ≥ 0 and < 1"),
        (lambda: RangeRatio(10, -0.1), "random_range_ratio=-0.1"),
        (lambda: RangeRatio(0, 0.1), "tokens=0"),
        (lambda: Lognormal(0.0, 1.0), "mean=0"),
        (lambda: Lognormal(float("nan"), 1.0), "mean=nan"),
        (lambda: Lognormal(10.0, -1.0), "sigma=-1"),
        (lambda: Lognormal(1000.0, 0.1, high=10), "only .* of a lognormal .* lies inside"),
        (lambda: Lognormal(1000.0, 0.0, high=10), "lies inside"),
        (lambda: Zipf(-1.0, 1, 2), "theta=-1"),
        (lambda: Zipf(20.1, 1, 2), "theta=20.1: must be from 0 to 20"),
        (lambda: Zipf(1.0, 1, 10_000_002), "10 million"),
        (lambda: Zipf(1.0, 1, 2**30), "10 million"),
        (lambda: Split(Fixed(3), 0.0), "prompt_to_output=0"),
        (lambda: Empirical(np.array([1]), np.array([1, 2])), "1 prompt and 2 output"),
        (lambda: Empirical(np.array([], np.int64), np.array([], np.int64)), "at least 1"),
    ],
)
def test_impossible_lengths_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 300), st.floats(0, 2), st.integers(0, 5))
def test_every_distribution_gives_counts_of_at_least_one(n: int, low: int, more: int, shape: float, seed: int) -> None:
    sides: list[OneLength] = [Fixed(low), Uniform(low, low + more), Zipf(shape, low, low + more), Lognormal(low, shape)]
    pairs: list[Lengths] = [Both(side, side) for side in sides]
    pairs.append(Split(Uniform(low + 1, low + 1 + more), shape + 0.1))
    for pair in pairs:
        prompt, output = pair.sample(n, stream(seed, "x"))
        assert prompt.shape == output.shape == (n,)
        assert prompt.dtype == output.dtype == np.int64
        assert min(prompt.min(), output.min()) >= 1
        again = pair.sample(n, stream(seed, "x"))
        assert (again[0] == prompt).all()
        assert (again[1] == output).all()


def test_ranges_reach_to_their_very_ends() -> None:
    assert Zipf(20.0, 1, 2).draw(5, stream(0, "x")).tolist() == [1] * 5
    assert Zipf(0.0, 7, 7).draw(3, stream(0, "x")).tolist() == [7] * 3
    drawn = Zipf(0.0, 5, 7).draw(N, stream(0, "x"))
    assert np.bincount(drawn)[5:] / N == pytest.approx([1 / 3] * 3, abs=0.01)
    drawn = Zipf(1.0, 5, 7).draw(N, stream(0, "x"))  # in proportion to 1, 1/2 and 1/3
    assert np.bincount(drawn)[5:] / N == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.01)
    assert set(Uniform(3, 4).draw(100, stream(0, "x")).tolist()) == {3, 4}


def test_seeds_are_heeded() -> None:
    for side in (Uniform(1, 1000), Zipf(0.5, 1, 1000), Lognormal(100.0, 1.0)):
        first, other = (side.draw(50, stream(seed, "x")).tolist() for seed in (0, 1))
        assert first != other


MEDIAN_1000 = 1000 * np.exp(0.5)
"""Mean of a lognormal of sigma 1 whose median is 1,000: below 98 and above 10,200 lies one in a hundred."""


def test_one_draw_in_a_hundred_must_lie_inside_the_bounds() -> None:
    assert Lognormal(MEDIAN_1000, 1.0, high=98).high == 98
    assert Lognormal(MEDIAN_1000, 1.0, low=10_200).low == 10_200
    for bounds in ({"high": 97}, {"low": 10_300}, {"low": 9_000, "high": 10_000}):
        with pytest.raises(InputError, match="widen the bounds"):
            Lognormal(MEDIAN_1000, 1.0, **bounds)
    with pytest.raises(InputError) as error:
        Lognormal(MEDIAN_1000, 1.0, high=50)
    assert str(error.value) == (
        "low=1, high=50: only 0.0014 of a lognormal of mean 1648.72 and sigma 1 lies inside; widen the bounds"
    )
    wide = Lognormal(np.exp(2.0) * 1000, 2.0, high=10)
    assert wide.sigma == 2.0
    with pytest.raises(InputError, match=r"only 0\.00"):
        Lognormal(np.exp(2.0) * 1000, 2.0, high=9)


def test_lengths_at_their_limits() -> None:
    assert Fixed(2**40).tokens == 2**40
    with pytest.raises(InputError, match=r"tokens=1\.09951e\+12: must be from 1 to 2\^40 tokens"):
        Fixed(2**40 + 1)
    assert Uniform(4, 4).draw(2, stream(0, "x")).tolist() == [4, 4]
    assert Lognormal(40.0, 0.0, low=40, high=40).draw(2, stream(0, "x")).tolist() == [40, 40]
    assert Lognormal(10.0, 10.0).sigma == 10.0
    with pytest.raises(InputError, match=r"sigma=10\.1: must be from 0 to 10"):
        Lognormal(10.0, 10.1)
    assert Zipf(1.0, 5, 10_000_005).high == 10_000_005
    with pytest.raises(InputError, match="high=10000006: must be at most 10 million above low=5"):
        Zipf(1.0, 5, 10_000_006)
    with pytest.raises(InputError, match="prompt_to_output=inf"):
        Split(Fixed(3), float("inf"))


def test_bands_hold_equal_shares_and_whole_tokens() -> None:
    """Three bands of outputs: 1, 10 and 100 tokens for the shortest, middle and longest third of the prompts."""
    bands = tuple(Quantiles((0, 1), (value, value)) for value in (1.0, 10.0, 100.0))
    prompt, output = Banded(Quantiles((0, 1), (1, 1000)), bands).sample(N, stream(0, "x"))
    thirds = [prompt[output == value] for value in (1, 10, 100)]
    assert [len(third) / N for third in thirds] == pytest.approx([1 / 3] * 3, abs=0.01)
    assert [third.max() for third in thirds] == pytest.approx([10, 100, 1000], abs=1)
    assert Banded(Quantiles((0, 1), (0.1, 0.1)), bands[:1]).sample(1, stream(0, "x"))[0].tolist() == [1]
    assert Banded(Quantiles((0, 1), (2.6, 2.6)), bands[:1]).sample(1, stream(0, "x"))[0].tolist() == [3]
