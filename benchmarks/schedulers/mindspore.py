"""The MindSpore tuning report: its table, its phases, and the prefill batch that pays best (checklist 330-358)."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.charts import Points, lines
from benchmarks.page import Findings, table
from benchmarks.schedulers.machine import Costs, Machine, Served
from windtunnel import Workload
from windtunnel.perf.batch_times import BatchTimes, Floats, linear
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
LONGEST = 4096
"""Tokens of a request at most."""
VOCABULARY = 32_000
"""Llama-7B's."""
CODE_MOST = 128 // 32 + 1
"""Prompts at which the report's code ends a call: more than batch_size // 32 of 128 (master.py). Its text waits for 2
free slots (schedule.py). mindspore-ai/llm-serving, which it changes, fills slots first and then computes the prompts
that stand in them, before any decodes."""
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
def workload(prompt: int = PROMPT) -> Workload:
    """10 requests a second for 150 s, as the report's load generator sends them."""
    output = stream(1, "outputs").lognormal(np.log(OUTPUT) - 0.32, 0.8, REQUESTS)
    return Workload.from_columns(
        arrival=np.arange(REQUESTS) / RATE,
        prompt_tokens=np.full(REQUESTS, prompt),
        output_tokens=np.clip(np.ceil(output), 1, 1400).astype(np.int64),
    )


def _scheduler(prefill_batch: int, most: int = 0) -> str:
    return f"mindspore:prefill_batch_share=0,prefill_batch={prefill_batch},prefill_batch_max={most}"


def _machine(times: Costs, places: int, prompt: int = PROMPT) -> Machine:
    return Machine(
        costs=times,
        model="Qwen/Qwen3-0.6B",
        kv_tokens=256_000,
        max_num_seqs=places,
        max_num_batched_tokens=max(places * prompt, LONGEST),
        max_model_len=LONGEST,
    )


@cache
def served(overhead: float, per_prompt: float, places: int, prefill_batch: int) -> Served:
    """The report's run with so many decode slots and prompts in a prefill call."""
    return _machine(costs(overhead, per_prompt), places).serve(_scheduler(prefill_batch), workload())


def sweep(overhead: float, per_prompt: float, places: int) -> dict[int, float]:
    """Prefill batch → seconds of the whole run."""
    batches = [batch for batch in PREFILL_BATCHES if batch <= places]
    return {batch: served(overhead, per_prompt, places, batch).seconds for batch in batches}


def best(seconds: dict[int, float]) -> int:
    """The prefill batch with the shortest run."""
    return min(seconds, key=lambda batch: seconds[batch])


@dataclass(frozen=True)
class Parts:
    """What a call costs, each from a number of the report: seconds."""

    call: float
    """Of a prefill call: what its phase has beyond the table's seconds a token."""
    token: float
    """Of a prompt's token: the table's."""
    step: float
    """Of a decode step, without requests."""
    request: float
    """Of a request in it."""
    host: float
    """Communication and post-processing of any call."""

    def costs(self) -> Costs:
        """As batch times."""

        def times(tokens: int, requests: int, longest: int) -> BatchTimes:
            sizes = {"max_num_batched_tokens": tokens, "max_num_seqs": requests, "max_model_len": longest}
            counts = np.arange(tokens + 1, dtype=np.float64)
            return replace(
                linear(0.0, 0.0, 0.0, 0.0, **sizes),
                mixed_tokens=self.host + self.call + self.token * counts,
                decode_tokens=self.host + self.step + self.request * counts,
            )

        return times


@cache
def parts(whole: float, prompt: int = PROMPT) -> Parts:
    """The phases' parts for prompts of so many tokens, all scaled alike so that they add up to this many seconds.

    The phases give a prefill call and all decode steps together; how many steps those are, and of how many requests,
    the simulated schedule says. A step of n requests is taken to cost as 60 + 0.15·n.
    """
    decodes = _decodes(served(OVERHEAD, PER_PROMPT, 128, 1))
    scale = whole / (PREFILL_SECONDS + DECODE_SECONDS + OTHER_SECONDS)
    token = fitted()[1]
    unit = DECODE_SECONDS / float(np.sum(60.0 + 0.15 * decodes))
    host = OTHER_SECONDS / (len(decodes) + REQUESTS)
    call = PREFILL_SECONDS / REQUESTS - token * prompt
    return Parts(*(scale * value for value in (call, token, 60.0 * unit, 0.15 * unit, host)))


def _decodes(found: Served) -> Floats:
    """Requests in each decode step."""
    return found.steps.decodes[found.steps.decodes > 0].astype(np.float64)


@cache
def by_parts(whole: float, places: int, prefill_batch: int, most: int = 0, prompt: int = PROMPT) -> Served:
    """The report's run with the phases' parts: calls wait for ``prefill_batch`` free slots, and hold ``most``."""
    machine = _machine(parts(whole, prompt).costs(), places, prompt)
    return machine.serve(_scheduler(prefill_batch, most), workload(prompt))


def phases(whole: float, prefill_batch: int, most: int = 0) -> tuple[float, float, float]:
    """Milliseconds of prefill, of decoding, and of communication and post-processing in a simulated run."""
    steps, host = by_parts(whole, 128, prefill_batch, most).steps, parts(whole).host
    decode = steps.decodes > 0
    prefill, decoding = (float(np.sum(steps.duration[kind] - host)) for kind in (~decode, decode))
    return 1000 * prefill, 1000 * decoding, 1000 * host * len(decode)


def shapes(whole: float, prefill_batch: int) -> int:
    """Different numbers of prompts in the prefill calls of a run, each of which is a graph to compile."""
    steps = by_parts(whole, 128, prefill_batch).steps
    tokens = (steps.duration[steps.decodes == 0] - parts(whole).host - parts(whole).call) / parts(whole).token
    return len(np.unique(np.round(tokens / PROMPT)))


def occupancy(places: int, prefill_batch: int) -> float:
    """Share of the decode slots that stay empty while requests are still waiting."""
    whole = PREFILL_SECONDS + DECODE_SECONDS + OTHER_SECONDS
    steps = by_parts(whole, places, prefill_batch).steps
    last = int(np.flatnonzero(steps.decodes == 0)[-1])
    busy = steps.decodes[:last][steps.start[:last] > REQUESTS / RATE]
    return 1.0 - float(busy[busy > 0].mean()) / places


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
    measured: dict[str, Points] = {
        f"{length} tokens": list(zip(map(float, BATCHES), map(float, row), strict=True))
        for length, row in TABLE.items()
    }
    measured |= {
        f"{length}, the line": [(b, 1000 * (call / b + token * length)) for b in (1.0, 2.0, 4.0, 8.0, 16.0)]
        for length in TABLE
    }
    label = "milliseconds a prompt"
    table_chart = lines("Prefill by prompts in a call", "prompts in a call", label, measured, log_x=True)
    return Findings(facts | _facts_of_parts(), {"mindspore.svg": chart, "mindspore-table.svg": table_chart})


def _facts_of_parts() -> dict[str, Any]:
    """The phases, empty slots, graphs to compile and logits of the runs whose parts the report gives."""
    reported = (PREFILL_SECONDS, DECODE_SECONDS, OTHER_SECONDS)
    whole = sum(reported)
    rows = [("the report, 1 prompt in a call", *(f"{1000 * value:,.0f}" for value in reported), f"{whole:.0f}")]
    settings = {"1": (1, 0), "2": (2, 0), f"2 to {CODE_MOST}": (2, CODE_MOST), f"{CODE_MOST}": (CODE_MOST, 0)}
    for name, (batch, most) in settings.items():
        found = [f"{value:,.0f}" for value in phases(whole, batch, most)]
        rows.append((f"simulated, {name} in a call", *found, f"{by_parts(whole, 128, batch, most).seconds:.1f}"))
    seconds = {batch: by_parts(whole, 128, batch).seconds for batch in (2, 4, 8, 16, 32)}
    graphs = {batch: shapes(whole, batch) for batch in seconds}
    compiling = [
        (batch, f"{time:.0f}", graphs[batch])
        + (("–", "–") if batch == 2 else _break_even(seconds[2] - time, graphs[batch] - graphs[2], batch - 2))
        for batch, time in seconds.items()
    ]
    empty = [
        (slots, batch, f"{occupancy(slots, batch):.1%}", f"{batch / slots:.0%}")
        for slots, batch in ((128, 2), (128, 20), (24, 2), (24, 20))
    ]
    logits = 4.0 * VOCABULARY * int(workload().output_tokens.sum())
    tuned = by_parts(whole, 128, 2, CODE_MOST)
    lengths = {prompt: by_parts(whole, 128, 2, CODE_MOST, prompt).seconds for prompt in (128, 1024)}
    return {
        "steps": len(_decodes(by_parts(whole, 128, 1))),
        "host_ms": 1000 * parts(whole).host,
        "phases": table(("ms", "prefill", "decode", "communication, post-processing", "whole run, s"), rows),
        "by_phases": by_parts(whole, 128, 2).seconds,
        "most": CODE_MOST,
        "tuned": tuned.seconds,
        "tuned_off": tuned.seconds / TUNED_SECONDS - 1,
        "tuned_calls": int(np.sum(tuned.steps.decodes == 0)),
        "tuned_batch": REQUESTS / int(np.sum(tuned.steps.decodes == 0)),
        "tuned_short": lengths[128],
        "tuned_long": lengths[1024],
        "empty": table(("decode slots", "prompts in a call", "empty on average", "just before a call"), empty),
        "compiling": table(
            ("prompts in a call", "s", "numbers that occur", "a graph, s", "if all up to k, s"), compiling
        ),
        "least_graph": max((seconds[2] - time) / (batch - 2) for batch, time in seconds.items() if batch > 2),
        "tokens": int(workload().output_tokens.sum()),
        "logits": logits / 1e9,
        "argmax": logits / 10e9,
    }


def _break_even(gain: float, more: int, all_more: int) -> tuple[str, str]:
    """Seconds of a graph from which the longer calls lose what they gain."""
    return (f"{gain / more:.0f}" if more > 0 else "–", f"{gain / all_more:.0f}")
