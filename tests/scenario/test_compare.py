"""Comparisons: each variant is what `run` would give, differences are taken seed by seed, under common requests."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.metrics import comparison_json, spread, summary, summary_json
from windtunnel.scenario import Goals, Scenario, Server, vary
from windtunnel.scenario.compare import compare, require_names
from windtunnel.scenario.load_flags import Load
from windtunnel.simulate.simulate import simulate

LOAD = Load(random_input_len=400, random_output_len=60, random_range_ratio=0.8, num_prompts=150, request_rate=25.0)
BASE = Scenario(Server("Qwen/Qwen3-8B"), load=LOAD, goals=Goals(goodput=("ttft:60",)))


def documents(scenario: Scenario, seeds: range) -> list[dict[str, Any]]:
    """What `run` says under each seed."""
    return [
        summary_json(summary(simulate(scenario.deployment(), scenario.load.workload(seed), seed), BASE.goals.limits()))
        for seed in seeds
    ]


def test_each_variant_is_the_run_of_its_scenario() -> None:
    found = compare(BASE, {"few": {"max_num_seqs": 8}, "two": {"replicas": 2, "router": "random"}}, seeds=3)
    assert [variant.name for variant in found.variants] == ["baseline", "few", "two"]
    assert [variant.words for variant in found.variants] == [
        {}, {"max_num_seqs": 8}, {"replicas": 2, "router": "random"},
    ]  # fmt: skip
    for variant in found.variants:
        own = documents(vary(BASE, variant.words), range(3))
        assert list(variant.documents) == own
        assert variant.intervals["ttft.p99"] == spread(own)["ttft.p99"]
        assert variant.loads == found.baseline.loads
    assert len(set(found.baseline.loads)) == 3
    assert found.baseline.differences["e2el.mean"].mean == 0.0


def test_a_variant_without_a_change_differs_in_nothing() -> None:
    found = compare(BASE, {"same": BASE}, seeds=2)
    assert not any(interval.differs for interval in found.variants[1].differences.values())


def test_common_requests_narrow_the_interval() -> None:
    """The paired interval of the mean E2EL is less than a fifth of what independent seeds would give."""
    found = compare(BASE, {"sync": {"async_scheduling": False}}, seeds=6)
    name, varied = "e2el.mean", found.variants[1]
    independent = math.hypot(found.baseline.intervals[name].half_width, varied.intervals[name].half_width)
    assert varied.differences[name].half_width < independent / 5
    assert varied.differences[name].differs


def test_a_variant_may_change_the_load() -> None:
    found = compare(BASE, {"slow": {"request_rate": 5.0}}, seeds=2)
    assert set(found.variants[1].loads).isdisjoint(found.baseline.loads)
    assert found.variants[1].differences["queue.mean"].mean < 0


def test_one_seed_has_differences_without_intervals() -> None:
    found = compare(BASE, {"few": {"max_num_seqs": 8}}, seeds=1)
    difference = found.variants[1].differences["ttft.mean"]
    assert difference.mean > 0
    assert math.isnan(difference.half_width)
    document = comparison_json(found)
    assert document["variants"][1]["differences"]["ttft.mean"]["low"] is None
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_the_document_names_every_number_of_every_run() -> None:
    found = compare(vary(BASE, {"request_rate": "inf"}), {"few": {"max_num_seqs": 8, "request_rate": 9}}, seeds=2)
    document = comparison_json(found)
    assert document["seeds"] == [0, 1]
    variant = document["variants"][1]
    assert variant["words"] == {"max_num_seqs": 8, "request_rate": 9.0}
    assert set(variant["intervals"]) == set(variant["differences"]) == set(spread(variant["runs"]))


def test_a_load_that_no_seed_changes_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [json.dumps({"arrival": second, "prompt_tokens": 50, "output_tokens": 9}) for second in range(9)]
    file.write_text("\n".join(rows), encoding="utf-8")
    found = compare(
        vary(Scenario(Server("Qwen/Qwen3-8B")), {"trace": str(file)}), {"few": {"max_num_seqs": 8}}, seeds=2
    )
    assert any("same under every seed" in text for text in found.warnings)


def test_goals_hold_if_every_run_of_every_variant_keeps_them() -> None:
    tight = {"few": {"max_num_seqs": 2}}
    assert compare(BASE, tight, seeds=2).meets_goals()
    assert not compare(BASE, tight, seeds=2).meets_goals(attainment=0.5)
    assert not compare(vary(BASE, {"slo": "ttft_p99=0.2"}), tight, seeds=2).meets_goals()
    assert compare(vary(BASE, {"slo": "ttft_p99=60"}), tight, seeds=2).meets_goals()


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ({}, "at least one variant"),
        ({"baseline": {"max_num_seqs": 8}}, "name of the scenario itself"),
        ({"other": {"seed": 3}}, "same seeds, from 0 on"),
        ({"other": {"max_num_seq": 3}}, "variant 'other': unknown key 'max_num_seq': did you mean 'max_num_seqs'"),
        ({"other": {"model": "Qwen/Qwen3-8"}}, "Qwen/Qwen3-8B"),
        ({"other": {"max_model_len": 40_000_000}}, "max_model_len=40000000"),
    ],
)
def test_mistakes_are_named_before_anything_is_simulated(variants: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare(BASE, variants)


@pytest.mark.parametrize(("words", "message"), [({"seeds": 0}, "seeds=0"), ({"confidence": 1.0}, "confidence=1")])
def test_counts_that_mean_nothing_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare(BASE, {"few": {"max_num_seqs": 8}}, **words)


def test_names_are_looked_up_before_anything_is_simulated() -> None:
    require_names(vary(BASE, {"scheduler": "sarathi"}).deployment())
    with pytest.raises(InputError, match="unknown scheduler 'sarahti': did you mean 'sarathi'"):
        require_names(vary(BASE, {"scheduler": "sarahti"}).deployment())
    with pytest.raises(InputError, match="unknown router"):
        require_names(vary(BASE, {"router": "best"}).deployment())
