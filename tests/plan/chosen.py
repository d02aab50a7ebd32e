"""A search whose answers are chosen: two configurations, of which the second wins."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from plan.planning import question
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.plan.bound import Bound
from windtunnel.plan.elimination import Contender, Entry
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Candidate, Enumeration
from windtunnel.plan.survey import Surveyed


def outcome(rate: float, tokens: float, ttft: float, tpot: float, met: bool = True) -> Outcome:
    """Percentiles are those of ttft and tpot (s), all alike."""
    latencies = {
        name: dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), value)
        for name, value in (("ttft", ttft), ("tpot", tpot), ("itl", tpot), ("e2el", math.inf), ("queue", 0.0))
    }
    return Outcome(rate, met, False, 1.0, (), 1.0, latencies, tokens, 1.0, 0.5, 0.5, 0.5, 0.5, 0)


NO_RATE = cast(Bound, SimpleNamespace(rate=0.0))
"""A bound below every rate: no step of the candidates can be tried."""


class Chosen(SearchResult):
    """A search that found three replicas at 7 requests/s."""

    def measured(self, entry: Entry) -> Any:
        """Three of the candidate's replicas."""
        return self.contenders[entry.index].candidate.scaled(3), 7.000049


def answer(price: float = 3.6, objective: Any = None, goodput: tuple[str, ...] = ("ttft:400",), **more: Any) -> Chosen:
    """Two configurations that differ in their tensor parallel size; the second one wins with 100 tokens/s at 0.2 s."""
    chip = replace(device("h100"), price_per_hour=price)
    contenders = {}
    for index, size in enumerate((1, 2)):
        engine = Engine(tensor_parallel_size=size, max_num_seqs=8)
        settings = {"device": "h100", "tensor_parallel_size": size, "max_num_seqs": 8}
        deployment = Deployment((Pool(load_model("Llama-3.1-8B"), chip, engine),))
        contenders[index] = Contender(Candidate(index, settings, deployment), NO_RATE)
    best = Entry(1, "exact", 2.0, 3, outcome(7, 100.0, 0.2, 0.02))
    return Chosen(
        question=question(goodput=goodput, **more),
        objective=objective or RatePerDollar(),
        enumeration=Enumeration((), Counter()),
        contenders=contenders,
        entries={1: best},
        top=1,
        trials=0,
        reused=0,
        seconds=0.0,
    )


SURVEYED = (
    Surveyed(0, (outcome(1, 50.0, 0.1, 0.02), outcome(2, 100.0, 0.3, 0.03), outcome(3, 150.0, 9.0, 0.3, met=False))),
    Surveyed(1, (outcome(1, 50.0, 0.3, 0.03), outcome(2, 200.0, 0.4, 0.01))),
)
"""USD per million of a replica: 20, 10, and, of two GPUs, 40 and 10; so of these the third is worse than the second."""
