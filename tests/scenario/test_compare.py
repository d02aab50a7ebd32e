"""Comparisons: each variant is what `run` would give, differences are taken seed by seed, under common requests."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.metrics import comparison_json, spread, summary, summary_json
from windtunnel.scenario import Goals, Scenario, Server, vary
from windtunnel.scenario.compare import compare, require_names
from windtunnel.scenario.load_flags import Load
from windtunnel.simulate.simulate import batch_times, simulate

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


OWN = """
from windtunnel import Decision


class FCFS:
    def schedule(self, now, waiting, running, limits):
        tokens, free = {}, limits.num_blocks - sum(request.num_blocks for request in running)
        budget, seats = limits.max_num_batched_tokens, limits.max_num_seqs - len(running)
        for request in running:
            tokens[request] = min(request.num_tokens - request.num_computed_tokens, budget)
            free -= limits.blocks(request.num_computed_tokens + tokens[request]) - request.num_blocks
            budget -= tokens[request]
        for request in waiting[:seats]:
            free -= limits.blocks(request.num_tokens)
            if free < 0 or not budget:
                break
            tokens[request] = min(request.num_tokens, budget)
            budget -= tokens[request]
        return Decision(tokens)
"""


def test_the_engines_own_rules_written_by_a_user_differ_in_nothing(tmp_path: Path) -> None:
    """First come first served under default flags: the same times, which host work beside the GPU is part of."""
    (tmp_path / "mine.py").write_text(OWN)
    found = compare(BASE, {"own": {"scheduler": f"{tmp_path / 'mine.py'}:FCFS"}}, seeds=2)
    for name in ("ttft.mean", "tpot.mean", "e2el.p99", "output_throughput"):
        assert found.variants[1].differences[name].mean == pytest.approx(0.0, abs=1e-9)
    assert not any("async_scheduling" in text for text in found.warnings)


def test_a_variant_that_decides_at_another_time_says_so() -> None:
    found = compare(BASE, {"other": {"scheduler": "sarathi"}, "sync": {"async_scheduling": False}}, seeds=1)
    said = [text for text in found.warnings if "async_scheduling" in text]
    assert len(said) == 1
    assert said[0].startswith("other: cannot have the baseline's async_scheduling=true: for a fair comparison")


def test_no_variant_has_a_lead_that_another_cannot_have() -> None:
    """Sarathi decides when a step has ended: so do all, the baseline too, unless a word says otherwise."""
    found = compare(BASE, {"other": {"scheduler": "sarathi"}, "few": {"max_num_seqs": 8}}, seeds=1, bands=False)
    alone = compare(vary(BASE, {"async_scheduling": False}), {"few": {"max_num_seqs": 8}}, seeds=1, bands=False)
    assert [one.documents for one in found.variants if one.name != "other"] == [one.documents for one in alone.variants]
    assert [text for text in found.warnings if "async_scheduling=false: not every variant can" in text]


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


# --- measured servers -------------------------------------------------------------------------------------------------


def test_a_difference_on_measured_servers_is_the_variant_with_other_steps() -> None:
    found = compare(BASE, {"wide": {"tensor_parallel_size": 2}}, seeds=2)
    wide = found.variants[1]
    assert wide.ends is not None
    assert wide.ends.divergence.differ == ("layout",)
    deployment, factors = vary(BASE, wide.words).deployment(), wide.ends.divergence.factors("steps")
    for factor, end in zip(factors, wide.ends.differences["tpot.mean"], strict=True):
        tables = [table.scaled(factor) for table in batch_times(deployment, "auto")]
        run = summary_json(summary(simulate(deployment, BASE.load.workload(0), 0, tables=tables)))
        before, after = wide.documents[0]["tpot"]["mean"], run["tpot"]["mean"]
        down = wide.intervals["tpot.mean"].mean * (after / before - 1)
        assert end == pytest.approx(wide.differences["tpot.mean"].mean + (down if after < before else after - before))
    assert wide.ends.differences["cost_per_hour"][0] == pytest.approx(wide.differences["cost_per_hour"].mean)
    span = found.span(wide, "tpot.mean")
    assert span is not None
    assert span[0] < 1 + found.relative(wide, "tpot.mean").mean < span[1]
    said = json.loads(json.dumps(comparison_json(found)))["variants"]
    assert "servers_90" not in said[0]
    assert said[1]["servers_90"]["differences"]["tpot.mean"] == pytest.approx(wide.ends.differences["tpot.mean"])


def test_the_nearer_two_batches_are_the_surer_is_their_difference() -> None:
    words: dict[str, dict[str, Any]] = {
        "near": {"max_num_seqs": 60},
        "far": {"max_num_seqs": 4},
        "sync": {"async_scheduling": False},
    }
    near, far, sync = (variant.ends for variant in compare(BASE, words, seeds=1).variants[1:])
    assert near is not None
    assert far is not None
    assert sync is not None
    assert (near.divergence.octaves or 0.0) < 0.1 < (far.divergence.octaves or 0.0)
    assert near.divergence.factors("steps")[1] < 1.05 < far.divergence.factors("steps")[1]
    assert sync.divergence.octaves == 1.0  # the same batches, but other steps
    unchanged = compare(BASE, {"same": BASE, "far": words["far"]}, seeds=1, bands=False).variants
    assert [variant.ends for variant in unchanged] == [None] * 3
    assert compare(BASE, {"same": BASE}, seeds=1).variants[1].ends is None  # nothing differs


def test_a_variant_that_cannot_keep_up_at_an_end_is_overloaded_there() -> None:
    load = replace(LOAD, num_prompts=1500, request_rate=45.0)
    found = compare(replace(BASE, load=load), {"wide": {"tensor_parallel_size": 2, "max_num_seqs": 8}}, seeds=1)
    ends = found.variants[1].ends
    assert ends is not None
    assert math.isinf(ends.differences["ttft.p99"][1])
    assert comparison_json(found)["variants"][1]["servers_90"]["differences"]["ttft.p99"][1] is None
    assert math.isfinite(ends.differences["tpot.mean"][1])
