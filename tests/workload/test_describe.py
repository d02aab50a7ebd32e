from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.workload import AllAtOnce, Both, Fixed, Gamma, Modulated, Poisson, Workload, describe, generate
from windtunnel.workload.describe import histogram, lengths, rank_correlation, rate_cv, text_histogram
from windtunnel.workload.synthetic import stream
from workload.random_workloads import workloads

LENGTHS = Both(Fixed(100), Fixed(25))


def test_numbers_of_a_small_workload() -> None:
    workload = Workload.from_columns(
        arrival=[0, 1, 4, 9],
        prompt_tokens=[10, 20, 30, 40],
        output_tokens=[1, 2, 3, 4],
        max_tokens=[1, 2, 3, 9],
        session=[0, -1, 0, -1],
        think_time=[0, 0, 7, 0],
        hash_ids=[[0, 1], [0], [0, 1, 2], []],
        hash_block_size=5,
    )
    found = describe(workload)
    assert found["requests"] == 4
    assert found["duration"] == 9
    assert found["request_rate"] == pytest.approx(2 / 9)
    assert found["prompt_tokens"]["mean"] == 25
    assert found["prompt_tokens"]["p50"] == 25
    assert (found["prompt_tokens"]["min"], found["output_tokens"]["max"]) == (10, 4)
    assert found["prompt_to_output"] == 10
    assert found["correlation"] == pytest.approx(1)
    assert found["declared_limits"] == 1
    assert (found["sessions"], found["turns_per_session"], found["mean_think_time"]) == (1, 2, 7)
    assert (found["blocks"], found["shared_blocks"]) == (6, 0.5)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_found_again(burstiness: float) -> None:
    found = describe(generate(Gamma(5.0, burstiness), LENGTHS, 50_000))
    assert found["burstiness"] == pytest.approx(burstiness, rel=0.05)
    assert found["gap_cv"] == pytest.approx(burstiness**-0.5, rel=0.03)
    assert found["request_rate"] == pytest.approx(5, rel=0.03)


def test_drift_is_told_from_noise() -> None:
    steady = Poisson(20.0).times(72_000, stream(0, "a"))
    drifting = Modulated(Poisson(20.0), (0.5, 1.5), 600.0).times(72_000, stream(0, "a"))
    assert rate_cv(steady) < 0.02
    assert rate_cv(drifting) == pytest.approx(0.5, abs=0.02)
    assert np.isnan(rate_cv(steady[:100]))


@given(workloads())
def test_the_description_is_plain_json(workload: Workload) -> None:
    json.dumps(describe(workload), allow_nan=False)


def test_what_does_not_exist_is_none() -> None:
    found = describe(generate(AllAtOnce(), LENGTHS, 3))
    for key in ("request_rate", "gap_cv", "burstiness", "rate_cv", "correlation", "turns_per_session", "shared_blocks"):
        assert found[key] is None


def test_rank_correlation_is_spearmans_with_ties() -> None:
    a, b = np.array([1, 2, 2, 3]), np.array([10, 20, 30, 5])
    ranks = np.corrcoef([1, 2.5, 2.5, 4], [2, 3, 4, 1])[0, 1]
    assert rank_correlation(a, b) == pytest.approx(ranks)
    assert rank_correlation(a, 7 - a) == pytest.approx(-1)


@given(st.lists(st.floats(0.001, 1e9), min_size=1, max_size=50), st.integers(1, 30), st.booleans())
def test_histograms_count_every_value_once(values: list[float], bins: int, log: bool) -> None:
    edges, counts = histogram(values, bins, log)
    assert (len(edges), len(counts), counts.sum()) == (bins + 1, bins, len(values))
    assert (np.diff(edges) >= 0).all()
    lines = text_histogram(edges, counts, width=20)
    assert len(lines) == bins
    assert max(line.count("█") for line in lines) == 20


def test_a_text_histogram_reads_well() -> None:
    assert text_histogram([0, 500, 1000, 1500], [1, 8, 0], width=4) == ["    0 ▌    1", "  500 ████ 8", "1,000      0"]


def test_gaps_and_priorities_by_hand() -> None:
    """Releases at 2, 3 and 11 s: gaps of 1 and 8 s, with a mean of 4.5 and a deviation of 3.5."""
    found = describe(
        Workload.from_columns(arrival=[2, 3, 11], prompt_tokens=[1, 2, 3], output_tokens=[3, 2, 1], priority=[0, 5, 5])
    )
    assert found["gap_cv"] == pytest.approx(3.5 / 4.5)
    assert found["burstiness"] == pytest.approx((4.5 / 3.5) ** 2)
    assert (found["priorities"], found["correlation"], found["declared_limits"]) == (2, pytest.approx(-1), 0)
    assert (found["sessions"], found["blocks"], found["mean_think_time"]) == (0, 0, None)


def test_the_rate_by_windows_by_hand() -> None:
    """Ten, twenty and thirty requests a minute, from 100 s on: a variance of 66.7, of which chance would make 20."""
    arrival = 100 + np.concatenate([60 * k + np.linspace(0, 59, n) for k, n in enumerate((10, 20, 29))] + [[180.0]])
    assert rate_cv(arrival) == pytest.approx(np.sqrt(200 / 3 - 20) / 20)
    assert np.isnan(rate_cv(arrival[:-1]))  # less than three whole minutes
    assert rate_cv(np.append(arrival, [315.0, np.nan])) == rate_cv(arrival)  # what is left of a minute does not count
    assert rate_cv(np.arange(0.0, 301.0, 60.0), window=60.0) == 0.0  # more even than chance


def test_all_percentiles_of_a_hundred_and_one_lengths() -> None:
    assert lengths(np.arange(101)) == {
        "mean": 50.0, "min": 0, "p10": 10.0, "p25": 25.0, "p50": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0,
        "p99": 99.0, "max": 100,
    }  # fmt: skip


def test_histograms_by_hand() -> None:
    edges, counts = histogram([1.0, 1.0, 2.0, 9.0, np.nan, np.inf], 4)
    assert (edges.tolist(), counts.tolist()) == ([1, 3, 5, 7, 9], [3, 0, 0, 1])
    edges, counts = histogram([1.0, 10.0, 100.0], 2, log=True)
    assert (edges.tolist(), counts.tolist()) == ([1, pytest.approx(10), 100], [1, 2])
    edges, counts = histogram([5.0, 5.0], 2)
    assert (edges.tolist(), counts.tolist()) == ([5, 5.5, 6], [2, 0])
    assert len(histogram([1.0, 2.0])[1]) == 20


def test_labels_and_bars_by_hand() -> None:
    """Of 40 letters: half, an eighth of a letter more, and nothing."""
    assert text_histogram([0.1234, 2, 99.5, 100.4, 2000], [320, 161, 0, 1]) == [
        "0.123 " + "█" * 40 + " 320",
        "    2 " + "█" * 20 + "▏" + " " * 19 + " 161",
        " 99.5 " + " " * 40 + " 0",
        "  100 ▏" + " " * 39 + " 1",
    ]
    assert text_histogram([0, 1], [0], width=3) == ["0     0"]
