"""Constants of pools, against sizes worked out from the published shapes."""

from dataclasses import asdict

import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.footprint import footprint
from windtunnel.hardware import device
from windtunnel.metrics.usage import read_footprint
from windtunnel.model import load_model


def pool(model: str, **engine: object) -> Pool:
    return Pool(load_model(model), device("h100_sxm"), Engine(**engine), replicas=2)  # type: ignore[arg-type]


def test_a_dense_model() -> None:
    found = footprint(pool("Qwen/Qwen3-32B", tensor_parallel_size=2))
    weights = 64 * (5120 * (64 + 2 * 8) * 128 + 64 * 128 * 5120 + 3 * 5120 * 25600)
    assert found.gpus == 4
    assert found.gpus_per_rank == 2
    assert found.linear_flops_per_token == pytest.approx(2 * weights, rel=1e-3)
    assert found.head_flops == 2 * 5120 * 151936
    assert found.attention == ((0, 64 * 2 * 64 * 2 * 128, 64 * 2 * 4 * 2 * 128),)
    assert found.weight_bytes == pytest.approx(2 * (weights + 5120 * 151936) / 2, rel=1e-3)
    assert (found.expert_bytes, found.expert_share) == (0, 0)
    assert found.peak_flops == device("h100_sxm").peak_flops("bfloat16")


def test_a_mixture_of_experts() -> None:
    found = footprint(pool("Qwen/Qwen3-30B-A3B", tensor_parallel_size=1))
    assert found.expert_share == 8 / 128
    assert found.expert_bytes == 2 * 48 * 128 * 3 * 2048 * 768
    assert found.weight_bytes < found.expert_bytes / 5


def test_block_sparse_layers_score_all_tokens_and_attend_to_the_best() -> None:
    found = footprint(pool("MiniMaxAI/MiniMax-M3", tensor_parallel_size=8))
    dense, index = 3 * 2 * 64 * 2 * 128, 57 * 2 * 4 * 128
    kv = 2 * 128 * 2
    assert found.attention == ((0, dense + index, 3 * kv + 57 * 256), (2048, 57 * 2 * 64 * 2 * 128, 57 * kv))


def test_the_manifest_gives_it_back() -> None:
    import json

    found = footprint(pool("Qwen/Qwen3-32B", tensor_parallel_size=2))
    assert read_footprint({"footprint": json.loads(json.dumps(asdict(found)))}) == found
    assert read_footprint({}) is None
