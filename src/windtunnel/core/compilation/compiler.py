"""How entries and what they call become machine code: numba's compiler, with other passes and libraries.

To import this takes as long as numba, so it is imported when something has to be compiled.
"""

import gc
from collections.abc import Callable
from typing import Any

import numba
from llvmlite.binding import (
    Linkage,
    create_pass_builder,
    create_pipeline_tuning_options,
    parse_assembly,
    parse_bitcode,
)
from numba import types
from numba.core.cgutils import normalize_ir_text
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, PassManager, register_pass
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.typed_passes import AnnotateTypes, BaseNativeLowering, NativeLowering
from numba.core.typing.templates import builtin_registry
from numba.extending import intrinsic, overload, typeof_impl

from windtunnel.core.compilation import shortcuts
from windtunnel.core.compilation.direct import STANDARD, WAY_IN, text_of_way_in
from windtunnel.core.compilation.kept import KeptCode
from windtunnel.core.compilation.lowering import LowerWhole, text_of
from windtunnel.core.kernels import give_back_memory

WRAPPER = "_ZN7cpython"
"""Begins the name of the function that numba adds to an entry, by which Python calls it."""
OF_NUMBA = ("numba_", "NRT_")
"""Begin the names of numba's own functions, which code that is called without it must not need."""


def _passes() -> Any:
    """LLVM's passes. Loops here are short: unrolled they are slower, and a tenth of the work."""
    options = create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling, options.loop_vectorization, options.slp_vectorization = False, True, False
    return create_pass_builder(cpu_target.target_context.codegen()._tm, options)


class _NoMachine:
    """In place of the code generator of a function without machine code: there is nothing to point at."""

    def set_env(self, name: str, env: Any) -> None:
        """The environment is that of the entry."""


class Translated(JITCodeLibrary):
    """Code as it was translated, each function optimised alone."""

    def add_ir_module(self, ir_module: Any) -> None:
        """As numba does, but unverified."""
        module = parse_assembly(normalize_ir_text(text_of(ir_module)))
        passes = _passes()
        of_function = passes.getFunctionPassManager()
        for function in module.functions:
            if not function.is_declaration:
                of_function.run(function, passes)
        self._final_module.link_in(module)


class Inner(Translated):
    """The code of one function, which only an entry links, with that of all functions that it calls."""

    codegen = _NoMachine()

    def finalize(self) -> None:
        """Nothing is linked here: what is left is kept as a string of bits, a tenth of the module."""
        module = self._final_module
        for function in module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = Linkage.linkonce_odr
        self._bits = module.as_bitcode()
        self._final_module = None
        module.close()
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """A module that its caller may keep."""
        return parse_bitcode(self._bits)

    def get_pointer_to_function(self, name: str) -> int:  # noqa: ARG002
        """None: 0."""
        return 0


class Linked(Translated):
    """The code of an entry."""

    def finalize(self) -> None:
        """Link what is called from here, directly or not, optimise it, and make machine code of it.

        Callers come before what they call: LLVM leaves out what nothing refers to when it is linked.
        """
        found: dict[Any, None] = {}
        ahead = [(self, iter(list(self._linking_libraries)))]
        while ahead:
            library, called = ahead[-1]
            following = next((each for each in called if each not in found), None)
            if following is not None:
                inner = following._linking_libraries if isinstance(following, Inner) else ()
                ahead.append((following, iter(list(inner))))
                continue
            found[library] = None
            ahead.pop()
        del found[self]
        self._add_way_in()
        self._linking_libraries = list(reversed(found))
        super().finalize()

    def _add_way_in(self) -> None:
        """Give the function a way in: see ``direct``."""
        made = [each for each in self._final_module.functions if not each.is_declaration]
        own = [each for each in made if not each.name.startswith(WRAPPER)]
        if len(own) == 1:
            text = text_of_way_in(own[0].name, [each.type for each in own[0].arguments])
            self._final_module.link_in(parse_assembly(text))

    def _optimize_final_module(self) -> None:
        """LLVM's passes, once: numba's first ones are for counting references."""
        passes = _passes()
        passes.getModulePassManager().run(self._final_module, passes)
        self._leave_out_way_in()

    def _leave_out_way_in(self) -> None:
        """Where the code needs numba."""
        every = list(self._final_module.functions)
        helpers = [f"@{each.name}(" for each in every if _needs_numba(each)]
        own = [each for each in every if not each.is_declaration and not each.name.startswith(WRAPPER)]
        if any(helper in text for text in map(str, own) for helper in helpers):
            for each in own:
                if each.name.startswith(WAY_IN):
                    each.name = f"no_{each.name}"

    def serialize_using_object_code(self) -> tuple[str, str, Any]:
        """What numba keeps of the code, without the three quarters that are for others to link it into theirs, which
        nobody does: of its functions only the names are left, which numba looks up."""
        lines = [f'define void @"{each.name}"() {{ unreachable }}' for each in self.get_defined_functions()]
        return self.name, "object", (self._get_compiled_object(), parse_assembly("\n".join(lines)).as_bitcode())


class UseLibrary(LoweringPass):
    """Lower the function into a library of this kind."""

    kind: type[JITCodeLibrary]

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        """Choose the library before lowering would."""
        state.library = self.kind(state.targetctx.codegen(), state.func_id.func_qualname)
        if self.kind is Linked:
            state.library.enable_object_caching()
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class UseInner(UseLibrary):
    """Of functions that only compiled functions call."""

    _name, kind = "use_inner", Inner


@register_pass(mutates_CFG=False, analysis_only=False)
class UseLinked(UseLibrary):
    """Of entries."""

    _name, kind = "use_linked", Linked


@register_pass(mutates_CFG=True, analysis_only=False)
class UseLowerWhole(BaseNativeLowering):
    """Of both: their way from numba's language to LLVM's."""

    _name: Any = "lower_whole"
    lowering_class = LowerWhole


NEEDLESS = {
    "annotate_types",
    "dump_parfor_diagnostics",
    "find_literally",
    "inline_closure_likes",
    "inline_inlinables",
    "inline_overloads",
    "ir_legalization",
    "literal_unroll",
    "make_function_op_code_to_jit_function",
    "nopython_rewrites",
    "nopython_supported_feature_validation",
    "with_lifting",
}
"""numba's passes for what no function here has: closures, comprehensions, expressions of whole arrays, literal_unroll,
variables that have to be deleted. They look for it in every function, and after each the variables' lives are counted
anew: an eighth of the time."""
shortcuts.take()


class InnerCompiler(CompilerBase):
    """numba's own passes but the needless ones, and those two."""

    library: type[UseLibrary] = UseInner

    def define_pipelines(self) -> list[Any]:
        """As numba's default in nopython mode otherwise."""
        every = DefaultPassBuilder.define_nopython_pipeline(self.state)
        every.add_pass_after(self.library, AnnotateTypes)
        manager = PassManager(every.pipeline_name)
        chosen = [(each, says) for each, says in every.passes if each._name not in NEEDLESS]
        manager.passes = [(UseLowerWhole if each is NativeLowering else each, says) for each, says in chosen]
        manager.finalize()
        return [manager]

    def _compile_core(self) -> Any:
        """Types of variables are not needed any more: of 250 functions they take 50 MB."""
        made = super()._compile_core()
        made.fndesc.typemap = made.fndesc.calltypes = None
        return made


class EntryCompiler(InnerCompiler):
    """The same for an entry."""

    library = UseLinked


def dispatcher_of(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """numba's function of one that only compiled functions call."""
    return _once(numba.njit(**options, pipeline_class=InnerCompiler)(function))


def entry_of(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """numba's function of one that Python calls."""
    made: Any = numba.njit(**options, pipeline_class=EntryCompiler)(function)
    made._cache = KeptCode(function)
    made._compiler.compile = _collecting(made._compiler.compile)
    return made


def _needs_numba(function: Any) -> bool:
    return function.is_declaration and function.name.startswith(OF_NUMBA) and function.name not in STANDARD


def intrinsic_of(function: Callable[..., Any], _: dict[str, Any]) -> Any:
    """numba's function of one that says its instructions."""
    return intrinsic(function)


def overloaded(function: Callable[..., Any], choose: Callable[..., Any], options: dict[str, Any]) -> None:
    """Let compiled code call a function of Python, by what is chosen for the types of its arguments."""
    said: Any = options | {"pipeline_class": InnerCompiler}
    overload(function, jit_options=said, strict=False)(choose)


def let_compiled_code_see(kind: type) -> None:
    """Objects of this class, each with what one of these functions says as ``made``."""
    typeof_impl.register(kind)(lambda value, _: _type_of(value.made))


def _type_of(made: Any) -> Any:
    """What the compiler takes it for."""
    if isinstance(made, Dispatcher):
        return types.Dispatcher(made)
    return next(kind for value, kind in reversed(builtin_registry.globals) if value is made)


def _once(dispatcher: Any) -> Any:
    """Compile a function for integers and for flags, not anew for each width of them and for each constant."""
    template = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: template(tuple(map(_widened, args)), kws)
    return dispatcher


def _widened(kind: Any) -> Any:
    if isinstance(kind, types.Literal):
        kind = kind.literal_type
    return types.int64 if kind in types.signed_domain else kind


COLLECTED_EVERY = 50_000
"""New objects after which garbage is collected during compilation: 240 MB of it would lie about otherwise, and less
does not with smaller numbers."""


def _collecting(compile_for: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with a collector of garbage that leaves out what was there before: millions of objects, all needed."""

    def collecting(*signature: Any) -> Any:
        if gc.get_freeze_count() > 0:  # somebody else's, and to stay so
            return compile_for(*signature)
        thresholds = gc.get_threshold()
        give_back_memory()
        gc.freeze()
        gc.set_threshold(COLLECTED_EVERY, *thresholds[1:])
        try:
            return compile_for(*signature)
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()

    return collecting
