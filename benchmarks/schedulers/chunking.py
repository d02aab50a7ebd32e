"""Chunked prefills: what a chunk's size does to both latencies (checklist 305-313)."""

from functools import cache

from benchmarks.charts import lines
from benchmarks.page import Findings, table
from benchmarks.schedulers.machine import Machine, Served, conversations

CHUNKS = (128, 256, 512, 1024, 2048, 4096)
WHOLE = "trtllm-max-utilization:allocation=prompt"
ALONE = "prefill alone, whole prompts"


def chunked(size: int) -> str:
    """Sarathi-Serve with chunks of so many tokens, and no cap on requests of its own."""
    return f"sarathi:chunk={size},max_num_seqs=0"


SCHEDULERS = {
    ALONE: f"{WHOLE},mixed=false,group_order=prefill_first",
    "mixed, whole prompts": WHOLE,
    **{f"mixed, chunks of {size:,}": chunked(size) for size in reversed(CHUNKS)},
}
LOADS = {"light": 3.0, "heavy": 5.0}
"""Requests per second; the machine serves about 6."""


@cache
def served(scheduler: str, rate: float) -> Served:
    """Conversations with long prompts under a scheduler."""
    return Machine(max_num_seqs=128).serve(scheduler, conversations(rate, prompt=700))


def row(name: str, run: Served) -> tuple[object, ...]:
    """Both latencies of a run."""
    ttft, tpot = (run.mean("ttft"), run.percentile("ttft", 99)), (run.mean("tpot"), run.percentile("tpot", 99))
    gaps = (run.percentile("itl", 99), run.percentile("itl", 100))
    return (name, *ttft, *(1000 * value for value in (*tpot, *gaps)))


def findings() -> Findings:
    """A table for each load, and the trade-off as a chart."""
    heads = ("", "TTFT mean, s", "TTFT p99, s", "TPOT mean, ms", "TPOT p99, ms", "ITL p99, ms", "longest gap, ms")
    tables = {
        load: table(heads, [row(name, served(text, rate)) for name, text in SCHEDULERS.items()])
        for load, rate in LOADS.items()
    }
    series = {
        f"{load} load": [
            (1000 * run.percentile("itl", 99), run.percentile("ttft", 99))
            for run in (served(chunked(size), rate) for size in CHUNKS)
        ]
        for load, rate in LOADS.items()
    }
    light, heavy = (served(SCHEDULERS[ALONE], rate) for rate in LOADS.values())
    whole, good, small = (served(text, LOADS["heavy"]) for text in (WHOLE, chunked(512), chunked(128)))
    facts = {
        "light_rate": LOADS["light"],
        "heavy_rate": LOADS["heavy"],
        **tables,
        "stall": heavy.percentile("itl", 99) / heavy.percentile("itl", 50),
        "longest_light_ms": 1000 * light.percentile("itl", 100),
        "longest_heavy_ms": 1000 * heavy.percentile("itl", 100),
        "gap": good.percentile("itl", 99) / heavy.percentile("itl", 99) - 1,
        "gap_of_mixing": whole.percentile("itl", 99) / heavy.percentile("itl", 99) - 1,
        "tpot": good.percentile("tpot", 99) / heavy.percentile("tpot", 99) - 1,
        "ttft_ms": 1000 * (good.percentile("ttft", 99) - heavy.percentile("ttft", 99)),
        "mean_of_mixing": whole.mean("tpot") / heavy.mean("tpot") - 1,
        "mean_of_chunks": good.mean("tpot") / whole.mean("tpot") - 1,
        "small_tokens": 128 / (18.1e-3 + 128 * 0.1019e-3),
        "small_ttft": small.mean("ttft"),
    }
    chart = lines(
        "Chunks of 128 (left) to 4,096 tokens (right)",
        "gap between tokens, 99 %, ms",
        "first token, 99 %, s",
        series,
        log_x=True,
        log_y=True,
    )
    return Findings(facts, {"chunking.svg": chart})
