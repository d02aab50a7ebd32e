"""Evidence: quantiles of a group drawn towards larger ones, known-bad groups alone, and a user's own run."""

from dataclasses import replace
from math import exp, inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.metrics.evidence import (
    KEYS,
    PRIOR,
    QUANTILES,
    Group,
    ServerKey,
    doubt,
    other_loads,
    served_groups,
    server_key,
    span,
)
from windtunnel.model import load_model
from windtunnel.simulate.overheads import Agreement

ALL = Group(100, 50, 0.1, (-0.4, -0.1, 0.0, 0.1, 0.4), (-0.8, -0.2, 0.0, 0.2, 0.8), ("a/x", "a/y", "a/z"))
ENGINE = replace(ALL, points=40, loads=4, steps=(-0.2, -0.1, 0.0, 0.1, 0.2), key=("vllm",))
SERVER = ServerKey("vllm", "QwenForCausalLM", "h100_sxm", "fp8", "a/x", "TP2")
BAD = replace(ENGINE, key=SERVER[:5], known_bad=True, steps=(0.3, 0.4, 0.5, 0.6, 0.7), models=("a/x",))


def table(*groups: Group) -> dict[tuple[str, ...], Group]:
    return {group.key: group for group in groups}


def test_a_group_counts_as_much_as_it_has_independent_loads() -> None:
    low, high = doubt(SERVER, 0.1, table(ALL, ENGINE)).factors("steps", 0.9)
    weight = 4 / (4 + PRIOR)
    assert log(low) == pytest.approx(weight * -0.2 + (1 - weight) * -0.4)
    assert high == pytest.approx(1 / low)
    assert doubt(SERVER, 0.1, table(ALL, replace(ENGINE, loads=10**6))).factors("steps", 0.9)[0] == pytest.approx(
        exp(-0.2)
    )


def test_a_server_that_nothing_is_known_of_has_the_band_of_all() -> None:
    other = SERVER._replace(engine="sglang")
    assert doubt(other, nan, table(ALL, ENGINE)).factors("first_token", 0.5) == pytest.approx((exp(-0.2), exp(0.2)))


def test_a_family_that_was_not_measured_on_its_device_has_the_quantiles_of_those_elsewhere() -> None:
    elsewhere = (-0.5, -0.2, 0.0, 0.2, 0.6), (-0.9, -0.3, 0.0, 0.3, 1.0)
    own = replace(ENGINE, key=SERVER[:3], steps=(-0.1, -0.05, 0.0, 0.05, 0.1))
    asked = replace(ENGINE, elsewhere=elsewhere)
    found = doubt(SERVER, nan, table(ALL, asked))
    assert (found.steps, found.first_token) == elsewhere
    assert doubt(SERVER, nan, table(ALL, asked, own)) == doubt(SERVER, nan, table(ALL, ENGINE, own))
    assert all((group.elsewhere is None) == ("device" in KEYS[: len(key)]) for key, group in served_groups().items())


def test_first_tokens_are_moved_where_this_layout_was_measured() -> None:
    own = replace(ENGINE, key=SERVER, loads=10**6, points=30, first_token=(0.1, 0.2, 0.3, 0.4, 0.5))
    family = replace(own, key=SERVER[:3], points=39)
    assert doubt(SERVER, nan, table(ALL, ENGINE, family)).first_shift == 0.0
    found = doubt(SERVER, nan, table(ALL, ENGINE, family, own))
    assert found.first_shift == pytest.approx(0.3)
    assert replace(found, calibrated=True).first_shift == 0.0


@given(st.floats(0, 2), st.floats(0, 2))
def test_the_further_the_kernels_are_from_their_data_the_wider_the_band(one: float, other: float) -> None:
    near, far = (doubt(SERVER, error, table(ALL)).factors("steps", 0.9) for error in sorted((one, other)))
    assert far[0] <= near[0] <= 1 <= near[1] <= far[1]


def test_the_band_contains_the_run_and_half_lies_in_nine_tenths() -> None:
    for server in (SERVER._replace(engine=name) for name in ("vllm", "sglang", "trtllm", "none")):
        found = doubt(server, 0.1)
        for latency in ("steps", "first_token"):
            (low, high), (inner_low, inner_high) = (found.factors(latency, level) for level in (0.9, 0.5))
            assert 0 < low <= inner_low <= 1 <= inner_high <= high < inf


def test_what_is_known_to_be_wrong_is_said_and_keeps_its_own_band() -> None:
    found = doubt(SERVER, 0.1, table(ALL, ENGINE, BAD))
    assert found.factors("steps", 0.9) == pytest.approx((exp(0.3), exp(0.7)))
    assert found.warning is not None
    assert "measured 1.3 to 2 times" in found.warning
    assert doubt(SERVER._replace(model="a/y"), 0.1, table(ALL, ENGINE, BAD)).warning is None


def test_a_run_of_ones_own_narrows_the_band_of_its_server_alone() -> None:
    own = Agreement(SERVER, 0.01, -0.02)
    wide = table(replace(ALL, steps=(-2.0, -1.0, 0.0, 1.0, 2.0)))
    found = doubt(SERVER, 0.1, wide, own)
    assert found.factors("steps", 0.9) == pytest.approx(
        tuple(exp(0.01 + other_loads("vllm")["steps"][place]) for place in (0, -1))
    )
    assert doubt(SERVER._replace(layout="TP4"), 0.1, wide, own).factors("steps", 0.9) == pytest.approx(
        (exp(-2), exp(2))
    )
    sure = table(replace(ALL, steps=(-0.01, 0.0, 0.0, 0.0, 0.01)))
    assert doubt(SERVER, 0.1, sure, own).factors("steps", 0.9) == pytest.approx((exp(-0.01), exp(0.01)))


def test_nobody_is_confident_of_a_range_that_says_nothing() -> None:
    measured = replace(BAD, known_bad=False)
    narrow, wide = (replace(measured, steps=(-end, -0.3, 0.0, 0.3, end)) for end in (0.6, 3.0))
    assert doubt(SERVER, nan, table(ALL, narrow)).grade[0] == "high"
    word, why = doubt(SERVER, nan, table(ALL, wide)).grade
    assert (word, why[:14]) == ("low", "steps may take")


def test_shares_of_servers_stay_below_factors() -> None:
    found = doubt(SERVER, nan, table(ALL))
    assert [found.below("steps", share) for share in QUANTILES] == pytest.approx([exp(log_) for log_ in ALL.steps])
    assert exp(0.1) < found.below("steps", 0.85) < exp(0.4)


def test_a_pool_says_which_servers_are_like_it() -> None:
    engine = Engine(preset="sglang-0.5", tensor_parallel_size=2)
    pool = Pool(load_model("Qwen/Qwen3-32B-FP8"), device("h100"), engine)
    assert server_key(pool.spec()) == (
        *("sglang", "Qwen3ForCausalLM", "h100_sxm"),
        *(pool.spec()["quantization"], "Qwen/Qwen3-32B-FP8", "TP2"),
    )
    moe = Engine(tensor_parallel_size=1, data_parallel_size=2, enable_expert_parallel=True)
    assert server_key(Pool(load_model("Qwen/Qwen3-30B-A3B"), device("h100"), moe).spec()).layout == "TP1 DP2 EP"


def test_the_file_is_of_whole_groups() -> None:
    groups = served_groups()
    assert () in groups
    for key, group in groups.items():
        assert len(key) <= len(KEYS)
        for logs in (group.steps, group.first_token):
            assert list(logs) == sorted(logs)
        assert group.known_bad or group.points <= groups[()].points


def test_evidence_is_said_in_words() -> None:
    assert doubt(SERVER, nan, table(ALL, ENGINE)).words.startswith("40 points of 3 models, all devices, vllm: -")
    assert BAD.words == "40 points of x on h100_sxm, vllm"
    assert span((0.96, 1.19)) == "-4…+19 %"
    assert span((0.3, 12.0)) == "×0.3…12"
    assert span((0.4, 3.0)) == "-60…+200 %"
    assert (span((0.39, 1.0)), span((1.0, 3.01))) == ("×0.39…1", "×1…3")


def test_kernels_twice_as_uncertain_widen_both_bands_each_by_its_own() -> None:
    """Twice the group's error of 0.1, and steps 1.5 and first tokens 3 times as wide as the quantiles say."""
    found = doubt(SERVER, 0.2, table(replace(ALL, width=(1.5, 3.0))))
    assert found.factors("steps", 0.9) == pytest.approx((exp(-1.2), exp(1.2)))
    assert found.factors("first_token", 0.9) == pytest.approx((exp(-4.8), exp(4.8)))
    surer = doubt(SERVER, 0.05, table(ALL))
    assert surer.factors("steps", 0.9) == pytest.approx((exp(-0.4), exp(0.4)))


def test_an_estimate_moves_to_the_middle_of_servers_like_it_on_its_device() -> None:
    group = replace(ENGINE, key=SERVER[:3], points=30, steps=(-0.1, 0.0, 0.05, 0.1, 0.2))
    assert doubt(SERVER, 0.1, table(ALL, ENGINE, group)).shift == pytest.approx(0.05 * 4 / (4 + PRIOR))
    skewed = replace(ENGINE, steps=(-0.2, 0.0, 0.1, 0.2, 0.3))
    assert doubt(SERVER._replace(device="b200_sxm"), 0.1, table(ALL, skewed, group)).shift == 0.0
    assert doubt(SERVER, 0.1, table(ALL, group, BAD)).shift == 0.5
    assert doubt(SERVER, 0.1, table(ALL, group), Agreement(SERVER, 0.01, -0.02)).shift == 0.0
