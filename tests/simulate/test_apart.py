"""Prefill and decode pools through the public door, by the rules of each engine."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool, find_handover, find_link, usual_handover
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.metrics.handed import TTFT_PARTS
from windtunnel.model import load_model
from windtunnel.simulate.overheads import INFERENCEX, Overheads
from windtunnel.simulate.run import FINISHED, REJECTED, Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Both, Gamma, Lognormal, Workload, generate

LENGTHS = Both(Lognormal(400, 0.8, 3000), Lognormal(60, 0.8, 400))
ENGINES = ("vllm-0.32", "sglang-0.5", "trtllm-1.0")


def pools(preset: str, **decode: Any) -> Deployment:
    """One prefill replica and two for decoding, with the link that Mooncake measured."""
    settings: dict[str, Any] = {
        "preset": preset,
        "max_model_len": 4096,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
    }
    model, h100 = load_model("Llama-3.1-8B"), device("h100")
    prefill = Pool(model, h100, Engine(**settings), 1, "prefill")
    decoding = Pool(model, h100, Engine(**(settings | decode)), 2, "decode")
    rules = find_handover(usual_handover(preset.partition("-")[0]))
    return Deployment((prefill, decoding), link=find_link("vllm-mooncake-8x400g"), handover=rules)


def served(deployment: Deployment, workload: Workload, **more: Any) -> Run:
    return simulate(deployment, workload, perf="modelled", **more)


def parts(run: Run) -> np.ndarray[Any, Any]:
    """[parts, n] of the time to first token."""
    return np.array([getattr(run.handovers, f"ttft_{name}") for name in TTFT_PARTS])


@pytest.mark.parametrize("preset", ENGINES)
def test_parts_of_the_time_to_first_token_add_up_to_the_bit(preset: str) -> None:
    workload = generate(Gamma(30.0, 0.5), LENGTHS, 300, seed=1)
    for load, overheads in (
        (workload, Overheads()),
        (replace(workload, max_concurrency=24), Overheads(client=INFERENCEX)),
    ):
        run = served(pools(preset), load, overheads=overheads)
        assert (run.requests.status == FINISHED).all()
        found, ttft = parts(run), run.requests.first_token - run.requests.arrival
        for order in (slice(None), slice(None, None, -1)):
            total = np.zeros(len(ttft))
            for part in found[order]:
                total = total + part
            assert (total == ttft).all()
        assert (found >= 0).all()
        assert (run.handovers.ttft_transfer[run.requests.output_tokens > 1] > 0).all()  # type: ignore[union-attr]


def test_a_decode_replica_that_is_full_makes_the_others_wait() -> None:
    """SGLang keeps 512 tokens for each request: 4,800 tokens of memory are soon too few."""
    burst = replace(generate(Gamma(30.0, 0.5), LENGTHS, 40, seed=2), max_concurrency=20)
    tight = served(pools("sglang-0.5", num_gpu_blocks_override=300), burst)
    wide = served(pools("sglang-0.5"), burst)
    waited = [float(np.nanmean(run.handovers.ttft_admission)) for run in (tight, wide)]  # type: ignore[union-attr]
    assert waited[0] > 10 * waited[1]


def test_bytes_are_those_of_whole_blocks() -> None:
    """Llama-3.1-8B: 32 layers, 8 heads of 128, keys and values of two bytes each."""
    run = served(pools("vllm-0.32"), generate(Gamma(30.0, 0.5), LENGTHS, 50, seed=3))
    blocks = -(-run.requests.prompt_tokens // 16)
    assert (run.handovers.kv_bytes == blocks * 16 * 32 * 8 * 128 * 2 * 2).all()  # type: ignore[union-attr]


def test_the_columns_survive_on_disk(tmp_path: Any) -> None:
    run = served(pools("trtllm-1.0"), generate(Gamma(30.0, 0.5), LENGTHS, 20, seed=4))
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run").handovers
    for field in fields(again):  # type: ignore[arg-type]
        assert np.array_equal(getattr(again, field.name), getattr(run.handovers, field.name), equal_nan=True)


def test_requests_that_no_decode_replica_ever_takes_are_rejected() -> None:
    few = pools("sglang-0.5", num_gpu_blocks_override=300)
    few = replace(few, handover=replace(few.handover, reserved_decode_tokens=3000))
    run = served(few, generate(Gamma(30.0, 0.5), LENGTHS, 100, seed=5))
    tokens = run.manifest["pools"][1]["kv_blocks"] * run.manifest["pools"][1]["block_size"]
    assert tokens < 5000
    assert ((run.requests.status == REJECTED) == (run.requests.prompt_tokens + 3000 > tokens)).all()


def test_routers_that_know_more_are_refused() -> None:
    with pytest.raises(InputError, match="not simulated between prefill and decode pools"):
        served(replace(pools("vllm-0.32"), decode_router="prefix_aware"), generate(Gamma(1.0), LENGTHS, 2, seed=1))
