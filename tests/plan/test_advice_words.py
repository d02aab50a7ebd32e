"""What the advice says, of searches and bands that are chosen."""

import math
from dataclasses import replace
from typing import Any, cast

import handmade
import pytest

from plan.chosen import Chosen, answer, outcome
from windtunnel.plan import advice as advising
from windtunnel.plan.advice import (
    Advice,
    _beyond,
    _cheaper,
    _ends,
    _routing,
    _whole,
    advice_json,
    advise,
    describe,
    percent,
)
from windtunnel.plan.band import Band, _could_be_better
from windtunnel.plan.bottleneck import Finding
from windtunnel.plan.bound import Bound
from windtunnel.plan.capacity import Capacity, Draws
from windtunnel.plan.elimination import Entry
from windtunnel.plan.objective import LeastForRate
from windtunnel.plan.outcome import Margin
from windtunnel.plan.space import Constraints


@pytest.mark.parametrize(
    ("margin", "says"),
    [
        (Margin("queue growth", 0.0123, 0.005), "the queue grows by 0.012 s every second"),
        (Margin("tightest limit", 1.256, 1.0), "the tightest limit of each request is at 126 %"),
        (Margin("tightest limit", math.inf, 1.0), "the tightest limit of each request is at over 100 %"),
        (Margin("ttft_p99", math.inf, 0.5), "ttft_p99 cannot be met: too many requests do not finish"),
        (Margin("ttft_p99", 0.61234, 0.5), "ttft_p99 is 612 ms, the limit 500 ms"),
    ],
)
def test_limits_in_words(margin: Margin, says: str) -> None:
    assert describe(margin) == says


def test_shares_in_words() -> None:
    assert (percent(0.256), percent(math.inf)) == ("26 %", "over 100 %")


def cheaper(other: Entry, price: float = 3.6, **more: Any) -> str:
    """Of a winner of two GPUs, with a candidate of one beside it."""
    found = answer(price)
    found = replace(found, entries={**found.entries, 0: other}, **more)
    return _cheaper(found, found.entries[1], found.contenders[1].candidate.deployment)


def test_the_next_cheaper_by_its_own_price() -> None:
    """The winner costs 7.2 USD an hour and the other half: it says why that one loses."""
    name = "device h100, tensor_parallel_size 1, max_num_seqs 8 at $3.60/h: "
    unit = answer().objective.unit
    assert cheaper(Entry(0, "bounded", 1.5)) == f"{name}cannot be better than 1.5 {unit}"
    assert cheaper(Entry(0, "exact", 1.25, 2)) == f"{name}reaches 1.25 {unit}"
    impossible = Entry(0, "impossible", -math.inf, stretch=2.5)
    assert (
        cheaper(impossible) == f"{name}even a single request misses the limits; they would have to be 2.5 times as long"
    )
    missed = replace(outcome(4.0, 1.0, 1.0, 0.1, met=False), margins=(Margin("ttft_p99", 0.6, 0.5),))
    beaten = Entry(0, "beaten", 1.0, missed=missed)
    assert cheaper(beaten) == f"{name}at 4 requests/s, ttft_p99 is 600 ms, the limit 500 ms"
    assert cheaper(Entry(0, "exact", -math.inf, missed=missed)) == cheaper(beaten), "no step holds: why"
    assert cheaper(Entry(0, "beaten", 1.0, missed=replace(missed, margins=()))) == f"{name}it cannot run"
    assert cheaper(Entry(0, "bounded", 1.5), price=0.0) == "none is cheaper", "no price is known"
    assert cheaper(Entry(0, "bounded", 1.5), contenders={1: answer().contenders[1]}) == "none is cheaper"


def test_of_two_cheaper_ones_the_dearer_is_told() -> None:
    """Of 1 and 0.5 USD below 2; a candidate that costs as much as the winner is not cheaper."""
    found = answer(1.0)
    one, two = found.contenders[0], found.contenders[1]
    (pool,) = two.candidate.deployment.pools
    chip = replace(pool.device, price_per_hour=0.25)
    third = replace(two.candidate.deployment, pools=(replace(pool, device=chip),))
    settings = {"device": "x", "tensor_parallel_size": 2, "max_num_seqs": 8}
    contenders = {
        **found.contenders,
        2: replace(two, candidate=replace(one.candidate, settings=settings, deployment=third)),
    }
    contenders[3] = two
    entries = {**found.entries, **{index: Entry(index, "bounded", 1.0) for index in (0, 2, 3)}}
    said = _cheaper(replace(found, contenders=contenders, entries=entries), found.entries[1], two.candidate.deployment)
    assert said.startswith("device h100, tensor_parallel_size 1, max_num_seqs 8 at $1.00/h: ")


def test_the_ends_of_axes_name_the_value_that_was_not_tried() -> None:
    found = answer()
    assert _ends(found, found.entries[1]) == "", "one value only"
    contenders = {}
    for index, seqs in ((0, 8), (1, 16)):
        candidate = found.contenders[index].candidate
        settings = {**candidate.settings, "max_num_seqs": seqs}
        contenders[index] = replace(found.contenders[index], candidate=replace(candidate, settings=settings))
    found = replace(found, contenders=contenders)
    assert _ends(found, found.entries[1]) == "max_num_seqs 16: also try 32"
    assert _ends(found, Entry(0, "exact", 1.0, 1)) == "", "fewer than 8 are worth no trial"


def band(**more: Any) -> Band:
    """Of a capacity of 7 requests/s, 5 to 9, for 3.6 USD an hour."""
    usual: dict[str, Any] = {
        "evidence": "words", "grade": ("high", "why"), "known_bad": None,
        "replicas": None, "confident": None, "rates": (9.0, 7.0, 5.0),
        "price_per_hour": 3.6, "attainment": (0.99, 0.95, 0.5), "could_be_better": (2, 4),
    }  # fmt: skip
    return Band(**(usual | more))


def test_a_band_of_rates_in_words() -> None:
    """3.6 USD an hour are 1,000 µUSD a second: 111, 143 and 200 USD for a million requests."""
    words = dict(band().words())
    assert words == {
        "capacity": "7 requests/s (5 to 9 on a real server)",
        "cost": "$143 per million requests at capacity ($111 to $200 on a real server)",
        "within goal": "95.0 % of requests (50.0 to 99.0 % on a real server)",
        "evidence": "words",
        "tied": "ranks 2, 4: within the model's error of the first",
    }
    kept = dict(band(rates=(9.0, 7.0, 7.0), could_be_better=()).words())
    assert "tied" not in kept
    assert "cost" not in dict(band(price_per_hour=0.0).words())
    assert "within goal" not in dict(band(attainment=(math.nan,) * 3).words())
    assert band(rates=(9.0, 7.0, 0.0)).cost == pytest.approx([111.1, 142.9, math.inf], abs=0.1)


def test_a_band_of_replicas_in_words() -> None:
    asked = {"rates": None, "replicas": (3, 4, None), "confident": (4, None), "price_per_hour": 1000.0}
    words = dict(band(**asked).words())
    sure = "half of real servers need 4, 9 of 10 at most more than were tried, 19 of 20 at most more than were tried"
    assert words["replicas"] == sure
    assert "cost" not in words, "the ranking has it"


def test_the_document_of_an_advice() -> None:
    found: Chosen = answer()
    deployment, rate = found.measured(found.entries[1])
    advice = Advice(
        entry=found.entries[1], deployment=deployment, rate=rate, run=handmade.two_requests(),
        findings=(Finding("host", 0.5, "evidence", "advice"),), binding=Margin("ttft_p99", 0.6, 0.5), routing="any",
        cheaper="none", ends="tp", draws=Draws((1.0, 1.5), 0.05), band=band(),
    )  # fmt: skip
    document = advice_json(found, advice)
    assert {key: document[key] for key in ("replicas", "routing", "next_cheaper", "at_an_end_of")} == {
        "replicas": 3, "routing": "any", "next_cheaper": "none", "at_an_end_of": "tp"
    }  # fmt: skip
    assert document["breaks_first"] == {"name": "ttft_p99", "value": 0.6, "limit": 0.5}
    assert document["findings"] == [{"name": "host", "share": 0.5, "evidence": "evidence", "advice": "advice"}]
    assert document["load_draws"]["rates"] == [1.0, 1.5]
    assert document["band"]["rates"] == [9.0, 7.0, 5.0]
    assert len(document["band"]["cost"]) == 3
    bare = advice_json(found, replace(advice, draws=None, binding=None))
    assert (bare["load_draws"], bare["breaks_first"]) == (None, None)
    lost = replace(found, entries={0: Entry(0, "impossible", -math.inf, stretch=1.5)})
    assert advice_json(lost, None) == {
        "closest": {"settings": found.contenders[0].candidate.settings, "limits_times": 1.5}
    }
    assert advice_json(replace(found, entries={}), None) == {"closest": None}


def test_who_could_be_better_is_as_near_as_the_evidence_leaves_open() -> None:
    """The winner has 2.0, and one GPU and two are told apart from 11.4 % on: 8 % are not enough, 14 % are."""
    found = replace(answer(), top=2)
    for promise, places in ((1.85, [2]), (1.75, []), (1.0, [])):
        entries = {**found.entries, 0: Entry(0, "exact", promise, 1)}
        assert list(_could_be_better(replace(found, entries=entries), found.entries[1])) == places


class Fixed:
    """An objective whose steps are rates of themselves."""

    def climb(self, *_: Any) -> Any:
        return self

    def trial(self, step: int) -> tuple[Any, float]:
        return None, float(step)


def test_a_trial_that_was_stopped_early_is_made_again_at_the_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step above the highest that holds, or at the one that was tried; one that was not stopped is taken as it
    is."""
    whole = outcome(0.0, 1.0, 1.0, 0.1)
    monkeypatch.setattr("windtunnel.plan.advice.trial_whole", lambda _, __, rate: replace(whole, rate=rate))
    found = replace(answer(), objective=cast(Any, Fixed()))
    stopped = replace(whole, rate=99.0, stopped=True)
    again = _whole(found, Entry(1, "exact", 2.0, 3, missed=stopped))
    assert again is not None
    assert (again.rate, again.met, again.stopped) == (4.0, False, False)
    tried = _whole(found, Entry(1, "beaten", 2.0, missed=stopped), 7)
    assert tried is not None and tried.rate == 7.0
    assert _whole(found, Entry(1, "beaten", 2.0, missed=stopped)) is stopped  # no step is known
    assert _whole(found, Entry(1, "exact", 2.0, 3, missed=whole)) is whole
    assert _whole(found, Entry(1, "exact", 2.0, 3)) is None


def test_beyond_the_last_step_the_capacity_says_what_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    found, deployment = answer(), answer().contenders[1].candidate.deployment
    whole = outcome(0.0, 1.0, 1.0, 0.1)
    monkeypatch.setattr("windtunnel.plan.advice.trial_whole", lambda _, __, rate: replace(whole, rate=rate))
    for missed, rate in (
        (None, None),
        (replace(whole, rate=math.inf), None),
        (replace(whole, rate=5.0), 5.0),
        (replace(whole, rate=6.0, stopped=True), 6.0),
    ):
        chosen = Capacity(4.0, None, missed, 1)
        monkeypatch.setattr("windtunnel.plan.advice.capacity", lambda *_, chosen=chosen: chosen)
        beyond = _beyond(found, deployment)
        assert (beyond and beyond.rate) == rate
        assert beyond is None or not beyond.stopped


def test_the_router_that_uses_the_limits_least_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    stretches = {"round_robin": 0.9, "least_outstanding": 0.704, "vllm_dp": math.inf}
    monkeypatch.setattr(
        "windtunnel.plan.advice.trial",
        lambda _, deployment, __: replace(outcome(1.0, 1.0, 1.0, 0.1), stretch=stretches[deployment.router]),
    )
    found = answer()
    best, candidate = found.entries[1], found.contenders[1].candidate
    text = "round_robin uses 90 % of the tightest limit (least_outstanding 70 %, vllm_dp over 100 %)"
    two = candidate.scaled(2)
    assert _routing(found, best, two, 1.0) == f"{text}; --router least_outstanding leaves more headroom"
    stretches["least_outstanding"] = 0.89
    assert "--router" not in _routing(found, best, two, 1.0), "a point is no reason"
    assert _routing(found, best, candidate.scaled(1), 1.0) == ""


@pytest.mark.parametrize(
    ("other", "gpus", "says"),
    [
        (Entry(0, "exact", -9.0, -9), False, "$5.00/h: misses the goal; $9.00/h would meet it"),
        (Entry(0, "bounded", -9.5), True, "5 GPUs: cannot be better than 9.5 GPUs"),
        (Entry(0, "impossible", -math.inf, stretch=1.5), False, "none is cheaper"),
    ],
)
def test_the_next_cheaper_for_a_rate_is_the_dearest_below_the_winner(other: Entry, gpus: bool, says: str) -> None:
    """One GPU at 1 USD serves 1.5 requests/s at best, so 4 need three or more; the winner has three of two GPUs."""
    objective = LeastForRate(4.0, Constraints(), gpus)
    found = answer(1.0, objective)
    rate = 0.0 if other.status == "impossible" else 1.5
    contenders = {0: replace(found.contenders[0], bound=Bound(rate, 0.5, 1)), 1: found.contenders[1]}
    best = Entry(1, "exact", -6.0, -3)
    found = replace(found, contenders=contenders, entries={0: other, 1: best})
    name = "device h100, tensor_parallel_size 1, max_num_seqs 8 at "
    said = _cheaper(found, best, found.contenders[1].candidate.scaled(3))
    assert said == (says if says.startswith("none") else name + says)
    two = replace(best, promise=-3.0)
    assert _cheaper(replace(found, entries={0: other, 1: two}), two, found.contenders[1].candidate.scaled(3)) == (
        "none is cheaper"
    ), "three of one GPU cost as much"


def test_a_candidate_that_was_stopped_early_below_the_winner_is_simulated_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At five replicas: the most that cost less than the winner's 6 USD."""
    margins = (Margin("ttft_p99", 0.6, 0.5),)
    tried: list[tuple[int, float]] = []

    def whole(_: object, deployment: Any, rate: float) -> Any:
        tried.append((deployment.replicas, rate))
        return replace(outcome(rate, 1.0, 1.0, 0.1), margins=margins)

    monkeypatch.setattr(advising, "whole_trial", whole)
    found = answer(1.0, LeastForRate(4.0, Constraints()))
    contenders = {0: replace(found.contenders[0], bound=Bound(1.5, 0.5, 1)), 1: found.contenders[1]}
    best = Entry(1, "exact", -6.0, -3)
    stopped = Entry(0, "beaten", -9.0, missed=replace(outcome(4.0, 1.0, 1.0, 0.1, met=False), stopped=True))
    found = replace(found, contenders=contenders, entries={0: stopped, 1: best})
    said = _cheaper(found, best, found.contenders[1].candidate.scaled(3))
    assert said.endswith(" at $5.00/h: at 4 requests/s, ttft_p99 is 600 ms, the limit 500 ms")
    assert tried == [(5, 4.0)]


@pytest.mark.parametrize(("seeds", "drawn"), [((), False), ((4,), False), ((4, 5), True)])
def test_an_advice_is_put_together(monkeypatch: pytest.MonkeyPatch, seeds: tuple[int, ...], drawn: bool) -> None:
    """Draws need two seeds at least; what breaks is that of the step that failed, or else of a higher rate."""
    run, draws, width = handmade.two_requests(), Draws((1.0, 2.0), 0.01), band()
    margin, beyond = Margin("ttft_p99", 0.6, 0.5), Margin("tpot_p99", 0.6, 0.5)
    failed = replace(outcome(4.0, 1.0, 1.0, 0.1, met=False), margins=(margin,))
    monkeypatch.setattr(advising, "whole_run", lambda _, deployment, rate: (deployment.replicas, rate, run)[2])
    monkeypatch.setattr(advising, "capacity_draws", lambda *told: draws if told[3] == (4, 5) else None)
    monkeypatch.setattr(advising, "_beyond", lambda *_: replace(failed, margins=(beyond,)))
    monkeypatch.setattr(advising, "trial", lambda _, d, __: replace(failed, stretch=0.5 + len(d.router)))
    monkeypatch.setattr(advising, "band_of", lambda _: width)
    monkeypatch.setattr(advising, "bottlenecks", lambda told: (told,))
    found = answer()
    for missed, binding in ((failed, margin), (None, beyond)):
        best = replace(found.entries[1], missed=missed)
        advice = advise(replace(found, entries={1: best}), lambda seed: cast(Any, seed), seeds)
        assert advice is not None
        assert (advice.entry, advice.rate, advice.deployment.replicas) == (best, 7.000049, 3)
        findings: tuple[Any, ...] = advice.findings
        assert (advice.run, findings, advice.binding, advice.band) == (run, (run,), binding, width)
        assert advice.draws is (draws if drawn else None)
        assert (advice.cheaper, advice.ends) == ("none is cheaper", "")
        assert "round_robin uses 100 % of the tightest limit" in advice.routing
    assert advise(replace(found, entries={})) is None
    plain = advise(found)
    assert plain is not None and plain.draws is None


def test_the_ranking_and_the_closest_by_hand() -> None:
    """Of equals the first; who holds no step is not ranked, and of those who miss the one that misses by least is told,
    if how much is known."""
    found = answer()
    missed = replace(outcome(4.0, 1.0, 1.0, 0.1, met=False), stretch=1.4)
    entries = {
        5: Entry(5, "exact", 2.0, 1), 3: Entry(3, "exact", 2.0, 1), 4: Entry(4, "exact", 3.0, 1),
        0: Entry(0, "exact", -math.inf, missed=missed), 1: Entry(1, "impossible", -math.inf, stretch=1.6),
        2: Entry(2, "beaten", 9.0, missed=replace(missed, stopped=True)), 6: Entry(6, "bounded", 9.0),
        7: Entry(7, "exact", 1.0, 1, missed=replace(missed, stretch=1.1)),
    }  # fmt: skip
    found = replace(found, entries=entries, top=3)
    assert [entry.index for entry in found.ranking] == [4, 3, 5]
    assert found.counts() == {"exact": 5, "impossible": 1, "beaten": 1, "bounded": 1}
    closest = found.closest()
    assert closest is not None and (closest[0].index, closest[1]) == (0, 1.4)
    others = {index: entry for index, entry in entries.items() if index in (2, 6, 7)}
    assert replace(found, entries=others).closest() is None
    only = {1: entries[1], 2: Entry(2, "impossible", -math.inf, stretch=1.6)}
    tie = replace(found, entries=only).closest()
    assert tie is not None and tie[0].index == 1


def test_the_document_of_a_search() -> None:
    found = answer(price=0.0)
    (row,) = found.to_json()["ranking"]
    assert (row["replicas"], row["gpus"], row["price_per_hour"], row["request_rate"], row["value"]) == (
        3, 6, None, 7.000049, 2.0
    )  # fmt: skip
    assert row["settings"] == {"device": "h100", "tensor_parallel_size": 2, "max_num_seqs": 8}
    margins = (Margin("ttft_p99", 0.6, 0.5),)
    held = replace(outcome(7, 100.0, 0.2, 0.02), margins=margins, attainment=0.75)
    found = replace(answer(), entries={1: Entry(1, "exact", 2.0, 3, held)}, trials=5, reused=6, seconds=1.5)
    document = found.to_json()
    (row,) = document["ranking"]
    assert (row["price_per_hour"], row["attainment"]) == (pytest.approx(21.6), 0.75)
    assert row["margins"] == {"ttft_p99": {"value": 0.6, "limit": 0.5}}
    assert row["latencies"]["ttft"]["p90"] == 0.2
    assert {key: document[key] for key in ("schema_version", "points", "trials", "reused", "seconds")} == {
        "schema_version": 1, "points": 0, "trials": 5, "reused": 6, "seconds": 1.5
    }  # fmt: skip
