"""DistServe's study, OPT-13B and 66B on A100s: its algorithm 1 over simulations with its own step times."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import SLO, Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.step_law import StepLaw, Terms
from windtunnel.plan.disaggregation.placement import Layout, Oracle, Placement, goodput, high_affinity
from windtunnel.plan.question import Question
from windtunnel.plan.trial import trial
from windtunnel.workload import Workload

LAWS = Path(__file__).parents[4] / "shared" / "truth" / "disagg" / "step_laws.json"
LIMITS = {"max_num_batched_tokens": 16_384, "max_num_seqs": 512, "max_model_len": 2048}
ADMITTED = 50_000
"""Tokens that a decode replica admits at most in simdistserve, whatever its layout."""
AT_ONCE = 1e-3
"""Seconds of a step of the side that is not asked: too few to matter, and not none."""


def laws(model: str) -> dict[int, tuple[StepLaw, int]]:
    """By tensor parallel size: step times as simdistserve has them, and the tokens that are admitted."""
    found = {}
    for entry in json.loads(LAWS.read_text(encoding="utf-8"))["laws"]:
        if entry["model"] == model:
            prompt, small, large = (
                Terms(*(1e-3 * term for term in entry[name])) for name in ("prefill", "decode_small", "decode_large")
            )
            law = StepLaw(prompt, small, large, entry["large_from"]).in_simdistserve()
            found[entry["tp"]] = law, min(entry["max_num_tokens"], ADMITTED)
    return found


def chat(count: int, seed: int = 0) -> Workload:
    """Poisson arrivals with lengths like ShareGPT's in the paper, whose means are about 755 and 200 tokens."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(6.35, 0.8, count), 4, 1400).astype(np.int64)
    outputs = np.clip(rng.lognormal(4.95, 0.9, count), 4, 600).astype(np.int64)
    arrival = rng.exponential(1.0, count).cumsum()
    return Workload.from_columns(arrival=arrival, prompt_tokens=prompts, output_tokens=outputs)


def oracle(model: str, role: str, question: Question) -> Oracle:
    """Goodput of one instance of a side, with the other side as good as free."""
    known = laws(model)

    def served(layout: Layout) -> float:
        if layout.inter_op > 1 or layout.intra_op not in known:
            return 0.0
        law, tokens = known[layout.intra_op]
        free = StepLaw(Terms(AT_ONCE, 0, 0), Terms(AT_ONCE, 0, 0))
        pools = tuple(
            Pool(
                load_model("facebook/opt-13b"),
                device("a100"),
                Engine(
                    tensor_parallel_size=8,  # any: times and blocks are given
                    max_num_seqs=512,
                    max_num_batched_tokens=16_384,
                    num_gpu_blocks_override=tokens // 16 if side == role else 20_000,
                    enable_chunked_prefill=False,
                    enable_prefix_caching=False,
                    async_scheduling=False,
                    gpu_memory_utilization=1.0,
                ),
                role=side,
            )
            for side in ("prefill", "decode")
        )
        tables = [(law if side == role else free).tabulated(**LIMITS) for side in ("prefill", "decode")]
        return goodput(lambda rate: trial(question, Deployment(pools), rate, tables).met, 40.0 * layout.gpus, 0.02)

    return served


def placed(model: str, ttft: float, tpot: float, rate: float, most: int) -> Placement | None:
    """Algorithm 1 with at most so many GPUs for an instance of either side."""
    load = chat(5000)
    sides = [
        oracle(model, role, Question(load, slo=slo))
        for role, slo in (("prefill", SLO(ttft=ttft)), ("decode", SLO(tpot=tpot)))
    ]
    return high_affinity(*sides, rate=rate, nodes=1, gpus_per_node=most)


@pytest.mark.long
@pytest.mark.skipif(not LAWS.is_file(), reason="DistServe's step times are not beside the checkout")
def test_the_study() -> None:
    """simdistserve's README finds for 13B on four GPUs prefill on two and decode on one, 1.56 requests/s for each
    GPU, with limits of 200 and 100 ms for nine of ten; both models together in two minutes."""
    began = time.process_time()
    found: Any = placed("facebook/opt-13b", 0.2, 0.1, rate=10.0, most=2)
    assert (found.prefill, found.decode) == (Layout(1, 2), Layout(1, 1))
    assert min(found.prefill_rate, found.decode_rate) / 3 == pytest.approx(1.56, abs=0.25)
    larger: Any = placed("facebook/opt-66b", 0.4, 0.1, rate=10.0, most=8)
    assert time.process_time() - began < 120.0
    for each in (found, larger):
        assert each.prefills * each.prefill_rate >= 10.0
        assert each.decodes * each.decode_rate >= 10.0
