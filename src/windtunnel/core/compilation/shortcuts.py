"""Shorter ways through numba's compiler to the same results: a sixth of a first run.

They are numba's own functions, for all code of the process; what they leave out nobody looks at.
"""

from functools import cache
from hashlib import sha256
from typing import Any

from llvmlite.binding import ffi
from numba.core import base, errors, itanium_mangler
from numba.core.postproc import PostProcessor, VariableLifetime
from numba.core.targetconfig import TargetConfig
from numba.core.transforms import canonicalize_cfg
from numba.core.types import ArrayCompatible, Record
from numba.core.typing.npydecl import NumpyRulesArrayOperator

LONGEST = 500
"""Letters of the types in the name of a function."""

every_operator = NumpyRulesArrayOperator.generic
every_lifetime = PostProcessor.run
every_option = TargetConfig.__eq__
every_type = itanium_mangler.mangle_args


def take() -> None:
    """Take them, in this process."""
    for owner, name, shorter in (
        (NumpyRulesArrayOperator, "generic", operator_of_arrays),
        (PostProcessor, "run", lifetimes_where_asked),
        (TargetConfig, "__eq__", equal_where_set_alike),
        (Record, "__repr__", cache(Record.__repr__)),
        (itanium_mangler, "mangle_args", lambda kinds: short_types(tuple(kinds))),
    ):
        setattr(owner, name, shorter)
    colours: Any = errors.termcolor()
    colours._markup = lambda text, *_: text  # thousands of messages that say which function an operator is not
    callbacks = ffi.lib._lock._cblist  # at each of 50,000 calls of LLVM, for those who time them
    callbacks[:] = [each for each in callbacks if each[0].__module__ != base.__name__]


def operator_of_arrays(self: Any, args: Any, kws: Any) -> Any:
    """An operator's type by NumPy's rules, which numba works out for scalars also, and then leaves to others."""
    kinds = (getattr(each, "type", each) for each in args)  # also of what may be None
    return every_operator(self, args, kws) if any(isinstance(each, ArrayCompatible) for each in kinds) else None


def lifetimes_where_asked(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """What is known of a function after a pass, without the variables that live at the start of each block: only
    generators and the interpreted mode ask for them."""
    function = self.func_ir
    if emit_dels or function.is_generator:
        every_lifetime(self, emit_dels, extend_lifetimes)
        return
    function.blocks = canonicalize_cfg(function.blocks)
    function.variable_lifetime = VariableLifetime(function.blocks)
    function.generator_info = None


@cache
def short_types(kinds: tuple[Any, ...]) -> str:
    """The types of a function's arguments in its name, of which a State alone would make 30,000 letters."""
    said = every_type(kinds)
    return said if len(said) <= LONGEST else itanium_mangler.mangle_identifier(sha256(said.encode()).hexdigest())


def equal_where_set_alike(self: Any, other: object) -> bool:
    """Whether two sets of options are equal; alike without a look at defaults."""
    return isinstance(other, TargetConfig) and (self._values == other._values or every_option(self, other))
