"""What drifted is found within one window, and nothing is where nothing did."""

from dataclasses import replace

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.workload import Both, Gamma, Lognormal, Workload, builtin, generate, prefix_repetition
from windtunnel.workload.drift import as_seen, drift, fit, sharing

WINDOW = 300.0


def load(
    seed: int, rate: float = 4.0, prompt: float = 800.0, burstiness: float = 1.0, seconds: float = WINDOW
) -> Workload:
    lengths = Both(Lognormal(prompt, 0.9), Lognormal(200, 0.7))
    return generate(Gamma(rate, burstiness), lengths, round(rate * seconds), seed)


PLANNED = fit(load(1000, seconds=1200.0), WINDOW)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_where_nothing_drifted(seed: int) -> None:
    assert drift(PLANNED, fit(load(seed))) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_drift_of_rate_and_prompts(seed: int) -> None:
    found = drift(PLANNED, fit(load(seed, rate=5.2, prompt=1200.0)))
    assert [change.what for change in found] == ["rate", "prompt_tokens"]
    assert found[0].seen / found[0].planned == pytest.approx(1.3, rel=0.15)
    assert found[1].seen / found[1].planned == pytest.approx(1.5, rel=0.15)


def test_bursts() -> None:
    assert [change.what for change in drift(PLANNED, fit(load(3, burstiness=0.2)))] == ["gap_cv"]


def test_a_trace_whose_rate_varies_has_not_drifted_from_itself() -> None:
    planned = builtin("azure-conv")
    before = fit(planned, WINDOW)
    for begin in range(0, int(planned.duration - WINDOW), 300):
        rows = np.flatnonzero((planned.arrival >= begin) & (planned.arrival < begin + WINDOW))
        assert "rate" not in [change.what for change in drift(before, fit(planned.take(rows)))]


def test_sharing_is_compared_over_as_many_requests() -> None:
    lengths = Both(Lognormal(300, 0.5), Lognormal(100, 0.5))

    def shared(prefixes: int, count: int, seed: int) -> Workload:
        return prefix_repetition(Gamma(4.0), lengths, count, seed, num_prefixes=prefixes)

    planned = shared(10, 4000, 0)
    for prefixes, expected in ((10, []), (1000, ["sharing"])):
        seen = fit(shared(prefixes, 400, 1))
        before = replace(fit(planned, WINDOW), sharing=sharing(planned, 401))
        assert [change.what for change in drift(before, seen) if change.what == "sharing"] == expected


def test_a_change_is_told_in_one_line() -> None:
    (change,) = drift(PLANNED, replace(PLANNED, requests=2 * PLANNED.requests))
    assert str(change).startswith("rate: ") and str(change).endswith("(+100%)")


def test_the_planned_requests_as_they_were_seen() -> None:
    planned = load(1000)
    before = fit(planned)
    now = fit(load(7, rate=8.0, prompt=1600.0))
    found = fit(as_seen(planned, before, now))
    assert found.rate == pytest.approx(now.rate, rel=0.01)
    assert found.prompt_mean == pytest.approx(now.prompt_mean, rel=0.01)
    assert drift(found, now) == []


def test_too_few_requests() -> None:
    with pytest.raises(InputError, match="at least 20"):
        fit(load(1).take(np.arange(5)))
