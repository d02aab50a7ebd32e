"""The gap of a run: how far what a simulated server did is from the bound by formula."""

from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.optimum.bounds import bounds
from windtunnel.optimum.certificate import gap
from windtunnel.optimum.objective import MEASURES, Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Outcome
from windtunnel.perf.batch_times import whole
from windtunnel.policy import Limits
from windtunnel.simulate.run import FINISHED, Run


def gaps(run: Run) -> dict[str, Any]:
    """For every objective {value, bound, gap}, in seconds; what ``windtunnel run --gap`` says.

    The bound holds for every scheduler that serves these requests under the limits and batch times of the run.

    Raises:
        InputError: the run has something that no bound covers yet.
    """
    _check(run)
    requests, pool = run.requests, run.manifest["pools"][0]
    engine = pool["engine"]
    limits = Limits(
        max_num_seqs=pool["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"],
        num_blocks=pool["kv_blocks"],
        block_size=pool["block_size"],
    )
    lengths = requests.prompt_tokens, requests.output_tokens
    problem = Problem(requests.arrival, *lengths, limits, whole(run.times[0]))
    caching = engine["enable_prefix_caching"] is not False and bool(requests.preemptions.sum())
    engines = sum(replica["lanes"] for replica in run.manifest["replicas"])
    found = bounds(problem, engines, cached=caching)
    outcome = Outcome(requests.arrival, requests.output_tokens, requests.first_token, requests.finish, np.zeros(0))
    document: dict[str, Any] = {"proof": "formula"}
    for name in MEASURES:
        objective = Objective.parse(name)
        value, bound = outcome.value(objective), found.of(objective)
        document[name] = {"value": value, "bound": min(bound, value), "gap": gap(value, bound)}
    return document


def _check(run: Run) -> None:
    """Raise InputError for what no bound covers."""
    pools, engine = run.manifest["pools"], run.manifest["pools"][0]["engine"]
    workload = run.manifest["workload"]
    reasons = {
        "several pools": len(pools) > 1,
        "a pipeline": engine["pipeline_parallel_size"] > 1,
        "speculative decoding": bool(engine["num_speculative_tokens"]),
        "a closed loop": bool(workload.get("max_concurrency")),
        "sessions": bool(workload.get("sessions")),
        "requests that did not finish": bool((run.requests.status != FINISHED).any()),
        "prompts found in a prefix cache": bool((run.requests.cached_tokens[run.requests.preemptions == 0] > 0).any()),
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"gap: {reason}: no bound covers that yet; leave out --gap")
