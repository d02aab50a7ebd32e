"""Routers that remember what they have sent where, as plain objects: sessions, and the view of ``policy.routing``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import isnan

import numpy as np

from oracle.loop import Balancer, Replica, Router, drawn, outstanding
from oracle.vllm_v1.blocks import Block, CachedBlocks
from oracle.vllm_v1.request import Request
from windtunnel.policy import routing
from windtunnel.policy.routing import Array, Conductor, RouteView, Routing


def power_of_two(uniforms: list[float]) -> Router:
    """Of two different replicas drawn at random the one with fewer requests, the first drawn of equals."""

    def choose(replicas: list[Replica], there: Sequence[int], _: Balancer, count: int, __: Request) -> int:
        pairs = list(permutations(there, 2)) or [(there[0], there[0])]
        return min(pairs[int(drawn(uniforms, count) * len(pairs))], key=lambda j: outstanding(replicas[j]))

    return choose


def session_affinity(before: dict[int, int]) -> Router:
    """The replica of the session's request before, if it is there; otherwise the one with the fewest requests, where
    the session stays from then on."""
    sent: dict[int, int] = {}

    def choose(replicas: list[Replica], there: Sequence[int], _: Balancer, __: int, request: Request) -> int:
        earlier = before.get(request.id)
        while earlier is not None and earlier not in sent:
            earlier = before.get(earlier)
        stays = earlier is not None and sent[earlier] in there
        fewest = min(there, key=lambda j: outstanding(replicas[j]))
        sent[request.id] = sent[earlier] if earlier is not None and stays else fewest
        return sent[request.id]

    return choose


@dataclass(eq=False)
class Ledger:
    """What a router knows of one replica, as long as that is the same."""

    replica: Replica | None
    index: CachedBlocks | None
    sent: list[Request] = field(default_factory=list)
    to_compute: dict[int, int] = field(default_factory=dict)
    """By request: tokens of its prompt that the index did not find."""
    busy_until: float = 0.0

    def found(self, request: Request) -> list[Block]:
        """Blocks of the request's beginning that the replica should have."""
        return self.index.find(request) if self.index else []

    def enter(self, request: Request) -> None:
        """It gets the prompt, whose blocks are now those that were used last."""
        if self.index is None:
            return
        size = self.index.block_size
        tokens = min(request.prompt_tokens, self.index.free * size)
        hits = self.found(request)[: tokens // size]
        self.index.take(request, hits, -(-tokens // size) - len(hits))
        self.index.offer(request, tokens)
        self.index.release(request)


class Scored:
    """A router that chooses by a formula of ``policy.routing``.

    ``fixed`` are the columns of the view that never change. The index of each replica begins empty.
    """

    def __init__(self, settings: Routing, uniforms: list[float], fixed: Array, block_size: int, hashed: bool) -> None:
        self.settings, self.uniforms, self.view = settings, uniforms, fixed.copy()
        self.size = settings.block_size or block_size
        tokens = [int(row[routing.CAPACITY]) for row in fixed]
        self.sizes = [(settings.blocks or max(count // self.size, 1)) if hashed else 0 for count in tokens]
        self.ledgers = [self._ledger(j, None) for j in range(len(tokens))]
        self.decodes: list[float] = []
        """When each request that Conductor accepted should begin to decode."""

    def _ledger(self, j: int, replica: Replica | None) -> Ledger:
        """Of a replica that was sent nothing."""
        return Ledger(replica, CachedBlocks(self.sizes[j], self.size, False) if self.sizes[j] else None)

    def __call__(self, replicas: list[Replica], there: Sequence[int], _: Balancer, count: int, request: Request) -> int:
        """The replica for a request; one that is rejected becomes ``refused``. Of a replica that has failed or stopped
        nothing is known when it is back."""
        time = request.arrival
        for j, replica in enumerate(replicas):
            if self.ledgers[j].replica is not replica:
                self.ledgers[j] = self._ledger(j, replica)
        for row, replica, ledger in zip(self.view, replicas, self.ledgers, strict=True):
            ledger.sent = [one for one in ledger.sent if not one.finished]
            row[routing.OUTSTANDING] = outstanding(replica)
            row[routing.WAITING] = sum(group.schedulers[i].num_waiting for group, i in replica.ranks)
            row[routing.PREFILL] = sum(ledger.to_compute[one.id] for one in ledger.sent if isnan(one.first_token))
            row[routing.ACTIVE] = sum(one.prompt_tokens for one in ledger.sent)
            row[routing.CACHED] = len(ledger.found(request)) * self.size
            row[routing.QUEUE] = max(ledger.busy_until - time, 0.0)
        j, cost = self._choose(there, count, request)
        if isinstance(self.settings, Conductor) and not self._promise(self.settings, j, cost, request):
            request.refused = True
            return j
        cached = max(int(self.view[j, routing.CACHED]), request.brought[1])
        self.ledgers[j].sent.append(request)
        computed = request.prompt_tokens if request.generated else min(cached, request.prompt_tokens)
        self.ledgers[j].to_compute[request.id] = request.prompt_tokens - computed
        self.ledgers[j].enter(request)
        return j

    def _choose(self, there: Sequence[int], count: int, request: Request) -> tuple[int, float]:
        """(A replica of these, what it costs.)"""
        view, costs = self.view[list(there)], np.zeros(len(there))
        if isinstance(self.settings, RouteView):
            for k, (j, row) in enumerate(zip(there, view, strict=True)):
                seen = (row[routing.WAITING], row[routing.PREFILL], row[routing.ACTIVE], row[routing.CACHED])
                known = (j, int(row[routing.OUTSTANDING]), request.prompt_tokens, request.arrival)
                costs[k] = self.settings.route_view(*known, *map(int, seen))
            best = int(np.argmin(costs))
        else:
            routing.FORMULAS[self.settings.kind](view, request.prompt_tokens, self.settings.weights, costs)
            best = routing.pick(costs, drawn(self.uniforms, count), self.settings.temperature)
        return there[best], float(costs[best])

    def _promise(self, settings: Conductor, j: int, ttft: float, request: Request) -> bool:
        """Whether Conductor accepts a request; if so, note what its replica gets from another one, and its end."""
        time, row, ledger = request.arrival, self.view[j], self.ledgers[j]
        at = time + ttft if settings.predict else time
        decoding = sum(start <= at < start + settings.decode_s for start in self.decodes)
        if ttft > settings.ttft_slo or (settings.decode_slots and decoding >= settings.decode_slots):
            return False
        own, best = row[routing.CACHED], max(self.view[:, routing.CACHED])
        fetched = routing.fetched_tokens(own, best, settings.threshold)
        if fetched:
            request.ready = time + (settings.latency + fetched * settings.weights[2])
            request.brought = int(own), int(own + fetched)
        begin = max(ledger.busy_until, request.ready if fetched else time)
        ledger.busy_until = begin + routing.prefill_seconds(self.view, j, request.prompt_tokens, own + fetched)
        self.decodes.append(ledger.busy_until)
        return True
