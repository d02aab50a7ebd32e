"""Tables: the journal as a profile folder, in Vidur's CSV schema (milliseconds), with a manifest."""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from windtunnel.files import write_whole
from windtunnel.perf.profile.folder import MANIFEST
from windtunnel.perf.profile.shapes import ATTENTION, BITS_8, HEAD, SKEWED, Shape
from windtunnel.profiling.clock import Reading
from windtunnel.profiling.journal import Journal, Key
from windtunnel.profiling.measure import AGAIN

STATISTICS = ("min", "max", "mean", "median", "std")
Row = dict[str, Any]


def write_tables(
    folder: Path,
    model: str,
    device: str,
    shape: Shape,
    journal: Journal,
    extent: Mapping[str, Any],
    host: Row,
    waited: float = 0.0,
) -> list[Path]:
    """Write every table and the manifest; the files. ``waited``: seconds for a CPU in each second of the measurement,
    which short points do not show one by one."""
    place = folder / "compute" / device / model
    keys = {
        "n_head": shape.n_head,
        "n_kv_head": shape.n_kv_head,
        "n_embd": shape.n_embd,
        "n_expanded_embd": shape.n_expanded_embd,
        "vocab_size": shape.vocab_size,
        "use_gated_mlp": shape.use_gated_mlp,
        "head_dim": shape.head_dim,
    }
    keys |= shape.optional
    if shape.weights in BITS_8:
        keys["weights"] = BITS_8.index(shape.weights)
    files = {
        place / "mlp.csv": _by_tokens(journal, shape.token_operators, keys),
        place / "head.csv": _by_tokens(journal, HEAD, keys),
        place / "attention.csv": _attention(journal, shape, extent),
    }
    for name in ("all_reduce", "send_recv"):
        if rows := _collectives(journal, name, shape, extent.get("nnodes", 1)):
            files[folder / "network" / device / f"{name}.csv"] = rows
    for path, table in files.items():
        write_whole(path, [_csv(table)])
    manifest = {
        "format": "windtunnel profile",
        "version": 1,
        "units": "ms",
        "device": device,
        "model": model,
        "settings": dict(extent),
        "host": host,
        "repeats_differ": repeatability(journal),
        "waited_for_cpu": max(median([one.waited for one in journal.readings.values()] or [0.0]), waited),
        "skew": skew(journal),
        "skipped": [
            {"operator": key[0], "tp": key[1], "a": key[2], "b": key[3], "why": why}
            for key, why in journal.skipped.items()
        ],
    }
    write_whole(folder / MANIFEST, [json.dumps(manifest, indent=1) + "\n"])
    return [*files, folder / MANIFEST]


def _by_tokens(journal: Journal, operators: Iterable[str], keys: Mapping[str, Any]) -> list[Row]:
    """One row for every shard and size that any of the operators has."""
    rows: dict[tuple[int, int], Row] = {}
    for operator in operators:
        for (_, tp, a, _), reading in journal.of(operator):
            row = rows.setdefault((tp, a), {**keys, "num_tokens": a, "num_tensor_parallel_workers": tp})
            row |= _statistics(operator, reading)
    return [rows[place] for place in sorted(rows)]


def _attention(journal: Journal, shape: Shape, extent: Mapping[str, Any]) -> list[Row]:
    rows = []
    for operator, phase in ATTENTION.items():
        for (_, tp, a, b), reading in sorted(journal.of(operator)):
            prefill = phase == "prefill" or (phase == "tokens" and a > extent["max_num_seqs"])
            rows.append(
                {
                    "n_embd": shape.n_embd,
                    "n_q_head": shape.n_head,
                    "n_kv_head": shape.n_kv_head,
                    "block_size": 16,
                    "num_tensor_parallel_workers": tp,
                    "max_model_len": extent["max_model_len"],
                    "batch_size": 1 if prefill else a,
                    "prefill_chunk_size": a if prefill else 0,
                    "kv_cache_size": b,
                    "is_prefill": prefill,
                    "attention_backend": "torch",
                    **_statistics(operator, reading),
                }
            )
    return rows


def _collectives(journal: Journal, name: str, shape: Shape, hosts: int) -> list[Row]:
    return [
        {
            "rank": 0,
            "num_workers": tp,
            "size": 2 * shape.n_embd * a,
            "collective": name,
            "devices_per_node": max(tp // hosts, 1),
            "max_devices_per_node": max(tp // hosts, 1),
            **_statistics(name, reading),
        }
        for (_, tp, a, _), reading in sorted(journal.of(name))
    ]


def _statistics(operator: str, reading: Reading) -> Row:
    return {f"time_stats.{operator}.{name}": 1000.0 * getattr(reading, name) for name in STATISTICS}


def _csv(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def skew(journal: Journal) -> list[Row]:
    """How many times as long decode attention takes where one request has half of all keys, by requests and keys each
    would have."""
    rows = []
    for (_, tp, a, b), reading in sorted(journal.of(SKEWED)):
        even = journal.readings.get(("attn_decode", tp, a, b))
        if even is not None:
            rows.append({"tp": tp, "requests": a, "keys": b, "times": reading.median / even.median})
    return rows


def repeatability(journal: Journal) -> dict[str, float]:
    """Operator → median of how far its points were from themselves when they were measured again."""
    found: dict[str, list[float]] = {}
    for (name, *place), reading in journal.readings.items():
        if name.startswith(AGAIN):
            first: Key = (name.removeprefix(AGAIN), *place)  # type: ignore[assignment]
            found.setdefault(first[0], []).append(abs(reading.median / journal.readings[first].median - 1.0))
    return {name: median(values) for name, values in found.items()}
