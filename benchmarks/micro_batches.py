"""What two micro-batches are worth: steps of DeepSeek-V3 with and without, next to what others measured.

``python -m benchmarks.micro_batches`` prints the tables that docs/batch-times.md sums up; needs the kernel database.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.tabulate.grid import tabulate

MODEL = "deepseek-ai/DeepSeek-V3"
EVEN = ALL.without("expert_imbalance")
"""Experts as a perfect load balancer leaves them."""
PROMPT = 4096
Batch = tuple[int, int, list[tuple[int, int]]]
"""Decodes, tokens that they have in the cache, and chunks, as ``BatchTimes.lockstep`` takes them."""


@dataclass(frozen=True)
class Bench:
    """Ranks of one GPU each, with whole experts."""

    device: str
    ranks: int
    engine: dict[str, Any]
    corrections: Corrections = ALL

    def tables(self, enable_dbo: bool) -> BatchTimes:
        """Batch times with two micro-batches or without."""
        limits = {"max_model_len": 8192, "max_num_seqs": 512, "max_num_batched_tokens": 16384}
        ranks = {"data_parallel_size": self.ranks, "enable_expert_parallel": True, "enable_dbo": enable_dbo}
        engine = Engine(**{**limits, **ranks, **self.engine})
        return tabulate(Pool(load_model(MODEL), device(self.device), engine), corrections=self.corrections).times

    def decodes(self, requests: tuple[int, ...], context: int) -> Iterator[tuple[int, float, float]]:
        """Requests of each rank, seconds of a step whole, and of one in two halves."""
        whole, split = (self.tables(enable_dbo) for enable_dbo in (False, True))
        for n in requests:
            batch: list[Batch] = [(n, n * context, [])] * self.ranks
            yield n, whole.lockstep(batch), split.lockstep(batch)

    def prompts(self, tokens: tuple[int, ...]) -> Iterator[tuple[int, float, float]]:
        """Tokens of each rank's prompts, and the same seconds."""
        whole, split = (self.tables(enable_dbo) for enable_dbo in (False, True))
        for n in tokens:
            batch: list[Batch] = [(0, 0, [(PROMPT, 0)] * (n // PROMPT))] * self.ranks
            yield n, whole.lockstep(batch), split.lockstep(batch)


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def gains(name: str, steps: Iterator[tuple[int, float, float]]) -> str:
    """Milliseconds without and with, and how much faster tokens come, of every size."""
    found = [f"{1e3 * whole:,.0f} → {1e3 * split:,.0f} ({whole / split - 1:+.0%})" for _, whole, split in steps]
    return row(name, *found)


def here() -> Iterator[str]:
    """16 ranks on two nodes of H200."""
    requests, tokens = (32, 64, 128, 256), (4096, 8192, 16384)
    heads = [*(f"{n} decodes" for n in requests), *(f"{n:,} prompt tokens" for n in tokens)]
    yield row("H200 × 16", *heads)
    yield row("---", *["---:"] * len(heads))
    for preset, backend in (("vllm-0.32", "low_latency"), ("vllm-0.32", "high_throughput"), ("sglang-0.5", "auto")):
        bench = Bench("h200", 16, {"preset": preset, "all2all_backend": f"deepep_{backend}"})
        decodes, prompts = (list(found) for found in (bench.decodes(requests, 4000), bench.prompts(tokens)))
        yield gains(f"{preset}, {backend}", iter([*decodes, *prompts]))


def published() -> Iterator[str]:
    """What the SGLang team measured (LMSYS, 5 May 2025) and DeepSeek profiled, and the same here."""
    sglang = {"preset": "sglang-0.5", "all2all_backend": "deepep_auto"}
    yield row("", "published", "routed by power law", "routed evenly")
    yield row("---", "---:", "---:", "---:")
    wide = [list(Bench("h100", 72, sglang, causes).decodes((32, 128, 256), 2000)) for causes in (ALL, EVEN)]
    for place, said in enumerate(("−27 %", "more than 0 %", "+25.5 %")):
        n, told = wide[0][place][0], [f"{found[place][1] / found[place][2] - 1:+.1%}" for found in wide]
        yield row(f"decode, {n} requests a GPU, EP72 H100: gain", said, *told)
    node = [f"{8 * found[2][0] / found[2][2]:,.0f}" for found in wide]
    yield row("the last, split: tokens/s and node", "22,310", *node)
    long = [list(Bench("h100", 32, sglang, causes).prompts((8192, 16384))) for causes in (ALL, EVEN)]
    yield row(
        "prefill, 8,192 tokens, EP32 H100: gain", "+27 to +35 %", *(f"{one[1] / one[2] - 1:+.1%}" for one, _ in long)
    )
    rates = [f"{8 * n / split:,.0f}" for _, (n, _, split) in long]
    yield row("prefill, 16,384 tokens, split: tokens/s and node", "50,302; balanced 59,337", *rates)
    vllm = {"preset": "vllm-0.32", "all2all_backend": "deepep_high_throughput"}
    own = [next(Bench("h100", 32, vllm, causes).prompts((16384,))) for causes in (ALL, EVEN)]
    rates = [f"{8 * n / split:,.0f}" for n, _, split in own]
    yield row("the same: DeepSeek's own engine, balanced; vLLM here", "62,713", *rates)


if __name__ == "__main__":
    print("\n".join([*here(), "", *published()]).replace("(-", "(−").replace(" -", " −").replace("| −--", "| ---"))
