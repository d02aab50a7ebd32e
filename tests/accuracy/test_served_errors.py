"""Served errors: the bands of points that decide, checked on points that decide nothing."""

import re
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.accuracy.points import Measured, measured
from benchmarks.accuracy.served_errors import (
    GROUP,
    Held,
    around_other_loads,
    checked,
    elsewhere,
    evenly,
    groups,
    halves,
    known_separate,
    left_out,
    plain_groups,
    render,
    report,
    shifted,
)
from windtunnel.metrics.evidence import Separate, ServerKey, separate_workers
from windtunnel.validation.served_points import Point
from windtunnel.validation.served_replay import Result, row


def drawn(models: int = 3, loads: int = 8, clients: int = 6, seed: int = 0) -> list[Measured]:
    """Points of two engines whose latencies miss the simulated ones by a normal law in logs, each model's its own."""
    random, found = np.random.default_rng(seed), []
    for engine in ("sglang", "vllm"):
        for model in range(models):
            bias = random.normal(0.0, 0.03)
            for layout in ("TP1", "TP2"):
                server = ServerKey(engine, f"Family{model}", "h100_sxm", "fp8", f"m/{model}", layout)
                for load in range(loads):
                    for _ in range(clients):
                        steps, first = random.normal(bias, 0.1), random.normal(0.1, 0.2)
                        found.append(Measured(server, f"{server}", f"{load}", 0.1, steps, first))
    return found


def test_halves_share_servers_and_loads_but_no_load_of_a_server() -> None:
    points = drawn()
    one, other = halves(points)
    assert sorted(map(id, one + other)) == sorted(map(id, points))
    for name in ("setup", "load"):
        assert {getattr(each, name) for each in one} == {getattr(each, name) for each in other}
    assert not {(each.setup, each.load) for each in one} & {(each.setup, each.load) for each in other}


def test_bands_hold_nine_tenths_of_the_half_that_decides_nothing() -> None:
    found = checked(drawn())
    assert np.mean([one.steps for one in found]) == pytest.approx(0.9, abs=0.05)
    assert np.mean([one.first_token for one in found]) == pytest.approx(0.9, abs=0.05)


def test_bands_of_other_groups_hold_a_group_like_them() -> None:
    assert np.mean([one.steps for one in left_out(drawn())]) > 0.8


def test_elsewhere_a_family_on_a_device_weighs_as_its_loads_and_the_own_family_more() -> None:
    point = replace(drawn()[0], first_token=0.0)

    def of(family: str, device: str, steps: float, number: int, loads: int) -> list[Measured]:
        server = ServerKey("vllm", family, device, "fp8", family, "TP1")
        return [replace(point, server=server, steps=steps, load=str(each % loads)) for each in range(number)]

    points = of("A", "h100_sxm", 0.0, 900, 12) + of("B", "h100_sxm", 0.5, 36, 36) + of("B", "h200_sxm", 1.0, 36, 36)
    # A weighs 12/16 and each of B 36/40: A has 5/17, each of B 6/17
    assert elsewhere(points, ())[0] == (0.0, 0.0, 0.5, 1.0, 1.0)
    # the two of B weigh 1.8 / (1.8 + 4) before: A has 4/5.8 · 5/17, a fifth
    assert elsewhere(points, ("vllm", "B"))[0] == (0.0, 0.5, 0.5, 1.0, 1.0)
    assert elsewhere(points + of("C", "h100_sxm", 9.0, 4, 4), ()) == elsewhere(points, ())  # few points say nothing


def test_the_worth_of_a_shift_is_that_of_points_that_decide_nothing() -> None:
    slow = [replace(one, steps=one.steps + 0.2, first_token=one.first_token + 0.4) for one in drawn()]
    words = re.findall(r"[\d.]+(?=%)", shifted(slow))
    before, halved, alone, first, first_halved = map(float, words[:5])
    assert before == pytest.approx(18, abs=2) and halved < 8 and alone < 8
    assert first == pytest.approx(39, abs=3) and first_halved < 18
    assert shifted(slow).endswith("Of 6 groups of 50 points 6 are beyond 12% (tpot) or 22% (ttft), 0 so moved.")


def test_groups_of_30_points_are_even_from_75_to_99_per_cent() -> None:
    point = drawn()[0]
    shares = {"A": (75, 74), "B": (99, 100), "C": (100, 90)}
    found = [
        Held(replace(point, server=point.server._replace(family=name)), i < steps, i < first, 0.1, known_bad=False)
        for name, (steps, first) in shares.items()
        for i in range(100)
    ]
    few = [replace(one, one=replace(point, server=point.server._replace(family="D"))) for one in found[:29]]
    assert evenly(found + few) == "2 (tpot) and 1 (ttft) of 3 such groups are held to 75% to 99%"


def test_a_measurement_under_two_names_counts_once() -> None:
    line = {
        **dict.fromkeys(("family", "dtype", "layout"), "x"),
        **{"backend": "vllm", "system": "h100_sxm", "checkpoint": "a", "version": "1", "isl": 10, "osl": 20},
        **{"concurrency": 4, "kernel_error": 0.1, "reason": "", "unreadable": ""},
        **{"ttft_measured": 0.1, "tpot_measured": 0.02, "ttft_simulated": 0.1, "tpot_simulated": 0.01},
    }
    found = measured([line, line | {"checkpoint": "b"}, line | {"concurrency": 8}, line | {"reason": "too large"}])
    assert [(one.server.model, one.clients) for one in found] == [("a", "4"), ("a", "8")]


def test_what_is_known_to_be_wrong_widens_no_other_band() -> None:
    points = drawn()
    off = [replace(one, steps=one.steps + 1.0) if one.server.model == "m/0" else one for one in points]
    sound = plain_groups([one for one in points if one.server.model != "m/0"])
    found = plain_groups(off)
    assert found[()] == sound[()]
    assert {group.models for group in found.values() if group.known_bad} == {("m/0",)}
    assert {key[:GROUP][0] for key, group in found.items() if group.known_bad} == {"sglang", "vllm"}


def test_unreadable_points_decide_nothing() -> None:
    points = drawn()
    strange = [replace(one, steps=9.0, unreadable=True) for one in points[::20]]
    assert groups(points + strange) == groups(points)
    most = [replace(one, unreadable=True) for one in points if one.server.model == "m/0"][::3]
    named = {group.models for group in groups(points + most).values() if group.known_bad}
    assert named == {("m/0",)}


def test_other_loads_are_told_apart_from_their_server() -> None:
    server = drawn(1)[0].server
    steps = {"a": 0.1, "b": 0.1, "c": 0.4}
    points = [Measured(server, "one", load, 0.1, value, 0.0) for load, value in steps.items() for _ in range(4)]
    assert around_other_loads(points, "steps")[-1] == pytest.approx(0.3)
    assert around_other_loads(points, "first_token") == [0.0] * 5


def test_points_are_read_from_what_validate_writes() -> None:
    point = Point("a", "agg", "vllm", "0.19.0", "m", "", "h100_sxm", 100, 10, 4, 1, 1, False, 0.2, 0.02)
    key = ServerKey("vllm", "F", "h100_sxm", "fp8", "m/1", "TP1")
    rows = [row(Result(point, 0.1, 0.02, 0.0, 0.05, key)), row(Result(replace(point, id="b"), reason="because"))]
    (found,) = measured(rows)
    assert found.server == key
    assert found.first_token == pytest.approx(np.log(2.0))
    assert found.steps == 0.0


def test_the_file_and_the_report_name_every_group() -> None:
    points = drawn(2, 4)
    separate = {("sglang", "long"): Separate(-0.05, 0.18, 27, "sglang", "long", ("F",))}
    text, said = render(points, separate), report(points)
    for engine in ("sglang", "vllm"):
        assert f'key = ["{engine}", "Family0", "h100_sxm"]' in text
        assert f"| {engine} | Family0 | h100_sxm | 48 |" in said
    assert "[other_loads.vllm]" in text
    assert text.endswith(
        '[separate_workers.sglang.long]\nfamilies = ["F"]\npoints = 27\nsteps = -0.050\nfirst_token = 0.180\n'
    )


def test_what_the_file_says_of_separate_workers_stays() -> None:
    server = ServerKey("sglang", "DeepseekV3ForCausalLM", "gb200", "fp8", "m", "TP8")
    assert known_separate()["sglang", "short"] == separate_workers(server, 1024)
