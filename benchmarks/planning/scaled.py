"""Autoscalers on prefill and decode pools: the best of some, and a score that none is above.

In any window, each side of a deployment is paid for at least one replica, and for the GPU-seconds that its good
requests take at least: a prompt's tokens that no earlier prompt of the load shares, and its decode steps, each by the
cheapest of all servers (``prefill_queue.seconds_of_prompts``, ``decode_bound.Lines``). So good tokens are at most s for
each GPU-second if for all x in [0, 1], with t the tokens and p, d the GPU-seconds of request i,

    Σ t·x ≤ s · (Σ over windows of prompts: max(G·W, Σ p·x) + Σ over those of answers: max(H·V, Σ d·x)),

G and H the GPUs of the smallest servers, W and V the seconds of windows. Each maximum is at least either of the two:
here the second where it is larger with all requests, and the first elsewhere; then x is 0 or 1 by the sign of what
request i adds. What may not lie in one window takes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Deployment
from windtunnel.perf.batch_times import BatchTimes, Times
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.goodput.closed import Closed, Server
from windtunnel.plan.goodput.decode_bound import lines_under
from windtunnel.plan.goodput.points import good_run
from windtunnel.plan.goodput.prefill_queue import computed, dealt, seconds_of_prompts
from windtunnel.plan.question import Question
from windtunnel.plan.space import autoscaler
from windtunnel.plan.trial import tables_for
from windtunnel.simulate.run import Run

Floats = NDArray[np.float64]
WINDOWS = (20.0, 300.0)
"""Seconds of prompts, and of answers."""
ROLES = ("prefill", "decode")


def elastic(whole: PoolSpace, prefill: Server, decode: Server, words: str) -> Deployment:
    """Pools that a rule scales; where prefill and decode have each their words, a slash is between them."""
    first, slash, second = words.partition("/")
    each = (first.strip(), second.strip() if slash else first.strip())
    scaling = tuple(autoscaler(f"{own} pool={role}") for own, role in zip(each, ROLES, strict=True))
    plain = whole.deployment(prefill.pool, decode.pool, (scaling[0].most, scaling[1].most))
    return replace(plain, scaling=scaling)


def scaled(whole: PoolSpace, closed: Closed, question: Question, rules: Sequence[str]) -> str:
    """The best of these rules on the servers of the best deployment, and what no autoscaler is above."""
    if closed.best is None:
        return "no deployment to scale"
    p, d, _ = closed.best
    found = [(scored(elastic(whole, closed.prefills[p], closed.decodes[d], words), question), words) for words in rules]
    (score, gpus), words = max(found)
    return f"{words}: {score:.3f} on {gpus:.1f} GPUs, no autoscaler above {no_more(whole, closed, question):.3f}"


def scored(deployment: Deployment, question: Question) -> tuple[float, float]:
    """Good tokens per second and GPU that is paid, and those GPUs."""
    tables, rate, runs = tables_for(question, deployment), question.workload.request_rate, list[Run]()
    found = good_run(question, deployment, rate, tables, lambda *_: True, runs.append, only_count=True)
    each = np.repeat([pool.gpus / pool.replicas for pool in deployment.pools], [p.replicas for p in deployment.pools])
    gpus = float(np.array(runs[0].manifest["lives"]["paid_s"]) @ each) / question.workload.duration
    return found.good_rate / gpus, gpus


def no_more(whole: PoolSpace, closed: Closed, question: Question) -> float:
    """A score that no autoscaler of any router exceeds, see above."""
    load, limits = question.workload, question.slo.limits
    first = np.full(len(load), limits.get("ttft", np.inf))
    life = first + limits.get("tpot", np.inf) * np.maximum(load.output_tokens - 1, 0)
    taken, paid = np.zeros(len(load)), 0.0
    sides = zip(_work(whole, closed, question), (first, life), WINDOWS, (closed.prefills, closed.decodes), strict=True)
    for work, lasts, width, servers in sides:
        windows, window = int(load.duration / width), np.floor(load.arrival / width).astype(np.int64)
        within = (np.floor((load.arrival + lasts) / width) == window) & (window < windows)
        one = min(server.weight for server in servers)
        least = width * one
        full = np.append(np.bincount(window[within], work[within], windows) > least, False)
        taken += np.where(within & full[np.minimum(window, windows)], work, 0.0)
        paid += one * (load.duration - width * float(full.sum()))
    tokens, low, high = load.output_tokens.astype(np.float64), 0.0, float(load.output_tokens.sum()) / max(paid, 1e-9)
    for _ in range(50):
        middle = (low + high) / 2
        left = float(np.maximum(tokens - middle * taken, 0.0).sum()) - middle * paid
        low, high = (low, middle) if left <= 0 else (middle, high)
    return high


def _work(whole: PoolSpace, closed: Closed, question: Question) -> tuple[Floats, Floats]:
    """Least GPU-seconds of each request's prompt and of its decode steps, on any server."""
    load = question.workload
    prompt, steps = load.prompt_tokens.astype(np.float64), np.maximum(load.output_tokens - 1, 0).astype(np.float64)
    work = computed(load, dealt(load, 1))
    first, second = np.full(len(load), np.inf), np.full(len(load), np.inf)
    for server, deployment, times in _tables(whole, closed, question, 0):
        first = np.minimum(first, seconds_of_prompts(deployment, load, work, times) * server.weight)
    for server, _, times in _tables(whole, closed, question, 1):
        lines = lines_under(times, server.pool.engine.data_parallel_size) if isinstance(times, BatchTimes) else None
        seconds = np.zeros(len(load)) if lines is None else lines.seconds(steps, prompt, np.inf)
        second = np.minimum(second, seconds * server.weight)
    return first, second


def _tables(
    whole: PoolSpace, closed: Closed, question: Question, side: int
) -> Iterator[tuple[Server, Deployment, Times]]:
    """The servers of a side, each in a deployment, with their tables."""
    for server in (closed.prefills, closed.decodes)[side]:
        pair = (server, closed.decodes[0]) if side == 0 else (closed.prefills[0], server)
        deployment = whole.deployment(pair[0].pool, pair[1].pool, (1, 1))
        yield server, deployment, question.overheads.applied(tables_for(question, deployment)[side].times)
