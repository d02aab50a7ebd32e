"""Schedulers: the type of ``State.own`` decides, when a loop is compiled, whose rules it follows.

So each scheduler's loop holds its own code alone, and costs nothing when another one grows. A scheduler is a module of
``core.schedulers`` with

- ``POOL_FIELDS``, ``LANE_FIELDS``, ``REQUEST_FIELDS``: what it appends to the records,
- ``Own``: a named tuple of what else it reads and writes, and ``arrays(fleet, demand, pools, lanes, requests)``, which
  makes it before a run and fills in the fields,
- the compiled functions below.

Where its arrays may have to grow, it has ``room(state, pool, group)``, compiled, and ``with_more_room(own)``; where the
real engine may die, ``check(state)`` raises the error after the run.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from numba.extending import overload

from windtunnel.core.compiled import INNER
from windtunnel.core.records import Group, Lane, Pool, State
from windtunnel.errors import InputError
from windtunnel.policy import Policy, Sglang, VllmV0, VllmV1

SCHEDULERS: dict[type, str] = {VllmV1: "vllm", VllmV0: "vllm_v0", Policy: "unified", Sglang: "sglang"}
"""Type of a scheduler's settings → its module in ``core.schedulers``, imported when it runs."""


def scheduler_of(policies: tuple[Any, ...]) -> ModuleType:
    """The module that runs these settings; the pools of one simulation share it.

    Raises:
        InputError: they are of several kinds.
    """
    kinds = {type(policy) for policy in policies}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InputError(f"schedulers of {len(kinds)} kinds ({names}): the pools of one deployment need one kind")
    return import_module(f"windtunnel.core.schedulers.{SCHEDULERS[kinds.pop()]}")


def module_of(own: Any) -> ModuleType:
    """The module that runs these arrays."""
    return sys.modules[type(own).__module__]


def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put the arriving request ``r`` into the queue of a lane."""
    module_of(state.own).enqueue(state, pool, lane, r)


def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one step of a group, and move its clock; IDLE if there is nothing to do until an arrival."""
    done: int = module_of(state.own).step(state, pool, group)
    return done


def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """The first half of ``step``: whether anything is scheduled, and whether any request was preempted."""
    scheduled, preempted = module_of(state.own).decide(state, pool, group)
    return scheduled, preempted


def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The second half, if anything is scheduled: the step ends at ``end``."""
    done: int = module_of(state.own).conclude(state, pool, group, end)
    return done


def pass_over(state: State, pool: Pool, group: Group, preempted: bool) -> int:
    """The second half, if nothing is scheduled."""
    done: int = module_of(state.own).pass_over(state, pool, group, preempted)
    return done


def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make equal steps while the group's ``now`` < ``until`` (which counts only if an arrival could join them).

    Returns how many; 0: the next step has to be made singly.
    """
    done: int = module_of(state.own).jump(state, pool, group, until)
    return done


def update_bound(state: State, pool: Pool, group: Group) -> None:
    """Set the group's ``bound``: no change can be seen from outside before it; infinite while the group is idle."""
    module_of(state.own).update_bound(state, pool, group)


def room(state: State, pool: Pool, group: Group) -> bool:
    """Whether the scheduler's own arrays can take one more step."""
    module = module_of(state.own)
    return bool(module.room(state, pool, group)) if hasattr(module, "room") else True


def _compile(function: Callable[..., Any], absent: Callable[..., Any] | None = None) -> None:
    """Let compiled code call ``function``: it becomes that of the scheduler, by the compiler's type of a State."""

    def chosen(state: Any, *_: Any) -> Any:
        own = state.types[state.fields.index("own")].instance_class
        found = getattr(sys.modules[own.__module__], function.__name__, absent)
        return getattr(found, "py_func", found)

    options: Any = INNER | {"forceinline": True}
    overload(function, jit_options=options, strict=False)(chosen)


for _function in (enqueue, step, decide, conclude, pass_over, jump, update_bound):
    _compile(_function)
_compile(room, lambda state, pool, group: True)  # noqa: ARG005 - numba matches them by name
