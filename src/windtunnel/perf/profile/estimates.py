"""Estimates: a trained estimator for every operator of a profile, from its points or from a file."""

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.estimators.files import MANIFEST, Trained, load, save, train
from windtunnel.perf.estimators.kinds import DEFAULT, grid
from windtunnel.perf.estimators.points import Learner, points_of
from windtunnel.perf.kernel_times import INTERPOLATED, MODELLED, KernelTimes
from windtunnel.perf.profile.folder import Profile, read_profile, stamp
from windtunnel.perf.profile.shapes import Shape

NEAR = 1.01
"""Share of the farthest point up to which a time counts as inside: a decode's own token is one key more."""


@dataclass(frozen=True)
class Reach:
    """How far the points of an operator reach."""

    phase: str
    a: float
    b: float


@dataclass(frozen=True, eq=False)
class Estimates:
    """Times of the operators of one model on one device."""

    device: str
    shape: Shape
    trained: Mapping[str, Trained]
    """By operator and shards: ``mlp_up_proj@2``."""
    reach: Mapping[str, Reach]
    stamp: str
    """Changes with what it was trained on."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """The manifest of the profile."""

    @property
    def shards(self) -> tuple[int, ...]:
        """Degrees of tensor parallelism with all operators that the model needs."""
        degrees = sorted({int(name.rpartition("@")[2]) for name in self.trained})
        return tuple(tp for tp in degrees if all(self.has(name, tp) for name in self.shape.needed))

    def has(self, operator: str, tp: int) -> bool:
        """Whether an operator was measured."""
        return f"{operator}@{tp}" in self.trained

    def times(self, operator: str, tp: int, a: Floats, b: Floats) -> KernelTimes:
        """Seconds of one shard's operator; beyond its points they count as modelled."""
        name = f"{operator}@{tp}"
        reach = self.reach[name]
        asked = points_of(self.shape.kernel(operator, tp), reach.phase, np.ravel(a), np.ravel(b))
        beyond = np.maximum(asked.a / max(reach.a, 1.0), asked.b / max(reach.b, 1.0)).reshape(np.shape(a))
        inside = beyond <= NEAR
        return KernelTimes(
            self.trained[name].fitted.times(asked).reshape(np.shape(a)),
            np.where(inside, INTERPOLATED, MODELLED).astype(np.int8),
            np.where(inside, 0.0, np.log2(np.maximum(beyond, 1.0))),
        )

    def save(self, folder: Path) -> None:
        """Write ``estimators.npz`` and ``estimators.json``."""
        reach = {name: [one.phase, one.a, one.b] for name, one in self.reach.items()}
        about = {"device": self.device, "shape": self.shape.spec(), "reach": reach, "profile": dict(self.about)}
        save(folder, self.trained, about)


def estimate(
    profile: Profile, learners: Mapping[str, Learner] | None = None, usual: Learner | None = None
) -> Estimates:
    """Train an estimator for every operator: that of ``learners``, by operator, and for others the ``usual`` one, which
    by default needs no library."""
    learners, usual = learners or {}, usual or grid(DEFAULT)[0]
    trained, reach = {}, {}
    for (operator, tp), points in profile.points.items():
        name = f"{operator}@{tp}"
        trained[name] = train(name, learners.get(operator, usual), points)
        reach[name] = Reach(points.phase, float(points.a.max()), float(points.b.max()))
    return Estimates(profile.device, profile.shape, trained, reach, stamp(profile.files), profile.about)


def read_estimates(folder: Path, device: tuple[str, ...] = (), shape: Shape | None = None) -> Estimates:
    """From a folder of ``windtunnel estimate``, or trained on a profile folder.

    Args:
        folder: either.
        device: names of the deployment's device, to choose among several.
        shape: of its model, likewise.

    Raises:
        InputError: nothing there fits; see ``read_profile`` and ``load``.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"profile {str(folder)!r}: no such folder; write one with windtunnel profile")
    if not (folder / MANIFEST).is_file():
        profile = read_profile(folder, device, shape)
        return _estimate(stamp(profile.files), profile.files[0], profile)
    trained, about = load(folder)
    try:
        reach = {name: Reach(str(row[0]), float(row[1]), float(row[2])) for name, row in about["reach"].items()}
        named = Shape(**about["shape"]).as_of(shape)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{str(folder / MANIFEST)!r}: says nothing of {error}; train again") from error
    if shape is not None and named != shape:
        raise InputError(f"{str(folder)!r}: estimators of another model ({named}, not {shape})")
    made_of = stamp((folder / MANIFEST,))
    return Estimates(str(about["device"]), named, trained, reach, made_of, about.get("profile", {}))


_kept: dict[tuple[str, Path], Estimates] = {}


def _estimate(made_of: str, file: Path, profile: Profile) -> Estimates:
    """Trained once for each state of the files."""
    if (made_of, file) not in _kept:
        _kept[made_of, file] = estimate(profile)
    return replace(_kept[made_of, file], about=profile.about)
