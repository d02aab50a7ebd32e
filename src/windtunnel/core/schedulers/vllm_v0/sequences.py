"""The sequences of one request (OpenAI's ``n``) in vLLM's v0 scheduler up to 0.6.3: a group is admitted, preempted
and swapped together (vllm/sequence.py, core/scheduler.py, core/block_manager.py, core/block/naive_block.py, read in
0.6.3.post1; the same code schedules groups in 0.8.5, whose engine makes none).

Their prompt is computed once. They share its blocks, of which the last one, if it is not full, is copied for each that
goes on in it but the last. What is swapped to the host is shared no longer: each comes back with blocks of its own.
They are rows one after the other; the first arrives, and the others with it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import part
from windtunnel.core.records import Array, Fields, Lane, Pool, Request, State
from windtunnel.core.step import emit_first
from windtunnel.errors import InputError

OF_SEQUENCE: Fields = [
    ("family", np.int32),  # the first of the sequences of its request, which stand one after the other
    ("samples", np.int32),  # of the first one: how many they are; 1: of all others
    ("sharing", np.int32),  # of the first one: those that share the blocks of their prompt
    ("unsplit", np.int32),  # of the first one: those of them that share its last block still, which is not full
    ("swaps", np.int32),  # how often it went to the host
]
"""How the sequences of a request hang together."""


def families(fleet: Any, demand: Any, requests: NDArray[Any]) -> int:
    """Write down who belongs together; returns how many sequences the largest request has.

    Raises:
        InputError: sequences of one request are not simulated with a setting of the fleet.
    """
    requests["family"], requests["samples"] = np.arange(len(requests)), 1
    if demand.sample_of is None:
        return 1
    _require_groups(fleet, demand)
    requests["family"] = demand.sample_of
    others = demand.sample_of[demand.sample_of != np.arange(len(requests))]
    np.add.at(requests["samples"], others, 1)
    return int(requests["samples"].max())


def _require_groups(fleet: Any, demand: Any) -> None:
    """Raise InputError where sequences of one request are not simulated."""
    most = int(np.bincount(demand.sample_of).max())
    roles = fleet.roles or ("mixed",) * len(fleet.limits)
    for limits, policy, role in zip(fleet.limits, fleet.policies, roles, strict=True):
        asked = {
            "chunked prefill": policy.chunked_prefill,
            "prefix caching": policy.prefix_caching,
            "admission_order=priority": policy.admission_order == "priority",
            "pipeline_parallel_size > 1": policy.pipeline_parallel_size > 1,
            "failures": bool(fleet.failures),
            "autoscaling": any(fleet.scaling),
            "a router that scores": fleet.routing is not None,
            "prefill and decode pools": role != "mixed",
        }
        for name, wanted in asked.items():
            if wanted:
                raise InputError(f"n={most}: groups of sequences are not simulated with {name}: leave one of them out")
        if most > limits.max_num_seqs:
            raise InputError(f"n={most}: more sequences than max_num_seqs={limits.max_num_seqs}: raise that")


@part
def arrive_with(lane: Lane, requests: Array, r: int) -> None:
    """The other sequences of a request that arrives come with it."""
    for s in range(r + 1, r + requests[r].samples):
        requests[s].arrival, requests[s].lane = requests[r].arrival, requests[r].lane
        requests[s].server = requests[r].server
        lane.outstanding += 1
        lane.in_flight[requests[s].server] += 1


@part
def rows_of(requests: Array, r: int) -> tuple[int, int]:
    """(The first of the rows of the sequences of a request, the one after the last)."""
    family = requests[r].family
    return family, family + requests[family].samples


@part
def placed(request: Request) -> int:
    """Tokens that have a place in a request's blocks, when its clock has been read."""
    return request.prompt + request.generated if request.prefilling else request.context


@part
def kept_by_others(pool: Pool, requests: Array, r: int) -> int:
    """Of the blocks of a sequence that gives its own back, those that others share; it shares none from then on."""
    request = requests[r]
    first = requests[request.family]
    if request.output == 1 and r != request.family:  # its only token is that of the prompt: it never had any
        return blocks_of(pool, request.prompt)
    if first.sharing == 0:
        return 0
    first.sharing -= 1
    if first.sharing == 0:
        return 0
    appended = placed(request) > request.prompt
    return request.prompt // pool.block_size if appended else blocks_of(pool, request.prompt)


@part
def split(lane: Lane, requests: Array, r: int) -> None:
    """A sequence goes on in the last block of its prompt: in a copy, unless it is the last that shares it."""
    first = requests[requests[r].family]
    if first.unsplit == 0:
        return
    first.unsplit -= 1
    if first.unsplit > 0:
        lane.free -= 1
    else:
        lane.unsplit -= 1


@part
def share(pool: Pool, lane: Lane, requests: Array, r: int) -> None:
    """The prompt of the first sequence is computed: the others that go on share its blocks."""
    first, going = requests[r], 0
    for s in range(r, r + first.samples):
        going += requests[s].output > 1
    first.sharing = going + (first.output == 1)
    if going > 1 and first.prompt % pool.block_size > 0:
        first.unsplit = going
        lane.unsplit += 1


@part
def begin_others(state: State, pool: Pool, lane: Lane, r: int, end: float) -> None:
    """The prompt of a request is computed: its other sequences also get their first tokens, and share its blocks."""
    requests = state.requests
    share(pool, lane, requests, r)
    for s in range(r + 1, r + requests[r].samples):
        requests[s].prefilling, requests[s].context, requests[s].accessed = 0, requests[r].context, lane.steps
        emit_first(state, s, end)
