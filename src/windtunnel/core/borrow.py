"""Views without reference counts: the arrays of a State are handed from function to function many times per step.

Each hand-over of a counted array costs two atomic operations; the caller of a loop keeps the arrays alive anyway.
"""

from typing import Any

from numba import config
from numba.core import cgutils
from numba.extending import intrinsic

from windtunnel.core.kernel import kernel
from windtunnel.core.records import State

if config.DISABLE_JIT:  # type: ignore[attr-defined]

    def uncounted(array: Any) -> Any:
        """The array itself: nothing is compiled."""
        return array

else:

    @intrinsic
    def uncounted(typing_context: Any, array: Any) -> Any:  # noqa: ARG001
        """The same array without an owner, so that handing it on counts nothing."""

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            view = context.make_array(signature.return_type)(context, builder, arguments[0])
            view.meminfo = cgutils.get_null_value(view.meminfo.type)
            view.parent = cgutils.get_null_value(view.parent.type)
            return view._getvalue()

        return array(array), build


@kernel
def borrow(state: State) -> State:
    """The state with uncounted arrays; valid while the caller holds the original."""
    return State(
        uncounted(state.pools),
        uncounted(state.groups),
        uncounted(state.lanes),
        uncounted(state.replicas),
        uncounted(state.requests),
        uncounted(state.heap),
        uncounted(state.phases),
        uncounted(state.floats),
        uncounted(state.integers),
        uncounted(state.rows),
        uncounted(state.stalls),
        uncounted(state.counters),
        uncounted(state.clocks),
        uncounted(state.uniforms),
        uncounted(state.follow),
        uncounted(state.think_time),
        uncounted(state.releases),
        uncounted(state.gate),
    )
