import re
from math import inf
from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.policy.named import BY_NAME, FORMULAS, ROUTERS, find_router
from windtunnel.policy.routing import ROUTE_SCORE, SCORED, Conductor, PrefixAware, RouteView


def test_every_router_that_is_listed_is_found() -> None:
    assert set(ROUTERS) == set(BY_NAME) | set(FORMULAS)
    found = [find_router(name) for name in ROUTERS]
    assert len({(router.number, router.routing) for router in found}) == len(ROUTERS)
    assert all((router.number == SCORED) == (router.routing is not None) for router in found)


def test_settings_are_changed_by_name() -> None:
    assert find_router("prefix_aware:queue=3,kv=1").routing == PrefixAware(queue=3.0, kv=1.0)
    assert find_router("conductor:threshold=inf").routing == Conductor(threshold=inf)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("least_outstandin", "unknown router 'least_outstandin': did you mean 'least_outstanding'"),
        ("round_robin:prefix=2", "router 'round_robin:prefix=2': round_robin has no settings"),
        ("prefix_aware:prefx=2", "unknown setting 'prefx' of router 'prefix_aware': did you mean 'prefix'"),
        ("prefix_aware:queue=-1", "router setting queue=-1.0: must be ≥ 0"),
        ("prefix_aware:queue=1,queue=2", "queue is given twice"),
        ("dynamo_kv:request_weight=x", "request_weight='x': must be a number"),
        ("dynamo_kv:request_weight=nan", "router setting request_weight=nan: must be ≥ 0"),
        ("conductor:bandwidth=0", "bandwidth=0: must be > 0; threshold=inf keeps KV where it is"),
        ("conductor:decode_slots=5", "decode_slots=5: give decode_s, too"),
    ],
)
def test_a_wrong_router_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        find_router(text)


def test_a_function_sees_as_much_as_it_takes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "four = lambda replica, outstanding, prompt, arrival: 0.0\n"
        "eight = lambda a, b, c, d, waiting, prefill, active, cached: 0.0\n"
        "six = lambda a, b, c, d, e, f: 0.0\n"
        "number = 4\n"
        "three = lambda a, b, c: 0.0\n"
        "class Some: ...\n"
        "any_number = lambda *values: 0.0\n"
        "either = lambda a, b, c, d, waiting=0, prefill=0, active=0, cached=0: 0.0\n"
        "eight_or_more = lambda a, b, c, d, waiting, prefill, active, cached, *more: 0.0\n"
        "a_word_too_many = lambda a, b, c, d, waiting, prefill, active, cached, *, word: 0.0\n"
        "built_in = max\n"
    )
    for name in ("four", "any_number", "either"):
        found = find_router(f"{tmp_path}/mine.py:{name}")
        assert found.number == ROUTE_SCORE
        assert found.route_score is not None
    for name in ("eight", "eight_or_more"):
        assert isinstance(find_router(f"{tmp_path}/mine.py:{name}").routing, RouteView)
    for name in ("six", "number", "three", "Some", "a_word_too_many", "built_in"):
        with pytest.raises(InputError, match=r"must be a function of \(replica, outstanding, prompt_tokens, arrival\)"):
            find_router(f"{tmp_path}/mine.py:{name}")
