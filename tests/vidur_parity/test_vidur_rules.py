"""The oracle with a Policy does as Vidur's schedulers on random workloads, with scarce memory, too."""

import json
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from oracle.vllm_v1.batch import Batch, Scheduled
from oracle.vllm_v1.request import Request

from benchmarks.vidur_parity.__main__ import main
from benchmarks.vidur_parity.given import Given, drawn, lengths, read
from benchmarks.vidur_parity.serve import policy, serve
from benchmarks.vidur_parity.settings import SETTINGS, given_by
from benchmarks.vidur_parity.times import StageSeconds
from vidur_parity.vidur_rules import Item, Node, run

RUNS = Path(__file__).parents[3] / "shared" / "vidur" / "reference"

CONFIG: dict[str, Any] = {
    "cluster_config": {
        "num_replicas": 1,
        "replica_config": {
            "memory_margin_fraction": 0.1,
            "num_pipeline_stages": 1,
            "tensor_parallel_size": 1,
            "model_config": {
                "num_layers": 8,
                "num_q_heads": 8,
                "num_kv_heads": 2,
                "embedding_dim": 512,
                "mlp_hidden_dim": 1024,
                "use_gated_mlp": True,
                "post_attn_norm": True,
            },
            "device_config": {"total_memory_gb": 80},
        },
        "global_scheduler_config": {"name": "round_robin"},
        "replica_scheduler_config": {
            "name": "vllm",
            "batch_size_cap": 8,
            "block_size": 4,
            "watermark_blocks_fraction": 0.01,
            "num_blocks": 400,
            "max_tokens_in_batch": 256,
            "chunk_size": 32,
        },
    },
    "request_generator_config": {"name": "synthetic", "max_tokens": 256, "seed": 42},
    "execution_time_predictor_config": {
        "kv_cache_prediction_granularity": 8,
        "nccl_cpu_launch_overhead_ms": 0.02,
        "nccl_cpu_skew_overhead_per_device_ms": 0.0,
        "attention_decode_batching_overhead_fraction": 0.1,
        "attention_prefill_batching_overhead_fraction": 0.1,
    },
}


def milliseconds(operator: str, key: tuple[int, ...]) -> float:
    """Something that grows with every part of a key, and differs by operator."""
    return len(operator) * 1e-3 + sum(0.01 * k if i == 0 else 0.0007 * k for i, k in enumerate(key))


def given(scheduler: str, stages: int, blocks: int, replicas: int, rng: Any, gap: float, count: int = 80) -> Given:
    config = json.loads(json.dumps(CONFIG))
    cluster = config["cluster_config"]
    cluster["num_replicas"] = replicas
    cluster["replica_config"]["num_pipeline_stages"] = stages
    cluster["replica_scheduler_config"] |= {"name": scheduler, "num_blocks": blocks}
    cluster["global_scheduler_config"]["name"] = "round_robin" if replicas == 1 else "lor"
    prompts = rng.integers(1, 120, count).astype(float)
    requests = {
        "id": np.arange(count, dtype=float),
        "arrived_at": np.cumsum(rng.exponential(gap, count)),
        "num_prefill_tokens": prompts,
        "num_decode_tokens": rng.integers(1, 100, count).astype(float),
        "num_restarts": np.zeros(count),
    }
    return Given(Path(), config, requests, {})


def expected(asked: Given) -> tuple[list[Item], list[tuple[float, float, list[tuple[int, int]]]]]:
    """Requests and batches as (formed, ended, [(request, tokens)]) by the second writing."""
    _, limits = policy(asked)
    settings = asked.scheduler
    rows = zip(
        *(asked.requests[k].tolist() for k in ("arrived_at", "num_prefill_tokens", "num_decode_tokens")), strict=True
    )
    items = [Item(i, at, int(p), int(d)) for i, (at, p, d) in enumerate(rows)]
    name = settings["name"]
    nodes = [
        Node(
            name,
            asked.stages,
            settings["batch_size_cap"],
            limits.num_blocks,
            settings["block_size"],
            int(settings["watermark_blocks_fraction"] * limits.num_blocks) if name != "orca" else 0,
            settings["max_tokens_in_batch"] if name == "vllm" else settings["chunk_size"],
            asked.max_tokens // settings["block_size"] if name == "orca" else 0,
            free_at=[0.0] * asked.stages,
        )
        for _ in range(asked.config["cluster_config"]["num_replicas"])
    ]
    stage = StageSeconds(asked, milliseconds)

    def time(decodes: list[tuple[int, int]], chunks: list[tuple[int, int]], sends: bool) -> float:
        batch, one = Batch(), Request(0, 0.0, 1, 1, 1)
        batch.scheduled += [Scheduled(one, 1, done - 1, True, True) for _, done in decodes]
        batch.scheduled += [Scheduled(one, n, done, False, False) for n, done in chunks]
        return stage(batch, sends=sends)

    batches = run(items, nodes, lambda nodes: min(range(len(nodes)), key=lambda j: len(nodes[j].waiting)), time)
    return items, [(one.at, one.end, sorted((item.id, n) for item, n in one.parts)) for one in batches]


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("scheduler", "blocks"), [("vllm", 400), ("vllm", 110), ("sarathi", 400), ("sarathi", 110), ("orca", 512)]
)
def test_random_workloads_give_the_same_batches(scheduler: str, blocks: int, stages: int, replicas: int) -> None:
    restarts = 0
    for seed in range(6):
        rng = np.random.default_rng([seed, stages, replicas, blocks])
        asked = given(scheduler, stages, blocks, replicas, rng, gap=[0.02, 0.005, 0.3][seed % 3])
        items, batches = expected(asked)
        served = serve(asked, StageSeconds(asked, milliseconds))
        found = [
            (one.at, one.end, sorted((part.request.id, part.tokens) for part in one.batch.scheduled))
            for one in served.batches
        ]
        assert [tokens for _, _, tokens in found] == [tokens for _, _, tokens in batches], f"seed {seed}"
        assert [at for row in found for at in row[:2]] == pytest.approx(
            [at for row in batches for at in row[:2]], rel=1e-12
        )
        assert [one.finish for one in served.requests] == pytest.approx([item.end for item in items], rel=1e-12)
        assert [one.first_token for one in served.requests] == pytest.approx([item.first for item in items], rel=1e-12)
        assert [one.preemptions for one in served.requests] == [item.restarts for item in items]
        restarts += sum(item.restarts for item in items)
    assert (restarts > 0) == (blocks == 110)


@pytest.mark.skipif(not RUNS.is_dir(), reason="Vidur's runs are not here")
@pytest.mark.parametrize("run", sorted(RUNS.glob("*/config.json")), ids=lambda path: path.parent.name)
def test_vidur_s_own_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.parent)]) == 0, capsys.readouterr().out


@pytest.mark.skipif(not RUNS.is_dir(), reason="Vidur's runs are not here")
def test_our_estimators_in_place_of_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    profile = RUNS.parent / "profiling"
    assert main([str(RUNS / "vllm-conv-q1"), "--perf", f"profile:{profile}"]) == 0, capsys.readouterr().out


@pytest.mark.skipif(not RUNS.is_dir(), reason="Vidur's runs are not here")
def test_lengths_are_drawn_as_vidur_drew_them() -> None:
    """Needed only where requests restarted, but the run at hand shows that they are the same."""
    found = read(RUNS / "vllm-conv-q1")
    assert drawn(found)[:512] == lengths(found)


def test_uniform_lengths_come_after_the_interval_from_one_stream() -> None:
    asked = given("vllm", 1, 400, 1, np.random.default_rng(0), 0.1, count=3)
    uniform = {"name": "uniform", "min_tokens": 256, "max_tokens": 4096, "prefill_to_decode_ratio": 3.0}
    asked.config["request_generator_config"] |= {
        "length_generator_config": uniform,
        "interval_generator_config": {"name": "poisson"},
    }
    stream = Random(42)
    expected = []
    for _ in range(3):
        stream.random()
        total = 256 + (4096 - 256) * stream.random()
        expected.append((int(total - ceil(total / 4)), ceil(total / 4)))
    assert drawn(asked) == expected


@pytest.mark.skipif(not RUNS.is_dir(), reason="Vidur's runs are not here")
def test_a_load_is_drawn_from_its_settings_as_vidur_drew_it() -> None:
    found = read(RUNS / "vllm-conv-q1")
    asked = given_by(SETTINGS[0], found, RUNS.parent)
    for name in ("arrived_at", "num_prefill_tokens", "num_decode_tokens"):
        assert np.array_equal(asked.requests[name], found.requests[name]), name
