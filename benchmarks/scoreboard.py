"""Simulators against what was measured: ``python -m benchmarks.scoreboard [--rows N]``.

Served points of the kernel database's package, servers that prefill and decode, always the same sample. Each simulator
predicts mean TTFT and TPOT of every one that it can: windtunnel, windtunnel with perfect kernels (roofline), and the
closed form of AIConfigurator (``run_agg`` of aiconfigurator-core, the database's newest tables, the row's layout,
weights' formats and clients; steps of ``STEP`` tokens). Medians of absolute relative errors over all that a simulator
predicts, and over those that each of them does. Rows that say nothing of their server's flags are among them.
"""

import argparse
import csv
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from windtunnel.validation.comparison import PLAIN, Options
from windtunnel.validation.served_points import Point, find_file, read_points
from windtunnel.validation.served_replay import replay, sample

STEP = 8192
"""Tokens of a step that AIConfigurator takes prompts in."""


class Means(NamedTuple):
    """What a simulator expects, in seconds."""

    ttft: float
    tpot: float


Simulator = Callable[[Point, Mapping[str, str]], Means | None]
"""A served point and its row of the file → its means; None where it has none."""


def windtunnel(options: Options) -> Simulator:
    """This project."""

    def predict(point: Point, row: Mapping[str, str]) -> Means | None:  # noqa: ARG001 - the others' way to say it
        found = replay(point, options)
        return None if found.reason else Means(found.ttft, found.tpot)

    return predict


def aiconfigurator(point: Point, row: Mapping[str, str]) -> Means | None:
    """NVIDIA's closed form."""
    common, config, perf_database, backends, models = (
        import_module(f"aiconfigurator_core.sdk.{name}")
        for name in ("common", "config", "perf_database", "backends.factory", "models")
    )
    formats: dict[str, Any] = {}
    for name, modes in (("gemm_quant_mode", common.GEMMQuantMode), ("moe_quant_mode", common.MoEQuantMode)):
        formats |= {name: modes[row[name]]} if row[name] else {}
    widths = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    try:
        newest = perf_database.get_latest_database_version(row["system"], row["backend"])
        database = perf_database.get_database(row["system"], row["backend"], newest)
        layout = {name: int(float(row[name] or 1)) for name in widths}
        model = models.get_model(row["model_path"], config.ModelConfig(**layout, **formats), row["backend"])
        asked = config.RuntimeConfig(batch_size=int(float(row["batch_size"])), isl=point.isl, osl=point.osl)
        backend = backends.get_backend(row["backend"])
        found = backend.run_agg(model, database, asked, ctx_tokens=STEP).get_summary_df().iloc[0]
    except Exception:  # what it cannot do it says in many ways
        return None
    return Means(1e-3 * float(found["ttft"]), 1e-3 * float(found["tpot"]))


SIMULATORS: dict[str, Simulator] = {
    "windtunnel": windtunnel(PLAIN),
    "windtunnel, perfect kernels": windtunnel(Options("roofline", PLAIN.overheads, PLAIN.strict)),
    "AIConfigurator": aiconfigurator,
}


class Score(NamedTuple):
    """Of one simulator: rows that it predicts, median errors over these and over all simulators' common ones."""

    rows: int
    own: Means
    common: Means
    seconds: float
    """Of wall-clock time for each row that was asked."""


def scores(
    points: Sequence[Point], rows: Mapping[str, Mapping[str, str]], simulators: Mapping[str, Simulator]
) -> tuple[dict[str, Score], int]:
    """The score of each simulator, and how many points all of them predict."""
    errors: dict[str, np.ndarray[tuple[int, int], np.dtype[np.float64]]] = {}
    seconds = {}
    for name, predict in simulators.items():
        began, found = time.perf_counter(), []
        for point in points:
            means = predict(point, rows[point.id])
            measured = Means(point.ttft, point.tpot)
            found.append(
                [np.nan] * 2 if means is None else [abs(a / b - 1) for a, b in zip(means, measured, strict=True)]
            )
        errors[name], seconds[name] = np.array(found), (time.perf_counter() - began) / len(points)
    everywhere = np.isfinite([each.sum(axis=1) for each in errors.values()]).all(axis=0)
    return {
        name: Score(
            int(np.isfinite(each.sum(axis=1)).sum()),
            Means(*np.nanmedian(each, axis=0)),
            Means(*(np.median(each[everywhere], axis=0) if everywhere.any() else (np.nan, np.nan))),
            seconds[name],
        )
        for name, each in errors.items()
    }, int(everywhere.sum())


def main(argv: Sequence[str]) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=120)
    count = parser.parse_args(argv).rows
    if count < 1:
        parser.error(f"--rows {count}: must be ≥ 1")
    logging.disable(logging.CRITICAL)
    measured = [point for point in read_points() if isinstance(point, Point) and point.ttft > 0 and point.tpot > 0]
    points = [point for point in measured if not point.repeats]
    with find_file().open(encoding="utf-8", newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    chosen = [point for point in sample(points, count) if isinstance(point, Point)]
    found, common = scores(chosen, rows, SIMULATORS)
    print(f"{len(chosen)} of {len(points):,} served points, aiconfigurator-core {version('aiconfigurator-core')}\n")
    print(f"| simulator | predicts | TTFT | TPOT | of the {common} that all predict: TTFT | TPOT | s a row |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, score in found.items():
        cells = " | ".join(f"{100 * value:.1f} %" for value in (*score.own, *score.common))
        print(f"| {name} | {score.rows / len(chosen):.0%} | {cells} | {score.seconds:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
