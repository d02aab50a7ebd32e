"""A run whose requests come piece by piece, and are forgotten when they have ended.

Where the router looks at nothing, it is known beforehand which replica gets which request: each is then simulated by
itself, wherever there is a core for it, to the bit as among the others.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.engine import Demand, Fleet
from windtunnel.core.live.stream import Piece, Stream
from windtunnel.core.records import GONE, NONE
from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.policy import UserScheduler
from windtunnel.policy.named import find_router
from windtunnel.policy.routing import RANDOM, ROUND_ROBIN
from windtunnel.simulate.overheads import ENGINE_CLOCK, Overheads
from windtunnel.simulate.run import FINISHED, REJECTED, Iterations, Requests, Run, Stalls
from windtunnel.simulate.simulate import demand_of, fleet_of, manifest_of, router_stream, schedulers_of
from windtunnel.workload.columns import Workload

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
BLIND = (ROUND_ROBIN, RANDOM)
"""Routers that look at nothing."""


@dataclass(frozen=True)
class Part:
    """What became known of some replicas while a piece of the requests came."""

    run: Run
    """Its requests are those that have ended, its steps those since the last part."""
    replica: Integers
    """Of the prefills that have ended, after which requests may decode; and ``rank``."""
    rank: Integers
    time: Floats
    """When each has ended."""
    finish: Floats
    """When its request does, infinite where it is not known yet."""


@dataclass(frozen=True, eq=False)
class Streaming:
    """A deployment that is to be simulated in pieces. Raises InputError for one that cannot be."""

    deployment: Deployment
    tables: Sequence[Tabulated]
    seed: int = 0
    overheads: Overheads = ENGINE_CLOCK

    def __post_init__(self) -> None:
        """Refuse what needs the whole run at once."""
        pool = self.deployment.pools[0]
        asked = {
            "prefill and decode pools": len(self.deployment.pools) > 1,
            "KV stores": any(pool.stores for pool in self.deployment.pools),
            "faults": bool(self.deployment.faults),
            "autoscaling": any(self.deployment.autoscaler(pool) for pool in self.deployment.pools),
            "pipeline_parallel_size > 1": pool.engine.pipeline_parallel_size > 1,
            "a scheduler in Python": isinstance(self._policies[0], UserScheduler),
            "a client's clock": self.overheads.client is not None,
            "acceptance_length or stream_interval > 1": max(
                pool.engine.stream_interval, pool.engine.acceptance_length or 1.0) > 1,
            "scheduler_recv_interval > 1": pool.engine.scheduler_recv_interval > 1,
        }  # fmt: skip
        for name, wanted in asked.items():
            if wanted:
                raise InputError(f"stream: does not go with {name}: leave out one of them")

    @property
    def count(self) -> int:
        """Parts that are simulated each by itself: the replicas, or 1."""
        pool = self.deployment.pools[0]
        blind = find_router(self.deployment.router).number in BLIND and pool.engine.data_parallel_size == 1
        return pool.replicas if blind else 1

    def run(self, pieces: Iterable[Workload], parts: Sequence[int]) -> Iterator[tuple[int, Part]]:
        """(Which part, what became known of it), piece by piece and at the end; of these parts alone."""
        router = find_router(self.deployment.router).number
        numbers, fleet = router_stream(self.seed), self._fleet
        alone = replace(fleet, replicas=(1,)) if self.count > 1 else fleet
        chosen_by = ROUND_ROBIN if self.count > 1 else router
        streams = {part: Stream(alone, chosen_by, router_stream(self.seed)) for part in parts}
        last, routed, template, came = 0.0, 0, None, 0
        for workload in pieces:
            if workload.released_by_ends or workload.texts is not None:
                raise InputError("stream: does not go with sessions, closed loops and prompts that share text")
            if float(workload.arrival[0]) < last:
                raise InputError(f"stream: a piece begins at {workload.arrival[0]:g} s, before the last one ends")
            last = float(workload.arrival[-1])
            demand, _cut = demand_of(workload, fleet)
            template = template or self._template(workload, fleet)
            chosen = np.zeros(len(workload), dtype=np.int64)
            if self.count > 1:
                some = np.flatnonzero(~demand.refused)
                order = routed + np.arange(len(some))
                by_chance = router == RANDOM
                chosen[some] = (numbers.random(len(some)) * self.count).astype(int) if by_chance else order % self.count
                routed += len(some)
            for part, stream in streams.items():
                rows = np.flatnonzero(chosen == part) if self.count > 1 else np.arange(len(workload))
                if len(rows):
                    asked = np.stack([came + rows, workload.max_tokens[rows]], axis=1)
                    yield part, self._part(part, stream, stream.feed(_taken(demand, rows), asked), template)
            came += len(workload)
        if template is None:
            raise InputError("stream: no requests came: give at least one")
        for part, stream in streams.items():
            yield part, self._part(part, stream, stream.finish(), template)

    @cached_property
    def _policies(self) -> Any:
        return schedulers_of(self.deployment)

    @cached_property
    def _fleet(self) -> Fleet:
        times = tuple(self.overheads.applied(table.pipeline or table.times) for table in self.tables)
        budgets = [kv_blocks(pool) for pool in self.deployment.pools]
        fleet = fleet_of(self.deployment, times, budgets, self._policies, find_router(self.deployment.router))
        return replace(fleet, policies=tuple(policy.without_known_prefixes() for policy in fleet.policies))

    def _template(self, workload: Workload, fleet: Fleet) -> Run:
        """A run without requests and steps."""
        budgets = [kv_blocks(pool) for pool in self.deployment.pools]
        manifest = manifest_of(self.deployment, workload, self.seed, self.tables, budgets, fleet, self.overheads, [])
        nothing: Any = np.zeros(0, dtype=np.int64)
        return Run(
            requests=Requests(*[nothing] * len(fields(Requests))),
            iterations=Iterations(*[nothing] * len(fields(Iterations))),
            stalls=Stalls(*[nothing] * len(fields(Stalls))),
            manifest=manifest,
            times=fleet.times,
        )

    def _part(self, part: int, stream: Stream, piece: Piece, template: Run) -> Part:
        rows, lane = piece.requests, piece.requests["lane"].astype(np.int64)
        there = lane != NONE
        replica = stream.replica_of_lane[lane] + (part if self.count > 1 else 0)
        columns = {name: rows[name].copy() for name in ("arrival", "scheduled", "first_token", "finish")}
        counts: dict[str, Any] = {name: rows[name].astype(np.int64) for name in ("preemptions", "cached_tokens")}
        requests = Requests(
            id=piece.asked[:, 0],
            prompt_tokens=rows["prompt"].astype(np.int64),
            output_tokens=rows["output"].astype(np.int64),
            max_tokens=piece.asked[:, 1],
            pool=np.where(there, 0, NONE),
            replica=np.where(there, replica, NONE),
            lane=np.where(there, stream.state.lanes["rank"][lane], NONE),
            status=np.where(rows["state"] == GONE, FINISHED, REJECTED),
            **columns,
            **counts,
        )
        stalls = Stalls(*(piece.stalls[name].copy() for name in ("request", "last_token", "resumed_token")))
        run = replace(template, requests=requests, iterations=Iterations.of(piece.rows), stalls=stalls)
        lane, time, finish = piece.joins
        return Part(run, stream.replica_of_lane[lane], stream.state.lanes["rank"][lane], time, finish)


def _taken(demand: Demand, rows: Integers) -> Demand:
    """Some of the requests, which wait for no others."""
    names = ("arrival", "prompt_tokens", "output_tokens", "overruns", "refused", "think_time", "max_tokens", "priority")
    columns = {name: getattr(demand, name)[rows] for name in names}
    return replace(demand, **columns, follow=np.full(len(rows), NONE), sessions=None, after=None, begins=None)
