"""Routers on Mooncake's traces: ``python -m benchmarks.routing [TRACE …] [--replicas N]``.

Mooncake's paper (FAST'25, figure 5) gives mean TTFTs of four ways to choose a prefill instance: random 19.65 s, load
balancing 5.27, local cache-aware 3.58, global cache-aware 3.07. Its cluster ran a dummy LLaMA3-70B on nodes of
8 × A800; how many of them prefilled it does not say. Here are 8 of its 16: A100s, which compute as fast, with room for
3 million tokens of KV each (its DRAM beside the GPUs', as one memory), at the speed of the trace. A request ends with
its first token. Prints a Markdown table: mean TTFT, that by the last router's, and the share of prompts found cached.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from windtunnel import Deployment, Engine, Pool, device, load_model, load_trace
from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.deployment.memory import kv_blocks
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.named import find_router
from windtunnel.simulate.simulate import batch_times
from windtunnel.workload import Workload

TRACES = Path(__file__).parents[2] / "shared" / "traces"
CACHED_TOKENS = 3_000_000
BLOCK = 16
PAPER = {"random": 6.40, "load balancing": 1.72, "local cache-aware": 1.17, "global cache-aware": 1.0}
ROUTERS = {
    "random": "random",
    "least outstanding": "least_outstanding",
    "power of two": "power_of_two",
    "llm-d": "prefix_aware",
    "Dynamo": "dynamo_kv",
    "load balancing": "dynamo_kv:overlap_credit=0,block_size=512",
    "local cache-aware": "conductor:threshold=inf,block_size=512",
    "global cache-aware": "conductor:block_size=512",
}
"""Load balancing: the fewest tokens to prefill. KV goes from node to node at 100 GB/s (4 × 200 Gbit/s)."""


@dataclass(frozen=True)
class Result:
    """What a router made of a trace."""

    ttft: float
    """Mean, in seconds."""
    cached: float
    """Share of all prompt tokens."""


def pool() -> Pool:
    """One node."""
    return Pool(
        load_model("meta-llama/Llama-3.1-70B"),
        device("a100_sxm"),
        Engine(tensor_parallel_size=8, max_model_len=131_072, block_size=BLOCK),
    )


def demand(workload: Workload, longest: int) -> Demand:
    """The prompts of a trace, and one token of each."""
    ones = np.ones(len(workload), dtype=np.int64)
    return Demand(
        arrival=workload.arrival,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=ones,
        overruns=ones < 1,
        refused=workload.prompt_tokens >= longest,
        follow=-ones,
        think_time=np.zeros(len(ones)),
        max_concurrency=0,
        hash_ids=workload.hash_ids,
        hash_block_size=workload.hash_block_size,
    )


def measure(workload: Workload, replicas: int) -> dict[str, Result]:
    """Every router on the same requests."""
    node = pool()
    budget = kv_blocks(node)
    times = batch_times(Deployment((node,)))[0].times
    limits = Limits(
        budget.max_num_seqs,
        node.engine.resolved("max_num_batched_tokens"),
        node.engine.resolved("max_model_len"),
        CACHED_TOKENS // BLOCK,
        BLOCK,
    )
    asked = demand(workload, limits.max_model_len)
    fleet = Fleet((limits,), (VllmV1(prefix_caching=True),), (times,), (replicas,), (1,), (False,))
    uniforms = np.random.default_rng(0).random(len(workload))
    found = {}
    for name, text in ROUTERS.items():
        router = find_router(text)
        settings = router.routing.with_kv(budget.block_bytes * 8 / BLOCK) if router.routing else None
        requests = run(replace(fleet, routing=settings), asked, router.number, uniforms).requests
        served = requests[~asked.refused]
        cached = served["cached_tokens"].sum() / asked.prompt_tokens[~asked.refused].sum()
        found[name] = Result(float((served["first_token"] - served["arrival"]).mean()), float(cached))
    return found


def table(found: dict[str, Result]) -> str:
    """In Markdown, beside the paper's ratios."""
    last = found["global cache-aware"].ttft
    lines = ["| router | mean TTFT, s | by global | paper | cached |", "|---|--:|--:|--:|--:|"]
    for name, result in found.items():
        paper = f"{PAPER[name]:.2f}" if name in PAPER else ""
        ratio = result.ttft / last
        lines.append(
            f"| {name} (`{ROUTERS[name]}`) | {result.ttft:.2f} | {ratio:.2f} | {paper} | {result.cached:.1%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=["conversation", "synthetic"])
    parser.add_argument("--replicas", type=int, default=8)
    asked = parser.parse_args(arguments)
    for name in asked.traces:
        workload = load_trace(TRACES / f"{name}_trace.jsonl")
        print(f"{name}: {len(workload):,} requests on {asked.replicas} nodes\n")
        print(table(measure(workload, asked.replicas)), "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
