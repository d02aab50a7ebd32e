"""Bands against served points: what they hold by group, and which points nobody could have measured."""

from dataclasses import replace

import pytest

from windtunnel.metrics.evidence import ServerKey, doubt
from windtunnel.validation.markdown import bands_text
from windtunnel.validation.served_points import Point
from windtunnel.validation.served_replay import Result, coverage, document, held, replay, unreadable

POINT = Point("a", "agg", "vllm", "0.19.0", "Qwen/Qwen3-32B", "", "h100_sxm", 1000, 200, 8, 2, 1, False, 0.2, 0.02)
KEY = ServerKey("vllm", "Qwen3ForCausalLM", "h100_sxm", "16 bits", "Qwen/Qwen3-32B", "TP2")
RESULT = Result(POINT, 0.2, 0.02, 0.1, 0.08, KEY)


def scaled(factor: float) -> Result:
    return replace(RESULT, point=replace(POINT, ttft=0.2 * factor, tpot=0.02 * factor))


def test_a_band_holds_what_lies_in_it() -> None:
    low, high = doubt(KEY, 0.08).factors("steps", 0.9)
    inside, outside = [scaled(0.999 * high), scaled(1.001 * low)], [scaled(1.001 * high), scaled(0.999 * low)]
    assert [held([one], "tpot") for one in (*inside, *outside)] == [1.0, 1.0, 0.0, 0.0]
    assert held([*inside, *outside, scaled(1.0)], "tpot") == pytest.approx(0.6)


def test_coverage_is_said_by_group() -> None:
    other = replace(RESULT, server=KEY._replace(device="h200_sxm"))
    rows = coverage([RESULT, scaled(9.0), other, Result(POINT, reason="because")])
    assert [(row["group"][2], row["points"], row["tpot"]["held"]) for row in rows] == [
        ("h100_sxm", 2, 0.5),
        ("h200_sxm", 1, 1.0),
    ]
    many = [replace(RESULT, unreadable="it is odd")] * 30
    text = "\n".join(bands_text(many))
    assert "| vllm | Qwen3ForCausalLM | h100_sxm | 30 | 100.0 % |" in text
    assert "Unreadable (30): it is odd" in text
    assert document(many)["bands"][0]["tpot"]["low"] == pytest.approx(doubt(KEY, 0.08).factors("steps", 0.9)[0])


def test_clients_that_wait_for_nothing_and_perfect_servers_are_unreadable() -> None:
    result = replay(POINT)
    assert not result.reason
    like_it = replace(POINT, ttft=result.ttft, tpot=result.tpot)
    whole = result.ttft + 199 * result.tpot
    for point, said in (
        (like_it, ""),
        (replace(like_it, tpot=2 * result.tpot), ""),
        (replace(like_it, ttft=whole), "wait"),
        (replace(like_it, tpot=result.tpot / 5, ttft=result.ttft / 5), "faster than perfect kernels"),
    ):
        found = unreadable(replace(result, point=point))
        assert said in found
        assert bool(found) == bool(said)
