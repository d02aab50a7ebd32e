"""Prefill first against decode first (checklist 31, 32, 266, 310-313)."""

from functools import cache

from benchmarks.charts import lines
from benchmarks.page import Findings, table
from benchmarks.schedulers.machine import Machine, Served, conversations

RATES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
USUAL = 4.0
WHOLE = "trtllm-max-utilization:allocation=prompt,mixed=false"
SCHEDULERS = {
    "prefill first": f"{WHOLE},group_order=prefill_first",
    "decode first": f"{WHOLE},group_order=decode_first",
    "decode first, mixed chunks": "sarathi",
}


@cache
def served(name: str, rate: float) -> Served:
    """Conversations under one of the schedulers; an infinite rate: all at once."""
    return Machine().serve(SCHEDULERS[name], conversations(rate))


def findings() -> Findings:
    """Latencies over the load, and throughput at saturation."""
    most = {name: served(name, float("inf")) for name in SCHEDULERS}
    usual = {name: served(name, USUAL) for name in SCHEDULERS}
    rows = [
        (
            name,
            run.tokens_per_second,
            run.batch,
            usual[name].percentile("ttft", 99),
            1000 * usual[name].mean("tpot"),
            1000 * usual[name].percentile("tpot", 99),
            1000 * usual[name].percentile("itl", 99),
        )
        for name, run in most.items()
    ]
    heads = ("", "tokens/s at most", "decode batch then", "TTFT p99, s", "TPOT, ms", "TPOT p99, ms", "ITL p99, ms")
    prefill, decode, mixed = SCHEDULERS
    facts = {
        "rate": USUAL,
        "table": table(heads, rows),
        "batch_gain": most[prefill].batch / most[decode].batch,
        "speed_gain": most[prefill].tokens_per_second / most[decode].tokens_per_second,
        "mixed_speed": most[mixed].tokens_per_second / most[prefill].tokens_per_second - 1,
        "mixed_tpot": usual[mixed].mean("tpot") / usual[prefill].mean("tpot") - 1,
        "mixed_gap": usual[mixed].percentile("itl", 99) / usual[prefill].percentile("itl", 99) - 1,
        "mixed_ttft_ms": 1000 * (usual[mixed].percentile("ttft", 99) - usual[prefill].percentile("ttft", 99)),
        "decode_capacity": most[decode].summary.request_throughput,
        "decode_gap_ms": 1000 * usual[decode].percentile("itl", 100),
        "prefill_gap_ms": 1000 * usual[prefill].percentile("itl", 100),
    }
    charts = {
        "order-gaps.svg": over_load("Gap between tokens, 99 %", "ms", "itl", 1000.0),
        "order-first.svg": over_load("Time to first token, 99 %", "seconds", "ttft", 1.0),
    }
    return Findings(facts, charts)


def over_load(title: str, unit: str, latency: str, scale: float) -> str:
    """A chart of a latency's 99 % over the request rate."""
    series = {
        name: [(rate, scale * served(name, rate).percentile(latency, 99)) for rate in RATES] for name in SCHEDULERS
    }
    return lines(title, "requests/s", unit, series, log_y=True)
