"""Why another device or setting did not win, of searches whose answers are chosen."""

import math
from dataclasses import replace
from typing import Any

import pytest

from plan.chosen import Chosen, answer, outcome
from plan.planning import small_space
from windtunnel.errors import InputError
from windtunnel.plan.answer import why as asking
from windtunnel.plan.answer.why import Asked, asked_of, why_not
from windtunnel.plan.elimination import Entry, Report
from windtunnel.plan.objective import LeastForRate
from windtunnel.plan.outcome import Margin
from windtunnel.plan.space import Constraints, Space
from windtunnel.plan.store import Store

SPACE = small_space(tensor_parallel_size=(1, 2))
SINGLE = Asked("tensor_parallel_size=1", None, {"tensor_parallel_size": "1"})
"""The candidate of one GPU, which loses."""
COST = LeastForRate(7.0, Constraints())
MISSED = replace(outcome(7.0, 1.0, 1.0, 0.1, met=False), margins=(Margin("tpot p90", 0.062, 0.05),))


def said(other: Entry, objective: Any = None, asked: Asked = SINGLE, price: float = 3.6) -> str:
    """About the candidate of one GPU; the winner has three replicas of two."""
    found = answer(price, objective)
    best = replace(found.entries[1], promise=-21.6) if objective else found.entries[1]
    best = replace(best, held=replace(outcome(7, 100.0, 0.2, 0.02), stretch=0.5))
    with Store() as store:
        return why_not(replace(found, entries={0: other, 1: best}, by_headroom=True), asked, SPACE, store)


def test_a_device_is_named_as_it_is_written() -> None:
    asked = asked_of("L40S, tensor-parallel-size=2", SPACE)
    assert (asked.device, asked.name) == ("l40s", "L40S with tensor_parallel_size 2")
    assert asked_of("max_num_seqs=16", SPACE).name == "max_num_seqs 16"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("l4", "why 'l4': is not searched: add it to --devices"),
        ("l40", "did you mean 'l40s'"),
        ("tensor_paralel_size=2", "did you mean 'tensor_parallel_size'"),
        ("tensor_parallel_size=8", "only tensor_parallel_size 1, 2: add it there"),
    ],
)
def test_what_is_not_searched(words: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        asked_of(words, SPACE)


def test_a_cost_against_the_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs 9 USD for each replica of 3.6: three of them, at three times 9 USD in all; 21.6 buy two."""
    monkeypatch.setattr(asking, "trial_whole", lambda *_: MISSED)
    text = said(Entry(0, "exact", -27.0, -3, outcome(7, 100.0, 0.2, 0.02)), COST)
    assert text == (
        "tensor_parallel_size 1: 3 × H100 SXM (3 replicas of 1 GPU), $27.00/h, would be needed: 25 % more than the "
        "winner ($21.60/h). For the winner's cost it has 2 of 3 replicas: tpot p90 is 62 ms, the limit 50 ms. "
        "It would win below $2.88 per GPU-hour (now $3.60)."
    )


def test_one_replica_may_cost_too_much() -> None:
    text = said(Entry(0, "exact", -90.0, -3, outcome(7, 100.0, 0.2, 0.02)), COST, price=30.0)
    assert "One replica costs more than the winner." in text


def test_equal_costs_are_told_by_headroom() -> None:
    text = said(Entry(0, "exact", -21.6, -3, outcome(7, 100.0, 0.2, 0.02)), COST)
    assert "as much as the winner ($21.60/h). The winner has more headroom." in text


def test_capacity_for_a_dollar() -> None:
    text = said(Entry(0, "exact", 1.5, 3, outcome(7, 100.0, 0.2, 0.02)))
    assert text.startswith("tensor_parallel_size 1 reaches 1.5 requests/s per $/h, the winner 2:")
    assert text.endswith("It would win below $2.70 per GPU-hour (now $3.60).")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (Entry(0, "impossible", -math.inf, stretch=2.5), "the limits would have to be 2.5 times as long."),
        (Entry(0, "refused", -math.inf, reason="too large"), "cannot run: too large."),
        (
            Entry(0, "exact", -math.inf, missed=MISSED),
            "at any size that was tried: tpot p90 is 62 ms, the limit 50 ms.",
        ),
    ],
)
def test_what_never_meets_the_goal(entry: Entry, says: str) -> None:
    assert said(entry).endswith(says)


def test_what_was_ruled_out_is_tried_for_its_own_value(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Entry(0, "exact", -27.0, -3, outcome(7, 100.0, 0.2, 0.02))
    monkeypatch.setattr(asking, "eliminate", lambda _: Report(entries=[exact]))
    monkeypatch.setattr(asking, "trial_whole", lambda *_: MISSED)
    assert said(Entry(0, "bounded", -7.2), COST) == said(exact, COST)


def test_the_winner_and_what_cannot_run() -> None:
    assert said(Entry(0, "bounded", -7.2), COST, Asked("h100", "h100_sxm", {})) == "H100 SXM: is the winner."
    large = Space("Llama-3.1-70B", {"device": ("h100", "a10"), "tensor_parallel_size": (1,)})
    found: Chosen = answer()
    with Store() as store:
        text = why_not(found, asked_of("a10", large), large, store)
    assert text == "A10 cannot run: meta-llama/Llama-3.1-70B does not fit into the memory of 1 × a10."
