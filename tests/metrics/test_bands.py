"""Bands: time scales, so the band of a run is that of the same load at the same share of the capacity."""

import json
from dataclasses import replace
from math import inf, log, nan
from typing import Any

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.cli import main
from windtunnel.deployment import SLO, Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.metrics import Bands, Uncertainty, bands, client_json, summary, summary_json
from windtunnel.metrics.bands import least_certain
from windtunnel.metrics.ends import End, end_of
from windtunnel.metrics.evidence import Doubt, Group, Separate, separate_workers, server_key
from windtunnel.model import load_model
from windtunnel.simulate.bounds import capacity, with_perfect_kernels
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload import at_rate
from windtunnel.workload.columns import Workload

POOL = Pool(load_model("Qwen/Qwen3-0.6B"), device("l40s"), Engine(max_model_len=2048, max_num_seqs=8))
DEPLOYMENT = Deployment((POOL,))
LOAD = Workload.from_columns(
    arrival=[0.02 * i for i in range(400)], prompt_tokens=[100 + i % 80 for i in range(400)], output_tokens=30
)
TABLES = batch_times(DEPLOYMENT, "modelled", cache=False)


@pytest.fixture(scope="module")
def around() -> Bands:
    return bands(simulate(DEPLOYMENT, LOAD, tables=TABLES))


def test_slower_steps_under_a_slower_load_are_the_same_run_in_slow_motion(around: Bands) -> None:
    low, high = around.factors("tpot")
    for factor in (low, high):
        slow = simulate(
            DEPLOYMENT, at_rate(LOAD, LOAD.request_rate / factor), tables=[table.scaled(factor) for table in TABLES]
        )
        for name in ("ttft", "tpot", "e2el", "queue"):
            for statistic, value in client_json(slow)[name].items():
                assert value == pytest.approx(factor * around.said[name][statistic], rel=1e-6, abs=1e-9)


def test_the_capacity_is_what_a_queue_is_served_with_and_scales_too() -> None:
    most = capacity(DEPLOYMENT, LOAD, 0, TABLES)
    assert most is not None
    slow = capacity(DEPLOYMENT, LOAD, 0, [table.scaled(2.0) for table in TABLES])
    assert slow == pytest.approx(most / 2, rel=1e-6)
    for share, grows in ((0.8, False), (1.2, True)):
        queue = simulate(DEPLOYMENT, at_rate(LOAD, share * most), tables=TABLES).requests
        waits = queue.scheduled - queue.arrival
        assert (np.median(waits[-40:]) > 3 * np.median(waits[40:80]) + 0.1) == grows


def test_a_closed_loop_and_a_load_at_once_have_no_capacity() -> None:
    assert capacity(DEPLOYMENT, replace(LOAD, max_concurrency=4), 0, TABLES) is None
    assert capacity(DEPLOYMENT, at_rate(LOAD, float("inf")), 0, TABLES) is None


@pytest.mark.parametrize(("share", "said"), [(0.1, None), (0.99, "overloaded at the upper end"), (1.3, "overloaded")])
def test_a_load_says_whether_it_is_too_much(around: Bands, share: float, said: str | None) -> None:
    loaded = replace(around, request_rate=share * 40.0, capacity=40.0)
    assert loaded.overloaded == said
    assert (said or "capacity") in dict(loaded.words())["capacity"] + "capacity"


def test_no_band_goes_below_perfect_kernels(around: Bands) -> None:
    perfect = client_json(with_perfect_kernels(DEPLOYMENT, LOAD, 0))
    close = {name: {key: 0.999 * around.said[name][key] for key in around.said[name]} for name in ("ttft", "tpot")}
    for bound in (perfect, perfect | close):
        found = replace(around, perfect=bound)
        for name in ("ttft", "tpot", "itl", "e2el", "queue"):
            for statistic, value in around.said[name].items():
                ends = found.around(name, statistic)
                assert ends is not None
                assert min(bound[name][statistic], value) <= ends[0] <= value <= ends[1]


def test_the_band_of_a_whole_request_lies_between_its_parts(around: Bands) -> None:
    for place in (0, 1):
        parts = sorted((around.factors("ttft")[place], around.factors("tpot")[place]))
        assert parts[0] <= around.factors("e2el")[place] <= parts[1]


def test_a_run_in_python_has_bands() -> None:
    found = wt.bands(wt.simulate(DEPLOYMENT, LOAD, perf="modelled"))
    low, high = found.around("ttft", "p95") or (0, 0)
    assert low < found.said["ttft"]["p95"] < high
    half = found.around("ttft", "p95", 0.5)
    assert half is not None
    assert low <= half[0] <= half[1] <= high


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    load = ["--model", "Qwen/Qwen3-0.6B", "--device", "l40s", "--isl", "100", "--osl", "20", "--num-prompts", "200"]
    assert main(["run", *load, "--request-rate", "5", *more]) == 0
    return capsys.readouterr().out


def test_a_command_says_between_which_values(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(printed(capsys, "--json"))
    found = document["bands"]
    low, high = found["ttft"]["p99"]
    assert low < document["ttft"]["p99"] < high
    assert document["roofline"]["tpot"]["mean"] < document["tpot"]["mean"]
    assert found["capacity"]["ends"][0] < found["capacity"]["request_rate"] < found["capacity"]["ends"][1]
    assert "bands" not in json.loads(printed(capsys, "--no-bands", "--json"))


def test_the_table_fits_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--verbose").splitlines()
    rule = next(line for line in lines if "───" in line)
    assert len(rule.rstrip()) <= 80
    assert any(line.startswith("evidence") for line in lines)
    assert "p99 on a real server" in lines[lines.index(rule) - 1]


def test_limits_are_kept_by_a_band_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(printed(capsys, "--goodput", "ttft:20", "tpot:3", "--json"))
    slow, fast = document["bands"]["attainment"]
    assert slow <= document["attainment"] <= fast
    assert slow < fast
    assert "% of requests on a real server" in document["bands"]["words"]["within goal"]


def test_a_band_without_width_is_one_figure(capsys: pytest.CaptureFixture[str]) -> None:
    words = json.loads(printed(capsys, "--goodput", "e2el:100000", "--json"))["bands"]["words"]
    assert words["within goal"] == "100.0 % of requests on a real server, at this rate"


def test_a_cost_is_as_many_times_higher_as_steps_take_longer() -> None:
    run = simulate(DEPLOYMENT, LOAD, tables=TABLES)
    found = bands(run, summary_json(summary(run)))
    value = found.said["cost_per_million_output_tokens"]
    assert found.cost == pytest.approx([factor * value for factor in found.factors("tpot")])
    assert found.to_json()["cost_per_million_output_tokens"] == list(found.cost or ())
    assert bands(run).cost is None  # what a client sees says nothing of money


# --- ends -------------------------------------------------------------------------------------------------------------


def end(factors: tuple[float, float], load: Workload = LOAD) -> End:
    run = simulate(DEPLOYMENT, load, tables=[table.scaled(factors[0]) for table in TABLES])
    return end_of(run, factors, SLO(ttft=1.0))


def test_an_end_is_the_load_as_it_comes_on_a_slower_server() -> None:
    slow, later = end((1.5, 1.5)), end((1.5, 3.0))
    plain = summary_json(summary(simulate(DEPLOYMENT, LOAD, tables=[table.scaled(1.5) for table in TABLES])))
    assert slow.said["tpot"] == plain["tpot"]
    for statistic in ("mean", "p99"):
        assert later.said["ttft"][statistic] == pytest.approx(2 * slow.said["ttft"][statistic])
        assert later.said["tpot"][statistic] == slow.said["tpot"][statistic]
    # its mean differs by what first tokens come later
    assert later.said["e2el"]["mean"] - slow.said["e2el"]["mean"] == pytest.approx(slow.said["ttft"]["mean"])
    assert later.said["attainment"] <= slow.said["attainment"]


def test_at_an_unchanged_rate_a_band_is_what_the_ends_say(around: Bands) -> None:
    ends = end((0.9, 0.9)), end((1.2, 1.2))
    found = replace(around, ends=ends, unchanged_rate=True)
    assert found.around("tpot", "p90") == (ends[0].said["tpot"]["p90"], ends[1].said["tpot"]["p90"])
    assert found.around("tpot", "p90", 0.5) is None  # these ends were not simulated
    document = found.to_json()
    assert document["at"] == "rate"
    assert document["at_unchanged_rate"]["overloaded"] == [False, False]
    assert document["attainment"] == document["at_unchanged_rate"]["attainment"]
    assert "this load at this rate" in document["words"]["ranges"]
    assert replace(around, ends=ends).to_json()["at"] == "share"


def test_an_overload_has_no_upper_end(around: Bands) -> None:
    found = replace(around, ends=(end((1.0, 1.0)), end((40.0, 40.0))), unchanged_rate=True)
    assert found.ends is not None
    assert found.ends[1].overloaded
    assert found.shown("ttft").endswith("%…overloaded")
    assert found.shown("tpot") == "×1…39"  # a token takes as long as in the fullest batch, however long the load lasts
    assert found.to_json()["ttft"]["mean"][1] is None
    assert replace(found, ends=(found.ends[1], found.ends[1])).shown("e2el") == "overloaded"


def test_a_command_says_what_an_unchanged_rate_does(capsys: pytest.CaptureFixture[str]) -> None:
    share, rate = (json.loads(printed(capsys, "--bands", words, "--json"))["bands"] for words in ("share", "rate"))
    assert (share["at"], rate["at"]) == ("share", "rate")
    assert share["at_unchanged_rate"] == rate["at_unchanged_rate"]
    assert rate["tpot"]["mean"][1] > share["tpot"]["mean"][0]
    assert main(["run", "--bands", "both"]) == 2
    assert '"share", "rate"' in capsys.readouterr().err


def test_a_load_too_short_for_its_waves_is_repeated() -> None:
    """Requests of one length that begin together end together: of a few waves more end than are served."""
    few, many = (
        Workload.from_columns(arrival=[0.02 * i for i in range(count)], prompt_tokens=[100] * count, output_tokens=30)
        for count in (16, 1600)
    )
    assert capacity(DEPLOYMENT, few, 0, TABLES) == pytest.approx(capacity(DEPLOYMENT, many, 0, TABLES), rel=0.1)


# --- by hand ----------------------------------------------------------------------------------------------------------

GROUP = Group(90, 8, 0.1, (0.0,) * 5, (0.0,) * 5, ("Qwen/Qwen3-32B",), key=("vllm", "Q", "h100_sxm"))
DOUBT = Doubt(
    tuple(log(each) for each in (0.8, 0.9, 1.0, 1.25, 1.5)),
    tuple(log(each) for each in (0.5, 0.8, 1.0, 2.0, 4.0)),
    GROUP,
)
"""Steps 0.8 to 1.5 times as long on 90 % of servers, 0.9 to 1.25 on half; first tokens 0.5 to 4, and 0.8 to 2."""
SAID: dict[str, Any] = {
    **{name: {"mean": mean, "p99": 2 * mean} for name, mean in (("ttft", 1.0), ("tpot", 0.1), ("itl", 0.1))},
    "e2el": {"mean": 4.0, "p99": 8.0},
    "queue": {"mean": 0.0, "p99": None},
    "attainment": 0.8,
    "cost_per_million_output_tokens": 2.0,
}
HAND = Bands(DOUBT, Uncertainty(0.12, 0.5, 0.02), SAID, request_rate=6.0, capacity=8.0)


def moved(shift: float) -> Doubt:
    """With another middle."""
    return replace(DOUBT, steps=(*DOUBT.steps[:2], shift, *DOUBT.steps[3:]))


def of_end(factor: float, attainment: float | None, overloaded: bool = False) -> End:
    said = {name: {key: None if value is None else factor * value for key, value in SAID[name].items()} for name in
            ("ttft", "tpot", "itl", "e2el", "queue")}  # fmt: skip
    cost = {"attainment": attainment, "cost_per_million_output_tokens": 2.0 * factor, "goodput": None}
    return End({**said, **cost, "request_throughput": 5.0, "output_throughput": 50.0 / factor}, overloaded)


def test_factors_by_hand() -> None:
    """A quarter of a whole request is its first token: 0.25 · 0.5 + 0.75 · 0.8 and 0.25 · 4 + 0.75 · 1.5."""
    assert HAND.factors("ttft") == HAND.factors("queue") == pytest.approx((0.5, 4.0))
    assert HAND.factors("tpot") == HAND.factors("itl") == pytest.approx((0.8, 1.5))
    assert HAND.factors("e2el") == pytest.approx((0.725, 2.125))
    assert HAND.factors("e2el", 0.5) == pytest.approx((0.25 * 0.8 + 0.75 * 0.9, 0.25 * 2 + 0.75 * 1.25))
    nothing = replace(HAND, said=SAID | {"e2el": {"mean": None, "p99": None}})
    assert nothing.factors("e2el") == pytest.approx((0.8, 1.5))
    late = replace(HAND, said=SAID | {"e2el": {"mean": 0.5, "p99": 1.0}})
    assert late.factors("e2el") == pytest.approx((0.5, 4.0))  # nothing but its first token
    assert HAND.around("tpot", "p99") == pytest.approx((0.16, 0.3))
    assert HAND.around("tpot", "p99", 0.5) == pytest.approx((0.18, 0.25))
    assert HAND.around("queue", "p99") is None
    assert (HAND.shown("tpot"), HAND.shown("ttft"), HAND.shown("queue")) == ("-20…+50 %", "×0.5…4", "")
    assert HAND.shown("tpot", 0.5) == "-10…+25 %"


def test_perfect_kernels_bound_the_lower_end_but_not_the_run() -> None:
    perfect = {name: {"mean": 0.09, "p99": 0.5} for name in ("tpot", "itl")} | {"e2el": {"mean": None, "p99": 1.0}}
    found = replace(HAND, perfect=perfect)
    assert found.around("tpot", "mean") == pytest.approx((0.09, 0.15))
    assert found.around("tpot", "p99") == pytest.approx((0.2, 0.3))  # no more than the run itself
    assert found.around("e2el", "mean") == pytest.approx((2.9, 8.5))


def test_the_capacity_and_what_is_used_of_it_by_hand() -> None:
    assert HAND.capacity_ends() == pytest.approx((8 / 1.5, 10.0))
    assert HAND.capacity_ends(0.5) == pytest.approx((8 / 1.25, 8 / 0.9))
    assert HAND.share == 0.75
    assert HAND.overloaded == "overloaded at the upper end"
    assert replace(HAND, request_rate=8.0).overloaded == "overloaded"
    assert replace(HAND, request_rate=5.3).overloaded is None
    assert replace(HAND, capacity=None).capacity_ends() is None
    assert replace(HAND, capacity=None).share is None
    assert replace(HAND, request_rate=None).overloaded is None


def test_what_a_reader_should_know_by_hand() -> None:
    words = dict(HAND.words())
    at = "the same load relative to each server's capacity"
    assert words["ranges"] == f"90 % of comparable servers, {at}; half of them: TPOT -10…+25 %, TTFT -20…+100 %"
    assert words["evidence"] == "90 points of Qwen3-32B on h100_sxm, vllm: -20…+50 %"
    assert (
        words["checked"]
        == "on averages of closed loops, open loads and percentiles on few servers (docs/uncertainty.md)"
    )
    assert words["model error"] == "per step: kernels ±10 %, host work ±2.0 %"
    assert words["capacity"] == "8 requests/s; 75 % used, 60 % to 112 % on a real server: overloaded at the upper end"
    assert "within goal" not in words
    assert dict(replace(HAND, request_rate=4.0).words())["capacity"].endswith(
        "50 % used, 40 % to 75 % on a real server"
    )
    unknown = replace(HAND, uncertainty=Uncertainty(nan, nan, nan), capacity=None)
    assert set(dict(unknown.words())) == {"ranges", "evidence", "checked"}


def test_ends_at_an_unchanged_rate_by_hand() -> None:
    found = replace(HAND, ends=(of_end(0.9, 0.95), of_end(2.0, 0.5)), unchanged_rate=True)
    assert found.around("tpot", "mean") == pytest.approx((0.09, 0.2))
    assert found.attainment == (0.5, 0.95)
    assert found.cost == pytest.approx((1.8, 4.0))
    words = dict(found.words())
    assert words["within goal"] == "50.0 to 95.0 % of requests on a real server, at this rate"
    assert "this load at this rate" in words["ranges"]
    document = found.to_json()
    assert document["at_unchanged_rate"] == {
        "request_throughput": [5.0, 5.0],
        "output_throughput": pytest.approx([25.0, 50 / 0.9]),
        "attainment": [0.5, 0.95],
        "cost_per_million_output_tokens": pytest.approx([1.8, 4.0]),
        "overloaded": [False, False],
    }
    worse = replace(found, ends=(of_end(0.9, 0.7), of_end(2.0, None)))
    assert worse.attainment == (0.7, 0.8)  # the run's own
    assert replace(found, ends=(of_end(1.1, 0.8), of_end(2.0, 0.8))).around("tpot", "mean") == pytest.approx((0.1, 0.2))
    share = replace(found, unchanged_rate=False)
    assert share.cost == pytest.approx((1.6, 3.0))
    assert share.around("tpot", "mean") == pytest.approx((0.08, 0.15))


def test_an_overloaded_end_by_hand() -> None:
    found = replace(HAND, ends=(of_end(0.9, 0.9), of_end(2.0, 0.0, overloaded=True)), unchanged_rate=True)
    assert found.around("ttft", "mean") == pytest.approx((0.9, inf))
    assert found.shown("ttft") == "-10 %…overloaded"
    both = replace(found, ends=(of_end(0.9, 0.9, overloaded=True),) * 2)
    assert both.shown("ttft") == "overloaded"


def test_the_document_of_a_band_by_hand() -> None:
    found = HAND.to_json()
    assert (found["level"], found["at"], found["known_bad"]) == (0.9, "share", None)
    assert found["checked"] == ["ttft.mean", "tpot.mean"]
    assert found["step_error"] == {"kernels": pytest.approx(0.1), "host": 0.02}
    assert found["factors"]["tpot"] == {"50": pytest.approx([0.9, 1.25]), "90": pytest.approx([0.8, 1.5])}
    assert found["tpot"] == {"mean": pytest.approx([0.08, 0.15]), "p99": pytest.approx([0.16, 0.3])}
    assert found["queue"] == {"mean": [0.0, 0.0], "p99": None}
    assert found["cost_per_million_output_tokens"] == pytest.approx([1.6, 3.0])
    assert found["capacity"] == {
        "request_rate": 8.0, "ends": pytest.approx([8 / 1.5, 10.0]), "share": 0.75,
        "overloaded": "overloaded at the upper end",
    }  # fmt: skip
    assert not {"attainment", "at_unchanged_rate"} & set(found)
    assert "capacity" not in replace(HAND, capacity=None).to_json()
    assert replace(HAND, said={**SAID, "cost_per_million_output_tokens": None}).cost is None


def test_the_widest_of_several_pools_counts() -> None:
    pools = [
        Pool(load_model("Qwen/Qwen3-0.6B"), device(on), Engine(max_model_len=2048)).spec() for on in ("h100", "l4")
    ]
    each = [least_certain([pool], nan, None) for pool in pools]
    widest = max(each, key=lambda one: one.steps[4] - one.steps[0])
    assert least_certain(pools, nan, None) == least_certain(pools[::-1], nan, None) == widest
    assert each[0].steps != each[1].steps


def test_the_expected_time_per_token_by_hand() -> None:
    """Half the way to 1.5 times as long is the root of it; at the same rate that end takes twice as long."""
    shifted = replace(HAND, doubt=moved(0.5 * log(1.5)))
    assert HAND.expected("mean") is None
    assert shifted.expected("mean") == pytest.approx(0.1 * 1.5**0.5)
    kept = replace(shifted, ends=(of_end(0.9, 0.95), of_end(2.0, 0.5)), unchanged_rate=True)
    assert kept.expected("mean") == pytest.approx(0.1 * 2.0**0.5)
    assert replace(kept, doubt=moved(2 * log(1.5))).expected("mean") == pytest.approx(0.2)
    faster = replace(kept, doubt=moved(0.5 * log(0.8)))
    assert faster.expected("p99") == pytest.approx(0.2 * 0.9**0.5)
    overloaded = replace(kept, ends=(of_end(0.9, 0.9), of_end(2.0, 0.0, overloaded=True)))
    assert overloaded.expected("mean") == pytest.approx(0.2**0.5 * 0.1**0.5)
    assert (
        dict(kept.words())["expected"] == "mean TPOT 141 ms: steps ×1.22, as 90 points of Qwen3-32B on h100_sxm, vllm"
    )
    assert kept.to_json()["expected"] == {
        "steps": pytest.approx(1.5**0.5),
        "tpot": {"mean": pytest.approx(0.1 * 2.0**0.5), "p99": pytest.approx(0.2 * 2.0**0.5)},
    }
    assert "expected" not in HAND.to_json()


def test_separate_workers_are_expected_where_others_of_their_engine_were() -> None:
    known = Separate(log(0.9), log(1.6), 33, "sglang", "short", ("Q",))
    found = replace(HAND, doubt=replace(moved(0.5 * log(1.5)), separate=known))
    assert found.expected("mean") == pytest.approx(0.09)
    assert found.expected_first("p99") == pytest.approx(3.2)
    assert dict(found.words())["expected"] == (
        "mean TPOT 90 ms, TTFT 1.6e+03 ms: steps ×0.90, as 33 points of separate workers of sglang with short prompts"
    )
    assert found.to_json()["expected"]["ttft"] == {"mean": pytest.approx(1.6), "p99": pytest.approx(3.2)}
    assert replace(found, doubt=replace(found.doubt, calibrated=True)).expected_first("mean") is None
    assert HAND.expected_first("mean") is None


@pytest.mark.plain_python
def test_only_a_run_with_separate_workers_of_a_measured_family_asks_for_them() -> None:
    """DeepSeek-V3's family was measured, Qwen3 was not; a model of two layers stands for it."""
    small = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    models = load_model("Qwen/Qwen3-0.6B"), load_model("deepseek-ai/DeepSeek-V3", overrides=small)
    found = {}
    for number, model in enumerate(models):
        pool = Pool(model, device("h200"), Engine(preset="sglang-0.5", max_model_len=9000))
        sides = tuple(replace(pool, role=role) for role in ("prefill", "decode"))
        for pools in ((pool,), sides):
            for tokens in (100, 8000):
                load = Workload.from_columns(arrival=[0.0], prompt_tokens=[tokens], output_tokens=4)
                run = simulate(Deployment(pools), load, perf="roofline")
                found[number, len(pools), tokens] = bands(run).doubt.separate
    server = server_key(Pool(models[1], device("h200"), Engine(preset="sglang-0.5")).spec())
    known = {tokens: separate_workers(server, tokens) for tokens in (100, 8000)}
    assert found[1, 2, 100] == known[100] != known[8000] == found[1, 2, 8000]
    assert {key for key, one in found.items() if one is not None} == {(1, 2, 100), (1, 2, 8000)}
    assert separate_workers(server._replace(engine="vllm"), 100) is None
