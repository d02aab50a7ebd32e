"""Images and other inputs that an encoder turns into embeddings (vLLM 0.33: v1/core/encoder_cache_manager.py,
_try_schedule_encoder_inputs of v1/core/sched/scheduler.py).

The embeddings of an input stand in the place of as many tokens of its prompt. An input is computed whole, in the step
that computes its first token; its request holds its entry in the cache until its last token is computed. Then it stays
until room is needed, and the one that was let go first makes way first. Where no pool has an encoder ``encoder`` is
None, and what asks for it vanishes when it is compiled.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Fields, Lane, Pool, Request, State
from windtunnel.core.seats import EMPTY, ENDS, NEVER, NOW, WHO

POOL_FIELDS: Fields = [
    (name, np.int64)
    for name in (
        "encoder_budget",  # embeddings of a step
        "whole_inputs",  # no chunk of a prompt ends within an input
        "input_shift",  # tokens by which an input is wanted before its place is computed
        "input_size",  # embeddings of an input where they are all alike, for the time that they take
        "first_seconds",  # in ``Encoder.seconds``
        "last_seconds",
    )
]

LANE_FIELDS: Fields = [
    ("encoder_takes", np.float64),  # seconds of this step
    *(
        (name, np.int64)
        for name in (
            "encoder_row",  # of the arrays of caches
            "encoder_step",  # decisions so far
            "encoder_left",  # embeddings that this step can still compute
            "encoder_free",  # embeddings that have room in the cache
            "encoder_freeable",  # these, and those of entries that nobody holds
            "encoder_entries",
            "encoder_releases",  # of entries, by the last who held each
            "encoder_dropped",  # entries that had to make way in this decision
            "encoder_wanted",  # inputs that the request which is looked at computes if it is scheduled
            "encoder_late",  # decodes that still hold an entry
            "encoder_busy",  # equal steps are not certain
        )
    ),
]

NAME, SIZE, HOLDERS, SINCE = range(4)
"""Of an entry: its content; its embeddings; how many requests hold it; when the last of them let it go."""
OFFSET, EMBEDDINGS, CONTENT, TWIN, HELD, STEP = range(6)
"""Of an input: where it begins in its prompt; its embeddings; equal numbers are equal inputs; the first one of its
request with this content; whether the request holds that one's entry; the decision that computes it."""
ALL = 1 << 40
"""More tokens than a request has."""


class Encoder(NamedTuple):
    """The inputs of all requests, and the caches."""

    first: Array
    """[requests + 1] where the inputs of each begin."""
    inputs: Array
    """[inputs, 6] in the order of their places."""
    holds: Array
    """[requests] entries that each holds."""
    entries: Array
    """[lanes, entries, 4]"""
    dropped: Array
    """[lanes, entries] contents of those that made way in this decision."""
    wanted: Array
    """Inputs that the request which is looked at computes if it is scheduled."""
    seconds: Array
    """Of the encoder for 0, 1, 2, … inputs of a step: of one pool after the other."""


def encoder_of(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Encoder | None:
    """Write the settings into the pools, and make the arrays; None where no pool has an encoder."""
    if all(policy.encoder is None for policy in fleet.policies):
        return None
    seconds: list[float] = []
    for pool, policy in zip(pools, fleet.policies, strict=True):
        pool["first_seconds"] = pool["last_seconds"] = len(seconds)
        times = (policy.encoder and policy.encoder.seconds) or (0.0,)
        seconds += times
        pool["last_seconds"] += len(times) - 1
        pool["input_size"] = policy.encoder.input_size if policy.encoder else 1
        if policy.encoder is not None:
            pool["encoder_budget"] = policy.encoder.compute_budget
            pool["whole_inputs"] = policy.encoder.disable_chunked_mm_input
            pool["input_shift"] = policy.drafts is not None and policy.drafts.drops_last_hit
    sizes = [policy.encoder.cache_size if policy.encoder else 0 for policy in fleet.policies]
    lanes["encoder_row"] = np.arange(len(lanes))
    lanes["encoder_free"] = lanes["encoder_freeable"] = np.repeat(sizes, np.multiply(fleet.replicas, fleet.lanes))
    n, nothing = len(demand.arrival), np.zeros(0, dtype=np.int64)
    first, *given = demand.images or (np.zeros(n + 1, dtype=np.int64), nothing, nothing, nothing)
    inputs = np.zeros((len(given[0]), STEP + 1), dtype=np.int64)
    inputs[:, OFFSET], inputs[:, EMBEDDINGS], inputs[:, CONTENT] = given
    inputs[:, TWIN], inputs[:, STEP] = _twins(first, inputs[:, CONTENT]), NONE
    least = int(inputs[:, EMBEDDINGS].min(initial=ALL))
    count = min(max(sizes) // max(least, 1), len(np.unique(inputs[:, CONTENT]))) + 1
    return Encoder(
        first=np.ascontiguousarray(first),
        inputs=inputs,
        holds=np.zeros(n, dtype=np.int64),
        entries=np.zeros((len(lanes), count, SINCE + 1), dtype=np.int64),
        dropped=np.zeros((len(lanes), 2 * count), dtype=np.int64),
        wanted=np.zeros(int(np.diff(first).max(initial=0)) + 1, dtype=np.int64),
        seconds=np.array(seconds),
    )


def _twins(first: NDArray[np.int64], content: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first input of the same request with the same content, of each."""
    owner = np.repeat(np.arange(len(first) - 1), np.diff(first))
    _, index, number = np.unique(np.stack([owner, content]), axis=1, return_index=True, return_inverse=True)
    found: NDArray[np.int64] = index[number.reshape(-1)]
    return found


def forget_inputs(encoder: Encoder, requests: NDArray[np.int64]) -> None:
    """These requests hold nothing."""
    encoder.holds[requests] = 0
    for r in requests:
        encoder.inputs[encoder.first[r] : encoder.first[r + 1], HELD] = 0


# The cache.


@part
def entry_of(lane: Lane, encoder: Encoder, content: int) -> int:
    """The entry of this content, or NONE."""
    entries = encoder.entries[lane.encoder_row]
    for k in range(lane.encoder_entries):
        if entries[k, NAME] == content:
            return k
    return NONE


@part
def holds_entry(lane: Lane, encoder: Encoder, r: int, j: int) -> bool:
    """Whether input ``j`` is cached; its request then holds it."""
    k = entry_of(lane, encoder, encoder.inputs[j, CONTENT])
    if k == NONE:
        return False
    entry, first = encoder.entries[lane.encoder_row, k], encoder.inputs[encoder.inputs[j, TWIN]]
    if entry[HOLDERS] == 0:
        lane.encoder_freeable -= entry[SIZE]
    if first[HELD] == 0:
        first[HELD] = 1
        entry[HOLDERS] += 1
        encoder.holds[r] += 1
    return True


@part
def make_room(lane: Lane, encoder: Encoder, size: int, others: int) -> bool:
    """Whether an input of ``size`` fits after ``others`` of its request; entries that nobody holds make room for it."""
    needed, entries = size + others, encoder.entries[lane.encoder_row]
    if size > lane.encoder_left or (needed > lane.encoder_free and needed > lane.encoder_freeable):
        return False
    while needed > lane.encoder_free:
        oldest = NONE
        for k in range(lane.encoder_entries):
            if entries[k, HOLDERS] == 0 and (oldest == NONE or entries[k, SINCE] < entries[oldest, SINCE]):
                oldest = k
        if lane.encoder_dropped < encoder.dropped.shape[1]:
            encoder.dropped[lane.encoder_row, lane.encoder_dropped] = entries[oldest, NAME]
            lane.encoder_dropped += 1
        lane.encoder_free += entries[oldest, SIZE]
        lane.encoder_entries -= 1
        for field in range(SINCE + 1):
            entries[oldest, field] = entries[lane.encoder_entries, field]
    return True


@compiled
def let_inputs_go(lane: Lane, encoder: Encoder, r: int, computed: int) -> None:
    """Release the inputs of a request that end within its first ``computed`` tokens."""
    if encoder.holds[r] == 0:
        return
    for j in range(encoder.first[r], encoder.first[r + 1]):
        one = encoder.inputs[j]
        first = encoder.inputs[one[TWIN]]
        if first[HELD] == 0 or one[OFFSET] + one[EMBEDDINGS] > computed:
            continue
        first[HELD] = 0
        encoder.holds[r] -= 1
        entry = encoder.entries[lane.encoder_row, entry_of(lane, encoder, one[CONTENT])]
        entry[HOLDERS] -= 1
        if entry[HOLDERS] == 0:
            entry[SINCE] = lane.encoder_releases
            lane.encoder_releases += 1
            lane.encoder_freeable += entry[SIZE]


# A decision.


@part
def begin_inputs(pool: Pool, lane: Lane, encoder: Any) -> None:
    """Nothing is computed yet."""
    if encoder is not None:
        lane.encoder_left, lane.encoder_wanted = pool.encoder_budget, 0
        lane.encoder_step += 1
        lane.encoder_dropped = 0


@part
def has_inputs(encoder: Encoder, r: int, computed: int) -> bool:
    """Whether a request has inputs whose last token is not among its first ``computed`` ones."""
    last = encoder.first[r + 1] - 1
    if last < encoder.first[r]:
        return False
    return encoder.inputs[last, OFFSET] + encoder.inputs[last, EMBEDDINGS] > computed


@part
def is_wanted(lane: Lane, encoder: Encoder, j: int) -> bool:
    """Whether the request that is looked at computes this content already."""
    found = False
    for k in range(lane.encoder_wanted):
        found |= encoder.inputs[encoder.wanted[k], TWIN] == encoder.inputs[j, TWIN]
    return found


@part
def leave_inputs(lane: Lane, encoder: Encoder) -> None:
    """The request that was looked at last was not scheduled."""
    for k in range(lane.encoder_wanted):
        lane.encoder_left += encoder.inputs[encoder.wanted[k], EMBEDDINGS]
    lane.encoder_wanted = 0


@compiled
def tokens_with_inputs(pool: Pool, lane: Lane, encoder: Encoder, r: int, computed: int, tokens: int) -> int:
    """Of the next tokens of a request, those whose inputs are cached or can be computed now."""
    leave_inputs(lane, encoder)
    embeddings = 0
    for j in range(encoder.first[r], encoder.first[r + 1]):
        begin, size = encoder.inputs[j, OFFSET], encoder.inputs[j, EMBEDDINGS]
        if begin >= computed + tokens + pool.input_shift:
            break
        if begin + size <= computed or is_wanted(lane, encoder, j) or holds_entry(lane, encoder, r, j):
            continue
        is_split = pool.whole_inputs and computed < begin and computed + tokens < begin + size
        if is_split or not make_room(lane, encoder, size, embeddings):
            tokens = max(begin - computed - pool.input_shift, 0)
            break
        embeddings += size
        lane.encoder_left -= size
        encoder.wanted[lane.encoder_wanted] = j
        lane.encoder_wanted += 1
    return int(tokens)


@part
def compute_inputs(lane: Lane, encoder: Encoder, r: int) -> None:
    """The request that was looked at is scheduled with its inputs."""
    for k in range(lane.encoder_wanted):
        one, entry = encoder.inputs[encoder.wanted[k]], encoder.entries[lane.encoder_row, lane.encoder_entries]
        one[STEP] = lane.encoder_step
        encoder.inputs[one[TWIN], HELD] = 1
        encoder.holds[r] += 1
        entry[NAME], entry[SIZE], entry[HOLDERS] = one[CONTENT], one[EMBEDDINGS], 1
        lane.encoder_entries += 1
        lane.encoder_free -= one[EMBEDDINGS]
        lane.encoder_freeable -= one[EMBEDDINGS]
    lane.encoder_wanted = 0


@part
def withdraw_inputs(lane: Lane, encoder: Encoder, r: int) -> None:
    """A request is preempted: it holds no input, and those of this step are not computed."""
    for j in range(encoder.first[r], encoder.first[r + 1]):
        if encoder.inputs[j, STEP] == lane.encoder_step:
            encoder.inputs[j, STEP] = NONE
            lane.encoder_left += encoder.inputs[j, EMBEDDINGS]
    let_inputs_go(lane, encoder, r, ALL)


@part
def known_computed(pool: Pool, request: Request, computed: int, unknown: int) -> int:
    """Of ``computed`` tokens those that are known when the step has run."""
    if not pool.async_scheduling:
        return computed
    return int(min(computed - unknown, request.prompt + request.generated - 1))


@part
def encoder_time(state: State, pool: Pool, i: int, start: float) -> float:  # noqa: ARG001 - as in ``core.step``
    """Seconds that the step of lane ``i`` takes longer, because its encoder runs before the model
    (``_execute_mm_encoder`` in vllm/v1/worker/gpu_model_runner.py)."""
    lane = state.lanes[i]
    inputs = (pool.encoder_budget - lane.encoder_left) // pool.input_size
    lane.encoder_takes = state.extra.encoder.seconds[min(pool.first_seconds + inputs, pool.last_seconds)]
    return float(lane.encoder_takes)


@part
def release_ended(lane: Lane, encoder: Any, r: int) -> None:
    """A request has ended."""
    if encoder is not None:
        let_inputs_go(lane, encoder, r, ALL)


@part
def end_inputs(
    pool: Pool, lane: Lane, requests: Array, seats: Array, encoder: Any, all_decode: bool, decodes: Any
) -> None:
    """A step is decided: what ends with its tokens is let go. An asynchronous scheduler does not count the token that
    is being sampled, so an input at the very end of a prompt is held until a decode after the first token is known.

    ``decodes``: as in ``vllm_passes``; ``all_decode``: all of them take part.
    """
    if encoder is not None:
        first = 0 if lane.encoder_late > 0 else lane.first
        lane.encoder_late = lane.encoder_busy = 0
        for i in range(first, lane.top):
            r, ends = seats[WHO, i], seats[ENDS, i]
            if ends == EMPTY:
                continue
            request = requests[r]
            if ends == NEVER:
                computed = request.context + seats[NOW, i]
                lane.encoder_busy |= has_inputs(encoder, r, computed)
                if seats[NOW, i] > 0:
                    let_inputs_go(lane, encoder, r, known_computed(pool, request, computed, 0))
                if computed < request.prompt + request.generated:
                    continue
            elif decodes(pool, lane, request, ends) and (all_decode or seats[NOW, i] > 0):
                let_inputs_go(lane, encoder, r, ALL if request.last_step <= lane.clock - 2 else 0)
            lane.encoder_late += 1 if encoder.holds[r] > 0 else 0
        lane.encoder_busy |= lane.encoder_late > 0


@compiled
def end_inputs_of_drafts(pool: Pool, lane: Lane, requests: Array, seats: Array, encoder: Any) -> None:
    """The same where each request has written down what is computed of it, and how many tokens are not known."""
    if encoder is not None:
        for i in range(lane.top):
            r = seats[WHO, i]
            if seats[ENDS, i] != EMPTY and seats[NOW, i] > 0 and encoder.holds[r] > 0:
                request = requests[r]
                computed = known_computed(pool, request, request.context + seats[NOW, i], request.unknown)
                let_inputs_go(lane, encoder, r, computed)
