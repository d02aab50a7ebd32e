"""What a prompt does to the decodes beside it, and they to it (checklist 324, 361, 362, 426)."""

from benchmarks.charts import lines
from benchmarks.disaggregation.machine import Side
from benchmarks.page import Findings, table

PROMPTS = (128, 512, 1024)
BATCHES = (1, 8, 16, 32, 64, 128)
CONTEXT = 300
"""Tokens in the cache of each decode."""


def findings() -> Findings:
    """Steps of decodes alone, of a prompt alone, and of both."""
    times = Side(1).tables().times
    rows, series = [], {"decodes alone": [(float(n), 1e3 * times.batch(n, n * CONTEXT, [])) for n in BATCHES]}
    slower: dict[tuple[int, int], float] = {}
    for prompt in PROMPTS:
        alone = times.batch(0, 0, [(prompt, 0)])
        both = [times.batch(n, n * CONTEXT, [(prompt, 0)]) for n in BATCHES]
        series[f"with a prompt of {prompt}"] = [(float(n), 1e3 * each) for n, each in zip(BATCHES, both, strict=True)]
        for n, each in zip(BATCHES, both, strict=True):
            slower[prompt, n] = each / times.batch(n, n * CONTEXT, [])
            rows.append((f"{prompt} + {n} decodes", 1e3 * alone, 1e3 * each, slower[prompt, n], each / alone))
    facts = {
        "table": table(("prompt", "alone, ms", "together, ms", "decodes slower", "prompt slower"), rows),
        "decodes_least": min(slower.values()),
        "decodes_most": max(slower.values()),
        "prompt_most": max(row[4] for row in rows),
    }
    chart = lines("A step of decodes, and of decodes with one prompt", "decodes", "ms", series, log_x=True)
    return Findings(facts, {"interference.svg": chart})
