"""Views without reference counts: the arrays of a State are handed from function to function many times per step.

Each hand-over of a counted array costs two atomic operations; the caller of a loop keeps the arrays alive anyway.
"""

from typing import Any

from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from windtunnel.core.kernel import kernel
from windtunnel.core.records import State

if config.DISABLE_JIT:  # type: ignore[attr-defined]

    def uncounted(arrays: Any) -> Any:
        """The arrays themselves: nothing is compiled."""
        return arrays

else:

    @intrinsic
    def uncounted(typing_context: Any, arrays: Any) -> Any:  # noqa: ARG001
        """The same array, or the same named tuple of arrays and such tuples, without owners: handing it on counts
        nothing."""

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _without_owner(context, builder, signature.return_type, arguments[0])

        return arrays(arrays), build

    def _without_owner(context: Any, builder: Any, kind: Any, value: Any) -> Any:
        if isinstance(kind, types.BaseTuple):
            kinds: tuple[Any, ...] = tuple(kind)  # type: ignore[arg-type]
            parts = zip(kinds, cgutils.unpack_tuple(builder, value), strict=True)
            views = [_without_owner(context, builder, part_kind, part) for part_kind, part in parts]
            return context.make_tuple(builder, kind, views)
        view = context.make_array(kind)(context, builder, value)
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        view.parent = cgutils.get_null_value(view.parent.type)
        return view._getvalue()


@kernel
def borrow(state: State) -> State:
    """The state with uncounted arrays; valid while the caller holds the original."""
    return uncounted(state)
