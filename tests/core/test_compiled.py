"""Compiled functions."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from numba.core.datamodel.registry import default_manager

from windtunnel.core import compiled, kernels
from windtunnel.core.compilation import compiler
from windtunnel.core.records import Play


def test_a_settled_entry_looks_at_types_again_when_its_state_is_another() -> None:
    def first(state: tuple[float, ...], factor: float) -> float:
        return state[0] * factor

    made = compiled.Settled(numba.njit(first))
    one, other = (1.0, 2.0), (3, 4, 5)
    assert [made(one, 2.0), made(one, 3.0), made(other, 2.0), made(one, 2.0)] == [2.0, 3.0, 6.0, 2.0]


def test_garbage_is_collected_during_compilation_and_what_was_there_before_is_left_alone() -> None:
    before = gc.get_threshold()
    seen: list[tuple[int, int]] = []
    compile_for = compiler._collecting(lambda _: seen.append((gc.get_freeze_count(), gc.get_threshold()[0])))
    compile_for(None)
    assert seen[0][0] > 0 and seen[0][1] == compiler.COLLECTED_EVERY
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
    gc.freeze()
    try:
        compile_for(None)
        assert seen[1][1] == before[0] and gc.get_freeze_count() > 0  # a server's own stays frozen
    finally:
        gc.unfreeze()


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")  # type: ignore[attr-defined]
def test_what_is_compiled_for_others_is_linked_again_and_again_from_a_string_of_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "kernel_folder", lambda: tmp_path)

    @compiled.compiled
    def inner(x: float) -> float:
        return 2.0 * x

    found = []
    for more in (1.0, 2.0):

        @compiled.entry
        def outer(x: float, more: float = more) -> float:
            return inner(x) + more

        found.append(outer(3.0))
    assert found == [7.0, 8.0]
    (made,) = inner.overloads.values()  # type: ignore[attr-defined]
    assert made.library._final_module is None and len(made.library._bits) < 10_000
    assert made.fndesc.typemap is made.type_annotation is None


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")  # type: ignore[attr-defined]
def test_what_is_to_be_called_does_not_become_a_part_of_the_parts_that_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "kernel_folder", lambda: tmp_path)

    @compiled.compiled
    def called(x: float) -> float:
        return 2.0 * x

    @compiled.part
    def between(x: float) -> float:
        return called(x) + 1.0

    @compiled.entry
    def outer(x: float) -> float:
        return between(x)

    def inlined(function: Any) -> bool:
        (made,) = function.overloads.values()
        inner = made.library._get_module_for_linking().functions
        return any(b"alwaysinline" in b"".join(each.attributes) for each in inner if not each.is_declaration)

    assert outer(3.0) == 7.0
    assert [inlined(between), inlined(called)] == [True, False]


class Elsewhere(NamedTuple):
    """A named tuple that is not of ``core``."""

    number: int
    share: float


def test_named_tuples_of_core_are_one_argument_and_those_of_others_are_left_to_numba() -> None:
    play = Play(*(np.zeros(1, dtype=np.float64 if i else np.int64) for i in range(len(Play._fields))))
    lookup: Any = default_manager.lookup
    typeof: Any = numba.typeof
    ours, others = (lookup(typeof(each)) for each in (play, Elsewhere(1, 0.5)))
    assert ours.get_argument_type() is ours.get_value_type()
    assert len(others.get_argument_type()) == 2


def test_arguments_that_are_written_again_and_tuples_in_tuples_keep_their_values() -> None:
    @compiled.part
    def largest(play: Any, least: float) -> float:
        if least < 0.0:
            least = -least
        for i in range(len(play[1])):
            least = max(least, play[1][i])
        return least

    @compiled.entry
    def both(pair: Any, least: float) -> float:
        return largest(pair[0], least) + 10.0 * largest(pair[1], -least)

    arrays = (np.arange(3.0) if i else np.zeros(1, dtype=np.int64) for i in range(len(Play._fields)))
    play = Play(*arrays)
    assert both((play, play), 0.5) == 2.0 + 20.0
    assert both((play, play), 4.0) == 4.0 + 40.0


READS = """
import numpy as np
from windtunnel.core.compiled import entry, part

@part
def inner(table, i, j):
    table[i, j] += 1
    return table[i, j] + table[-1, -2]

@entry
def outer(table, i, j):
    return inner(table, i, j)

for i, j in {}:
    try:
        print(outer(np.arange(12).reshape(3, 4), i, j))
    except IndexError:
        print("beyond")
"""


def _read(tmp_path: Path, places: list[tuple[int, int]], **environment: str) -> list[str]:
    (tmp_path / "reads.py").write_text(READS.format(places))
    known = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | environment
    command = [sys.executable, str(tmp_path / "reads.py")]
    return subprocess.run(command, env=known, capture_output=True, text=True, check=True).stdout.split()


def test_an_index_counts_from_the_start_and_a_negative_number_from_the_end(tmp_path: Path) -> None:
    places = [(0, 0), (1, 3), (2, 2)]
    assert _read(tmp_path, places) == _read(tmp_path, places, NUMBA_DISABLE_JIT="1") == ["11", "18", "22"]


def test_numba_looks_at_every_index_when_asked(tmp_path: Path) -> None:
    assert _read(tmp_path, [(0, 0)]) == ["11"]
    places = [(-1, 0), (0, -1), (3, 0), (0, 4), (0, 0)]
    assert _read(tmp_path, places, NUMBA_BOUNDSCHECK="1") == ["beyond"] * 4 + ["11"]
