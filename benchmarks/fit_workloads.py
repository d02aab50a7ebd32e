"""Fit the built-in workloads to the public traces: ``python -m benchmarks.fit_workloads ../shared/traces [--write]``.

Prints each fit next to its original as Markdown. ``--write`` first stores the fitted numbers in
src/windtunnel/data/workloads.toml, and afterwards the tables in docs/appendix/fits.md between the markers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.workload.arrivals import Constant
from windtunnel.workload.builtin import builtin, builtin_names
from windtunnel.workload.columns import Workload
from windtunnel.workload.describe import describe
from windtunnel.workload.rules import Integers
from windtunnel.workload.traces import load_trace

ROOT = Path(__file__).parents[1]
DATA = ROOT / "src" / "windtunnel" / "data" / "workloads.toml"
DOCS = ROOT / "docs" / "appendix" / "fits.md"
BEGIN, END = "<!-- fits: made by python -m benchmarks.fit_workloads --write -->", "<!-- end of fits -->"

PROMPT_LEVELS: tuple[float, ...] = (
    0,
    0.01,
    0.05,
    0.1,
    0.2,
    0.25,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.75,
    0.8,
    0.85,
    0.9,
    0.925,
    0.95,
)
PROMPT_LEVELS += (0.975, 0.99, 0.998, 1)
OUTPUT_LEVELS = (0, 0.02, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95, 0.98, 0.99, 0.997, 1)
GAP_LEVELS: tuple[float, ...] = (0, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
GAP_LEVELS += (0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 1)
BANDS = 8


@dataclass(frozen=True)
class Plan:
    """How one trace is fitted."""

    file: str
    source: str
    windows: int = 0  # entries of the rate's profile; 0: no drift
    gap_table: bool = False  # gaps by quantiles, where a gamma distribution cannot have such silences
    tick: float = 0.0  # s between the clock's ticks when times are quantised; requests are spread over it
    timed: bool = True


AZURE = "of the Azure LLM inference trace 2023 (AzurePublicDataset, CC-BY-4.0)"
MOONCAKE = "trace of Mooncake (FAST'25, Apache-2.0)"
PLANS = {
    "azure-code": Plan("AzureLLMInferenceTrace_code.csv", f"code completion {AZURE}", gap_table=True),
    "azure-conv": Plan("AzureLLMInferenceTrace_conv.csv", f"conversation {AZURE}", windows=24),
    "mooncake-conversation": Plan("conversation_trace.jsonl", f"conversation {MOONCAKE}", windows=6, tick=3.0),
    "mooncake-synthetic": Plan("synthetic_trace.jsonl", f"synthetic {MOONCAKE}"),
    "arxiv-summarization": Plan(
        "arxiv_lengths.csv",
        "arXiv summarisation lengths as shipped with Vidur (MIT)",
        timed=False,
    ),
}
PUBLISHED = """
# Means published in the vLLM paper (Kwon et al., SOSP 2023, section 6.1), for which no trace is at hand here:
# lognormal with these means before rounding; sigma 1 is an assumption.
[workloads.sharegpt]
source = "means of ShareGPT as published in the vLLM paper (Kwon et al., SOSP 2023)"
assumed = "only mean lengths are published: lognormal shapes (sigma 1) are assumed"
no_times = true
num_requests = 1000
request_rate = 1.0
prompt_mean = 161.31
prompt_sigma = 1.0
output_mean = 337.99
output_sigma = 1.0

[workloads.alpaca]
source = "means of Alpaca as published in the vLLM paper (Kwon et al., SOSP 2023)"
assumed = "only mean lengths are published: lognormal shapes (sigma 1) are assumed"
no_times = true
num_requests = 1000
request_rate = 1.0
prompt_mean = 19.31
prompt_sigma = 1.0
output_mean = 58.45
output_sigma = 1.0

[workloads.writing-prompts]
source = "means of WritingPrompts as published with it (Fan, Lewis and Dauphin, ACL 2018, table 1): creative writing"
assumed = "of 28.4 and 734.5 words: 4/3 tokens a word, lognormal (sigma 1) are assumed"
no_times = true
num_requests = 1000
request_rate = 1.0
prompt_mean = 37.9
prompt_sigma = 1.0
output_mean = 979.3
output_sigma = 1.0
"""


def read(plan: Plan, folder: Path) -> Workload:
    """The original, its quantised times spread over a tick."""
    return load_trace(folder / plan.file, jitter=plan.tick, arrivals=None if plan.timed else Constant(1.0))


def fit(plan: Plan, trace: Workload) -> dict[str, Any]:
    """The numbers that stand for a trace."""
    fitted: dict[str, Any] = {"source": f"{plan.source}, {len(trace):,} requests", "num_requests": len(trace)}
    if plan.timed:
        fitted |= fit_arrivals(plan, trace)
    else:
        fitted |= {"request_rate": 1.0, "no_times": True}
    level = (np.argsort(np.argsort(trace.prompt_tokens, kind="stable")) + 0.5) / len(trace)
    band = (level * BANDS).astype(np.int64)
    fitted["prompt"] = quantiles(trace.prompt_tokens, PROMPT_LEVELS)
    fitted["outputs"] = [quantiles(trace.output_tokens[band == index], OUTPUT_LEVELS) for index in range(BANDS)]
    return fitted


def quantiles(tokens: Integers, levels: tuple[float, ...]) -> list[int]:
    """Token counts at these levels."""
    return [int(value) for value in np.rint(np.quantile(tokens, levels))]


def fit_arrivals(plan: Plan, trace: Workload) -> dict[str, Any]:
    """Rate, drift (relative rates of equal windows), and the gaps that are left when the drift is taken out."""
    fitted: dict[str, Any] = {"request_rate": round(trace.request_rate, 4)}
    steady = trace.arrival
    if plan.windows:
        counts, edges = np.histogram(steady, bins=plan.windows)
        steady = np.interp(steady, edges, np.concatenate([[0], np.cumsum(counts)]))
        fitted["profile"] = [round(float(count), 2) for count in counts / counts.mean()]
    gaps = np.diff(steady)
    gaps /= gaps.mean()
    if plan.gap_table:
        table = np.maximum(np.quantile(gaps, GAP_LEVELS), 1e-4)
        return {**fitted, "gaps": [float(f"{gap:.3g}") for gap in table]}
    return {**fitted, "burstiness": round(float(1 / gaps.var()), 2)}


def write_data(fits: dict[str, dict[str, Any]]) -> None:
    """Store the fits as TOML."""
    lines = ["# Fitted by python -m benchmarks.fit_workloads: summary statistics of public traces, no trace data.", ""]
    lines += [
        "[levels]",
        f"prompt = {list(PROMPT_LEVELS)}",
        f"output = {list(OUTPUT_LEVELS)}",
        f"gaps = {list(GAP_LEVELS)}",
    ]
    for name, fitted in fits.items():
        lines += ["", f"[workloads.{name}]"]
        for key, value in fitted.items():
            if key == "outputs":
                lines += ["outputs = [", *(f"  {row}," for row in value), "]"]
            else:
                lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    DATA.write_text("\n".join(lines) + "\n" + PUBLISHED, encoding="utf-8")


def compare(name: str, trace: Workload, timed: bool) -> str:
    """One Markdown table: the original and our generator with seeds 0 and 1."""
    sides = [describe(side) for side in (trace, builtin(name, seed=0), builtin(name, seed=1))]
    rows = [("requests", [f"{side['requests']:,}" for side in sides])]
    if timed:
        for key, label in (("duration", "duration, s"), ("request_rate", "rate, 1/s"), ("gap_cv", "CV of gaps")):
            rows.append((label, [number(side[key]) for side in sides]))
        rows.append(("drift of the rate (CV, 1 min)", [number(side["rate_cv"]) for side in sides]))
    for key, label in (("prompt_tokens", "prompt"), ("output_tokens", "output")):
        parts = ("mean", "p10", "p25", "p50", "p75", "p90", "p95", "p99")
        rows += [(f"{label} {part}", [number(side[key][part]) for side in sides]) for part in parts]
    rows.append(("rank correlation", [number(side["correlation"]) for side in sides]))
    lines = [f"### {name}", "", "| | trace | ours, seed 0 | ours, seed 1 |", "|---|--:|--:|--:|"]
    return "\n".join([*lines, *(f"| {label} | {' | '.join(values)} |" for label, values in rows), ""])


def number(value: float) -> str:
    """Three or more digits, as a person would write them."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 0.005 else f"{value:.3f}"


def write_docs(tables: str) -> None:
    """Replace what stands between the markers."""
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    DOCS.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Fit, compare, and with --write store both."""
    folder = Path(next((item for item in arguments if not item.startswith("-")), "../shared/traces"))
    traces = {name: read(plan, folder) for name, plan in PLANS.items()}
    if "--write" in arguments:
        write_data({name: fit(plan, traces[name]) for name, plan in PLANS.items()})
    tables = "\n".join(compare(name, traces[name], PLANS[name].timed) for name in builtin_names() if name in PLANS)
    print(tables)
    if "--write" in arguments:
        write_docs(tables)


if __name__ == "__main__":
    main(sys.argv[1:])
