"""Shorter ways through numba's compiler lead to the same code."""

import os
import re
import subprocess
import sys

CODE = """
import sys
import numba, numpy as np
from windtunnel.core.compilation import shortcuts

if sys.argv[1] == "short":
    shortcuts.take()

pair = np.dtype([("one", np.int64), ("two", np.float64)])

@numba.njit
def of_scalars(number, weight, flag):
    found = number // 3 + number % 7 - (number << 2)
    if flag:
        found += int(weight * number) & 12
    return found if weight > 0.5 else -found

@numba.njit
def of_arrays(values, factor):
    values += factor
    return (values * factor - values[::-1]).sum() + (values > 3).sum()

@numba.njit
def maybe(number, flag):
    value = number if flag else None
    return 0 if value is None else value + 1

@numba.njit
def numbers(most):
    for each in range(most):
        yield each * each

@numba.njit
def of_generators(most):
    total = 0
    for each in numbers(most):
        total += each
    return total

@numba.njit
def of_records(rows):
    for row in rows:
        row.two = row.one / 2
    return rows[-1].two

calls = (
    (of_scalars, (40, 0.75, True)),
    (of_arrays, (np.arange(6.0), 2.0)),
    (maybe, (4, True)),
    (of_generators, (5,)),
    (of_records, (np.ones(3, dtype=pair),)),
)
for function, arguments in calls:
    print(function(*arguments))
    print(*function.inspect_llvm().values())
"""


def in_each_way(code: str) -> list[subprocess.CompletedProcess[str]]:
    plain = os.environ | {"NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}
    return [
        subprocess.run((sys.executable, "-c", code, way), env=plain, capture_output=True, text=True, check=False)
        for way in ("short", "long")
    ]


def test_the_same_code() -> None:
    short, long = (re.sub("0x[0-9a-f]+", "address", done.stdout) for done in in_each_way(CODE))
    assert short.count("define ") > 10
    assert short == long


def test_errors_say_the_same() -> None:
    short, long = in_each_way(f"{CODE}\nof_scalars('text', 1.0, True)")
    assert short.returncode == long.returncode == 1
    assert "TypingError" in short.stderr
    assert short.stderr == long.stderr
