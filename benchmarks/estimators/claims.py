"""The source documents' claims about batch times, measured on what is at hand."""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.database import open_database
from windtunnel.perf.estimators.interpolation import Interpolation
from windtunnel.perf.estimators.points import Points, ape
from windtunnel.perf.estimators.selection import errors, folds, held_out
from windtunnel.perf.estimators.terms import Linear, Polynomial, relative_least_squares
from windtunnel.perf.profile.folder import Profile

Floats = NDArray[np.float64]
SHAPE = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0}


def per_cent(value: float, digits: int = 1) -> str:
    """A share as text."""
    return f"{100 * value:.{digits}f} %"


def polynomials(profile: Profile, tp: int) -> list[str]:
    """Median error of each degree beside interpolation's, and the largest step between neighbouring sizes."""
    lines = ["| operator | 1 | 2 | 3 | 4 | 5 | interpolation | largest step |", "|---|---|---|---|---|---|---|---|"]
    for operator in ("attn_pre_proj", "mlp_up_proj", "mlp_down_proj", "attn_prefill", "attn_decode"):
        points = profile.points[operator, tp]
        degrees = [errors(held_out(Polynomial(degree), points)).median for degree in range(1, 6)]
        other = errors(held_out(Interpolation(), points)).median
        cells = [per_cent(one) for one in (*degrees, other)]
        lines.append(f"| {operator} | {' | '.join(cells)} | {_largest_step(points)} |")
    return lines


def _largest_step(points: Points) -> str:
    if points.phase != "tokens":
        return "–"
    ratio = points.seconds[1:] / points.seconds[:-1]
    at = int(np.argmax(np.where(np.diff(points.a) <= 32, ratio, 0.0)))
    return f"+{per_cent(float(ratio[at] - 1.0), 0)} from {points.a[at]:.0f} to {points.a[at + 1]:.0f}"


def sum_of_contexts(profile: Profile, tp: int) -> tuple[float, float, float]:
    """Median held-out errors of decode attention by Σ context alone, by (requests, context), and by a line in both."""
    points = profile.points["attn_decode", tp]
    total = Points("tokens", points.a * points.b, 0.0 * points.b, points.flops, points.moved, points.seconds)
    fold = folds(total)
    apes = []
    for i in range(5):
        known, asked = total.where(fold != i), total.where(fold == i)
        apes.append(ape(Interpolation().fit(known).times(asked), asked.seconds))
    both, line = (errors(held_out(learner, points)).median for learner in (Interpolation(), Linear()))
    return float(np.median(np.concatenate(apes))), both, line


def equal_sums() -> list[str]:
    """Decode attention of the kernel database: many requests with few keys against one with as many keys together."""
    table = _attention("generation_attention_perf")
    lines = ["| cached tokens together | requests → time of one request with all of them |", "|---|---|"]
    for total in (2**14, 2**16):
        alone = table.get((1, total))
        ratios = {n: table[n, total // n] / alone for n in (2, 8, 32, 128) if alone and (n, total // n) in table}
        lines.append(f"| {total:,} | {', '.join(f'{n}: {ratio:.2f} ×' for n, ratio in ratios.items())} |")
    return lines


def squared_lengths() -> list[str]:
    """Batched prefill attention of the kernel database against one prompt of √Σp², both measured."""
    table = _attention("context_attention_perf")
    lines = ["| prompts | 128 | 256 | 512 | 1,024 | 2,048 |", "|---|---|---|---|---|---|"]
    for count, root in ((4, 2), (16, 4), (64, 8)):
        cells = []
        for length in (128, 256, 512, 1024, 2048):
            batch, one = table.get((count, length)), table.get((1, length * root))
            cells.append(f"{batch / one:.2f} ×" if batch and one else "–")
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return lines


def _attention(name: str) -> dict[tuple[int, int], float]:
    """(batch, length) → ms of one shape on an H100 with vLLM's newest kernels, the fastest of them."""
    database = open_database("h100_sxm", "vllm")
    table = database.read("attention", name, ("kv_cache_dtype", "attn_dtype")) if database else None
    if table is None:
        return {}
    rows = table.where(**SHAPE, kv_cache_dtype="bfloat16", attn_dtype="bfloat16")
    lengths = rows["isl"] + rows["step"] if name.startswith("generation") else rows["isl"]
    found: dict[tuple[int, int], float] = {}
    for batch, length, time in zip(rows["batch_size"], lengths, rows["latency"], strict=True):
        key = (int(batch), int(length))
        found[key] = min(float(time), found.get(key, np.inf))
    return found


def linear_terms_of(profile: Profile, tp: int) -> list[tuple[str, str, float, float, Floats, Floats]]:
    """InferMax's three terms: (term, of what, R², median error of the line, x, seconds)."""
    tokens = [profile.points[name, tp] for name in ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")]
    rest = Points("tokens", tokens[0].a, tokens[0].b, *_sums(tokens))
    decode, prefill = profile.points["attn_decode", tp], profile.points["attn_prefill", tp]
    fresh = prefill.where(prefill.b == 0)
    rows = (
        ("tokens", "projections of a layer", rest.a, rest.seconds),
        ("KV read", "decode attention", decode.a * decode.b, decode.seconds),
        ("tokens²", "prefill attention without context", fresh.a**2, fresh.seconds),
    )
    return [(term, what, *_line(x, seconds), x, seconds) for term, what, x, seconds in rows]


def _sums(parts: list[Points]) -> tuple[Floats, Floats, Floats]:
    flops, moved, seconds = (np.sum([getattr(p, n) for p in parts], axis=0) for n in ("flops", "moved", "seconds"))
    return flops, moved, seconds


def _line(x: Floats, seconds: Floats) -> tuple[float, float]:
    design = np.stack([np.ones(len(x)), x], axis=1)
    plain = design @ np.linalg.lstsq(design, seconds, rcond=None)[0]
    r2 = 1.0 - float(np.sum((seconds - plain) ** 2) / np.sum((seconds - seconds.mean()) ** 2))
    relative = design @ relative_least_squares(design, seconds)
    return r2, float(np.median(ape(relative, seconds)))


def few_points(profile: Profile, tp: int) -> list[str]:
    """Median error on all other sizes, from so many of them, evenly spaced in order."""
    counts = (4, 8, 16, 32, 64, 128)
    lines = [f"| operator | {' | '.join(map(str, counts))} |", "|---|" + "---|" * len(counts)]
    for operator in ("attn_pre_proj", "mlp_up_proj", "mlp_act", "all_reduce"):
        points = profile.points[operator, tp]
        cells = []
        for count in counts:
            chosen = np.isin(np.arange(len(points)), np.linspace(0, len(points) - 1, count).round())
            asked = points.where(~chosen)
            predicted = Interpolation().fit(points.where(chosen)).times(asked)
            cells.append(per_cent(float(np.median(ape(predicted, asked.seconds)))))
        lines.append(f"| {operator} | {' | '.join(cells)} |")
    return lines


def splitwise(path: Path) -> list[str]:
    """DistServe's A, B, C on Splitwise's table: prompts; decodes with one and with two regimes, held out by fold."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["hardware"] == "a100-80gb" and row["model"] == "llama2-70b"]
    lines = ["| TP | prompts: A, B, C (ms) | error | decodes: one regime | two regimes |", "|---|---|---|---|---|"]
    for tp in sorted({row["tensor_parallel"] for row in rows}, key=int):
        own = [{key: float(row[key]) for key in NUMBERS} for row in rows if row["tensor_parallel"] == tp]
        whole = [row for row in own if abs(_pieces(row) / row["e2e_time"] - 1.0) < 0.02]
        batches = [(row["batch_size"] * row["prompt_size"], 0.0, row["prompt_time"]) for row in whole]
        prompts = _points("tokens", batches)
        squares = [row["batch_size"] * row["prompt_size"] ** 2 for row in whole]
        x = np.stack([np.ones(len(whole)), prompts.a, squares], axis=1)
        a, b, c = relative_least_squares(x, prompts.seconds)
        error = np.median(ape(x @ np.array([a, b, c]), prompts.seconds))
        decodes = _points(
            "decode",
            [(row["batch_size"], row["prompt_size"] + row["token_size"] / 2, row["token_time"]) for row in whole],
        )
        regimes = [per_cent(errors(held_out(Linear(n), decodes)).median) for n in (1, 2)]
        lines.append(f"| {tp} | {a:.1f}, {b:.4f}, {c:.2e} | {per_cent(float(error))} | {' | '.join(regimes)} |")
    return lines


NUMBERS = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time", "e2e_time")


def _pieces(row: dict[str, float]) -> float:
    return row["prompt_time"] + (row["token_size"] - 1) * row["token_time"]


def _points(phase: str, rows: list[tuple[float, float, float]]) -> Points:
    a, b, seconds = np.array(rows).T
    return Points(phase, a, b, a, a * b, seconds)
