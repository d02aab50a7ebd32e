"""plan finds what an exhaustive search finds, and proves it, in random spaces over all kinds of axes."""

import pytest

from plan.answer.checker import wrong
from plan.several.random_spaces import MOST, Case, case
from windtunnel.plan.answer.certificate import certificate
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.elimination import Entry
from windtunnel.plan.search import search
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.several.models import Models
from windtunnel.plan.space import Space


def check(seed: int, most: int, requests: int, plain: bool = False) -> tuple[int, int]:
    """Simulations of a search and of an exhaustive one, which must agree."""
    one = case(seed, most, requests, plain)
    found, whole = zip(*(_both(one, space, most) for space in (one.space, one.other) if space), strict=True)
    if one.other is not None:
        ours, all_of_them = (
            Models(
                {answer.enumeration.candidates[0].deployment.pools[0].model.name: {"load": answer} for answer in each}
            )
            for each in (found, whole)
        )
        assert ours.best("load") == all_of_them.best("load"), one.name
        for model in ours.answers:
            assert str(ours.regret(model, "load")) == str(all_of_them.regret(model, "load")), one.name
    return sum(answer.trials for answer in found), sum(answer.trials for answer in whole)


def _differs(entry: Entry, whole: Entry) -> bool:
    """Whether a bound is below what was found, or a candidate simulated twice ends at two levels."""
    return entry.promise < whole.promise or (entry.status == "exact" and entry.promise != whole.promise)


def _both(one: Case, space: Space | PoolSpace, most: int) -> tuple[SearchResult, SearchResult]:
    enumeration = space.enumerate(with_price=one.objective.needs_price)
    assert enumeration.size <= most, one.name
    found = search(enumeration, one.question, one.objective, top=2)
    whole = search(enumeration, one.question, one.objective, top=len(enumeration.candidates))
    odd = {index for index, entry in found.entries.items() if _differs(entry, whole.entries[index])}
    for index in odd:  # the search takes it that what fails at a level fails at higher ones (docs/plan.md)
        pair = found.entries[index], whole.entries[index]
        failed = [each.missed.rate for each in pair if each.missed is not None and not each.missed.met]
        held = [each.held.rate for each in pair if each.held is not None]
        assert min(failed) <= max(held), (one.name, index)
    own = [(entry.index, entry.promise) for entry in found.ranking if entry.index not in odd]
    others = [(entry.index, entry.promise) for entry in whole.ranking if entry.index not in odd]
    assert own == others[: len(own)], one.name
    assert own or odd or not others, one.name
    assert wrong(certificate(found)) == [], one.name
    return found, whole


@pytest.mark.parametrize("seed", range(6))
def test_small_random_spaces(seed: int) -> None:
    check(seed, 24, 100, plain=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_spaces(seed: int) -> None:
    check(100 + seed, MOST, 200)
