"""Python's side of ``core.schedulers.user``: it is called from compiled code, asks a scheduler, and writes down what it
decides.

Requests are views of the core's records (ctypes): what never changes stands in the object, what changes is read from
the record when it is looked at. Queues and running requests are dicts kept from what compiled code notes, so a question
costs as much as has changed since the last one, and two tuples.
"""

import copy
import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from windtunnel.core.records import GONE, IGNORED, NONE, REFUSED
from windtunnel.core.schedulers.user_columns import LIMIT_COLUMNS, address_of
from windtunnel.errors import InputError
from windtunnel.policy import Decision, Limits, UserScheduler

OBJECTS, IN_COLUMNS, MACHINE_CODE, WHETHER_TAKEN, WHAT_IS_NOTED = range(5)
"""How a scheduler is asked: with objects, with columns in Python, with columns in machine code; what is asked of one
beside its decisions; that Python is to read what compiled code has noted."""

NAMED, EVICTED, HOLD, CAME, SAT, WENT, BESIDE, BROKEN, WHICH, VALUE, LIMIT, ASKED, COUNT = range(13)
"""Entries of ``Extra.numbers``: how many requests a decision names and evicts, whether it is to be held; how many have
come to queues, sat down, gone and got memory since the lists were last read; what is wrong with a decision, with which
request, and two numbers of it; questions so far."""

OK, NOT_RUNNING, EVICTED_TOO, TOKENS, BUDGET, ENDED, SEATS, BLOCKS, FOR_EVER, RAISED = range(10)
"""What is wrong."""

WRONG = {
    NOT_RUNNING: "evict: request {id} is not running; name running requests, each once",
    EVICTED_TOO: "request {id} is evicted and scheduled: do one of them",
    TOKENS: "tokens={value} for request {id}: must be from 1 to the {limit} it has left",
    BUDGET: "max_num_batched_tokens={limit}: request {id} exceeds it with {value} tokens",
    ENDED: "request {id} neither waits nor runs: it has ended",
    SEATS: "max_num_seqs={limit}: no place for request {id}",
    BLOCKS: (
        "num_blocks={num_blocks}: request {id} needs {value} more and {limit} are free; evict a request, or schedule "
        "fewer tokens"
    ),
    FOR_EVER: "{value} evictions since a request received a token: it goes on for ever",
}

CALLED = dict.fromkeys(("schedule", "schedule_columns"), ("now", "waiting", "running", "limits"))
"""What the methods are given."""

CHANGING = {
    "known": "num_tokens",
    "computed": "num_computed_tokens",
    "blocks": "num_blocks",
    "preemptions": "preemptions",
    "arrival": "arrived",
    "seat": "seat",
}
"""Fields of a record that a view reads, and their names in it."""
FIXED = ("row", "id", "arrival", "prompt_tokens", "output_tokens", "max_tokens", "priority")
"""What stands in the view."""
KINDS = {"i8": ctypes.c_int64, "i4": ctypes.c_int32, "f8": ctypes.c_double, "i1": ctypes.c_int8}
CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_double, ctypes.c_int64, ctypes.c_int64)
LANE_BITS, ROW_BITS = 20, 40
LAST_ROW = (1 << ROW_BITS) - 1
ROW, INTEGER, SEQUENCES = attrgetter("row"), {int}, (tuple, list)


# Requests.


def view_of(record: np.dtype[Any]) -> Any:
    """A class of views of such records, a new one for each run: so that those of other runs differ."""
    parts: list[tuple[str, Any]] = []
    at = 0
    for name, (kind, offset, *_) in sorted((record.fields or {}).items(), key=lambda item: item[1][1]):
        if offset > at:
            parts.append((f"_{at}", ctypes.c_char * (offset - at)))
        parts.append((CHANGING.get(name, f"_{name}"), KINDS[kind.str[1:]]))
        at = offset + kind.itemsize
    if record.itemsize > at:
        parts.append((f"_{at}", ctypes.c_char * (record.itemsize - at)))

    class View(ctypes.Structure):
        """A request, as a scheduler sees it: ``policy.RequestView``."""

        __slots__ = FIXED
        _pack_ = 1
        _layout_ = "ms"
        _fields_ = parts

        __hash__ = object.__hash__

        def __repr__(self) -> str:
            return f"request {self.id}"

        def __copy__(self) -> "View":
            twin = type(self).from_buffer_copy(self)
            for name in FIXED:
                setattr(twin, name, getattr(self, name))
            return twin

        def __deepcopy__(self, _: Any) -> "View":
            return copy.copy(self)

    View.__name__ = View.__qualname__ = "Request"
    assert ctypes.sizeof(View) == record.itemsize
    return View


def views_of(kind: Any, requests: NDArray[Any], ids: NDArray[np.int64]) -> list[Any]:
    """A view of each record; ``arrival`` is written when it comes."""
    if not len(requests):
        return []
    found = list((kind * len(requests)).from_buffer(memoryview(requests.view(np.uint8).data)))
    columns = [np.arange(len(found)), ids, *(requests[name] for name in ("prompt", "output", "max_tokens", "priority"))]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for one, (row, number, prompt, output, most, priority) in zip(found, rows, strict=True):
        one.row, one.id, one.prompt_tokens, one.output_tokens = row, number, prompt, output
        one.max_tokens, one.priority = most, priority
    return found


# Questions.


@lru_cache(1024)
def _less(limits: Limits, blocks: int, seats: int) -> Limits:
    return replace(limits, num_blocks=limits.num_blocks - blocks, max_num_seqs=limits.max_num_seqs - seats)


class Asked:
    """The schedulers of a run's lanes, and what each of them is shown."""

    def __init__(self, fleet: Any, lanes: NDArray[Any], requests: NDArray[Any]) -> None:
        n, pools = len(requests), np.repeat(np.arange(len(fleet.replicas)), fleet.num_lanes)
        policies = [fleet.policies[pool] for pool in pools]
        mine = [
            isinstance(policy, UserScheduler) and free > 0 for policy, free in zip(policies, lanes["free"], strict=True)
        ]
        self.policies = policies
        self.limits = [fleet.limits[pool] for pool in pools]
        self.rules: list[Any] = [_made(policy) if here else None for policy, here in zip(policies, mine, strict=True)]
        self.pairs = n // 2 if {"prefill", "decode"} & set(fleet.roles) else 0
        """Requests that have two records, of both sides of a hand-over; 0: each has one."""
        self.ids = np.arange(n) % (self.pairs or n or 1)
        self.requests = requests
        self.kinds = [_kind(rule) for rule in self.rules]
        self.functions = np.array([_address(rule) for rule in self.rules], dtype=np.int64)
        self.choosing = [hasattr(rule, "takes") for rule in self.rules]
        self.allocating = [hasattr(rule, "allocate") for rule in self.rules]
        self.failure: BaseException | None = None
        self.now, self.lane = 0.0, 0
        with_objects = any(
            kind == OBJECTS for kind, rule in zip(self.kinds, self.rules, strict=True) if rule is not None
        )
        self.kind = {view_of(requests.dtype)}
        self.views = views_of(next(iter(self.kind)), requests, self.ids) if with_objects else []
        self.waiting: list[dict[Any, None]] = [{} for _ in pools]
        self.running: list[dict[Any, None]] = [{} for _ in pools]
        self.beside: list[dict[Any, None]] = [{} for _ in pools]

    def limits_of_lanes(self) -> NDArray[Any]:
        """[lanes + 1] their limits as columns; the first entry is free."""
        rows = [tuple(getattr(limits, name) for name in LIMIT_COLUMNS.names or ()) for limits in self.limits]
        return np.array([rows[0], *rows], dtype=LIMIT_COLUMNS)

    def begin(self, extra: Any) -> None:
        """Write down the address at which compiled code calls; it is good as long as ``extra.call`` is."""
        self.numbers, self.names, self.tokens, self.evict = extra.numbers, extra.names, extra.tokens, extra.evict
        self.wanted = extra.wanted
        self.logs = (extra.came, extra.sat, extra.went, extra.beside)
        self.columns = (extra.waiting, extra.running, extra.limits)
        self.callback = CALL(self.call)
        address = ctypes.cast(self.callback, ctypes.c_void_p).value
        assert address is not None
        extra.call[0] = address
        KEPT[address] = self
        weakref.finalize(extra.call, KEPT.pop, address, None)

    def call(self, what: int, lane: int, now: float, first: int, second: int) -> int:
        """What compiled code calls: yes or no, or −1 where something was raised, which is kept until the run ends."""
        try:
            if what == WHAT_IS_NOTED:
                self._read()
                return 0
            self.now, self.lane = now, lane & ((1 << LANE_BITS) - 1)
            if what == OBJECTS:
                return self.decide(lane, now, first, second)
            if what == WHETHER_TAKEN:
                return self.takes(lane >> LANE_BITS, first, second)
            return self.decide_in_columns(now, first, second)
        except BaseException as failure:  # nothing can be raised through compiled code
            self.failure = failure
            return -1

    def decide(self, i: int, now: float, seats: int, blocks: int) -> int:
        """Ask with objects; ``seats`` and ``blocks`` are not there for it."""
        self._read()
        waiting, running, limits = self.waiting[i], self.running[i], self.limits[i]
        if seats or blocks:
            limits = _less(limits, blocks, seats)
        decision = self._asked(self.rules[i].schedule, now, tuple(waiting), tuple(running), limits)
        if not isinstance(decision, Decision):
            raise self._error(f"schedule returned {type(decision).__name__}: must be a Decision")
        tokens, evict, numbers = decision.tokens, decision.evict, self.numbers
        if (
            type(tokens) is not dict
            or type(evict) not in (tuple, list)
            or not {*map(type, (*tokens, *evict))} <= self.kind
        ):
            self._require_requests(tokens, evict)
        n = len(tokens)
        if n:
            amounts = [*tokens.values()]
            if not {*map(type, amounts)} <= INTEGER:
                self._require_integers(tokens)
            self.names[:n] = [*map(ROW, tokens)]
            self.tokens[:n] = amounts
        if evict:
            self._evict(i, evict)
        numbers[NAMED], numbers[EVICTED], numbers[HOLD] = n, len(evict), bool(decision.hold)
        if self.allocating[i]:
            self.wanted[:n] = [self._allocated(i, one, amount) for one, amount in tokens.items()]
            numbers[HOLD] = False
        return 0

    def _allocated(self, i: int, one: Any, tokens: int) -> int:
        """Blocks that a request must hold once this many more of its tokens are computed."""
        least = self.limits[i].blocks(one.num_computed_tokens + tokens)
        found = self._asked(self.rules[i].allocate, one, least)
        if type(found) is not int or found < least:
            what = f"allocate returned {found!r} for request {one.id}"
            raise self._error(f"{what}: must be a whole number ≥ {least}, what it needs")
        return found

    def decide_in_columns(self, now: float, waiting: int, running: int) -> int:
        """Ask with columns; whether the decision is to be held."""
        rule = self.rules[self.lane].schedule_columns
        queue, runs, limits = self.columns
        if hasattr(rule, "py_func"):  # what failed in machine code fails again, and says where
            rule, queue, runs, limits = rule.py_func, _records(queue), _records(runs), _records(limits)
        answer = self._asked(rule, now, queue[:waiting], runs[:running], limits[0])
        if not isinstance(answer, bool | np.bool_):
            raise self._error(
                f"schedule_columns returned {answer!r}: must be True or False, whether to hold the decision"
            )
        return int(answer)

    def takes(self, row: int, seats: int, blocks: int) -> int:
        """Whether a scheduler takes a request of another lane."""
        self._read()
        i, request = self.lane, self.views[row]
        request.arrival = request.arrived
        limits = self.limits[i]
        if seats or blocks:
            limits = _less(limits, blocks, seats)
        running = [one for one in self.running[i] if one.seat >= 0]  # without those whose last token was just decided
        answer = self._asked(self.rules[i].takes, request, (*running, *self.beside[i]), limits)
        if not isinstance(answer, bool):
            raise self._error(f"takes returned {answer!r}: must be True or False")
        return int(answer)

    def _read(self) -> None:
        """What compiled code has noted since the last question."""
        numbers, views = self.numbers, self.views
        counts = numbers[CAME : BESIDE + 1].tolist()
        if not any(counts):
            return
        came, sat, went, beside = (
            log[:many].tolist() if many else () for log, many in zip(self.logs, counts, strict=True)
        )
        for place in came:
            one = views[place & LAST_ROW]
            one.arrival = one.arrived
            self.waiting[place >> ROW_BITS][one] = None
        for place in beside:
            one = views[place & LAST_ROW]
            one.arrival = one.arrived
            self.beside[place >> ROW_BITS][one] = None
        for place in sat:
            one, i = views[place & LAST_ROW], place >> ROW_BITS
            if one in self.waiting[i]:
                del self.waiting[i][one]
            else:
                del self.beside[i][one]
            self.running[i][one] = None
        for place in went:
            one, i = views[place & LAST_ROW], place >> ROW_BITS
            if one in self.beside[i]:  # its KV is gone; it may wait to be computed here
                del self.beside[i][one]
                continue
            self.running[i].pop(one, None)
            self.waiting[i].pop(one, None)
        numbers[CAME : BESIDE + 1] = 0

    def _evict(self, i: int, evict: Sequence[Any]) -> None:
        """Those evicted stand at the front of the queue."""
        n = min(len(evict), len(self.evict))
        self.evict[:n] = [*map(ROW, evict)][:n]
        for one in evict:
            self.running[i].pop(one, None)
        self.waiting[i] = dict.fromkeys(evict) | self.waiting[i]

    def _require_requests(self, tokens: Any, evict: Any) -> None:
        """Raise InputError where a decision does not name requests."""
        if not isinstance(tokens, Mapping) or not isinstance(evict, Sequence):
            kinds = f"{type(tokens).__name__}, {type(evict).__name__}"
            raise self._error(f"Decision({kinds}): must hold a mapping of requests to tokens, and a list of requests")
        for one in (*tokens, *evict):
            if type(one) not in self.kind:
                raise self._error(f"Decision names {one!r}: must name requests of waiting and running, not ids")

    def _require_integers(self, tokens: Mapping[Any, Any]) -> None:
        """Raise InputError where a decision's tokens are no integers."""
        for one, amount in tokens.items():
            if type(amount) is not int:
                left = one.num_tokens - one.num_computed_tokens
                raise self._error(f"tokens={amount!r} for request {one.id}: must be an int, from 1 to {left}")

    def _asked(self, rule: Callable[..., Any], *known: Any) -> Any:
        """What a method of the scheduler says. Raises InputError with the place where it raises something."""
        try:
            return rule(*known)
        except (Exception, SystemExit) as error:
            place = extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}, line {place.lineno}"
            if place.filename == __file__:  # none of its lines ran: its arguments are others
                name = getattr(rule, "__name__", "")
                where = f"called as {name}({', '.join(CALLED[name])})" if name in CALLED else f"called: {name}"
            raise self._error(f"{type(error).__name__}: {error} ({where})") from error

    def _error(self, text: str) -> InputError:
        return InputError(f"{_name(self.rules[self.lane])} at {self.now:.6g} s: {text}")

    def know(self, waiting: range, running: range, ids: NDArray[np.int64]) -> None:
        """These records wait, and these run, in the first lane, before anything was noted."""
        self.ids = ids
        for place, rows in ((self.waiting[0], waiting), (self.running[0], running)):
            for one in self.views[rows.start : rows.stop]:
                one.id, one.arrival = int(ids[one.row]), one.arrived
                place[one] = None

    def clear(self, i: int) -> None:
        """A rank has failed: another one, made anew, has seen nothing."""
        if self.rules[i] is None:
            return
        self._read()
        self.rules[i] = _made(self.policies[i])
        self.waiting[i], self.running[i], self.beside[i] = {}, {}, {}

    def renew(self, r: int) -> None:
        """Another request than before stands in a row: it has a view of its own."""
        self._read()
        number = self.requests["id"][r : r + 1]
        self.ids[r] = number[0]
        if self.views:
            one = views_of(type(self.views[r]), self.requests[r : r + 1], number)[0]
            self.views[r], one.row = one, r

    def stand_in(self, i: int, r: int, row: int) -> None:
        """Another row of the requests has what rank ``i`` has of request ``r``."""
        self._read()
        if not self.views:
            self.renew(row)
            return
        gone = self.views[r]
        self.renew(row)
        for place in (self.waiting[i], self.running[i], self.beside[i]):
            if gone in place:
                kept = [self.views[row] if one is gone else one for one in place]
                place.clear()
                place.update(dict.fromkeys(kept))
        self.renew(r)

    def require_right(self) -> None:
        """Raise what was raised, or InputError for the rule that a decision broke."""
        if self.failure is not None:
            raise self.failure
        numbers = self.numbers
        if numbers[BROKEN]:
            words = {"id": self.ids[numbers[WHICH]], "value": numbers[VALUE], "limit": numbers[LIMIT]}
            raise self._error(WRONG[numbers[BROKEN]].format(**words, num_blocks=self.limits[self.lane].num_blocks))

    def require_none_left(self, state: Any) -> None:
        """Raise InputError for requests that were left."""
        lanes = state.lanes
        asking = lanes["waiting"] + lanes["running"] + lanes["coming"] > 0
        names = [_name(rule) for rule, some in zip(self.rules, asking, strict=True) if some and rule is not None]
        left = self._left(state.requests)
        if names and len(left):
            raise InputError(
                f"{names[0]}: {len(left)} requests never finish, the first is {left[0]}: it is not scheduled"
            )

    def _left(self, requests: NDArray[Any]) -> NDArray[np.int64]:
        """The requests that have not ended."""
        ended = np.isin(requests["state"], (GONE, IGNORED, REFUSED))
        if self.pairs:
            prompt, rest = ended[: self.pairs], ended[self.pairs : 2 * self.pairs]
            ended = (prompt | (requests["lane"][: self.pairs] == NONE)) & (
                rest | (requests["lane"][self.pairs : 2 * self.pairs] == NONE)
            )
        return np.nonzero(~ended)[0]


def _made(policy: UserScheduler) -> Any:
    """The scheduler of a rank."""
    rule = policy.make()
    if not hasattr(rule, "schedule") and not hasattr(rule, "schedule_columns"):
        raise InputError(f"{_name(rule)}: has no schedule(now, waiting, running, limits), nor schedule_columns")
    for name in ("takes", "allocate"):
        if hasattr(rule, name) and hasattr(rule, "schedule_columns"):
            raise InputError(f"{_name(rule)}: {name} asks with objects: write schedule in place of schedule_columns")
    return rule


def _name(rule: Any) -> str:
    return type(rule).__name__


def _kind(rule: Any) -> int:
    """How it is asked."""
    columns = getattr(rule, "schedule_columns", None)
    if columns is None:
        return OBJECTS
    return MACHINE_CODE if hasattr(columns, "py_func") else IN_COLUMNS


def _address(rule: Any) -> int:
    """Where compiled code finds it; 0: nowhere."""
    return address_of(rule.schedule_columns, _name(rule)) if _kind(rule) == MACHINE_CODE else 0


def _records(columns: NDArray[Any]) -> Any:
    """Columns with their names as attributes, as machine code knows them."""
    return columns.view(np.recarray)


KEPT: dict[int, Asked] = {}
"""By the address at which compiled code calls them."""


if config.DISABLE_JIT:  # type: ignore[attr-defined]

    def call_python(address: int, what: int, lane: int, now: float, first: int, second: int) -> int:
        """See ``Asked.call``."""
        return KEPT[int(address)].call(int(what), int(lane), float(now), int(first), int(second))

else:

    @intrinsic
    def call_python(context: Any, address: Any, what: Any, lane: Any, now: Any, first: Any, second: Any) -> Any:  # noqa: ARG001
        """See ``Asked.call``."""
        integer = ir.IntType(64)
        codes = [integer, integer, ir.DoubleType(), integer, integer]

        def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            pointer = ir.FunctionType(integer, codes).as_pointer()
            return builder.call(builder.inttoptr(arguments[0], pointer), arguments[1:])

        kinds = (types.int64, types.int64, types.int64, types.float64, types.int64, types.int64)
        return types.int64(*kinds), build
