"""The space of pools: every pair of a prefill and a decode pool of two spaces, in every ratio of replicas."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import product
from math import gcd
from types import MappingProxyType
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Handover, Link, Pool, network
from windtunnel.errors import InputError
from windtunnel.plan.space import Candidate, Constraints, Enumeration, Space
from windtunnel.policy.named import find_router

RATIO = 4
"""Most replicas of a side in the ratios that are tried."""


@dataclass(frozen=True, eq=False)
class PoolSpace:
    """Disaggregated prefill and decode: the product of both sides' axes and of the ratios of their replicas.

    Ratios are in lowest terms. Where the objective finds the number of replicas, every pair of numbers is a multiple of
    one of them; where it does not, a deployment and twice it serve as much per GPU, but for what more of them even out.
    """

    prefill: Space
    decode: Space
    link: Callable[[Sequence[Pool]], Link] = network
    """What joins two pools, unless nothing is transferred."""
    handover: Handover = field(default_factory=Handover)
    constraints: Constraints = field(default_factory=Constraints)
    ratio: int = RATIO
    """Most replicas of a side in a ratio."""
    routers: tuple[str, ...] = ("round_robin",)
    """What may spread requests over prefill replicas."""
    decode_routers: tuple[str | None, ...] = (None,)
    """The same of decode replicas; None: as those of prefill."""
    only: tuple[int, int] | None = None
    """The one ratio that is tried, instead of all up to ``ratio``."""

    def __post_init__(self) -> None:
        """Refuse two models, and axes that are not of a side."""
        if self.prefill.model != self.decode.model:
            raise InputError(f"models {self.prefill.model} and {self.decode.model}: KV is transferred within one")
        if self.ratio < 1:
            raise InputError(f"ratio={self.ratio}: must be ≥ 1")
        if self.handover.on_expiry != "wait":
            raise InputError(
                f"handover: on_expiry={self.handover.on_expiry!r}: the bounds of a search hold where every request is "
                "served: leave it out, and simulate what is found with it"
            )
        for side in (self.prefill, self.decode):
            for axis in ("replicas", "autoscale"):
                if axis in side.axes:
                    raise InputError(f"{axis}: the replicas of both sides are found: leave the axis out")
            if "router" in side.axes:
                raise InputError("router: is an axis of both sides, and decode_router of decode: name it there")
        for router in {*self.routers, *self.decode_routers} - {None}:
            find_router(str(router))

    @property
    def model(self) -> str:
        """The model of both sides."""
        return self.prefill.model

    @property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        """Names of the axes of both sides."""
        sides = (("prefill", self.prefill), ("decode", self.decode))
        found = {f"{role} {axis}": tuple(values) for role, side in sides for axis, values in side.axes.items()}
        found |= {name: tuple(values) for name, values in self._routing.items()}
        return found | {"prefill : decode": tuple(f"{first} : {second}" for first, second in self.ratios())}

    @property
    def _routing(self) -> dict[str, tuple[str | None, ...]]:
        """Axes of routers that have several values."""
        each: dict[str, tuple[str | None, ...]] = {"router": self.routers, "decode_router": self.decode_routers}
        return {name: values for name, values in each.items() if len(values) > 1}

    @property
    def size(self) -> int:
        """Points in all, those that cannot run included."""
        return self.prefill.size * self.decode.size * len(list(self._points()))

    def ratios(self) -> Iterator[tuple[int, int]]:
        """Replicas of prefill and decode, in lowest terms."""
        if self.only is not None:
            whole = gcd(*self.only)
            yield self.only[0] // whole, self.only[1] // whole
            return
        for first in range(1, self.ratio + 1):
            yield from ((first, second) for second in range(1, self.ratio + 1) if gcd(first, second) == 1)

    def _points(self) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
        """Routers, as far as they vary, and ratios of each pair of pools."""
        for values in product(*self._routing.values()):
            yield from ((dict(zip(self._routing, values, strict=True)), replicas) for replicas in self.ratios())

    def deployment(
        self, first: Pool, second: Pool, replicas: tuple[int, int], routing: Mapping[str, Any] = MappingProxyType({})
    ) -> Deployment:
        """So many replicas of both; ``routing``: their routers where several may be. Raises InputError where KV cannot
        be transferred."""
        pools = tuple(replace(pool, replicas=count) for pool, count in zip((first, second), replicas, strict=True))
        link = Link() if self.handover.transfer == "none" else self.link(pools)
        chosen = {"router": self.routers[0], "decode_router": self.decode_routers[0]} | dict(routing)
        return Deployment(pools, link=link, handover=self.handover, **chosen)

    def enumerate(self, *, with_price: bool = False) -> Enumeration:
        """The points that can run and keep the constraints, and why the others do not; as of ``Space``."""
        found: list[Candidate] = []
        pruned: Counter[str] = Counter()
        sides = [self.side(role, with_price=with_price) for role in ("prefill", "decode")]
        points = list(self._points())
        (prefills, first_pruned), (decodes, second_pruned) = sides
        for reasons, others in ((first_pruned, self.decode.size), (second_pruned, len(prefills))):
            for why, count in reasons.items():
                pruned[why] += count * others * len(points)
        index = 0
        for first_words, first in prefills:
            for second_words, second in decodes:
                for routing, replicas in points:
                    index += 1
                    try:
                        deployment = self.deployment(first, second, replicas, routing)
                    except InputError as error:
                        pruned[str(error)] += 1
                        continue
                    if (reason := self.constraints.broken_by(deployment)) is not None:
                        pruned[reason] += 1
                        continue
                    ratio = {"prefill : decode": f"{replicas[0]} : {replicas[1]}"}
                    words = first_words | second_words | routing | ratio
                    found.append(Candidate(index, words, deployment))
        return Enumeration(tuple(found), pruned)

    def side(self, role: str, *, with_price: bool) -> tuple[list[tuple[dict[str, Any], Pool]], Counter[str]]:
        """The pools of one side, with their settings, and why the others cannot run."""
        space = self.prefill if role == "prefill" else self.decode
        listed = replace(space, constraints=Constraints()).enumerate(with_price=with_price)
        pools = []
        for candidate in listed.candidates:
            words = {f"{role} {axis}": value for axis, value in candidate.settings.items()}
            pools.append((words, replace(candidate.deployment.pools[0], role=role, name=role)))
        return pools, listed.pruned

    def beyond(self, settings: Mapping[str, Any]) -> None:
        """Nothing: the axes of pools are closed."""

    def spec(self) -> dict[str, Any]:
        """The space for JSON."""
        return {
            "prefill": self.prefill.spec(),
            "decode": self.decode.spec(),
            "ratio": self.ratio,
            "router": list(self.routers),
            "decode_router": list(self.decode_routers),
            "handover": self.handover.spec(),
        }
