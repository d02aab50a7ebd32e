"""What drifted is found within one window, and nothing is where nothing did."""

from dataclasses import replace

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.workload import Both, Gamma, Lognormal, Workload, builtin, generate, prefix_repetition
from windtunnel.workload.drift import Change, Fit, as_seen, drift, fit, sharing

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
    assert str(change).startswith("rate: ") and str(change).endswith("(+100 %)")


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


ONE = Fit(100, 100.0, 100.0, 100.0, 100.0, 100.0, gap_cv=1.0)
"""A hundred requests, one a second, of lengths with a standard deviation of 100; four times as many are seen."""
SEEN = replace(ONE, requests=400, seconds=400.0)


def told(planned: Fit, seen: Fit) -> list[str]:
    return [change.what for change in drift(planned, seen)]


@pytest.mark.parametrize(
    ("what", "before", "less", "more"),
    [
        # rate: 4 · √(0.1² + (1.5/20)²) = 0.5
        ("rate", {}, {"seconds": 400 / 1.49}, {"seconds": 400 / 1.51}),
        # half as irregular: half of 4 · √(0.1² + (1.24/20)²) = 0.24
        ("rate", {"gap_cv": 0.5}, {"seconds": 400 / 1.23, "gap_cv": 0.5}, {"seconds": 400 / 1.25, "gap_cv": 0.5}),
        # no gaps known: as Poisson
        ("rate", {"gap_cv": None}, {"seconds": 400 / 1.49, "gap_cv": None}, {"seconds": 400 / 1.51, "gap_cv": None}),
        # a rate that varies by 0.3 anyway: 4 · √(0.3² + 0.1² + (2.35/20)²) = 1.35
        ("rate", {"rate_cv": 0.3}, {"seconds": 400 / 2.3}, {"seconds": 400 / 2.4}),
        # lengths: 4 · √(10² + 5²) = 44.7
        ("prompt_tokens", {}, {"prompt_mean": 144.0}, {"prompt_mean": 145.0}),
        ("prompt_tokens", {}, {"prompt_mean": 56.0}, {"prompt_mean": 55.0}),
        ("output_tokens", {}, {"output_mean": 144.0}, {"output_mean": 145.0}),
        # gaps: 4 · 0.9 · √(1/100 + 1/400) = 0.4, and more where they are burstier than chance: 4 · 2.2² · 0.112 = 2.2
        ("gap_cv", {"gap_cv": 0.5}, {"gap_cv": 0.9}, {"gap_cv": 0.92}),
        ("gap_cv", {"gap_cv": 0.1}, {"gap_cv": 0.17}, {"gap_cv": 0.19}),
        # sharing: 4 · √(0.25/100 + 0.25/400) = 0.224
        ("sharing", {"sharing": 0.2}, {"sharing": 0.42}, {"sharing": 0.43}),
    ],
)  # fmt: skip
def test_four_standard_errors_by_hand(what: str, before: dict, less: dict, more: dict) -> None:  # type: ignore[type-arg]
    planned = replace(ONE, **before)
    seen = replace(SEEN, **{**before, "rate_cv": 0.0})
    assert told(planned, seen) == []
    assert told(planned, replace(seen, **less)) == []
    assert told(planned, replace(seen, **more)) == [what]


def test_a_tenth_is_not_told_however_certain() -> None:
    many = replace(ONE, requests=10**8, seconds=1e8, sharing=0.5)
    assert told(many, replace(many, prompt_mean=110.0, output_mean=90.0, sharing=0.45, seconds=1e8 / 0.91)) == []
    assert told(many, replace(many, prompt_mean=110.1)) == ["prompt_tokens"]
    assert told(many, replace(many, output_mean=89.9)) == ["output_tokens"]
    assert told(many, replace(many, sharing=0.44)) == ["sharing"]
    assert told(many, replace(many, seconds=1e8 / 1.11)) == ["rate"]


def test_what_is_not_known_is_not_compared() -> None:
    many = replace(ONE, requests=10**8, seconds=1e8)
    assert told(replace(many, sharing=None), replace(many, sharing=0.9)) == []
    assert told(replace(many, gap_cv=None), replace(many, gap_cv=0.2)) == []
    assert told(replace(many, seconds=0.0), many) == []  # planned all at once
    assert replace(many, seconds=0.0).rate == float("inf")


def test_a_fit_by_hand() -> None:
    """Twenty-one requests: gaps of 1 and 3 s in turn; prompts of 10 and 30, outputs of 5; the first prompts alike."""
    arrival = np.cumsum([5.0] + [1.0, 3.0] * 10)
    blocks = [[7]] * 4 + [[100 + i] for i in range(17)]
    made = Workload.from_columns(
        arrival=arrival,
        prompt_tokens=[10, 30] * 10 + [10],
        output_tokens=5,
        hash_ids=blocks,
        hash_block_size=10,
    )
    found = fit(made)
    assert (found.requests, found.seconds, found.rate) == (20, 40.0, 0.5)
    assert (found.output_mean, found.output_sd, found.rate_cv) == (5.0, 0.0, 0.0)
    assert found.prompt_mean == pytest.approx(410 / 21)
    assert found.prompt_sd == pytest.approx(np.sqrt(20**2 * (10 * 11 / 21) / 20))
    assert found.gap_cv == pytest.approx(np.sqrt(20 / 19) / 2)
    assert found.sharing == pytest.approx(3 * 10 / 410)
    assert sharing(made, 3) == pytest.approx(2 * 10 / 50)
    assert sharing(made, 1) == 0.0
    assert fit(replace(made, hash_ids=None, hash_block_size=0)).sharing is None
    with pytest.raises(InputError, match="19 requests: at least 20 are needed to see a drift: widen the window"):
        fit(made.take(np.arange(19)))
    assert fit(made.take(np.arange(20))).requests == 19
    at_once = fit(replace(made, arrival=np.zeros(21)))
    assert (at_once.gap_cv, at_once.rate) == (None, float("inf"))


def test_windows_whose_rate_varies_are_known_of_a_plan() -> None:
    """Ten, twenty and thirty requests a minute: a variance of 66.7, of which chance would make 20."""
    arrival = np.concatenate([60 * k + np.linspace(0, 59, n) for k, n in enumerate((10, 20, 29))] + [[180.0]])
    made = Workload.from_columns(arrival=arrival, prompt_tokens=1, output_tokens=1 + np.arange(60))
    assert fit(made, 60.0).rate_cv == pytest.approx(np.sqrt(200 / 3 - 20) / 20)
    assert fit(made, 90.0).rate_cv == 0.0  # two windows say nothing
    assert fit(made).rate_cv == 0.0


def test_the_planned_requests_twice_as_long_and_half_as_often() -> None:
    planned = Workload.from_columns(
        arrival=[0.0, 1.0, 3.0], prompt_tokens=[10, 20, 1], output_tokens=[4, 1, 8], max_tokens=[9, 9, 9]
    )
    now = replace(ONE, seconds=200.0, prompt_mean=200.0, output_mean=25.0)
    found = as_seen(planned, ONE, now)
    assert found.arrival.tolist() == [0.0, 2.0, 6.0]
    assert (found.prompt_tokens.tolist(), found.output_tokens.tolist()) == ([20, 40, 2], [1, 1, 2])
    assert found.max_tokens.tolist() == [9, 9, 9]
    longer = as_seen(planned, ONE, replace(now, output_mean=400.0))
    assert longer.max_tokens.tolist() == [16, 9, 32]
    short = as_seen(planned, ONE, replace(now, prompt_mean=1.0))
    assert short.prompt_tokens.tolist() == [1, 1, 1]
    with pytest.raises(InputError, match="all arrive at once: plan with a rate"):
        as_seen(planned, replace(ONE, seconds=0.0), now)


def test_changes_in_words() -> None:
    assert str(Change("rate", 1.0, 1.5)) == "rate: 1.5, planned 1 (+50 %)"
    assert str(Change("prompt_tokens", 1234.0, 617.0)) == "prompt_tokens: 617, planned 1.23e+03 (-50 %)"
    assert str(Change("sharing", 0.0, 0.25)) == "sharing: 0.25, planned 0"
