"""How numba's language becomes LLVM's.

Named tuples go from one compiled function to another whole. numba takes them apart where a function is called, and puts
them together in there again. Of a State, with its 260 values, that was half of all code before LLVM left it out.

An index counts from the start. numba has each one looked at whether it is negative, and counts from the end if so.
Here only a negative number in the source does that; another negative index reads and writes elsewhere, as one beyond
the end does. ``NUMBA_BOUNDSCHECK=1`` makes both an IndexError.
"""

import re
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel.models import TupleModel
from numba.core.datamodel.registry import default_manager
from numba.core.lowering import Lower

PACKAGE = __name__.rsplit(".", 2)[0]
NAME_OF_TYPE = re.compile(rf'%"({re.escape(PACKAGE)}\.\d+)"')


class WholeTuple(TupleModel):
    """Such a tuple in LLVM's language: a struct with a name, which is short where its fields are not."""

    def get_value_type(self) -> Any:
        """The struct."""
        if self._value_type is None:
            fields = [each.get_value_type() for each in self._models]
            known = ir.global_context.identified_types
            self._value_type = ir.global_context.get_identified_type(f"{PACKAGE}.{len(known)}")
            self._value_type.set_body(*fields)
        return self._value_type

    def get_argument_type(self) -> Any:
        """The struct too."""
        return self.get_value_type()

    def as_argument(self, builder: Any, value: Any) -> Any:  # noqa: ARG002
        """The value itself."""
        return value

    def from_argument(self, builder: Any, value: Any) -> Any:  # noqa: ARG002
        """The value itself."""
        return value


def goes_whole(kind: Any) -> bool:
    """Whether this is the compiler's type of a named tuple of ``core``."""
    return isinstance(kind, types.NamedTuple) and kind.instance_class.__module__.startswith(PACKAGE)


def _model_of(manager: Any, kind: Any) -> Any:
    return (WholeTuple if goes_whole(kind) else TupleModel)(manager, kind)


default_manager.register(types.NamedTuple, _model_of)


class LowerWhole(Lower):
    """numba's way from its language to LLVM's, where no references are counted: then nothing needs to be done when a
    variable is written again or ends, and an argument needs no second place."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arguments: dict[str, Any] = {}

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        """Write a variable."""
        if argidx is not None and len(self.func_ir._definitions[name]) == 1:
            self._arguments[name] = value
            return
        self._alloca_var(name, self.typeof(name))
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))

    def loadvar(self, name: str) -> Any:
        """Read a variable."""
        return self._arguments[name] if name in self._arguments else super().loadvar(name)

    def delvar(self, name: str) -> None:
        """Nothing needs to be done."""

    def lower_getitem(self, resty: Any, expr: Any, value: Any, index: Any, signature: Any) -> Any:
        """Read an item."""
        return super().lower_getitem(resty, expr, value, index, self._from_the_start(index, signature))

    def lower_setitem(self, target_var: Any, index_var: Any, value_var: Any, signature: Any) -> Any:
        """Write an item."""
        return super().lower_setitem(target_var, index_var, value_var, self._from_the_start(index_var, signature))

    def _from_the_start(self, index: Any, signature: Any) -> Any:
        """The types of an access to an item, where an array's index counts from the start."""
        container, _, *written = signature.args
        if not isinstance(container, types.Array):
            return signature
        return signature.replace(args=(container, without_sign(self.typeof(index.name)), *written))


def without_sign(kind: Any) -> Any:
    """The type of an index that counts from the start."""
    if isinstance(kind, types.BaseTuple):
        several: Any = kind
        return types.Tuple([without_sign(each) for each in several])
    if not isinstance(kind, types.Integer):
        return kind
    negative = isinstance(kind, types.IntegerLiteral) and kind.literal_value < 0
    return types.int64 if negative else types.uint64


def text_of(module: Any) -> str:
    """The module in LLVM's language, with those types alone that it names."""
    known = {each.name: each for each in module.get_identified_types().values()}
    module.get_identified_types = dict
    text = str(module)
    ahead, declared = set(NAME_OF_TYPE.findall(text)), {}
    while ahead:
        name = ahead.pop()
        declared[name] = known[name].get_declaration()
        ahead |= set(NAME_OF_TYPE.findall(declared[name])) - declared.keys()
    head, target, rest = text.partition("target datalayout")  # which LLVM wants to read before any type
    layout, end, rest = rest.partition("\n")
    return "".join([head, target, layout, end, *(f"{each}\n" for each in declared.values()), rest])
