"""The attacks of the benchmark that cost little: nothing is answered by a 5xx, or left without an answer."""

import asyncio
from collections import Counter

import pytest

from benchmarks.attacks import ATTACKS, STALL, Size, headers, lines, passed, words
from serve.endpoint import app, on_a_socket


@pytest.mark.parametrize("attack", [words, lines, headers])
def test_what_no_client_sends_is_refused(attack: object) -> None:
    assert attack in ATTACKS.values()
    with on_a_socket(app()) as url:
        found = asyncio.run(attack(int(url.rpartition(":")[2]), Size(megabytes=1)))  # type: ignore[operator]
    assert passed(found, 0.0)
    assert not {each for each in found if each.startswith("2") and attack is words}


def test_what_harms_others_does_not_pass() -> None:
    assert passed(Counter({"400": 3, "closed": 1, "left": 1}), 0.0)
    assert not passed(Counter({"400": 3, "500": 1}), 0.0)
    assert not passed(Counter({"never ended": 1}), 0.0)
    assert not passed(Counter({"200": 1}), STALL)
