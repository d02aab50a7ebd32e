"""Families of schedulers: the type of ``State.own`` decides, when a loop is compiled, whose rules it follows.

So each family's loop holds the code of that family alone, and costs nothing when another one grows. A family is a
module with four kernels (``enqueue``, ``step``, ``steady_run``, ``update_bound``, described below), the named tuple
``Arrays`` of what it alone reads and writes, and the function ``arrays`` that builds it before a run (or that of
another module, if the settings are better run by that one). Where these arrays may have to grow it has the kernel
``room`` and the function ``with_more_room``; where the real engine may die, ``check`` raises the error after the run.
A family whose ``step`` is made of ``decide`` and ``conclude`` or ``pass_over`` can be followed: see ``core.stepper``.
"""

from types import ModuleType
from typing import Any

from numba.extending import overload

from windtunnel.core import pipeline, sglang, unified, vllm_v0, vllm_v0_cached, vllm_v1, vllm_v1_full
from windtunnel.errors import InputError
from windtunnel.policy import Policy, Sglang, VllmV0, VllmV1

FAMILIES: dict[type, ModuleType] = {VllmV1: vllm_v1, VllmV0: vllm_v0, Policy: unified, Sglang: sglang}
"""Type of a scheduler's settings → the module that makes its arrays."""

MODULES: tuple[ModuleType, ...] = (vllm_v1, vllm_v1_full, pipeline, vllm_v0, vllm_v0_cached, unified, sglang)
"""Every module that runs: the type of the arrays tells which."""


def module_of(own: Any) -> ModuleType:
    """The module that runs these arrays."""
    return next(module for module in MODULES if module.Arrays is type(own))


def family_of(policies: tuple[Any, ...]) -> ModuleType:
    """The module that runs these schedulers; the pools of one simulation share a family."""
    kinds = {type(policy) for policy in policies}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InputError(f"schedulers of {len(kinds)} kinds ({names}): the pools of one deployment need one kind")
    return FAMILIES[kinds.pop()]


def enqueue(state: Any, lane: int, r: int) -> None:
    """Put the arriving request ``r`` into the queue of a lane."""
    module_of(state.own).enqueue(state, lane, r)


def step(state: Any, pool: Any, group: Any) -> int:
    """Schedule and run one step of a group, and move its clock; IDLE if there is nothing to do until an arrival."""
    done: int = module_of(state.own).step(state, pool, group)
    return done


def decide(state: Any, pool: Any, group: Any) -> tuple[bool, bool]:
    """The first half of ``step``: returns whether anything is scheduled, and whether anybody was preempted."""
    scheduled, preempted = module_of(state.own).decide(state, pool, group)
    return scheduled, preempted


def conclude(state: Any, pool: Any, group: Any, end: float) -> int:
    """The second half, if anything is scheduled: the step ends at ``end``."""
    done: int = module_of(state.own).conclude(state, pool, group, end)
    return done


def pass_over(state: Any, pool: Any, group: Any, preempted: bool) -> int:
    """The second half, if nothing is scheduled."""
    done: int = module_of(state.own).pass_over(state, pool, group, preempted)
    return done


def steady_run(state: Any, pool: Any, group: Any, until: float) -> int:
    """Run equal steps while the group's ``now`` < ``until`` (which counts only if an arrival could join them).

    Returns how many; 0: the next step has to be made singly.
    """
    done: int = module_of(state.own).steady_run(state, pool, group, until)
    return done


def update_bound(state: Any, pool: Any, group: Any) -> None:
    """Set the group's ``bound``: nobody outside can see a change before it; infinite while the group is idle."""
    module_of(state.own).update_bound(state, pool, group)


def room(state: Any, pool: Any, group: Any) -> bool:
    """Whether the family's own arrays can take one more step; families whose arrays never grow need not say."""
    module = module_of(state.own)
    return bool(module.room(state, pool, group)) if hasattr(module, "room") else True


def is_large(state: Any) -> bool:
    """Whether the rules, by the compiler's type of a State, are compiled once for all loops, and not into each."""
    return _compiled(state) is vllm_v1_full


def _compiled(state: Any) -> ModuleType:
    """The module by the compiler's type of a State."""
    arrays = state.types[state.fields.index("own")].instance_class
    return next(module for module in MODULES if module.Arrays is arrays)


@overload(enqueue, strict=False)
def _enqueue(state: Any, lane: Any, r: Any) -> Any:  # noqa: ARG001 - numba matches them by name
    return _compiled(state).enqueue.py_func


@overload(step, strict=False)
def _step(state: Any, pool: Any, group: Any) -> Any:  # noqa: ARG001
    return _compiled(state).step.py_func


@overload(decide, strict=False)
def _decide(state: Any, pool: Any, group: Any) -> Any:  # noqa: ARG001
    return _compiled(state).decide.py_func


@overload(conclude, strict=False)
def _conclude(state: Any, pool: Any, group: Any, end: Any) -> Any:  # noqa: ARG001
    return _compiled(state).conclude.py_func


@overload(pass_over, strict=False)
def _pass_over(state: Any, pool: Any, group: Any, preempted: Any) -> Any:  # noqa: ARG001
    return _compiled(state).pass_over.py_func


@overload(steady_run, strict=False)
def _steady_run(state: Any, pool: Any, group: Any, until: Any) -> Any:  # noqa: ARG001
    return _compiled(state).steady_run.py_func


@overload(update_bound, strict=False)
def _update_bound(state: Any, pool: Any, group: Any) -> Any:  # noqa: ARG001
    return _compiled(state).update_bound.py_func


@overload(room, strict=False)
def _room(state: Any, pool: Any, group: Any) -> Any:  # noqa: ARG001
    module = _compiled(state)
    return module.room.py_func if hasattr(module, "room") else lambda state, pool, group: True  # noqa: ARG005
