"""Prefill queue: prompts that a prefill side computes in time at most, whatever its limits of tokens and requests.

Where prompts are taken first come, first served, a step gives tokens to one only when all before it have theirs. Let a
step of t tokens of at most n prompts take at least b + c·t seconds, whatever t is, and let prompt i compute w_i tokens
at least: those that no earlier prompt of its replica has. If a step's time is shared out among its prompts, b equally
and the rest among tokens, then in their order prompt i has its last token no earlier than

    f_i = max(f_{i−1}, arrival_i) + b/n + c·w_i,

so its first token comes no earlier either. Who is in time by f is at most who is.
"""

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Deployment, Pool
from windtunnel.deployment.engine_scheduler import engine_scheduler
from windtunnel.perf.batch_times import BatchTimes, Times
from windtunnel.plan.goodput.classes import ROUNDED
from windtunnel.plan.goodput.decode_bound import hull_lines
from windtunnel.policy.sglang import Sglang
from windtunnel.policy.vllm_v1 import VllmV1
from windtunnel.workload import Workload
from windtunnel.workload.texts import taken

Floats = NDArray[np.float64]


def kept_in_turn(deployment: Deployment, workload: Workload, work: Floats, times: Times, limit: float) -> float:
    """Output tokens per second of requests whose first token may come within a limit (s), by the prefill side alone,
    where they compute this ``work`` (``computed``). Infinite where prompts are not dealt out in turn and taken as they
    come, or more than one rank or stage shares a replica's."""
    pool = deployment.pools[0]
    plain = workload.images == (0, 0) and not pool.stores and not workload.priority.any()
    fits = (workload.prompt_tokens + workload.max_tokens).max() <= pool.engine.resolved("max_model_len")
    in_turn = deployment.router == "round_robin" and takes_in_turn(pool) and pool.engine.data_parallel_size == 1
    if not (plain and fits and in_turn and isinstance(times, BatchTimes)):
        return np.inf
    seconds, tokens = least_seconds(times, work, pool.engine.resolved("max_num_seqs")), 0.0
    for one in range(pool.replicas):
        mine = slice(one, None, pool.replicas)
        arrival, so_far = workload.arrival[mine], np.cumsum(seconds[mine])
        done = so_far + np.maximum.accumulate(arrival - (so_far - seconds[mine]))
        kept = done - arrival <= limit + ROUNDED
        tokens += float(workload.output_tokens[mine][kept].sum())
    return tokens / workload.duration


def takes_in_turn(pool: Pool) -> bool:
    """Whether the scheduler takes prompts first come, first served, each with all that a step has left."""
    engine = pool.engine
    if engine.scheduler is not None:
        return False
    rules = engine_scheduler(engine)
    if isinstance(rules, VllmV1):
        whole = not (rules.long_prefill_token_threshold or rules.adaptive_threshold or rules.skip_unfit_prompts)
        return rules.admission_order == "fcfs" and whole and not rules.max_loras
    return isinstance(rules, Sglang) and rules.schedule_policy == "fcfs" and not rules.enable_priority_scheduling


def least_seconds(times: BatchTimes, work: Floats, prompts: int) -> Floats:
    """Least seconds that each prompt's tokens (``work``) take of steps of at most ``prompts``.

    By the line under a step that gives most in all. Attention is linear between its knots, so that it takes least for
    each token at one of them.
    """
    tokens, chunks = np.arange(1, len(times.mixed_tokens)), times.chunk_knots[1:]
    step = times.mixed_tokens[1:] + times.prefill_base + times.host_serial[1:].min() + times.sequences[1:].min()
    attention = float((times.prefill_attention[1:].min(axis=1) / chunks).min())
    lines = [(0.0, float((step / tokens).min())), *hull_lines(tokens, step)]
    total = float(work.sum())
    start, slope = max(lines, key=lambda line: line[0] / prompts * len(work) + line[1] * total)
    return np.asarray(work * (slope + attention) + start / prompts)


def computed(workload: Workload, replicas: int) -> Floats:
    """Tokens of each prompt that no earlier one dealt to the same replica shares, at least one."""
    found = workload.prompt_tokens.astype(np.float64)
    texts = workload.texts
    if texts is not None and (texts[0] >= np.arange(len(found))).any():  # shared with one that comes later
        return np.ones(len(found))
    for one in range(replicas):
        rows = np.arange(one, len(found), replicas)
        begins = taken(texts, rows)
        if begins is not None:
            found[rows] -= begins[1]
    return np.maximum(found, 1.0)
