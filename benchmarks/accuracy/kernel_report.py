"""Kernels held out and predicted: ``python -m benchmarks.accuracy.kernel_report [--device D] [--backend B] [--json]``.

Prints the errors by family as Markdown, with those of plain models and the noise of the data.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.accuracy.held_out import SPLITS, Bench, HeldOut, errors, used_sources
from benchmarks.accuracy.kernel_sources import TABLES
from windtunnel.cli.arguments import show_json
from windtunnel.errors import InputError
from windtunnel.metrics import clean
from windtunnel.validation.markdown import per_cent

MODELS = {"windtunnel": "predicted", "log-log": "interpolated", "roofline": "roofline", "regression": "regression"}
"""Column of the table → field of HeldOut."""


def held_out(benches: Iterable[Bench]) -> list[HeldOut]:
    """Every family of every table under both splits."""
    return [
        found for bench in benches for source in TABLES for split in SPLITS for found in bench.held_out(source, split)
    ]


def row(found: HeldOut) -> dict[str, Any]:
    """One entry of the JSON document; relative errors."""
    of_models = {name: errors(found, getattr(found, field)) for name, field in MODELS.items()}
    noise = np.expm1(found.noise)
    return {
        "system": found.system,
        "backend": found.backend,
        "family": found.family,
        "split": found.split,
        "points": int(found.compared.sum()),
        "left_out": len(found.measured),
        **of_models,
        "noise": {
            "median": float(np.median(noise)) if len(noise) else None,
            "p95": float(np.percentile(noise, 95)) if len(noise) else None,
        },
        "sources": used_sources(found),
    }


def document(found: Sequence[HeldOut]) -> dict[str, Any]:
    """Everything for JSON."""
    cleaned: dict[str, Any] = clean({"schema_version": 1, "kernels": [row(one) for one in found]})
    return cleaned


def table(found: Sequence[HeldOut]) -> str:
    """Median / 95th percentile of the relative errors as Markdown."""
    columns = (*MODELS, "noise")
    lines = [
        f"| | kernel | taken out | points | {' | '.join(columns)} |",
        "|---|---|---|---:|" + "---:|" * len(columns),
    ]
    for one in found:
        entry = row(one)
        cells = [f"{per_cent(entry[name]['median'])} / {per_cent(entry[name]['p95'])}" for name in columns]
        what = f"{one.system}, {one.backend} | {one.family} | {one.split} | {entry['points']:,}"
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the report of one system and engine; returns 2 after a wrong input, which is one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.kernel_report")
    parser.add_argument("--device", default="h100_sxm")
    parser.add_argument("--backend", default="vllm")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args(arguments)
    try:
        found = held_out([Bench(words.device, words.backend)])
    except InputError as wrong:
        sys.stderr.write(f"{wrong}\n")
        return 2
    if words.json:
        show_json(document(found))
    else:
        sys.stdout.write(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
