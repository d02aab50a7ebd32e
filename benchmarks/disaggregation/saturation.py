"""How throughput grows with the batch, of prompts and of decodes (checklist 324, 363, 368)."""

from benchmarks.charts import lines
from benchmarks.disaggregation.machine import Side, fitted
from benchmarks.page import Findings, table

PROMPTS = (64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8, 16, 32)
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512
SHARE = 0.8
"""Of the throughput of the largest batch."""


def findings() -> Findings:
    """Tokens per second by the size of the batch."""
    times = Side(1, max_num_batched_tokens=32_768).tables().times
    prompts = {n: {count: count * n / times.batch(0, 0, [(n, 0)] * count) for count in BATCHES} for n in PROMPTS}
    decodes = {
        tp: {count: count / Side(tp).tables().times.batch(count, count * CONTEXT, []) for count in DECODES}
        for tp in sorted(fitted())
    }
    rows = [
        (f"{n} tokens", *speeds.values(), min(c for c in BATCHES if speeds[c] >= SHARE * speeds[BATCHES[-1]]))
        for n, speeds in prompts.items()
    ]
    latency = {tp: 1e3 * Side(tp).tables().times.batch(16, 16 * CONTEXT, []) for tp in decodes}
    facts = {
        "table": table(("prompts of", *(f"{count} together" for count in BATCHES), "batch for 80 %"), rows),
        "short": prompts[64][32] / prompts[64][1],
        "long": prompts[1024][32] / prompts[1024][1],
        "decodes": decodes[1][256] / decodes[1][1],
        "tp2": latency[1] / latency[2],
        "tp4": latency[2] / latency[4],
        "per_gpu": max(decodes[4].values()) / 4 / max(decodes[1].values()),
    }
    of_prompts = {f"prompts of {n}": [(float(c), v) for c, v in speeds.items()] for n, speeds in prompts.items()}
    of_decodes = {f"TP {tp}": [(float(c), v) for c, v in speeds.items()] for tp, speeds in decodes.items()}
    return Findings(
        facts,
        {
            "saturation-prompts.svg": lines("Prompts", "prompts in a step", "tokens/s", of_prompts, log_x=True),
            "saturation-decodes.svg": lines("Decodes", "requests in a step", "tokens/s", of_decodes, log_x=True),
        },
    )
