"""plan finds what an exhaustive search finds, and proves it, in random spaces over all kinds of axes."""

import pytest

from plan.answer.checker import wrong
from plan.several.random_spaces import MOST, case
from windtunnel.plan.answer.certificate import certificate
from windtunnel.plan.search import search


def check(seed: int, most: int, requests: int, plain: bool = False) -> tuple[int, int]:
    """Simulations of a search and of an exhaustive one, which must agree."""
    one = case(seed, most, requests, plain)
    enumeration = one.space.enumerate(with_price=one.objective.needs_price)
    assert enumeration.size <= most, one.name
    if not enumeration.candidates:
        return 0, 0
    found = search(enumeration, one.question, one.objective, top=2)
    whole = search(enumeration, one.question, one.objective, top=len(enumeration.candidates))
    assert [(e.index, e.promise) for e in found.ranking] == [(e.index, e.promise) for e in whole.ranking[:2]], one.name
    for index, entry in found.entries.items():
        assert entry.promise >= whole.entries[index].promise, (one.name, index)
    assert wrong(certificate(found)) == [], one.name
    return found.trials, whole.trials


@pytest.mark.parametrize("seed", range(6))
def test_small_random_spaces(seed: int) -> None:
    check(seed, 24, 100, plain=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_spaces(seed: int) -> None:
    check(100 + seed, MOST, 200)
