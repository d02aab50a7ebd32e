"""Prefill queue: prompts that a prefill side computes in time at most, whatever its limits of tokens and requests.

Where prompts are taken first come, first served, a step gives tokens to one only when all before it have theirs. Let a
step of t tokens of at most n prompts take at least b + c·t seconds, whatever t is, and let prompt i compute w_i tokens
at least: those that no earlier prompt of its replica has. If a step's time is shared out among its prompts, b equally
and the rest among tokens, then in their order prompt i has its last token no earlier than

    f_i = max(f_{i−1}, arrival_i) + b/n + c·w_i,

so its first token comes no earlier either. Who is in time by f is at most who is. Ranks that share a replica have a
queue each, and prompts go to the shortest or in turn. Assumed: each prompt waits at least ``EVEN`` of what it would if
the ranks had one queue.

What an earlier prompt shares is in the cache only where it was used lately. Blocks are evicted in the order of their
last use, so one is gone when as many others as there are were taken after it. Of prompts that are taken as they come,
those between its last user and the next take at least the blocks of their w tokens. Assumed, as of prefill sides, which
a decode side that makes them wait makes no better: a prompt's KV has left before those behind it have taken ``HELD`` of
the memory.

Attention: let each chunk of n ≥ ``SMALL`` tokens at context c take at least α·(c·n + n²/2) + β·n. That is a sum over
its tokens of what grows with their place. All chunks of a prompt but its first and last are whole steps, so at most 2
are smaller: at least what all but 2 · ``SMALL`` of its tokens take, the last ones left out.
"""

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import entry
from windtunnel.deployment import Deployment, Pool
from windtunnel.deployment.engine_scheduler import engine_scheduler
from windtunnel.deployment.memory import kv_blocks
from windtunnel.perf.batch_times import BatchTimes, Times
from windtunnel.plan.goodput.classes import ROUNDED
from windtunnel.plan.goodput.decode_bound import hull_lines
from windtunnel.policy.sglang import Sglang
from windtunnel.policy.vllm_v1 import VllmV1
from windtunnel.workload import Workload
from windtunnel.workload.texts import Begins, taken

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

HELD = 1 / 8
"""Share of the memory that prompts behind one may take before its KV has left."""
EVEN = 1 / 2
"""How evenly ranks share a replica's requests: each has at least so much of the others' load."""
SMALL = 64
"""Tokens of a chunk below which its attention counts as nothing."""
PARTS = 16
"""Values of β that are tried."""
LOOKS = 64
"""Earlier prompts that are looked at; where more were used lately, all that is shared may be in the cache."""
ROUND = 512
"""A number of blocks is rounded up to a multiple of this, for few to be told apart."""
MANY = 4
"""Times that the memory must hold a step and the longest prompt, so that none is ever evicted while it is computed."""


def late_in_turn(deployment: Deployment, workload: Workload, seconds: Floats, limit: float) -> Floats:
    """Output tokens at least of requests from each on, and 0, whose first token comes later than a limit (s) after
    they did, where prompts take ``seconds`` of a replica (``seconds_of_prompts``)."""
    pool, late = deployment.pools[0], np.zeros(len(workload) + 1)
    share = 1.0 if pool.engine.data_parallel_size == 1 else EVEN
    for one in range(pool.replicas):
        mine = slice(one, len(workload), pool.replicas)
        arrival, so_far = workload.arrival[mine], np.cumsum(seconds[mine])
        done = so_far + np.maximum.accumulate(arrival - (so_far - seconds[mine]))
        late[mine] = np.where(share * (done - arrival) > limit + ROUNDED, workload.output_tokens[mine], 0)
    return np.asarray(np.cumsum(late[::-1])[::-1])


def seconds_of_prompts(deployment: Deployment, workload: Workload, work: Floats, times: Times) -> Floats:
    """Seconds of a replica that each prompt takes at least, of which this ``work`` is computed (``computed``): where
    ranks share it, a step lasts as long as that of the mean rank, and, in lockstep, the experts of all tokens. 0 where
    it is not known, or prompts are not dealt out in turn and taken as they come."""
    pool = deployment.pools[0]
    fits = (workload.prompt_tokens + workload.max_tokens).max() <= pool.engine.resolved("max_model_len")
    plain = workload.images == (0, 0) and not pool.stores and not workload.priority.any() and fits
    in_turn = deployment.router == "round_robin" and takes_in_turn(pool)
    if not (plain and in_turn and isinstance(times, BatchTimes)):
        return np.zeros(len(workload))
    prompt, experts = workload.prompt_tokens.astype(np.float64), times.expert_tokens[1:]
    of_rank = least_seconds(times, work, prompt, pool.engine.resolved("max_num_seqs"))
    shared = float((experts / np.arange(1, len(experts) + 1)).min()) if len(experts) else 0.0
    return np.asarray(of_rank / pool.engine.data_parallel_size + shared * work)


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


def least_seconds(times: BatchTimes, work: Floats, prompt: Floats, prompts: int) -> Floats:
    """Least seconds that the tokens to be computed (``work``, the last of each ``prompt``) take of steps of at most
    ``prompts``, by the line under a step that gives most in all."""
    tokens = np.arange(1, len(times.mixed_tokens))
    step = times.mixed_tokens[1:] + times.prefill_base + times.host_serial[1:].min() + times.sequences[1:].min()
    lines = [(0.0, float((step / tokens).min())), *hull_lines(tokens, step)]
    total = float(work.sum())
    start, slope = max(lines, key=lambda line: line[0] / prompts * len(work) + line[1] * total)
    return np.asarray(work * slope + start / prompts + least_attention(times, work, prompt))


def least_attention(times: BatchTimes, work: Floats, prompt: Floats) -> Floats:
    """Least seconds of attention of each prompt's last tokens: see above. Between its knots the table is linear in each
    direction, as c·n is, and above n²/2, so what holds at the knots holds."""
    knots, table = times.chunk_knots.astype(np.float64), times.prefill_attention
    first = int(np.searchsorted(knots, min(SMALL, knots[-1])))
    last = int(np.searchsorted(knots, min(prompt.max(), knots[-1])))
    chunk, seconds = knots[first : last + 1, None], table[first : last + 1]
    if not len(chunk):
        return np.zeros(len(work))
    square = chunk * times.context_knots[None, :] + chunk**2 / 2
    begin = prompt - work
    end = np.maximum(prompt - 2 * knots[first], begin)
    best = np.zeros(len(work))
    for each in np.linspace(0.0, float((seconds / chunk).min()), PARTS + 1):
        growing = max(float(((seconds - each * chunk) / square).min()), 0.0)
        found = growing * (end**2 - begin**2) / 2 + each * (end - begin)
        best = found if found.sum() > best.sum() else best
    return best


Dealt = list[tuple[Integers, Begins | None]]
"""Of each replica its prompts, and with what each begins among those."""


def dealt(workload: Workload, replicas: int) -> Dealt:
    """The prompts of each replica, dealt out in turn."""
    rows = [np.arange(one, len(workload), replicas) for one in range(replicas)]
    return [(mine, taken(workload.texts, mine)) for mine in rows]


def computed(workload: Workload, replicas: Dealt, pool: Pool | None = None) -> Floats:
    """Tokens of each prompt that no earlier one of its replica shares, or, with a pool, that none has which was used
    lately; at least one."""
    found, texts = workload.prompt_tokens.astype(np.float64), workload.texts
    if texts is not None and (texts[0] >= np.arange(len(found))).any():  # shared with one that comes later
        return np.ones(len(found))
    size, window = (1, 0) if pool is None else (kv_blocks(pool).block_size, lately(pool, workload))
    for rows, begins in replicas:
        if begins is not None:
            prompt = np.ascontiguousarray(workload.prompt_tokens[rows], dtype=np.int64)
            found[rows] -= _used_lately(*begins, prompt, size, window) if window else begins[1]
    return np.maximum(found, 1.0)


def lately(pool: Pool, workload: Workload) -> int:
    """How many blocks at most are taken after a prompt whose own are still there; 0 where that is not known."""
    engine, budget = pool.engine, kv_blocks(pool)
    at_once = engine.resolved("max_num_batched_tokens") + int(workload.prompt_tokens.max())
    plain = not (budget.window_bytes or budget.state_bytes or pool.stores) and engine.data_parallel_size == 1
    if not plain or budget.num_blocks * budget.block_size < MANY * at_once:
        return 0
    return -(-int(budget.num_blocks * (1 + HELD)) // ROUND) * ROUND


def _used_lately(above: Integers, tokens: Integers, prompt: Integers, size: int, window: int) -> Integers:
    """Tokens that prompts share with those before them, the blocks of whose last users may still be there: fewer than
    ``window`` blocks of ``size`` tokens were taken in between. Each begins with these ``tokens`` of that above it."""
    found, root, before, last = (np.zeros(len(prompt), np.int64) for _ in range(4))
    _look_back(above, tokens, prompt, size, window, found, root, before, last, np.zeros(len(prompt) + 1, np.int64))
    return found


@entry
def _look_back(
    above: Integers, tokens: Integers, prompt: Integers, size: int, window: int, found: Integers,
    root: Integers, before: Integers, last: Integers, blocks: Integers,
) -> None:  # fmt: skip
    """See above. ``before`` and ``last`` are prompts that share something with each, + 1; ``blocks`` those taken."""
    for i in range(len(prompt)):
        root[i] = root[above[i]] if above[i] >= 0 else i
        other = last[root[i]] - 1
        before[i] = last[root[i]]
        last[root[i]] = i + 1
        looks = 0
        while other >= 0 and blocks[i] - blocks[other + 1] < window and found[i] < tokens[i]:
            looks += 1
            if looks > LOOKS:
                found[i] = tokens[i]
                break
            one, two = i, other
            most = prompt[i]
            while one != two and one >= 0:  # up to the text that both begin with
                if one > two:
                    most, one = min(most, tokens[one]), above[one]
                else:
                    most, two = min(most, tokens[two]), above[two]
                    if two < 0:
                        one = -1
            if one >= 0:
                found[i] = max(found[i], min(most, prompt[other]))
            other = before[other] - 1
        blocks[i + 1] = blocks[i] + (prompt[i] - found[i]) // size
