"""Separate prefill and decode workers, as simulated and moved by what other deployments were found to be off:
``python -m benchmarks.accuracy.separate_workers ../shared/truth/disagg/points.jsonl``.

Measured times are moved by the middle of log(measured ÷ simulated) of the same engine with prompts about as long
(``evidence.separate_workers``). That is checked where nothing of the layout was seen: all rows of a layout are in one
of FOLDS parts, whose rows are moved by the others', in DIVISIONS divisions. That engine and prompts decide, not
weights, experts or device, was chosen with these rows in view.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from benchmarks.accuracy import in_one_line
from windtunnel.metrics.evidence import Separate, prompts_of
from windtunnel.validation.pool_points import PoolsPoint, read_pool_points
from windtunnel.validation.served_replay import Result, replay_all

DIVISIONS, FOLDS = 8, 5

Medians = Mapping[tuple[str, str], Separate]
"""By engine and length of prompts."""


@dataclass(frozen=True)
class Row:
    """One measured deployment with separate workers."""

    engine: str
    family: str
    prompts: str
    layout: str
    steps: float
    """log(measured ÷ simulated) of the time per output token."""
    first_token: float
    """Of the time to first token."""


def rows_of(results: Iterable[Result]) -> list[Row]:
    """What was simulated and is certain, each measurement once."""
    found = []
    for one in results:
        point = one.point
        if one.reason or not point.scored or not isinstance(point, PoolsPoint):
            continue
        sides = [f"{side.workers}x{side.tp}/{side.ep}/{side.ranks}" for side in (point.prefill, point.decode)]
        layout = "/".join((point.backend, point.system, point.model_path, point.precision, *sides))
        steps, first = (float(np.log(getattr(point, name) / getattr(one, name))) for name in ("tpot", "ttft"))
        family = one.server.family if one.server else ""
        found.append(Row(point.backend, family, prompts_of(point.isl), layout, steps, first))
    return found


def medians(rows: Iterable[Row]) -> Medians:
    """The middle of each engine with prompts of one length."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for one in rows:
        groups[one.engine, one.prompts].append(one)
    found = {}
    for (engine, prompts), members in sorted(groups.items()):
        steps, first = (float(np.median([getattr(one, name) for one in members])) for name in ("steps", "first_token"))
        families = tuple(sorted({one.family for one in members}))
        found[engine, prompts] = Separate(steps, first, len(members), engine, prompts, families)
    return found


def left_out(rows: Sequence[Row]) -> dict[str, list[float]]:
    """What is left of each row (steps, first_token) after it was moved by rows of other layouts."""
    found: dict[str, list[float]] = {"steps": [], "first_token": []}
    for division in range(DIVISIONS):
        parts = [int(sha256(f"{division}{one.layout}".encode()).hexdigest(), 16) % FOLDS for one in rows]
        for part in range(FOLDS):
            known = medians(one for one, place in zip(rows, parts, strict=True) if place != part)
            for one, place in zip(rows, parts, strict=True):
                middle = known.get((one.engine, one.prompts))
                if place == part and middle is not None:
                    for name, values in found.items():
                        values.append(getattr(one, name) - getattr(middle, name))
    return found


def error(logs: Iterable[float]) -> float:
    """Median relative error of times whose logs are off by these."""
    return float(np.median(np.abs(np.expm1(-np.array(list(logs))))))


def report(rows: Sequence[Row]) -> str:
    """What was found, in a sentence and a table."""
    after = left_out(rows)
    before = {name: error(getattr(one, name) for one in rows) for name in after}
    lines = [
        f"{len(rows)} measurements: TTFT {before['first_token']:.1%}, TPOT {before['steps']:.1%}; moved by those of "
        f"other layouts TTFT {error(after['first_token']):.1%}, TPOT {error(after['steps']):.1%}.",
        "",
        "| engine | prompts | measurements | TTFT, median error | TTFT, measured ÷ simulated | TPOT | TPOT |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (engine, prompts), middle in medians(rows).items():
        members = [one for one in rows if (one.engine, one.prompts) == (engine, prompts)]
        first, steps = (error(getattr(one, name) for one in members) for name in ("first_token", "steps"))
        lines.append(
            f"| {engine} | {prompts} | {len(members)} | {first:.1%} | {np.exp(middle.first_token):.2f} | {steps:.1%} "
            f"| {np.exp(middle.steps):.2f} |"
        )
    return "\n".join(lines)


def replayed(path: Path) -> list[Row]:
    """The rows of a file. Raises InputError for what is no such file."""
    return rows_of(replay_all(read_pool_points(path)))


def main(paths: Sequence[str]) -> int:
    """Print what was found; 2 after a wrong input."""
    return in_one_line(lambda: print(report(replayed(Path(paths[0])))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
