"""Models of one size (checklist 97): ``python -m benchmarks.same_size`` writes docs/experiments/same-size.md.

"Same-size models can have very different performance because of architectural details" (a finding of Vidur's authors):
memory of a token, requests that fit, and the decode step at the most of them, from the kernel database on one H100.
"""

from dataclasses import dataclass

from benchmarks.charts import lines
from benchmarks.page import PLACE, save, table
from windtunnel import Engine, Pool, device, load_model
from windtunnel.deployment.memory import kv_blocks
from windtunnel.perf.tabulate.grid import tabulate

MODELS = (
    "facebook/opt-6.7b",
    "meta-llama/Llama-2-7b-hf",
    "google/gemma-7b",
    "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-8B",
)
CONTEXT, MOST = 2000, 512
BATCHES = (1, 8, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Found:
    """One model."""

    name: str
    parameters: float
    kilobytes: float
    """KV of a token."""
    fit: int
    """Requests of CONTEXT tokens in memory."""
    speeds: dict[int, float]
    """Decodes together → tokens/s, as far as they fit."""


def measure(name: str) -> Found:
    """A model in 16 bits on one H100 under vLLM."""
    model = load_model(name)
    pool = Pool(model, device("h100"), Engine(max_num_seqs=MOST, max_model_len=2048, max_num_batched_tokens=2048))
    budget = kv_blocks(pool)
    fit = min(budget.num_tokens // CONTEXT, MOST)
    times = tabulate(pool).times
    sizes = sorted({*(n for n in BATCHES if n <= fit), fit})
    speeds = {n: n / times.batch(n, n * CONTEXT, []) for n in sizes}
    per_token = budget.block_bytes / budget.block_size
    return Found(name, model.num_parameters, per_token / 1000, fit, speeds)


def page(found: list[Found]) -> dict[str, str]:
    """The page and its chart."""
    rows = [
        (f"`{one.name}`", one.parameters / 1e9, one.kilobytes, one.fit, 1000 / one.speeds[1], one.speeds[one.fit])
        for one in found
    ]
    best, worst = (of(found, key=lambda one: one.speeds[one.fit]) for of in (max, min))
    ratio = best.speeds[best.fit] / worst.speeds[worst.fit]
    alone = max(one.speeds[1] for one in found) / min(one.speeds[1] for one in found)
    heads = (
        "model",
        "10⁹ parameters",
        "kB of KV a token",
        f"requests of {CONTEXT:,} that fit",
        "ms a token alone",
        "tokens/s, all",
    )
    verdict = "holds" if ratio > 1.5 else "fails"
    text = f"""# Models of one size

Written by `python -m benchmarks.same_size`: decodes on one H100 with vLLM's kernels, 16 bits, {CONTEXT:,} tokens in the
cache each.

{table(heads, rows)}

![Decodes by requests together](same-size.svg)

*"Models of one size can differ much, because of architectural details"* **{verdict}**: alone they differ by {alone:.2f}
times, with as many requests as fit by {ratio:.1f} times. The bytes of KV a token decide: `{best.name}` has
{best.kilobytes:.0f} kB and takes {best.fit} requests, `{worst.name}` {worst.kilobytes:.0f} kB and {worst.fit}.
"""
    series = {one.name.split("/")[1]: [(float(n), speed) for n, speed in one.speeds.items()] for one in found}
    chart = lines("Decodes by requests together", "requests", "tokens/s", series, log_x=True)
    return {"same-size.md": text, "same-size.svg": chart}


if __name__ == "__main__":
    save(page([measure(name) for name in MODELS]))
    print(PLACE)
