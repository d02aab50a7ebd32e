"""The page of estimators: ``python -m benchmarks.estimators [PROFILE] [--splitwise FILE] [--output FOLDER]``.

Compares all estimators on Vidur's profile and on the kernel database, tests the seeds' claims, and writes
docs/estimators.md with its plots. Needs scikit-learn (extra ``fit``); about two minutes of one core.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.charts import lines
from benchmarks.estimators import claims
from benchmarks.estimators.claims import per_cent
from benchmarks.estimators.shapes import FOR_OTHER_SHAPES, Row, held_out_models, held_out_shards
from benchmarks.page import with_minus
from windtunnel.errors import InputError
from windtunnel.files import write_whole
from windtunnel.perf.estimators.kinds import DEFAULT, GRIDS
from windtunnel.perf.profile.comparison import Compared, compare
from windtunnel.perf.profile.folder import Profile, read_profile

TEXT = Path(__file__).parent / "page.md"
SHARED = Path("../shared")
CHARTS = {"tokens": ("tokens", "tokens"), "KV read": ("kv", "keys read"), "tokens²": ("squares", "tokens²")}


def page(profile: Profile, splitwise: Path) -> tuple[str, dict[str, str]]:
    """The page, and its charts by file name."""
    tp = profile.shards[0]
    compared = compare(profile, tuple(GRIDS), tp, say=lambda text: print(text, file=sys.stderr))
    behind = {row.operator: row.found[DEFAULT][1].median - row.found[row.winner][1].median for row in compared}
    far = [name for name, points in behind.items() if points > 0.005]
    by_sum, by_both, by_line = claims.sum_of_contexts(profile, tp)
    terms = claims.linear_terms_of(profile, tp)
    facts: dict[str, Any] = {
        "shards": tp,
        "settings": sum(len(grid) for grid in GRIDS.values()),
        "operators": "\n".join(_operators(compared, tp)),
        "behind": f"{100 * max((value for name, value in behind.items() if name not in far), default=0.0):.1f}",
        "except_for": ", ".join(f"{name} ({100 * behind[name]:.1f} points)" for name in far) or "none",
        "impossible": ", ".join(_impossible(compared)) or "nowhere",
        "few": "\n".join(claims.few_points(profile, tp)),
        "held_out_shards": "\n".join(_rows(held_out_shards(profile))),
        "held_out_models": "\n".join(_rows(held_out_models())),
        "best_polynomial": per_cent(min(_least(compared, "polynomial"), _least(compared, "linear"))),
        "interpolation": per_cent(_least(compared, "interpolation")),
        "polynomials": "\n".join(claims.polynomials(profile, tp)),
        "by_sum": per_cent(by_sum),
        "by_both": per_cent(by_both),
        "by_line": per_cent(by_line),
        "equal_sums": "\n".join(claims.equal_sums()),
        "squared_lengths": "\n".join(claims.squared_lengths()),
        "linear": "\n".join(
            f"| {term} | {what} | {r2:.4f} | {per_cent(error)} |" for term, what, r2, error, *_ in terms
        ),
        "splitwise": "\n".join(claims.splitwise(splitwise)),
    }
    charts = {
        f"estimators-{CHARTS[term][0]}.svg": _chart(what, CHARTS[term][1], x, y) for term, what, _, _, x, y in terms
    }
    return with_minus(TEXT.read_text(encoding="utf-8").format(**facts)), charts


def _operators(compared: list[Compared], tp: int) -> Iterable[str]:
    names = list(GRIDS)
    yield f"| operator | points | {' | '.join(names)} |"
    yield "|---|--:|" + "--:|" * len(names)
    for row in compared:
        cells = [f"{100 * row.found[name][1].median:.2f}" for name in names]
        cells[names.index(row.winner)] = f"**{cells[names.index(row.winner)]}**"
        name = row.operator if row.shards == tp else f"{row.operator} (of {row.shards})"
        yield f"| {name} | {row.points:,} | {' | '.join(cells)} |"


def _impossible(compared: list[Compared]) -> Iterable[str]:
    for row in compared:
        for name, (_, errors) in row.found.items():
            if errors.impossible:
                yield f"{name} at {errors.impossible:,} of {errors.count:,} of {row.operator}"


def _rows(rows: Iterable[Row]) -> Iterable[str]:
    names = list(FOR_OTHER_SHAPES)
    yield f"| operator | left out | points | {' | '.join(names)} |"
    yield "|---|---|--:|" + "--:|" * len(names)
    for row in rows:
        cells = " | ".join(f"{100 * row.errors[name]:.1f}" for name in names)
        yield f"| {row.operator} | {row.left_out} | {row.points} | {cells} |"


def _least(compared: list[Compared], name: str) -> float:
    """The least median error among the projections."""
    return min(row.found[name][1].median for row in compared if row.operator.endswith("_proj"))


def _chart(what: str, label: str, x: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> str:
    """Medians of forty groups along x, beside the straight line with the least relative error."""
    edges = np.quantile(x, np.linspace(0, 1, 41))
    places = [(x >= low) & (x <= high) for low, high in pairwise(edges)]
    points = sorted({(float(np.median(x[at])), 1e3 * float(np.median(seconds[at]))) for at in places if at.any()})
    design = np.stack([np.ones(len(x)), x], axis=1)
    base, slope = np.linalg.lstsq(design, seconds, rcond=None)[0]
    line = [(at, 1e3 * (base + slope * at)) for at, _ in (points[0], points[-1])]
    return lines(what.capitalize(), label, "ms", {"measured": points, "straight line": line})


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimators", description=__doc__)
    parser.add_argument("profile", nargs="?", type=Path, default=SHARED / "vidur" / "profiling")
    parser.add_argument("--splitwise", type=Path, default=SHARED / "splitwise" / "perf_model.csv")
    parser.add_argument("--output", type=Path, default=Path("docs"))
    options = parser.parse_args(argv)
    try:
        text, charts = page(read_profile(options.profile), options.splitwise)
    except InputError as error:
        print(f"estimators: {error}", file=sys.stderr)
        return 2
    for name, chart in {"estimators.md": text, **charts}.items():
        write_whole(options.output / name, [chart])
    print(f"written: {options.output / 'estimators.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
