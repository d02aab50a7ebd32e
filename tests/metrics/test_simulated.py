"""Metrics on simulated runs: what must balance does, whatever the scheduler did."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.deployment.footprint import footprint
from windtunnel.hardware import device
from windtunnel.metrics import summary, summary_json, timeline, token_gaps_by_request, unroll
from windtunnel.model import load_model
from windtunnel.simulate.run import FINISHED, Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload.columns import Workload

LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B"
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "synchronous": (LLAMA, 1, {"async_scheduling": False}),
    "asynchronous": (LLAMA, 1, {"async_scheduling": True}),
    "preemptions": (LLAMA, 1, {"num_gpu_blocks_override": 400}),
    "replicas": (LLAMA, 3, {}),
    "pipeline": (LLAMA, 2, {"pipeline_parallel_size": 2}),
    "full pipeline": (LLAMA, 1, {"pipeline_parallel_size": 3, "num_gpu_blocks_override": 400}),
    "synchronous pipeline": (LLAMA, 1, {"pipeline_parallel_size": 4, "async_scheduling": False}),
    "pipelines of ranks": (LLAMA, 1, {"pipeline_parallel_size": 2, "data_parallel_size": 2}),
    "ranks": (LLAMA, 1, {"data_parallel_size": 2}),
    "overlap schedule": (LLAMA, 1, {"preset": "sglang-0.5"}),
    "retractions": (
        LLAMA,
        1,
        {
            "preset": "sglang-0.5",
            "num_gpu_blocks_override": 9000,
            "scheduler": "sglang-0.4.6:schedule_conservativeness=0",
        },
    ),
    "lockstep": (QWEN, 1, {"data_parallel_size": 2, "enable_expert_parallel": True}),
}


def simulated(case: str) -> Run:
    model, replicas, engine = CASES[case]
    rng = np.random.default_rng(7)
    number = 300
    output = rng.integers(1, 300, number)
    workload = Workload(
        arrival=np.cumsum(rng.exponential(0.05, number)),
        prompt_tokens=rng.integers(1, 3000, number),
        output_tokens=output,
        max_tokens=output,
        priority=np.zeros(number, dtype=np.int64),
        session=np.full(number, -1),
        think_time=np.zeros(number),
    )
    pool = Pool(load_model(model), device("h100_sxm"), Engine(max_model_len=4096, **engine), replicas=replicas)
    run = simulate(Deployment((pool,)), workload, perf="modelled", cache=False)
    run.manifest["pools"][0]["footprint"] = asdict(footprint(pool))
    return run


@pytest.mark.parametrize("case", CASES)
def test_a_simulated_run_balances(case: str) -> None:
    run = simulated(case)
    steps = unroll(run)
    found, requests = summary(run, steps=steps), run.requests
    assert (requests.status == FINISHED).all()
    itl = found.latencies["itl"]
    assert itl.count == (requests.output_tokens - 1).sum()
    assert itl.total == pytest.approx(float((requests.finish - requests.first_token).sum()))
    gaps = token_gaps_by_request(steps)
    assert [len(gap) for gap in gaps] == (requests.output_tokens - 1).tolist()
    assert itl.percentile(99) == pytest.approx(float(np.percentile(np.concatenate(gaps), 99)))
    used = found.usage
    for share in (used.busy, used.kv, used.mfu, used.mbu, *used.replicas.kv_peak.tolist()):
        assert 0 < share <= 1
    late = run.iterations.discarded.sum() if "preset" in CASES[case][2] else 0
    assert used.replicas.decode_tokens.sum() - late == itl.count - len(run.stalls.request)
    assert (found.preemptions > 0) == (case in ("preemptions", "full pipeline", "retractions"))
    in_system = float((used.replicas.running + used.replicas.waiting).sum())
    assert in_system == pytest.approx(found.request_throughput * found.latencies["e2el"].mean)
    assert (used.bubbles > 0) == ("pipeline" in case)
    lines = timeline(steps, 97)
    assert (lines.kv >= 0).all() and (lines.kv <= 1).all()
    assert lines.output_throughput.mean() == pytest.approx(found.output_throughput)
    shares = summary_json(found)["time_share"]
    assert sum(shares.values()) == pytest.approx(1.0)
