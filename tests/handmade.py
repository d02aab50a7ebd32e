"""Runs written by hand, for tests of metrics and reports: no engine, every number chosen."""

from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment.footprint import Footprint
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.simulate.run import Handovers, Iterations, Requests, Run, Stalls

FOOTPRINT = Footprint(
    gpus=2,
    gpus_per_rank=2,
    peak_flops=1e12,
    memory_bandwidth=1e9,
    power_w=700.0,
    idle_power_w=100.0,
    price_per_hour=3.0,
    linear_flops_per_token=1e6,
    head_flops=1e5,
    attention=((0, 100.0, 10.0),),
    weight_bytes=1e6,
    expert_bytes=0.0,
    expert_share=0.0,
    ranks=1,
)


def flat_times(seconds: float = 0.1, max_num_seqs: int = 64, **terms: float) -> BatchTimes:
    """Every step takes ``seconds``, plus the terms of ``linear``."""
    costs: dict[str, Any] = {"per_token": 0.0, "per_kv_token": 0.0, "per_pair": 0.0, **terms}
    return linear(seconds, **costs, max_num_batched_tokens=2048, max_num_seqs=max_num_seqs, max_model_len=8192)


def requests(**columns: Any) -> Requests:
    """Requests that finished on replica 0 unless a column says otherwise."""
    number = len(columns["arrival"])
    defaults = {
        "id": np.arange(number),
        "prompt_tokens": np.full(number, 10),
        "output_tokens": np.full(number, 2),
        "max_tokens": np.full(number, 2),
        "pool": np.zeros(number),
        "replica": np.zeros(number),
        "lane": np.zeros(number),
        "status": np.zeros(number),
        "preemptions": np.zeros(number),
        "cached_tokens": np.zeros(number),
        **{name: np.full(number, np.nan) for name in ("scheduled", "first_token", "finish")},
    }
    return Requests(**_typed(Requests, defaults | columns, ("arrival", "scheduled", "first_token", "finish")))


def iterations(*rows: dict[str, float]) -> Iterations:
    """Rows of the log; a column that a row leaves out is 0, and steps 1."""
    names = [field.name for field in fields(Iterations)]
    columns = {name: [row.get(name, 1 if name == "steps" else 0) for row in rows] for name in names}
    return Iterations(**_typed(Iterations, columns, ("start", "transfer")))


def run(
    requests: Requests,
    iterations: Iterations,
    stalls: tuple[tuple[int, float, float], ...] = (),
    times: BatchTimes | None = None,
    footprint: Footprint | None = FOOTPRINT,
    replicas: int = 1,
    lanes: int = 1,
    **more: Any,
) -> Run:
    """A run of one pool with 100 blocks of 16 tokens a rank."""
    gaps = np.array(stalls, dtype=np.float64).reshape(-1, 3)
    pool = {
        "name": "pool",
        "kv_blocks": 100,
        "block_size": 16,
        "max_num_seqs": 64,
        "gpus_per_replica": 2,
        "model": "Qwen/Qwen3-32B",
        "device": "h100_sxm",
        "engine": {
            "tensor_parallel_size": 2,
            "max_model_len": 8192,
            "enable_prefix_caching": False,
            "quantization": None,
        },
    }
    if footprint:
        pool["footprint"] = asdict(footprint)
    manifest = {
        "schema_version": 1,
        "windtunnel": "0.1.0",
        "seed": 0,
        "replicas": [{"pool": 0, "lanes": lanes} for _ in range(replicas)],
        "pools": [pool],
        "deployment": {"router": "round_robin", "pools": [{"name": "pool", "replicas": replicas}]},
        "workload": {"name": "by hand", "requests": len(requests.arrival)},
        "warnings": [],
        "provenance": [],
    }
    return Run(
        requests=requests,
        iterations=iterations,
        stalls=Stalls(gaps[:, 0].astype(np.int64), gaps[:, 1], gaps[:, 2]),
        manifest=manifest | more.pop("manifest", {}),
        times=(times or flat_times(),),
        **more,
    )


def _typed(table: type, columns: dict[str, Any], times: tuple[str, ...]) -> dict[str, Any]:
    kinds = {field.name: np.float64 if field.name in times else np.int64 for field in fields(table)}
    return {name: np.asarray(columns[name], dtype=kind) for name, kind in kinds.items()}


def two_requests() -> Run:
    """Two requests on one replica, steps of 0.1 s.

    Request 0 arrives at 0, is prefilled from 0 to 0.1, and emits tokens at 0.1, 0.2, 0.3, 0.4. Request 1 arrives at
    0.15, is prefilled from 0.2 to 0.3 beside request 0, and emits tokens at 0.3 and 0.4.
    """
    return run(
        requests(
            arrival=[0.0, 0.15],
            prompt_tokens=[32, 16],
            output_tokens=[4, 2],
            scheduled=[0.0, 0.2],
            first_token=[0.1, 0.3],
            finish=[0.4, 0.4],
        ),
        iterations(
            {"start": 0.0, "chunk_tokens": 32, "used_blocks": 2},
            {"start": 0.1, "decodes": 1, "kv_tokens": 32, "used_blocks": 3},
            {"start": 0.2, "decodes": 1, "kv_tokens": 33, "chunk_tokens": 16, "used_blocks": 4},
            {"start": 0.30000000000000004, "decodes": 2, "kv_tokens": 50, "used_blocks": 5},
        ),
    )


def with_host(times: BatchTimes, host_overlapped: NDArray[np.float64]) -> BatchTimes:
    """Those tables with host work that overlaps with the GPU's."""
    return replace(times, host_overlapped=host_overlapped)


def preempted() -> Run:
    """One request: token at 0.1, preempted, recomputed from 0.1 to 0.3 while the other decodes, tokens at 0.3, 0.4."""
    two = requests(
        arrival=[0.0, 0.0], output_tokens=[3, 4], preemptions=[1, 0], scheduled=[0, 0], first_token=[0.1, 0.1],
        finish=[0.4, 0.4],
    )  # fmt: skip
    log = iterations(
        {"start": 0.0, "chunk_tokens": 10},
        {"start": 0.0, "steps": 0, "chunk_tokens": 10},
        {"start": 0.1, "decodes": 1, "kv_tokens": 10},
        {"start": 0.2, "decodes": 1, "kv_tokens": 11, "chunk_tokens": 11},
        {"start": 0.3, "decodes": 2, "kv_tokens": 23},
    )
    return run(two, log, stalls=((0, 0.1, 0.3),))


def disaggregated(gate: str = "after_prefill") -> Run:
    """Two requests whose prompts replica 0 computes, and that replica 1 decodes, on a device of half the price.

    Request 0 arrives at 0, is prefilled from 0 to 0.1, and asks at 0.125 for memory that it has at 0.25; its KV is
    there at 0.375, and its first token comes at 0.5, the second at 0.6. Request 1 arrives at 0.5, waits until 1, is
    prefilled until 1.1, has its first token at 1.6 without waiting for anything but its KV, and its second at 1.7. With
    another ``gate``, what request 0 waits for memory comes first.
    """
    whole = run(
        requests(
            arrival=[0.0, 0.5], replica=[1, 1], pool=[1, 1], prompt_tokens=[32, 16], scheduled=[0.0, 1.0],
            first_token=[0.5, 1.6], finish=[0.6, 1.7],
        ),
        iterations(
            {"start": 0.0, "chunk_tokens": 32, "used_blocks": 2},
            {"replica": 1, "start": 0.5, "decodes": 1, "kv_tokens": 32, "used_blocks": 3},
            {"start": 1.0, "chunk_tokens": 16, "used_blocks": 1},
            {"replica": 1, "start": 1.6, "decodes": 1, "kv_tokens": 16, "used_blocks": 2},
        ),
        handovers=Handovers(
            prefill_pool=np.array([0, 0]),
            prefill_replica=np.array([0, 0]),
            kv_bytes=np.array([4096.0, 2048.0]),
            ttft_queue=np.array([0.0, 0.5]),
            ttft_prefill=np.array([0.1, 0.1]),
            ttft_held=np.array([0.025, 0.0]),
            ttft_admission=np.array([0.125, 0.0]),
            ttft_transfer=np.array([0.125, 0.5]),
            ttft_join=np.array([0.125, 0.0]),
        ),
    )  # fmt: skip
    pools = []
    for place, role in enumerate(("prefill", "decode")):
        price = FOOTPRINT.price_per_hour / (1 + place)
        pool = whole.manifest["pools"][0] | {"name": role, "role": role, "replicas": 1, "gpus": 2}
        engine = pool["engine"] | {"pipeline_parallel_size": 1, "data_parallel_size": 1}
        pools.append(pool | {"engine": engine, "footprint": asdict(replace(FOOTPRINT, price_per_hour=price))})
    several = {"pools": pools, "replicas": [{"pool": pool, "lanes": 1} for pool in range(2)]}
    deployment = {"router": "round_robin", "pools": pools, "handover": {"gate": gate}}
    manifest = whole.manifest | several | {"deployment": deployment}
    return replace(whole, manifest=manifest, times=2 * whole.times)
