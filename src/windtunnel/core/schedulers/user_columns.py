"""What a scheduler sees as columns: record arrays that it reads and writes, and its machine code, called by address."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core.errors import NumbaError
from numba.extending import intrinsic

from windtunnel.core.compiled import compiled
from windtunnel.core.records import Array, Lane
from windtunnel.core.seats import EMPTY, ENDS, WHO
from windtunnel.errors import InputError

REQUEST_COLUMNS = np.dtype(
    [
        *(
            (name, np.int64)
            for name in (
                "id",
                "priority",
                "prompt_tokens",
                "output_tokens",
                "max_tokens",
                "num_tokens",
                "num_computed_tokens",
                "num_blocks",
                "preemptions",
            )
        ),
        ("arrival", np.float64),
        # what a scheduler writes
        ("tokens", np.int64),  # to compute in this step
        ("evict", np.int64),  # of one that runs: 1, it loses its memory first
        ("turn", np.float64),  # of one that waits: the lowest is admitted first; its place in the queue, unless written
        ("row", np.int64),  # which request of the run it is
    ]
)

LIMIT_COLUMNS = np.dtype(
    [
        (name, np.int64)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks", "block_size")
    ]
)


@compiled
def show(lane: Lane, seats: Array, requests: Array, extra: Any, i: int, gone: int, blocks: int) -> None:
    """Write the columns of lane ``i``; this many seats and blocks are missing from its limits."""
    k = 0
    for seat in range(lane.top):
        ends = seats[ENDS, seat]
        if ends == EMPTY or requests[seats[WHO, seat]].seat < 0:
            continue
        show_one(extra.running[k], requests[seats[WHO, seat]], seats[WHO, seat], 0)
        k += 1
    r = lane.head
    for j in range(lane.waiting):
        show_one(extra.waiting[j], requests[r], r, j)
        r = requests[r].next
    left, whole = extra.limits[0], extra.limits[i + 1]
    left.max_num_batched_tokens, left.max_model_len = whole.max_num_batched_tokens, whole.max_model_len
    left.block_size = whole.block_size
    left.num_blocks, left.max_num_seqs = whole.num_blocks - blocks, whole.max_num_seqs - gone


@compiled
def show_one(one: Any, request: Any, r: int, place: int) -> None:
    """Write what is seen of a request."""
    one.id, one.row, one.priority, one.arrival = request.id, r, request.priority, request.arrival
    one.prompt_tokens, one.output_tokens, one.max_tokens = request.prompt, request.output, request.max_tokens
    one.num_tokens, one.num_computed_tokens, one.num_blocks = request.known, request.computed, request.blocks
    one.preemptions, one.tokens, one.evict, one.turn = request.preemptions, 0, 0, place


@compiled
def name_in_order(extra: Any, waiting: int, running: int) -> tuple[int, int]:
    """Read from the columns how many requests are named, and how many evicted; those admitted stand in their turns."""
    named = evicted = 0
    for k in range(running):
        one = extra.running[k]
        if one.evict != 0:
            extra.evict[evicted] = one.row
            evicted += 1
        if one.tokens != 0:
            extra.names[named], extra.tokens[named] = one.row, one.tokens
            named += 1
    first = named
    for k in range(waiting):
        one = extra.waiting[k]
        if one.tokens == 0:
            continue
        extra.turns[named] = one.turn
        at = named
        while at > first and extra.turns[at - 1] > one.turn:
            extra.names[at], extra.tokens[at], extra.turns[at] = (
                extra.names[at - 1],
                extra.tokens[at - 1],
                extra.turns[at - 1],
            )
            at -= 1
        extra.names[at], extra.tokens[at], extra.turns[at] = one.row, one.tokens, one.turn
        named += 1
    return named, evicted


# Machine code.

carray: Any = numba.carray  # type: ignore[attr-defined]
MADE: dict[Any, Any] = {}
"""The machine code of functions, kept since its address may be."""

if config.DISABLE_JIT:  # type: ignore[attr-defined]

    def call_columns(*_: Any) -> int:
        """Not there: Python asks."""
        return -1

else:

    @intrinsic
    def _pointer(context: Any, address: Any) -> Any:  # noqa: ARG001
        """What stands at an address."""

        def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

        return types.voidptr(types.int64), build

    pointer: Any = _pointer

    @intrinsic
    def call_columns(context: Any, at: Any, now: Any, queue: Any, m: Any, runs: Any, k: Any, limits: Any) -> Any:  # noqa: ARG001
        """Ask the function at an address: whether its decision is held, −1 where it raises something."""
        integer, number = ir.IntType(64), ir.DoubleType()

        def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            code = ir.FunctionType(integer, [number, *[integer] * 5]).as_pointer()
            return builder.call(builder.inttoptr(arguments[0], code), arguments[1:])

        kinds = types.int64, types.float64, *[types.int64] * 5
        return types.int64(*kinds), build


def address_of(function: Callable[..., Any], name: str) -> int:
    """Where the machine code of a ``schedule_columns`` stands that numba compiles.

    Raises:
        InputError: numba cannot.
    """
    if function not in MADE:
        try:
            MADE[function] = _machine_code(function)
        except NumbaError as error:
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            raise InputError(
                f"{name}: numba cannot compile schedule_columns(now, waiting, running, limits), which is to return "
                f"True or False: {first}; leave numba.njit out, and it is called as it is"
            ) from error
    return int(MADE[function].address)


def _machine_code(function: Callable[..., Any]) -> Any:
    signature = types.int64(types.float64, *[types.int64] * 5)

    @numba.cfunc(signature)
    def schedule(now: float, queue: int, waiting: int, runs: int, running: int, limits: int) -> int:
        held = False
        try:
            wait = carray(pointer(queue), (waiting,), REQUEST_COLUMNS)
            run = carray(pointer(runs), (running,), REQUEST_COLUMNS)
            held = function(now, wait, run, carray(pointer(limits), (1,), LIMIT_COLUMNS)[0])
        except Exception:
            return -1
        return 1 if held else 0

    return schedule
