"""Comparison of estimators on a profile: errors on held-out points by operator, and the one to take for each."""

from collections.abc import Callable, Mapping, Sequence

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.estimators.kinds import GRIDS, NEED_A_LIBRARY, grid
from windtunnel.perf.estimators.points import Learner
from windtunnel.perf.estimators.selection import FOLDS, Errors, best
from windtunnel.perf.profile.folder import Profile


@dataclass(frozen=True)
class Compared:
    """One operator: the best settings of each estimator and their errors."""

    operator: str
    shards: int
    """Degree of tensor parallelism of the points."""
    points: int
    found: Mapping[str, tuple[Learner, Errors]]
    why_not: Mapping[str, str]
    """Estimators that could not be trained, and why."""

    @property
    def winner(self) -> str:
        """The estimator with the least median error, the first of equals."""
        return min(self.found, key=lambda name: self.found[name][1].median)

    @property
    def learner(self) -> Learner:
        """The winner's settings."""
        return self.found[self.winner][0]


def installed() -> tuple[str, ...]:
    """Estimators that can be trained here."""
    from importlib.util import find_spec

    return tuple(name for name in GRIDS if name not in NEED_A_LIBRARY or find_spec("sklearn"))


def compare(
    profile: Profile,
    names: Sequence[str],
    shards: int,
    folds: int = FOLDS,
    say: Callable[[str], None] = lambda _: None,
) -> list[Compared]:
    """Cross-validate estimators on every operator of one degree of tensor parallelism.

    Args:
        profile: what was measured.
        names: estimators; each by a grid search over its settings.
        shards: the degree; operators that were measured with others alone are compared with those.
        folds: parts that are held out in turn.
        say: told what comes next.

    Raises:
        InputError: an unknown estimator, fewer than two folds, or none of the estimators can be trained.
    """
    if folds < 2:
        raise InputError(f"folds={folds}: must be ≥ 2, so that there is something to train on")
    rows = []
    for (operator, tp), points in profile.points.items():
        if tp != shards and (operator, shards) in profile.points:
            continue
        found: dict[str, tuple[Learner, Errors]] = {}
        why_not: dict[str, str] = {}
        for name in names:
            say(f"{operator}: {name}")
            try:
                found[name] = best(grid(name), points, folds)
            except InputError as error:
                why_not[name] = str(error)
        if not found:
            raise InputError(f"{operator}: {next(iter(why_not.values()))}")
        rows.append(Compared(operator, tp, len(points), found, why_not))
    return rows
