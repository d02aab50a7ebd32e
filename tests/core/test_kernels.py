"""Compiled code on disk: used again as long as nothing that it is made of has changed, and not a moment longer."""

import ast
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.core import compiled, kernels
from windtunnel.core.dispatch import SCHEDULERS

PACKAGE = kernels.ROOT
FILES = sorted(PACKAGE.rglob("*.py"))


def doubled(x: float) -> float:
    """An entry."""
    return 2 * x


def named(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_are_found_as_python_finds_them() -> None:
    modules = {named(path) for path in FILES}
    assert len(modules) > 300
    for path in FILES:
        wanted = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE.name}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= {each if each in modules else str(node.module) for each in inner}
        assert kernels.imported_by(named(path))[1] >= wanted, path


def test_an_entry_is_compiled_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "kernel_folder", lambda: tmp_path)
    with caplog.at_level(logging.INFO, logger=kernels.LOG.name):
        assert compiled.entry(doubled)(2.0) == 4.0
        assert caplog.messages == ["compiling doubled (once on this machine)", ""]
        assert compiled.entry(doubled)(3.0) == 6.0
    assert len(caplog.messages) == 2
    (file,) = (path for path in tmp_path.iterdir() if ".direct" not in path.name)
    file.write_bytes(file.read_bytes()[:1000])
    with caplog.at_level(logging.INFO, logger=kernels.LOG.name):
        assert compiled.entry(doubled)(4.0) == 8.0
    assert len(caplog.messages) == 4, "half a file is compiled anew"


def test_the_files_not_used_for_longest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KEPT", 2)
    for age, name in enumerate("abc"):
        path = tmp_path / f"{name}.kernel"
        kernels._write(path, b"code")
        os.utime(path, (time.time() - age - 1,) * 2)
    kernels._write(tmp_path / "d.kernel", b"code")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kernel", "d.kernel"]


def test_code_of_a_source_edited_since_it_was_imported_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "kernel_folder", lambda: tmp_path)
    here = Path(__file__)
    monkeypatch.setattr(kernels, "STARTED", here.stat().st_mtime - 1)
    assert compiled.entry(doubled)(2.0) == 4.0
    assert not list(tmp_path.iterdir())


# A copy of the package, one file of which is edited.

KEYS = """
import os, sys, time
import numpy as np
from windtunnel import policy
from windtunnel.core.compilation.direct import spread
from windtunnel.core.dispatch import SCHEDULERS
from windtunnel.core.engine import Demand, Fleet, new_state
from windtunnel.core.kernels import ROOT, imported_by, key_of
from windtunnel.core.rebuild import rebuild
from windtunnel.core.loop import loop
from windtunnel.perf.batch_times import linear

limits = policy.Limits(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=100, num_blocks=20, block_size=16)
times = linear(1, 0, 0, 0, max_num_batched_tokens=128, max_num_seqs=4, max_model_len=100)
one, zero = np.ones(1, dtype=np.int64), np.zeros(1)
demand = Demand(zero, one, one, zero > 0, zero > 0, -one, zero, 0)
kinds = {"rebuild": (rebuild, "", [])}
for name, module in SCHEDULERS.items():
    if name == "UserScheduler":  # is made of whatever its user wrote
        continue
    fleet = Fleet((limits,), (getattr(policy, name)(),), (times,), (1,), (1,), (False,))
    said, classes, _ = spread((new_state(fleet, demand, zero),))
    kinds[module] = (loop, said, classes)

def keys():
    imported_by.cache_clear()
    return {name: key_of(entry.py_func, *kind, ("machine",)) for name, (entry, *kind) in kinds.items()}

before = keys()
assert len(set(before.values())) == len(kinds) and keys() == before
for name in sys.argv[1:]:
    with (ROOT / name).open("a") as file:
        file.write("# edited")
    os.utime(ROOT / name, (time.time() - 60,) * 2)
    after = keys()
    print(name, *sorted(kind for kind in kinds if after[kind] != before[kind]))
    before = after
"""
TINY = """
from windtunnel.core.compiled import entry
from windtunnel.core.{rule} import FACTOR

@entry
def scaled(x):
    return FACTOR * x
"""
RUN = """
import logging, sys
from windtunnel.core import kernels
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from windtunnel.core.tiny import scaled
print(scaled(2.0), "numba" in sys.modules)
"""
KINDS = """
from typing import NamedTuple
import numpy as np
from windtunnel.core.compiled import entry

class Held(NamedTuple):
    rows: np.ndarray
    rest: tuple
    none: object

@entry
def first(held, wide, flag, more):
    held.rows[1].a += more
    held.rest[0][0, 1] = 7.0
    return held.rows[1].a * 100 + wide[1, 2] * 10 + (1 if flag and held.none is None else 0)

@entry
def second(wide, factor):
    return np.nextafter(wide[0, 1] * factor, 0.0)

@entry
def third(wide):
    return wide[0, 0] > 3

@entry
def fourth(wide):
    wide[0, 0] = 9

@entry
def fifth(wide):
    return wide[0, 0], wide[0, 1]
"""
CALLS = """
import sys
import numpy as np
from windtunnel.core.kinds import Held, fifth, first, fourth, second, third
rows = np.zeros(3, dtype=[("a", np.int64), ("b", np.float64)])
wide = np.arange(12, dtype=np.int64).reshape(3, 4)
square = np.zeros((2, 2))
held = Held(rows, (square, (1, 2.5)), None)
for kind in (wide, np.asfortranarray(wide), wide[:, ::2]):
    print(first(held, kind, True, 3), first(held, kind, np.bool_(False), np.int64(4)), second(kind, 0.1), third(kind))
    print(fourth(kind), third(kind), rows["a"].sum(), square.sum())
print("numba" in sys.modules)
print(fifth(wide), "numba" in sys.modules)
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[str]]:
    """Write files into a copy of the package, and run a script with it: the lines that it prints."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "static"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "WINDTUNNEL_CACHE": str(tmp_path / "cache")}

    def run(script: str, *arguments: str, **files: str) -> list[str]:
        for name, text in files.items():
            path = tmp_path / PACKAGE.name / (name.replace("__", "/") + ".py")
            path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + text, encoding="utf-8")
            os.utime(path, (time.time() - 60,) * 2)
        command = sys.executable, "-c", script, *arguments
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
        return done.stdout.splitlines()

    return run


def test_an_edit_compiles_anew_what_is_made_of_it(run: Callable[..., list[str]]) -> None:
    every = " ".join(sorted(module for name, module in SCHEDULERS.items() if name != "UserScheduler"))
    wanted = {
        "core/schedulers/sglang/admission.py": "sglang.scheduler",
        "core/schedulers/vllm.py": "vllm",
        "core/schedulers/vllm_v0/blocks.py": "vllm_v0.scheduler",
        "core/schedulers/sglang/tree/radix.py": "sglang.scheduler",
        "policy/unified.py": "unified",  # whose names of its modes compiled code compares with
        "policy/sglang.py": "",  # settings, which no compiled code reads
        "core/router.py": every,
        "perf/batch_times.py": f"rebuild {every}",
        "simulate/simulate.py": "",
    }
    assert run(KEYS, *wanted) == [f"{name} {kinds}".strip() for name, kinds in wanted.items()]


def test_stale_code_is_never_used(run: Callable[..., list[str]]) -> None:
    message = ["compiling windtunnel.core (once on this machine)", ""]
    tiny = TINY.format(rule="tiny_rule")
    assert run(RUN, core__tiny=tiny, core__tiny_rule="FACTOR = 2\n") == [*message, "4.0 True"]
    assert run(RUN) == ["4.0 False"], "kept code is called without numba"
    assert run(RUN, core__schedulers__sglang__tree__radix="\n# edited\n") == ["4.0 False"]
    assert run(RUN, core__tiny_rule="FACTOR = 3\n") == [*message, "6.0 True"]


def test_kept_code_is_called_without_numba(run: Callable[..., list[str]], tmp_path: Path) -> None:
    *said, with_numba, at_last = run(CALLS, core__kinds=KINDS)
    assert (with_numba, at_last) == ("True", "(9, 1) True")
    assert len(said) == 6 and said[0].startswith("361 760 0.09999")
    assert run(CALLS) == [*said, "False", at_last], "what returns a tuple is called by numba"
    for path in (tmp_path / "cache" / "kernels").glob("*.direct.kernel"):
        path.write_bytes(path.read_bytes()[:-9])
    assert run(CALLS) == [*said, "True", at_last]
