"""Step records: what an engine computed in each step, and how long it took, as JSON lines. A line has either form.

- **A step of windtunnel's schema**: ``decodes`` (requests that decode), ``kv_tokens`` (tokens in the cache of all of
  them together), ``chunks`` ([tokens, context] of each chunk of a prompt) and ``seconds``: from the start of the step
  to that of the next, which was ready then; of one data-parallel rank. What is left out is nothing.
- **Forward-pass metrics**, as SGLang and Dynamo's workers of vLLM publish them: ``wall_time`` (seconds) and
  ``scheduled_requests`` with ``num_prefill_requests``, ``sum_prefill_tokens``, ``sum_prefill_kv_tokens``,
  ``num_decode_requests`` and ``sum_decode_kv_tokens``. They hold sums: prompts of one pass count as equal ones. Passes
  without requests are left out.
"""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.perf.explain import Batch
from windtunnel.validation.measured_run import json_lines

KEYS = ("decodes", "kv_tokens", "chunks", "seconds")
SUMS = (
    *("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens"),
    *("num_decode_requests", "sum_decode_kv_tokens"),
)


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank."""

    where: str
    """File and line."""
    batch: Batch
    seconds: float


def read_step_records(path: Path) -> list[StepRecord]:
    """Every step of a file, in its order. Raises InputError naming the line and key that is wrong or missing."""
    found = []
    for where, entry in json_lines(path):
        if "scheduled_requests" in entry:
            batch, key = _of_sums(entry, where), "wall_time"
        else:
            batch, key = _plain(entry, where), "seconds"
        if batch is not None:
            found.append(StepRecord(where, batch, _seconds(entry, key, where)))
    if not found:
        raise InputError(f"{path}: no steps")
    return found


def _plain(entry: Mapping[str, Any], where: str) -> Batch:
    for name in entry:
        if name not in KEYS:
            raise InputError(f"{where}: {unknown('key', name, KEYS)}")
    chunks = entry.get("chunks", [])
    if not isinstance(chunks, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in chunks):
        raise InputError(f"{where}: chunks={chunks!r}: must be a list of [tokens, context]")
    pairs = tuple((_count(tokens, "chunks", where), _count(context, "chunks", where)) for tokens, context in chunks)
    decodes, cached = (_count(entry.get(name, 0), name, where) for name in KEYS[:2])
    return _batch(decodes, cached, pairs, where)


def _of_sums(entry: Mapping[str, Any], where: str) -> Batch | None:
    sums = entry["scheduled_requests"]
    if not isinstance(sums, dict):
        raise InputError(f"{where}: scheduled_requests={sums!r}: must be a JSON object")
    prompts, tokens, context, decodes, cached = (_count(sums.get(name, 0), name, where) for name in SUMS)
    if not prompts and not decodes:
        return None
    pairs = tuple(zip(_shared(tokens, prompts), _shared(context, prompts), strict=True))
    return _batch(decodes, cached, pairs, where)


def _shared(total: int, parts: int) -> list[int]:
    """A whole number in parts as equal as can be."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _batch(decodes: int, cached: int, chunks: tuple[tuple[int, int], ...], where: str) -> Batch:
    try:
        return Batch(decodes, cached, chunks)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _count(value: Any, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{where}: {name}={value!r}: must be an integer ≥ 0")
    return value


def _seconds(entry: Mapping[str, Any], name: str, where: str) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise InputError(f"{where}: {name}={value!r}: must be a number of seconds > 0")
    return float(value)
