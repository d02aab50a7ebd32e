"""What serves, in one line."""

from typing import Any

import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.deployment.title import title
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.policy.scaling import Autoscale, Thresholds


def pool(gpu: str = "h100", replicas: int = 1, role: str = "mixed", **engine: Any) -> Pool:
    return Pool(
        load_model("Qwen/Qwen3-8B"),
        device(gpu),
        Engine(**engine),
        replicas,
        role,
        name=role,
    )


@pytest.mark.parametrize(
    ("pools", "text"),
    [
        ((pool(),), "Qwen/Qwen3-8B on 1 × H100 SXM, vllm-0.32"),
        (
            (pool(replicas=3, tensor_parallel_size=2, pipeline_parallel_size=2),),
            "Qwen/Qwen3-8B on 3 replicas of 4 × H100 SXM, TP 2, PP 2, vllm-0.32",
        ),
        (
            (pool("a100", role="prefill"), pool(replicas=2, role="decode", tensor_parallel_size=2)),
            "Qwen/Qwen3-8B: prefill on 1 × A100 SXM; decode on 2 replicas of 2 × H100 SXM, TP 2; vllm-0.32",
        ),
        (
            (pool(role="prefill", scheduler="orca"), pool(role="decode")),
            "Qwen/Qwen3-8B: prefill on 1 × H100 SXM, vllm-0.32, orca; decode on 1 × H100 SXM, vllm-0.32",
        ),
    ],
)
def test_titles(pools: tuple[Pool, ...], text: str) -> None:
    assert title(Deployment(pools).spec()["pools"]) == text


def test_without_rules() -> None:
    assert title(Deployment((pool(),)).spec()["pools"], with_rules=False) == "Qwen/Qwen3-8B on 1 × H100 SXM"


def test_scaled_pools_say_between_how_many_replicas() -> None:
    scaled = Deployment((pool(replicas=4),), scaling=Autoscale(Thresholds(), least=1, most=4))
    assert title(scaled.spec()["pools"]) == "Qwen/Qwen3-8B on 1 to 4 replicas of 1 × H100 SXM, vllm-0.32"
