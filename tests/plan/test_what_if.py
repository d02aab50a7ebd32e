"""Other loads: winners change, and regrets say what keeping the old one costs."""

import math
from dataclasses import replace

import pytest

from plan.chosen import answer, outcome
from plan.planning import question, small_space
from windtunnel.plan.elimination import Asked, Entry, Job, Report
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.store import Store
from windtunnel.plan.what_if import WhatIf, _regret, what_if
from windtunnel.workload import Both, Fixed, Gamma, generate


def test_other_loads_have_other_winners_and_regrets() -> None:
    enumeration = small_space(max_num_seqs=(4, 64), tensor_parallel_size=(1,)).enumerate()
    prompts = generate(Gamma(1.0), Both(Fixed(1500), Fixed(4)), 300, 1)
    cases = {"chat": (question(), RatePerDollar()), "prompts": (question(prompts), RatePerDollar())}
    seen = what_if(enumeration, cases)
    for name in cases:
        assert seen.regrets[name][name] == 0.0
    exact = {n: search(enumeration, q, o, top=len(enumeration.candidates)) for n, (q, o) in cases.items()}
    for old in cases:
        winner, best = seen.answers[old].best, seen.answers["prompts"].best
        assert winner is not None and best is not None
        value = exact["prompts"].entries[winner.index].promise
        assert seen.regrets[old]["prompts"] == pytest.approx(1 - max(value, 0) / best.promise)
    assert set(seen.to_json()["regrets"]) == set(cases)


@pytest.mark.parametrize(
    ("best", "score", "lost"),
    [(2.0, 1.5, 0.25), (2.0, -math.inf, 1.0), (2.0, 2.0, 0.0), (-10.0, -12.0, 0.2), (-10.0, -math.inf, math.inf)],
)
def test_what_is_lost_by_the_old_winner(
    monkeypatch: pytest.MonkeyPatch, best: float, score: float, lost: float
) -> None:
    """A share of the best value; of costs, the share by which it costs more."""
    found = answer()
    found = replace(found, entries={1: replace(found.entries[1], promise=best)})
    monkeypatch.setattr("windtunnel.plan.what_if._score", lambda *_: score)
    assert _regret(found, 0, Store()) == pytest.approx(lost)
    assert _regret(found, 1, Store()) == 0.0


def test_the_document_of_other_loads() -> None:
    found, nothing = answer(), replace(answer(), entries={})
    document = WhatIf({"a": found, "b": nothing}, {"a": {"b": math.inf}}).to_json()
    assert document["best"] == {"a": found.contenders[1].candidate.settings, "b": None}
    assert document["values"] == {"a": 2.0, "b": None}
    assert document["regrets"] == {"a": {"b": None}}


def test_the_old_winner_is_tried_without_a_standard_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = answer(), list[Job]()

    def eliminated(job: Job) -> Report:
        told.append(job)
        asked = {"key": Asked("pools", 1, outcome(1.0, 1.0, 0.1, 0.01), 0.5)}
        return Report(entries=[Entry(0, "exact", 1.5, 2)], asked=asked)

    monkeypatch.setattr("windtunnel.plan.what_if.eliminate", eliminated)
    with Store() as store:
        assert _regret(found, 0, store) == pytest.approx(0.25)
        assert [row["key"] for row in store.trials(found.question.digest)] == ["key"]
    (job,) = told
    assert (job.contenders, job.standard) == ((found.contenders[0],), None)
