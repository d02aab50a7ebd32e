"""Vidur's run again on the oracle: its scheduler as a Policy, its routers as functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracle.loop import Balancer, Loop, Replica, Router, round_robin
from oracle.pipeline import EagerPipeline
from oracle.replica import Group
from oracle.schedulers.unified import Scheduler
from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.request import Request

from benchmarks.vidur_parity.given import Given, lengths, num_blocks, slots
from benchmarks.vidur_parity.times import StageSeconds
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import Passage
from windtunnel.policy import Limits, Policy

Floats = NDArray[np.float64]


def policy(given: Given) -> tuple[Policy, Limits]:
    """The run's scheduler. Raises InputError for one that Vidur itself cannot run to its end."""
    settings, stages = given.scheduler, given.stages
    most, longest = settings["batch_size_cap"], given.max_tokens
    name, tokens = settings["name"], most * longest
    rules: dict[str, Any] = {"pipeline_parallel_size": stages, "decide_on_arrival": stages > 1}
    rules |= {"places_per_step": stages > 1, "max_num_seqs": most // stages}
    memory = {
        "allocation": "prompt",
        "watermark": settings.get("watermark_blocks_fraction", 0.0),
        "decodes_ask_for_a_block": True,
    }
    if name == "vllm":
        tokens = settings["max_tokens_in_batch"]
        rules |= memory | {"group_order": "prefill_first", "mixed": False, "padded_prefills": True}
        rules["running_order"] = "arrival" if stages > 1 else "admission"
    elif name == "sarathi":
        tokens = settings["chunk_size"]
        rules |= memory | {"chunked_prefill": True, "admit_after_eviction": True}
    elif name == "orca":
        longest -= longest % settings["block_size"]
        rules |= {"allocation": "max_model_len", "preemption": "none", "max_num_seqs": min(slots(given), most)}
    else:
        raise InputError(f"scheduler {name!r}: Vidur's vllm, sarathi and orca run to their end; use one of them")
    limits = Limits(
        max_num_seqs=most,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        num_blocks=num_blocks(given),
        block_size=settings["block_size"],
    )
    return Policy(**rules), limits


def router(given: Given) -> Router:
    """The run's router. Raises InputError for an unknown one."""
    name = given.config["cluster_config"]["global_scheduler_config"]["name"]
    if name == "round_robin":
        return round_robin
    if name == "lor":
        return fewest_waiting
    if name == "random":
        return _drawing(given)
    raise InputError(f"router {name!r}: Vidur's round_robin, lor and random are known")


def fewest_waiting(replicas: list[Replica], there: Sequence[int], _: Balancer, __: int, ___: Request) -> int:
    """Its least outstanding requests: those in the queue alone, the first of equals."""
    return min(there, key=lambda j: replicas[j].groups[0].schedulers[0].num_waiting)


def _drawing(given: Given) -> Router:
    """From Python's own stream, as far as the requests have drawn from it."""
    generator = given.config["request_generator_config"]
    stream = Random(generator["seed"])
    drawn = 0
    if generator["name"] == "synthetic":
        drawn += generator["interval_generator_config"]["name"] == "poisson"
        drawn += generator["length_generator_config"]["name"] == "uniform"
    for _ in range(drawn * len(given.requests["id"])):
        stream.random()
    return lambda replicas, *_: stream.randint(1, len(replicas)) - 1


class Restarting(Request):
    """A request as Vidur restarts it: a prompt of which a part was computed ends there from then on, and the rest is
    generated token by token (Request.restart of vidur/entities/request.py)."""

    def restart(self) -> None:
        """Drop the KV, and from a part-way prompt what was not computed."""
        if self.num_computed_tokens < self.prefill_tokens:
            cut = self.num_tokens - self.num_computed_tokens
            self.prompt_tokens -= cut
            self.output_tokens += cut
            self.max_tokens += cut
        super().restart()


@dataclass
class Formed:
    """A batch, when it was formed, and when its last stage had done it."""

    batch: Batch
    at: float
    end: float = nan


@dataclass
class Served:
    """What the oracle did."""

    requests: list[Request]
    batches: list[Formed] = field(default_factory=list)
    """Of all replicas, in the order in which they were formed."""

    def column(self, of: Callable[[Formed], float]) -> Floats:
        """A number of every batch."""
        return np.array([of(one) for one in self.batches])


def serve(given: Given, seconds: StageSeconds) -> Served:
    """Simulate the run with these batch times."""
    rules, limits = policy(given)
    asked = zip(given.requests["arrived_at"].tolist(), lengths(given), strict=True)
    served = Served([Restarting(i, at, prompt, out, out) for i, (at, (prompt, out)) in enumerate(asked)])
    count = given.config["cluster_config"]["num_replicas"]
    replicas = [_replica(rules, limits, seconds, served) for _ in range(count)]
    Loop(replicas, router(given), served.requests).run()
    ends = {id(step.batch): step.end for replica in replicas for group in replica.groups for step in group.journal}
    for formed in served.batches:
        formed.end = ends[id(formed.batch)]
    return served


def _replica(rules: Policy, limits: Limits, seconds: StageSeconds, served: Served) -> Replica:
    scheduler = Scheduler(limits, rules)

    def passage(batch: Batch) -> Passage:
        served.batches.append(Formed(batch, scheduler.started))
        last = rules.pipeline_parallel_size - 1
        stages = [seconds(batch, sends=stage < last) for stage in range(last + 1)]
        return Passage(stages, [0.0] * last)

    if rules.pipeline_parallel_size > 1:
        return Replica([EagerPipeline(scheduler, rules, passage)])
    return Replica([Group([scheduler], lambda batches: passage(batches[0]).stages[0])])
