"""Roster: which replicas are there, since when, and what becomes of them. It knows nothing of records."""

from collections.abc import Sequence
from dataclasses import field
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.policy import Limits
from windtunnel.policy.scaling import Autoscale, Lives, PoolLives, Rule

OFF, STARTING, UP, DRAINING, DOWN = range(5)
SAID = {STARTING: "starting", DRAINING: "draining", DOWN: "failed"}
"""States that a record tells of."""


@dataclass
class Life:
    """What becomes of a replica."""

    number: int
    """Of all replicas of the fleet."""
    state: int
    since: float = 0.0
    """When it got this state."""
    spent: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Seconds in each state before."""
    past: list[tuple[int, float, float]] = field(default_factory=list)
    """(State, from, to) before, where something is said of it."""
    ready: float = nan
    """When it will be up."""

    def becomes(self, state: int, time: float) -> None:
        """It has another state from now on."""
        self.spent[self.state] += time - self.since
        if self.state in SAID and time > self.since:
            self.past.append((self.state, self.since, time))
        self.state, self.since = state, time

    @property
    def serves(self) -> bool:
        """It computes, though it may take no more requests."""
        return self.state in (UP, DRAINING)

    @property
    def may_fail(self) -> bool:
        """There is something that could fail."""
        return self.state in (UP, DRAINING, STARTING)


@dataclass
class Crew:
    """The replicas of a pool."""

    role: str
    limits: Limits
    lives: list[Life]
    scaling: Autoscale | None = None
    rule: Rule | None = None
    """Its rule, with what it has learned in this run."""
    rate_before: float = 0.0
    low_before: int = 0
    """Requests before this one had ended at the tick before."""
    starts: int = 0
    failures: int = 0
    unserved: float = 0.0
    """Seconds in which none served."""

    @property
    def serves(self) -> bool:
        """Whether any of them does."""
        return any(life.serves for life in self.lives)


class Roster:
    """The replicas of all pools: all of them are there at the beginning, or the least that their autoscaler keeps."""

    def __init__(
        self,
        roles: Sequence[str],
        replicas: Sequence[int],
        limits: Sequence[Limits],
        scaling: Sequence[Autoscale | None],
    ) -> None:
        self.crews: list[Crew] = []
        for role, count, limit, rule in zip(roles, replicas, limits, scaling, strict=True):
            first, there = len(self.lives), rule.least if rule else count
            lives = [Life(first + i, UP if i < there else OFF) for i in range(count)]
            self.crews.append(Crew(role, limit, lives, rule, rule.fresh() if rule else None))
        self.now = self.changed = self.unserved = 0.0
        self.link_failures = 0
        self.link_past: list[tuple[int, str, float, float]] = []

    @property
    def lives(self) -> list[Life]:
        """Of all replicas, by their number."""
        return [life for each in self.crews for life in each.lives]

    def crew_of(self, number: int) -> Crew:
        """The pool of a replica."""
        return next(each for each in self.crews if each.lives and number <= each.lives[-1].number)

    def life_of(self, number: int) -> Life:
        """A replica by its number."""
        lives = self.crew_of(number).lives
        return lives[number - lives[0].number]

    def takes(self, role: str) -> list[int]:
        """The replicas of a role that take requests."""
        return [life.number for each in self.crews if each.role == role for life in each.lives if life.state == UP]

    def becomes(self, life: Life, state: int, time: float) -> None:
        """A replica has another state from now on."""
        self.settle(time)
        life.becomes(state, time)

    def settle(self, time: float) -> None:
        """Count the seconds since the latest change in which there was none."""
        passed, self.changed = time - self.changed, time
        for each in self.crews:
            each.unserved += 0.0 if each.serves else passed
        roles = {each.role: False for each in self.crews}
        for each in self.crews:
            roles[each.role] |= each.serves
        self.unserved += 0.0 if all(roles.values()) else passed

    def fail(self, life: Life, down: float, time: float) -> bool:
        """A replica fails; whether it comes back by itself."""
        self.crew_of(life.number).failures += 1
        returns = life.state != DRAINING and down < inf
        self.becomes(life, DOWN if returns else OFF, time)
        life.ready = time + down
        return returns

    def note_link(self, replica: int, time: float, down: float) -> None:
        """A link is down."""
        self.link_failures += 1
        self.link_past.append((replica, "link failed", time, time + down))

    def account(self, retries: int, lost: list[int], resent: int = 0) -> Lives:
        """What became of the replicas and their requests, after the run."""
        self.settle(self.now)
        lives = self.lives
        for life in lives:
            life.becomes(life.state, self.now)
        states = [(life.number, SAID[state], begin, end) for life in lives for state, begin, end in life.past]
        links = [(j, said, begin, min(end, self.now)) for j, said, begin, end in self.link_past]
        return Lives(
            paid_s=[sum(life.spent) - life.spent[OFF] for life in lives],
            up_s=[life.spent[UP] + life.spent[DRAINING] for life in lives],
            seconds=self.now,
            unserved_s=self.unserved,
            starts=sum(each.starts for each in self.crews),
            failures=sum(each.failures for each in self.crews),
            retries=retries,
            lost=lost,
            pools=tuple(PoolLives(each.unserved, each.starts, each.failures) for each in self.crews),
            states=tuple(sorted(states + links, key=lambda one: (one[2], one[0]))),
            link_failures=self.link_failures,
            resent=resent,
        )


def as_asked(lives: Lives, numbers: NDArray[np.int64], pools: NDArray[np.int64]) -> Lives:
    """With the pools in the order of the fleet that was asked for; ``numbers``: of the replicas there. Links have them
    already."""
    places, links = np.argsort(numbers), [one for one in lives.states if one[1] == "link failed"]
    states = [(int(numbers[one[0]]), *one[1:]) for one in lives.states if one[1] != "link failed"]
    states = sorted(states, key=lambda one: one[0]) + links
    return lives._replace(
        paid_s=[lives.paid_s[j] for j in places],
        up_s=[lives.up_s[j] for j in places],
        pools=tuple(lives.pools[i] for i in np.argsort(pools)),
        states=tuple(sorted(states, key=lambda one: (one[2], one[0]))),
    )
