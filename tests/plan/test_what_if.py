"""Other loads: winners change, and regrets say what keeping the old one costs."""

import pytest

from plan.planning import question, small_space
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.what_if import what_if
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
