"""The MindSpore tuning report: its table, its phases, and the prefill batch that pays best (checklist 330-358)."""

from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.charts import lines
from benchmarks.page import Findings, table
from benchmarks.schedulers.machine import Costs, Machine, Served
from windtunnel import Workload
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.workload.synthetic import stream

BATCHES = (1, 2, 4, 8, 16)
TABLE = {
    128: (35, 21, 17, 13, 11),
    256: (44, 31, 23, 21, 20),
    512: (63, 47, 44, 42, 41),
    1024: (93, 84, 83, 83, 82),
}
"""Prompt tokens → prefill milliseconds per prompt, by prompts in the batch (the report's table)."""
REQUESTS, RATE = 1500, 10.0
PREFILL_SECONDS, DECODE_SECONDS, OTHER_SECONDS = 575.318, 168.259, 15.592
"""The report's phases with a prefill batch of 1."""
TUNED_SECONDS = 436.9
"""The report's whole run with a prefill batch of 2."""
UNTUNED_SECONDS = 650.0
"""The middle of the report's 600 to 700 s for a prefill batch of 1."""
PROMPT, OUTPUT = 512, 183
PREFILL_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
DECODE_BATCHES = (1, 4, 8, 16, 32, 64, 128)


def fitted() -> tuple[float, float, float, float]:
    """Seconds of a call and of a token, by relative least squares over the table; mean and largest relative error."""
    cells = [(b * length, b * ms / 1000) for length, row in TABLE.items() for b, ms in zip(BATCHES, row, strict=True)]
    tokens, seconds = np.array(cells).T
    design = np.column_stack((1 / seconds, tokens / seconds))
    (call, token), *_ = np.linalg.lstsq(design, np.ones(len(cells)), rcond=None)
    errors = np.abs(design @ (call, token) - 1)
    return float(call), float(token), float(errors.mean()), float(errors.max())


def implied(first: float) -> tuple[float, float]:
    """(overhead, prompt) seconds from the whole seconds of both runs, if decoding took the same time in both.

    1500·(h + c) = first − decode and 750·(h + 2c) = 436.9 − decode, for calls of h + c·prompts.
    """
    rest = DECODE_SECONDS + OTHER_SECONDS
    one, two = (first - rest) / REQUESTS, (TUNED_SECONDS - rest) / (REQUESTS / 2)
    return 2 * one - two, two - one


OVERHEAD, PER_PROMPT = implied(UNTUNED_SECONDS)
"""Seconds of a prefill call, and of a prompt in it."""


def costs(overhead: float, per_prompt: float) -> Costs:
    """Prefill calls of overhead + per_prompt·prompts; decode steps of 60 ms + 0.15 ms a request."""

    def times(tokens: int, requests: int, longest: int) -> BatchTimes:
        sizes = {"max_num_batched_tokens": tokens, "max_num_seqs": requests, "max_model_len": longest}
        flat = linear(0.0, 0.0, 0.0, 0.0, **sizes)
        counts = np.arange(tokens + 1, dtype=np.float64)
        return replace(
            flat, mixed_tokens=overhead + per_prompt / PROMPT * counts, decode_tokens=0.060 + 0.15e-3 * counts
        )

    return times


@cache
def workload() -> Workload:
    """10 requests a second for 150 s, as the report's load generator sends them."""
    output = stream(1, "outputs").lognormal(np.log(OUTPUT) - 0.32, 0.8, REQUESTS)
    return Workload.from_columns(
        arrival=np.arange(REQUESTS) / RATE,
        prompt_tokens=np.full(REQUESTS, PROMPT),
        output_tokens=np.clip(np.ceil(output), 1, 1400).astype(np.int64),
    )


@cache
def served(overhead: float, per_prompt: float, places: int, prefill_batch: int) -> Served:
    """The report's run with so many decode slots and prompts in a prefill call."""
    machine = Machine(
        costs=costs(overhead, per_prompt),
        model="facebook/opt-125m",
        kv_tokens=256_000,
        max_num_seqs=places,
        max_num_batched_tokens=max(places, 4) * PROMPT,
    )
    return machine.serve(f"mindspore:prefill_batch_share=0,prefill_batch={prefill_batch}", workload())


def sweep(overhead: float, per_prompt: float, places: int) -> dict[int, float]:
    """Prefill batch → seconds of the whole run."""
    batches = [batch for batch in PREFILL_BATCHES if batch <= places]
    return {batch: served(overhead, per_prompt, places, batch).seconds for batch in batches}


def best(seconds: dict[int, float]) -> int:
    """The prefill batch with the shortest run."""
    return min(seconds, key=lambda batch: seconds[batch])


SETTINGS = {
    "overhead 0.284 s, 128 slots": (OVERHEAD, PER_PROMPT, 128),
    "overhead 0.284 s, 24 slots": (OVERHEAD, PER_PROMPT, 24),
    "overhead 0.025 s, 128 slots": (0.025, 0.020, 128),
    "no overhead, 128 slots": (0.0, PER_PROMPT, 128),
}
"""Name → (overhead, per prompt, decode slots)."""


def findings() -> Findings:
    """The report's table, its hidden overhead, and both of its sweeps."""
    call, token, error, worst = fitted()
    runs = {name: sweep(*setting) for name, setting in SETTINGS.items()}
    slots = {places: served(OVERHEAD, PER_PROMPT, places, 1).seconds for places in DECODE_BATCHES}
    points = {name: [(float(batch), seconds) for batch, seconds in run.items()] for name, run in runs.items()}
    guesses = [(f"{first:g} s", *implied(first)) for first in (600.0, UNTUNED_SECONDS, 677.0, 700.0, 759.2)]
    main, small, low, none = runs.values()
    facts = {
        "call_ms": 1000 * call,
        "token_ms": 1000 * token,
        "error": error,
        "worst": worst,
        "short_gain": TABLE[128][0] / TABLE[128][1],
        "long_gain": TABLE[1024][0] / TABLE[1024][1],
        "prefill_seconds": PREFILL_SECONDS,
        "report_call_ms": 1000 * PREFILL_SECONDS / REQUESTS,
        "guesses": table(("run with a prefill batch of 1", "overhead of a call, s", "a prompt, s"), guesses),
        "overhead": OVERHEAD,
        "per_prompt": PER_PROMPT,
        "one": main[1],
        "two": main[2],
        "two_gain": main[2] / main[1] - 1,
        "best": best(main),
        "best_seconds": min(main.values()),
        "best_of_24": best(small),
        "decodes_at_1": served(OVERHEAD, PER_PROMPT, 24, 1).batch,
        "decodes_at_16": served(OVERHEAD, PER_PROMPT, 24, 16).batch,
        "low_gain": low[2] / low[1] - 1,
        "none_gain": none[2] / none[1] - 1,
        "slots": table(("decode slots", *map(str, slots)), [("seconds", *slots.values())]),
        "slots_8": slots[8],
    }
    chart = lines("Whole run by prefill batch", "prompts in a prefill call", "seconds", points, log_x=True, log_y=True)
    return Findings(facts, {"mindspore.svg": chart})
