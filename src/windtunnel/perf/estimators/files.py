"""Trained estimators on disk: an npz of plain arrays, and a JSON manifest that says what they were made from."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.files import parse_json, read_text, whole_file, write_whole
from windtunnel.perf.estimators.kinds import restored
from windtunnel.perf.estimators.points import Fitted, Learner, Points

MANIFEST, ARRAYS = "estimators.json", "estimators.npz"
FORMAT = "windtunnel estimators"
VERSION = 3


@dataclass(frozen=True, eq=False)
class Trained:
    """One operator's estimator."""

    operator: str
    """Name and shards: ``mlp_up_proj@2``."""
    fitted: Fitted
    learner: str
    """Its settings as text."""
    key: str
    """Changes with the points and the settings."""
    impossible: int = 0
    """Points that it was trained on and that it predicts to take no time, or less."""


def train(operator: str, learner: Learner, points: Points) -> Trained:
    """Fit an estimator to all points of an operator."""
    points = points.distinct()
    fitted = learner.fit(points)
    impossible = int(np.count_nonzero(fitted.times(points) <= 0))
    return Trained(operator, fitted, _settings(learner), key_of(learner, points), impossible)


def _settings(learner: Learner) -> str:
    return f"{type(learner).__name__} {json.dumps(asdict(learner), sort_keys=True)}"  # type: ignore[call-overload]


def key_of(learner: Learner, points: Points) -> str:
    """A name for settings and points together."""
    digest = hashlib.sha256(f"{VERSION} {_settings(learner)} {points.phase}".encode())
    for name in ("a", "b", "flops", "moved", "seconds"):
        digest.update(np.ascontiguousarray(getattr(points, name)).tobytes())
    return digest.hexdigest()[:32]


def save(folder: Path, trained: Mapping[str, Trained], about: Mapping[str, Any]) -> None:
    """Write both files, the manifest last. Equal estimators give equal bytes.

    Args:
        folder: made if need be.
        trained: by operator.
        about: what the reader of the estimators has to know: device, shapes.
    """
    arrays = {f"{name}/{part}": array for name, one in trained.items() for part, array in vars(one.fitted).items()}
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / ARRAYS) as file:
        np.savez(file, **arrays)
    rows = {
        name: {
            "class": type(one.fitted).__name__,
            "learner": one.learner,
            "key": one.key,
            "impossible": one.impossible,
        }
        for name, one in trained.items()
    }
    text = json.dumps(
        {"format": FORMAT, "version": VERSION, "sha256": _digest(folder / ARRAYS), "about": about, "operators": rows},
        indent=1,
    )
    write_whole(folder / MANIFEST, [text + "\n"])


def load(folder: Path) -> tuple[dict[str, Trained], dict[str, Any]]:
    """The estimators of a folder and what is said about them. No code of the files is run.

    Raises:
        InputError: a file is missing, foreign, cut off, or not the one that the manifest names.
    """
    manifest, path = folder / MANIFEST, folder / ARRAYS
    try:
        document = parse_json(read_text(manifest))
    except InputError as error:
        raise InputError(f"{str(manifest)!r}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{str(manifest)!r}: not a manifest of {FORMAT}; write one with windtunnel estimate")
    if document.get("version") != VERSION:
        raise InputError(
            f"{str(manifest)!r}: version {document.get('version')!r}: this one reads {VERSION}; train again"
        )
    if not path.is_file():
        raise InputError(f"{str(path)!r}: is missing beside its manifest; train again")
    if _digest(path) != document.get("sha256"):
        raise InputError(
            f"{str(path)!r}: not the file that its manifest names (cut off, or from elsewhere); train again"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: _one(name, row, file) for name, row in document["operators"].items()}, dict(document["about"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BadZipFile) as error:
        raise InputError(f"{str(path)!r}: holds no estimators as the manifest says ({error}); train again") from error


def _one(name: str, row: Mapping[str, Any], file: Any) -> Trained:
    arrays = {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}
    return Trained(name, restored(row["class"], arrays), row["learner"], row["key"], int(row["impossible"]))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
