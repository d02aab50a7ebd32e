"""The experiments on separate stages: what the page says holds, and the page is what the command writes."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from benchmarks.disaggregation import fits, placement, queueing, splitwise
from benchmarks.disaggregation.__main__ import EXPERIMENTS, FOLDER, files
from benchmarks.disaggregation.machine import LAWS, Side, apart, chat, serve
from benchmarks.page import PLACE
from windtunnel.perf.database import find_systems
from windtunnel.perf.step_law import fit

NAMES = re.compile(r"\{(\w+)")
HAS_DATA = LAWS.is_file() and splitwise.TABLE.is_file() and find_systems() is not None

pytestmark = pytest.mark.skipif(not HAS_DATA, reason="the papers' step times are not beside the checkout")


def test_the_crossover_is_where_both_formulas_are_equal() -> None:
    for speed_up in (1.1, 1.5, 1.9):
        rate = queueing.crossover(speed_up)
        assert queueing.tensor_parallel(speed_up, rate) == pytest.approx(queueing.pipelined(rate), rel=1e-9)
        assert queueing.tensor_parallel(speed_up, 0.9 * rate) < queueing.pipelined(0.9 * rate)


def test_two_gpus_that_are_twice_as_fast_never_lose_to_a_pipeline() -> None:
    for rate in np.linspace(0.1, 1.9, 7) / queueing.SECONDS:
        assert queueing.tensor_parallel(2.0, float(rate)) < queueing.pipelined(float(rate))


def test_a_fit_of_a_law_is_the_law() -> None:
    """Steps of a law are fitted without error, on prompts and on both sizes of batches."""
    times = Side(2).tables().times
    found = fits.errors(fit(*fits.samples(times, 1)), *fits.samples(times, 2))
    assert max(found) < 1e-9


def test_more_decode_replicas_lower_the_time_per_token() -> None:
    load = chat(8.0, 300)
    means = [float(np.nanmean(serve(apart((2, 1), (1, count)), load).tpot)) for count in (1, 2, 4)]
    assert means == sorted(means, reverse=True)
    assert means[0] > 1.05 * means[2]


def test_splitwises_table_is_read_at_its_points() -> None:
    prompts, steps = splitwise.curves("h100-80gb")
    times = splitwise.tables("h100-80gb").times
    assert times.batch(0, 0, [(1024, 0)]) == pytest.approx(dict(prompts)[1024.0])
    assert times.batch(32, 32 * 100, []) == pytest.approx(dict(steps)[32.0])
    assert times.batch(32, 32 * 100, [(1024, 0)]) == pytest.approx(dict(prompts)[1024.0] + dict(steps)[32.0], rel=0.02)


@pytest.fixture(scope="module")
def facts() -> Mapping[str, Mapping[str, Any]]:
    return {name: module.findings().facts for name, module in EXPERIMENTS.items()}


def test_the_claims_of_the_page_hold(facts: Mapping[str, Mapping[str, Any]]) -> None:
    found = facts["interference"]
    assert 1.2 < found["decodes_least"] < found["decodes_most"]
    assert found["decodes_most"] > 2 * found["prompt_most"]
    found = facts["saturation"]
    assert found["short"] > 3
    assert found["long"] < 1.3
    assert found["decodes"] > 20
    assert found["tp2"] > found["tp4"] > 1 > found["per_gpu"]
    assert found["pp4"] > 1.5 * found["tp4_speed"]
    found = facts["queueing"]
    assert found["worst"] < 0.01
    assert found["later_least"] > 0.05
    found = facts["fits"]
    assert found["prompts"] < 0.02
    assert max(found["one"], found["two"]) < 0.05
    found = facts["placement"]
    assert found["winner"] == "prefill TP 2, decode TP 1"
    assert found["summaries"] > 1.5
    assert found["summaries_loose"] < 1
    assert found["spread"] > 1.3
    found = facts["splitwise"]
    assert min(found["power"], found["cost"]) > 1.2
    assert found["power_best"] == "HH capped"
    assert found["cost_best"] == "AA"
    assert found["capped"] > 1.1
    found = facts["transfers"]
    assert found["worst"] < 0.07
    assert found["h20"] < 0.15


def test_the_page_is_what_the_command_writes() -> None:
    now = files()
    assert {name: (PLACE / name).read_text(encoding="utf-8") for name in now} == now


def test_every_experiment_is_on_the_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} - {"intro"} == set(EXPERIMENTS)
    assert placement in EXPERIMENTS.values()
    for name in EXPERIMENTS:
        text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert NAMES.search(text)
        assert re.findall(r"\]\(([\w-]+\.svg)\)", text), name
