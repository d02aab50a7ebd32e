"""Closed: which prefill and decode servers may go together in which numbers, and what closes each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.plan.goodput.points import OFFERED, SIMULATED, STOPPED

Layout = tuple[int, int]
"""Replicas of prefill and of decode."""

LIMITS = ("max_num_batched_tokens", "max_num_seqs")
"""Last words of the axes that limit a step and change nothing else."""
AT_BEST, PREFILL, DECODE, SHARED = "prefill at best", "prefill alone", "decode at best", "decode shared"
SAME, FEWER = "same", "fewer KV blocks"
"""Rules that close deployments: too few first tokens come in time where prompts are computed in turn at the best speed;
too few do from a prefill side that never waits; of those, too few tokens can be decoded in time, whatever is chosen to
be decoded, or where all that has come is decoded; a limit that was not reached is another; with it, fewer KV blocks and
slower steps are assumed to do no better."""
OPEN = "open"
"""Not closed."""


@dataclass(frozen=True, eq=False)
class Server:
    """One server of a side."""

    place: int
    """Among those of its side."""
    words: Mapping[str, Any]
    pool: Pool
    weight: float
    """GPUs, or USD per second, of one replica."""
    stands_for: tuple[int, ...] = ()
    """Places of those that do no better, where it has the most KV blocks of them and the ``fastest`` steps."""
    fastest: BatchTimes | None = None

    @property
    def kin(self) -> str:
        """What it has in common with servers that differ in their limits alone."""
        return repr([(axis, value) for axis, value in self.words.items() if axis.split()[-1] not in LIMITS])

    @property
    def limits(self) -> tuple[int, int]:
        """Tokens and sequences of a step."""
        engine = self.pool.engine
        return engine.resolved("max_num_batched_tokens"), engine.resolved("max_num_seqs")


class Closing(NamedTuple):
    """Deployments that cannot be better: every pair of these servers, in each of these numbers."""

    rule: str
    prefills: tuple[int, ...]
    decodes: tuple[int, ...]
    layouts: tuple[Layout, ...]
    tokens: float
    """Good tokens per second at most; exactly, where they were simulated."""


@dataclass(frozen=True, eq=False)
class Family:
    """Prefill servers and decode servers, each side alike but for its limits, and the layouts that may be."""

    prefills: Sequence[Server]
    decodes: Sequence[Server]
    layouts: Sequence[Layout]

    def weight(self, layout: Layout) -> float:
        """Of a layout."""
        return layout[0] * self.prefills[0].weight + layout[1] * self.decodes[0].weight

    @property
    def size(self) -> int:
        """Deployments in all."""
        return len(self.prefills) * len(self.decodes) * len(self.layouts)


@dataclass(frozen=True, eq=False)
class Closed:
    """How a space of pools was closed: for the certificate."""

    offered: float
    """Output tokens per second that the load asks for."""
    prefills: Sequence[Server]
    decodes: Sequence[Server]
    families: Sequence[Family]
    closings: Sequence[Closing]
    best: tuple[int, int, Layout] | None
    """Places of both servers of the best, and its layout."""
    score: float

    @cached_property
    def counts(self) -> Counter[str]:
        """Deployments by the rule that closed them, each once: by the load where that does; OPEN for those left."""
        found: Counter[str] = Counter()
        for family in self.families:
            by_load = np.array([self.offered / family.weight(layout) <= self.score for layout in family.layouts])
            found[OFFERED] += len(family.prefills) * len(family.decodes) * int(by_load.sum())
            rules = np.zeros((len(family.prefills), len(family.decodes), len(family.layouts)), np.int8)
            rules[:, :, by_load] = -1
            for number, (_, closings) in enumerate(self._by_rule, 1):
                for prefills, decodes, layouts in (_within(family, one) for one in closings):
                    part = rules[np.ix_(prefills, decodes, layouts)]
                    rules[np.ix_(prefills, decodes, layouts)] = np.where(part == 0, number, part)
            for number, (rule, _) in enumerate(self._by_rule, 1):
                found[rule] += int((rules == number).sum())
            found[OPEN] += int((rules == 0).sum())
        return +found

    @cached_property
    def _by_rule(self) -> list[tuple[str, list[Closing]]]:
        rules: dict[str, list[Closing]] = {}
        for one in self.closings:
            rules.setdefault(one.rule, []).append(one)
        order = (SIMULATED, STOPPED, SAME, FEWER, AT_BEST, PREFILL, DECODE, SHARED)
        return [(rule, rules[rule]) for rule in order if rule in rules]


def _within(family: Family, one: Closing) -> tuple[list[int], list[int], list[int]]:
    """The part of a closing that lies in a family, as indices."""
    places = ([server.place for server in side] for side in (family.prefills, family.decodes))
    sides: list[list[int]] = [
        [index for index, place in enumerate(listed) if place in wanted]
        for listed, wanted in zip(places, (one.prefills, one.decodes), strict=True)
    ]
    return sides[0], sides[1], [index for index, layout in enumerate(family.layouts) if layout in one.layouts]
