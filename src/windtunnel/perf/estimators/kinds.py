"""The estimators by name: the settings that a grid search tries, and how their arrays become one again."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from windtunnel.errors import InputError, unknown
from windtunnel.perf.estimators.interpolation import (
    FittedInterpolation,
    Interpolation,
)
from windtunnel.perf.estimators.points import Fitted, Learner
from windtunnel.perf.estimators.terms import (
    FittedLinear,
    FittedPolynomial,
    FittedRoofline,
    Linear,
    Polynomial,
    Roofline,
)
from windtunnel.perf.estimators.trees import Boosting, FittedTrees, Forest

GRIDS: dict[str, tuple[Learner, ...]] = {
    "interpolation": (Interpolation(),),
    "forest": (Forest(), Forest(64, 32), Forest(64, 16, 5)),
    "boosting": (Boosting(), Boosting(200, 6)),
    "polynomial": tuple(Polynomial(degree) for degree in range(1, 6)),
    "linear": (Linear(),),
    "two-regimes": (Linear(regimes=2),),
    "roofline": (Roofline(),),
}
"""Name → settings that are tried; the first is what is taken without a search."""

NEED_A_LIBRARY = ("forest", "boosting")
"""Trained by scikit-learn (extra ``fit``); once trained, they are read without it."""

DEFAULT = "interpolation"
"""The one with the least error on held-out points; see docs/estimators.md."""

FITTED: tuple[type[Any], ...] = (
    FittedInterpolation,
    FittedLinear,
    FittedPolynomial,
    FittedRoofline,
    FittedTrees,
)


def grid(name: str) -> tuple[Learner, ...]:
    """The settings of an estimator. Raises InputError for an unknown name, with the nearest."""
    if name not in GRIDS:
        raise unknown("estimator", name, GRIDS)
    return GRIDS[name]


def restored(kind: str, arrays: Mapping[str, Any]) -> Fitted:
    """A trained estimator from the name of its class and its arrays. Raises InputError if they do not belong to it."""
    found = next((one for one in FITTED if one.__name__ == kind), None)
    if found is None:
        raise InputError(f"{kind!r} is no estimator of this version")
    wanted = {entry.name for entry in fields(found)}
    if wanted != set(arrays):
        raise InputError(f"{kind}: has arrays {', '.join(sorted(arrays))}: must have {', '.join(sorted(wanted))}")
    return cast(Fitted, found(**arrays))
