"""Placed: DistServe's placement of a space of pools, with simulations as its oracle.

Each layout's other settings are those with which the side alone carries most; the other side then takes no time. With
``high`` each side is chosen by that; with ``low`` pairs are simulated together, within a node. What was placed is
simulated as a whole afterwards, by the search of the space that is returned.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO, Deployment, Link, Pool
from windtunnel.errors import InputError
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.plan.capacity import capacity
from windtunnel.plan.disaggregation.placement import Layout, Placement, high_affinity, low_affinity
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.question import Question
from windtunnel.plan.trial import tables_for

FREE = 1e-6
"""Times the step times of a side that is not asked."""
OF_SIDE = {"prefill": ("ttft", "queue"), "decode": ("tpot", "itl")}
"""Limits that a side alone can keep or miss."""
KINDS = ("high", "low")


@dataclass(frozen=True, eq=False)
class Placed:
    """A placement, and the space of it alone."""

    placement: Placement
    space: PoolSpace
    kind: str

    @property
    def words(self) -> str:
        """The placement in a sentence."""
        sides = (
            ("prefill", self.placement.prefills, self.placement.prefill, self.placement.prefill_rate),
            ("decode", self.placement.decodes, self.placement.decode, self.placement.decode_rate),
        )
        parts = [
            f"{count} × {role} of {layout.intra_op} GPU{'s' * (layout.intra_op > 1)}"
            + (f" in {layout.inter_op} stages" if layout.inter_op > 1 else "")
            + f" ({rate:.3g} requests/s each)"
            for role, count, layout, rate in sides
        ]
        return f"DistServe's placement ({self.kind} affinity): {' and '.join(parts)}"


def placed(space: PoolSpace, question: Question, rate: float, kind: str, nodes: int = 1) -> Placed:
    """The placement of a space for a rate; ``low`` keeps both sides of a stage within a node.

    Raises:
        InputError: an unknown kind, limits that no side has alone, or no layout that keeps them.
    """
    if kind not in KINDS:
        raise InputError(f"placement={kind!r}: must be high or low")
    if question.slo.e2el is not None:
        raise InputError("placement: e2el is a limit of both sides together: give ttft and tpot")
    oracle = _Oracle(space, question)
    per_node = min(pool.device.gpus_per_node for side in oracle.sides.values() for _, pool in side)
    limits = {"rate": rate, "nodes": nodes, "gpus_per_node": per_node}
    if kind == "high":
        found = high_affinity(oracle.prefill, oracle.decode, **limits)  # type: ignore[arg-type]
    else:
        found = low_affinity(oracle.pair, **limits)  # type: ignore[arg-type]
    if found is None:
        raise InputError("placement: no layout keeps the limits: loosen them, or add values of tensor_parallel_size")
    chosen = {
        role: oracle.best(role, layout) for role, layout in (("prefill", found.prefill), ("decode", found.decode))
    }
    alone = {
        role: replace(getattr(space, role), axes={axis: (value,) for axis, value in words.items()})
        for role, (words, _, _) in chosen.items()
    }
    together = replace(space, **alone, only=(found.prefills, found.decodes))
    if kind == "low":
        together = replace(together, link=_within_a_node)
    return Placed(found, together, kind)


def _within_a_node(pools: Any) -> Link:
    return Link(bandwidth=min(pool.engine.world_size * pool.device.link_bandwidth for pool in pools))


class _Oracle:
    """What layouts carry, each simulated once."""

    def __init__(self, space: PoolSpace, question: Question) -> None:
        self.space, self.question = space, question
        self.sides = {role: list(_pools(space, role)) for role in ("prefill", "decode")}
        for role, pools in self.sides.items():
            if not pools:
                raise InputError(f"placement: no {role} server of the space can run")
        self.found: dict[tuple[str, Layout], tuple[Mapping[str, Any], Pool | None, float]] = {}

    def prefill(self, layout: Layout) -> float:
        """Requests per second of a prefill instance."""
        return self.best("prefill", layout)[2]

    def decode(self, layout: Layout) -> float:
        """Requests per second of a decode instance."""
        return self.best("decode", layout)[2]

    def pair(self, first: Layout, second: Layout) -> float:
        """Requests per second of a pair within a node."""
        pools = self.best("prefill", first)[1], self.best("decode", second)[1]
        if pools[0] is None or pools[1] is None:
            return 0.0
        deployment = replace(self.space, link=_within_a_node).deployment(pools[0], pools[1], (1, 1))
        return self._carried(deployment, self.question, None)

    def best(self, role: str, layout: Layout) -> tuple[Mapping[str, Any], Pool | None, float]:
        """The settings of a layout with which its side carries most, its pool, and how much; the first of equals."""
        if (role, layout) not in self.found:
            best: tuple[Mapping[str, Any], Pool | None, float] = ({}, None, 0.0)
            for words, pool in self.sides[role]:
                if layout_of(pool) == layout and (rate := self._alone(role, pool)) > best[2]:
                    best = words, pool, rate
            self.found[role, layout] = best
        return self.found[role, layout]

    def _alone(self, role: str, pool: Pool) -> float:
        """What a side carries within the limits that it has alone, next to another that takes no time."""
        other = self.sides["decode" if role == "prefill" else "prefill"][0][1]
        pair = (pool, other) if role == "prefill" else (other, pool)
        return self._carried(self.space.deployment(*pair, (1, 1)), of_side(self.question, role), role)

    def _carried(self, deployment: Deployment, question: Question, role: str | None) -> float:
        try:
            tables = [
                table if role in (None, pool.role) else _free(table)
                for pool, table in zip(deployment.pools, tables_for(question, deployment), strict=True)
            ]
            held = capacity(deployment, question, tables).held
        except InputError:  # such as stages that decode pools do not have
            return 0.0
        return 0.0 if held is None else held.rate


def _free(table: Tabulated) -> Tabulated:
    """Tables of a side that takes no time, as uncertain as it is."""
    doubts = {name: part.scaled(FREE) for name, part in table.doubts.items()}
    return replace(table.scaled(FREE), doubts=doubts)


def of_side(question: Question, role: str) -> Question:
    """The question with the limits that a side has alone."""
    slo, kept = question.slo, OF_SIDE[role]
    percentiles = tuple(limit for limit in slo.percentiles if limit.metric in kept)
    return replace(question, slo=SLO(percentiles=percentiles, **{k: v for k, v in slo.limits.items() if k in kept}))


def layout_of(pool: Pool) -> Layout:
    """How a pool's instances are split."""
    return Layout(pool.engine.pipeline_parallel_size, pool.engine.tensor_parallel_size)


def _pools(space: PoolSpace, role: str) -> Iterator[tuple[Mapping[str, Any], Pool]]:
    """The servers of a side with their settings; data parallel ones are not among DistServe's layouts."""
    side = space.prefill if role == "prefill" else space.decode
    for candidate in side.enumerate().candidates:
        pool = candidate.deployment.pools[0]
        if pool.engine.data_parallel_size == 1:
            yield candidate.settings, replace(pool, role=role, name=role)
