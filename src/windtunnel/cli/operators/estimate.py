"""estimate: train estimators on a profile, and say how wrong they are."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, progress, show_json
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.perf.profile.comparison import Compared

BEST = "best"


def estimate(
    profile: Annotated[Path, Parameter(name="PROFILE")],
    /,
    *,
    device: str = "",
    estimator: str = BEST,
    tensor_parallel_size: int = 0,
    folds: int = 5,
    output: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    as_json: Json = False,
) -> None:
    """Train an estimator for every operator of a profile, and show the errors on points that it has not seen.

    With --output the trained estimators are written to a folder that every command takes as --perf profile:FOLDER.

    Parameters
    ----------
    profile
        Folder of windtunnel profile or of Vidur: a root with compute/, or a model's folder in it.
    device
        Whose times, where the folder has several devices.
    estimator
        interpolation, forest, boosting, polynomial, linear, two-regimes or roofline for all operators; best: for each
        operator the one with the least error on held-out points.
    tensor_parallel_size
        Whose shards the errors are of; without it the smallest that was measured. All are trained.
    folds
        Parts of the points that are held out in turn.
    output
        Folder to write estimators.npz and estimators.json to.
    as_json
        Print one JSON document instead of the table.
    """
    from windtunnel.perf.estimators.kinds import grid
    from windtunnel.perf.profile.comparison import compare, installed
    from windtunnel.perf.profile.estimates import estimate as train
    from windtunnel.perf.profile.folder import read_profile

    if estimator != BEST:
        grid(estimator)
    found = read_profile(profile, (device,) if device else ())
    shards = tensor_parallel_size or found.shards[0]
    if shards not in found.shards:
        raise InputError(f"tensor_parallel_size={shards}: {profile} has {', '.join(map(str, found.shards))}")
    with progress("holding out points"):
        compared = compare(found, installed() if estimator == BEST else (estimator,), shards, folds)
    if as_json:
        show_json({"schema_version": 1, "device": found.device, "shards": shards, "operators": _rows(compared)})
    else:
        _show(compared, found.device, shards)
    if output is not None:
        train(found, {row.operator: row.learner for row in compared}, compared[0].learner).save(output)
        sys.stderr.write(f"written to {output}: use --perf profile:{output}\n")


def _rows(compared: "list[Compared]") -> list[dict[str, Any]]:
    return [
        {
            "operator": row.operator,
            "shards": row.shards,
            "points": row.points,
            "best": row.winner,
            "settings": str(row.learner),
            "median_ape": {name: errors.median for name, (_, errors) in row.found.items()},
            "p90_ape": {name: errors.p90 for name, (_, errors) in row.found.items()},
            "impossible": {name: errors.impossible for name, (_, errors) in row.found.items()},
        }
        for row in compared
    ]


def _show(compared: "list[Compared]", device: str, shards: int) -> None:
    from windtunnel.cli.terminal import remarks, show, table

    names = dict.fromkeys(name for row in compared for name in row.found)
    rows = [
        [
            row.operator if row.shards == shards else f"{row.operator} (of {row.shards})",
            str(row.points),
            *(f"{100 * row.found[n][1].median:.2f}" if n in row.found else "–" for n in names),
            row.winner,
        ]
        for row in compared
    ]
    title = f"{device}, TP {shards}: median error on held-out points, %"
    said = remarks([*_why_not(compared), *_impossible(compared)])
    show(table(["operator", "points", *names, "least"], rows, title), *said)


def _why_not(compared: "list[Compared]") -> list[str]:
    lacking: dict[str, dict[str, str]] = {}
    for row in compared:
        for name, why in row.why_not.items():
            lacking.setdefault(name, {})[row.operator] = why.removeprefix(f"{name}: ")
    return [
        f"{name}: no error for {len(whys)} of {len(compared)} operators; for {operator}: {whys[operator]}"
        for name, whys in sorted(lacking.items())
        for operator in [next(iter(whys))]
    ]


def _impossible(compared: "list[Compared]") -> list[str]:
    return [
        f"{name}: predicts no time, or less, at {errors.impossible} of {errors.count} points of {row.operator} held "
        "out; where it does, a run takes the roofline"
        for row in compared
        for name, (_, errors) in row.found.items()
        if errors.impossible
    ]
