"""Which script served a row, and what follows from it."""

from dataclasses import replace
from typing import Any

import pytest

from windtunnel.deployment import engine_scheduler
from windtunnel.policy import Sglang, Trtllm, scheduler
from windtunnel.policy.unified import TRTLLM_GUARANTEED_NO_EVICT
from windtunnel.validation import served_points, served_replay
from windtunnel.validation.served_scripts import NO_SCRIPT, SCRIPTS, early_layout, prompt_graphs

ROW = served_points.Point("a", "agg", "sglang", "0.5.9", "m", "fp8", "b200_sxm", 1024, 1024, 8, 8, 1, False, 0.1, 0.02)


def row(**values: Any) -> served_points.Point:
    return replace(ROW, **values)


def test_looks_at_the_queue_are_rarer_from_16_clients_on() -> None:
    model = "deepseek-ai/DeepSeek-R1"
    assert row(model_path=model).wait_steps == 4.5
    assert row(model_path=model, concurrency=16).wait_steps == 14.5
    assert row(model_path=model, system="h200_sxm").wait_steps == 0.0
    assert row(model_path=model, scripted=False).script == NO_SCRIPT


def test_the_first_event_may_need_many_tokens() -> None:
    assert row(model_path="deepseek-ai/DeepSeek-R1", precision="fp4", version="0.5.0").wait_steps == 4.5 + 29


@pytest.mark.parametrize(("tp", "osl", "steps"), [(4, 1024, 20.0), (8, 1024, 0.0), (4, 8192, 0.0)])
def test_prompts_wait_for_others_to_share_their_step(tp: int, osl: int, steps: float) -> None:
    point = row(backend="trtllm", model_path="meta-llama/Llama-3.1-70B", tp=tp, osl=osl)
    assert point.wait_steps == steps


def test_ranks_wait_for_each_other() -> None:
    point = row(backend="trtllm", model_path="deepseek-ai/DeepSeek-R1", version="1.1.0", tp=1, dp=8)
    waiting = point.pool().engine.scheduler
    assert waiting is not None
    assert scheduler(waiting) == replace(TRTLLM_GUARANTEED_NO_EVICT, balance_timeout=60)
    assert replace(point, tp=8, dp=1).pool().engine.scheduler is None


def test_flags_of_the_script_reach_the_engine() -> None:
    pool = row(model_path="deepseek-ai/DeepSeek-R1", tp=8, version="0.5.9", shared=True).pool()
    assert pool.engine.resolved("max_num_batched_tokens") == 32768
    assert pool.engine.scheduler is not None
    assert scheduler(pool.engine.scheduler) == Sglang(version="0.4.6", max_prefill_tokens=32768, radix_cache=False)
    assert pool.engine.async_scheduling
    assert engine_scheduler(pool.engine) != scheduler(pool.engine.scheduler)


def test_multi_token_prediction_is_told_by_the_row() -> None:
    twins = [row(model_path="Qwen/Qwen3.5-397B-A17B", tp=4, expert_parallel=ep).pool().engine for ep in (False, True)]
    assert [engine.num_speculative_tokens for engine in twins] == [3, 0]


def test_multi_token_prediction_is_told_by_what_no_other_name_shares() -> None:
    named = {"model_path": "deepseek-ai/DeepSeek-R1", "tp": 8, "version": "0.5.9"}
    engines = [row(**named, shared=shared).pool().engine for shared in (False, True)]
    assert [engine.num_speculative_tokens for engine in engines] == [2, 0]
    assert [engine.max_num_seqs for engine in engines] == [512, 128]


@pytest.mark.parametrize(
    ("tp", "dp", "drafts", "places", "tokens"), [(8, 1, 3, 64, 1024 + 64 + 64), (1, 8, 1, 8, 1024 + 8 + 64 + 56)]
)
def test_scripts_of_multi_token_prediction_compute_one_prompt_a_step(
    tp: int, dp: int, drafts: int, places: int, tokens: int
) -> None:
    named = {"backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "version": "1.1.0rc2.post2"}
    predicting = row(**named, month="2026-01", tp=tp, dp=dp, expert_parallel=dp > 1, concurrency=64)
    engine = predicting.pool().engine
    assert engine.num_speculative_tokens == drafts
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (places, tokens)
    prompts, _ = served_replay.lengths(predicting)
    assert prompts[1] + places <= tokens < 2 * prompts[0] + places


@pytest.mark.parametrize("month", ["2025-12", ""])
def test_the_same_image_served_without_prediction_before(month: str) -> None:
    named = {"backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "version": "1.1.0rc2.post2"}
    engine = row(**named, month=month).pool().engine
    limits = (engine.max_num_seqs, engine.max_num_batched_tokens)
    assert (engine.num_speculative_tokens, *limits) == (0, 512, 1152)


@pytest.mark.parametrize(
    ("version", "system", "tokens"),
    [("1.1.0", "b200_sxm", 1152), ("1.1.0", "h200_sxm", 1152), ("1.2.0rc6.post2", "b200_sxm", 8192)],
)
def test_scripts_of_2025_have_room_for_one_prompt_and_all_clients(version: str, system: str, tokens: int) -> None:
    point = row(backend="trtllm", model_path="deepseek-ai/DeepSeek-V3", version=version, system=system, tp=8)
    for busy in (replace(point, concurrency=64), replace(point, concurrency=64, tp=1, dp=8, expert_parallel=True)):
        assert busy.pool().engine.max_num_batched_tokens == tokens
    assert replace(point, isl=8192).pool().engine.max_num_batched_tokens == 8192 + 64 + 64


SHORT, LONG_OUTPUT, LONG_PROMPT = (1024, 1024), (1024, 8192), (8192, 1024)


@pytest.mark.parametrize(
    ("precision", "predicts", "lengths", "clients", "ranks", "whole", "captured", "gathered"),
    [
        ("fp8", False, SHORT, 64, 1, True, True, True),
        ("fp8", False, SHORT, 63, 1, True, False, False),
        ("fp8", False, LONG_OUTPUT, 128, 1, True, True, False),
        ("fp8", False, LONG_OUTPUT, 256, 8, False, False, False),
        ("fp8", False, LONG_PROMPT, 64, 1, True, True, False),
        ("fp8", False, (2048, 128), 64, 1, True, False, False),
        ("fp4", False, SHORT, 4, 1, True, True, False),
        ("fp4", False, SHORT, 4, 1, False, False, False),
        ("fp4", False, LONG_PROMPT, 4, 1, True, False, False),
        ("fp8", True, SHORT, 8, 1, True, True, False),
        ("fp8", True, SHORT, 4, 1, True, False, False),
        ("fp8", True, SHORT, 64, 8, False, False, False),
        ("fp4", True, SHORT, 16, 1, True, False, False),
        ("fp4", True, SHORT, 64, 8, False, True, False),
        ("fp4", True, SHORT, 128, 1, True, True, False),
        ("fp4", True, SHORT, 128, 4, False, False, False),
        ("fp4", True, LONG_OUTPUT, 64, 4, False, True, False),
    ],
)
def test_scripts_of_2026_capture_some_prompts(
    precision: str,
    predicts: bool,
    lengths: tuple[int, int],
    clients: int,
    ranks: int,
    whole: bool,
    captured: bool,
    gathered: bool,
) -> None:
    found = prompt_graphs(precision, predicts, lengths, clients, ranks, whole)
    assert (len(found) > 0, "batch-wait-timeout-iters" in found) == (captured, gathered)


def test_captured_prompts_reach_the_engine_of_that_image_alone() -> None:
    point = row(backend="trtllm", model_path="deepseek-ai/DeepSeek-V3", tp=8, expert_parallel=True, concurrency=64)
    late, before = (replace(point, version=version).pool().engine for version in ("1.2.0rc6.post2", "1.1.0"))
    assert (late.prompt_graph_tokens, before.prompt_graph_tokens) == (8192, None)
    assert late.scheduler is not None
    waiting = scheduler(late.scheduler)
    assert isinstance(waiting, Trtllm)
    assert (waiting.batch_wait_timeout_iters, waiting.batch_wait_max_tokens_ratio) == (40, 0.8)
    assert replace(point, version="1.2.0rc6.post2", system="h200_sxm").pool().engine.prompt_graph_tokens is None


def test_a_script_may_send_fewer_requests() -> None:
    short = row(model_path="zhipuai/GLM-5", system="h200_sxm")
    assert len(served_replay.workload(short)) == 5 * 8
    assert len(served_replay.workload(replace(short, system="b200_sxm"))) == 10 * 8


@pytest.mark.parametrize(
    ("model", "precision", "system", "gpus", "lengths", "clients", "layout"),
    [
        ("openai/gpt-oss-120b", "fp4", "h200_sxm", 4, (1024, 1024), 64, (4, 1, True)),
        ("openai/gpt-oss-120b", "fp4", "b200_sxm", 4, (1024, 1024), 64, None),
        ("deepseek-ai/DeepSeek-R1", "fp8", "h200_sxm", 8, (8192, 1024), 32, (8, 1, True)),
        ("deepseek-ai/DeepSeek-R1", "fp8", "h200_sxm", 8, (8192, 1024), 33, (1, 8, True)),
        ("deepseek-ai/DeepSeek-V3", "fp4", "b200_sxm", 8, (1024, 8192), 16, (8, 1, False)),
        ("deepseek-ai/DeepSeek-V3", "fp4", "b200_sxm", 8, (1024, 8192), 17, (8, 1, True)),
        ("deepseek-ai/DeepSeek-V3", "fp4", "b200_sxm", 4, (1024, 1024), 256, (1, 4, True)),
        ("deepseek-ai/DeepSeek-V3", "fp4", "b200_sxm", 4, (2048, 128), 256, None),
    ],
)
def test_early_scripts_divide_experts_and_attention_by_the_load(
    model: str,
    precision: str,
    system: str,
    gpus: int,
    lengths: tuple[int, int],
    clients: int,
    layout: tuple[int, int, bool] | None,
) -> None:
    assert early_layout(model, precision, system, gpus, lengths, clients) == layout


@pytest.mark.parametrize(("day", "experts"), [("2025-11-02", True), ("2025-12-15", False)])
def test_only_rows_that_recorded_nothing_are_read_by_their_script(day: str, experts: bool) -> None:
    names = ("backend_version", "attention_dp_size", "batch_size")
    line = dict.fromkeys(names, "") | {
        "id": "a",
        "silicon_data_source": f"silicon_concurrency=8; measured={day}T00:00:00.000Z",
        "backend": "trtllm",
        "model_path": "openai/gpt-oss-120b",
        "system": "h200_sxm",
        "precision": "fp4",
        "mode": "agg",
        "isl": "1024",
        "osl": "1024",
        "tp_size": "4",
        "moe_tp_size": "4",
        "moe_ep_size": "1",
        "silicon_ttft_ms": "110",
        "silicon_tpot_ms": "6",
    }
    found = served_points._point(line)
    assert isinstance(found, served_points.Point)
    assert (found.tp, found.dp, found.expert_parallel) == (4, 1, experts)
    assert found.month == day[:7]


def test_marlin_serves_gpt_oss_on_hopper_with_the_times_of_integers() -> None:
    hopper = row(backend="vllm", model_path="openai/gpt-oss-120b", precision="fp4", version="0.18.0", system="h200_sxm")
    pools = [replace(hopper, system=name).pool() for name in ("h200_sxm", "b200_sxm")]
    assert [pool.model.weight_dtype("experts") for pool in pools] == ["int4", "mxfp4"]
    assert hopper.server(pools[0]).dtype == "mxfp4"


def test_every_script_can_be_chosen() -> None:
    kinds = [(each.backend, each.model, each.precision, each.system, each.version, each.gpus) for each in SCRIPTS]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(
    ("values", "tp", "dp", "replicas"),
    [
        ({"batch_size": "28", "moe_tp_size": "1", "moe_ep_size": "4", "tp_size": "4"}, 1, 4, 1),
        ({"batch_size": "28", "moe_tp_size": "0", "moe_ep_size": "0", "tp_size": "2"}, 2, 1, 4),
        ({"batch_size": "112", "moe_tp_size": "4", "moe_ep_size": "1", "tp_size": "4"}, 4, 1, 1),
    ],
)
def test_clients_for_each_batch_are_ranks_or_replicas(values: dict[str, str], tp: int, dp: int, replicas: int) -> None:
    names = dict.fromkeys(served_points.COLUMNS, "") | {"isl": "10", "osl": "10", "backend": "trtllm"}
    source = "auto-gap-analysis; silicon_concurrency=112"
    found = served_points._point(names | {"silicon_data_source": source, "backend_version": "1.3.0"} | values)
    assert isinstance(found, served_points.Point)
    assert (found.tp, found.dp, found.replicas) == (tp, dp, replicas)


def test_generated_deployments_hold_the_longest_prompt() -> None:
    plain = row(backend="trtllm", version="1.0.0", model_path="Qwen/Qwen3-32B", tp=2, scripted=False, system="h100_sxm")
    long = replace(plain, isl=15000, osl=500, concurrency=64, replicas=4).pool()
    assert (long.engine.resolved("max_num_batched_tokens"), long.replicas) == (15104, 4)
    assert plain.pool().engine.resolved("max_num_batched_tokens") == 8192
    assert plain.pool().engine.kv_cache_dtype == "fp8"
