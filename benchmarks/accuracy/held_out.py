"""Held-out kernels: measured points taken out of the tables and predicted from the rest.

Two splits. ``tokens`` takes out every third value of the axis along which tables are interpolated; ``shapes`` takes out
every second shape whole. Predictions come from the tables of every simulation (``perf.kinds``),
built from a database that lacks those rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.kernel_sources import Row, Source
from benchmarks.accuracy.plain_models import (
    MILLISECONDS,
    AcrossGrid,
    along_axis,
    between_engines,
    nothing,
    regression,
    repeats,
)
from windtunnel.errors import InputError
from windtunnel.hardware import Device, device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.corrections import Corrections
from windtunnel.perf.database import Columns, Database, Measured, one_per_key, open_database
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import SOURCES
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.exchange import Exchange
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.latent_attention import LatentAttention
from windtunnel.perf.kinds.sparse_attention import SparseAttention
from windtunnel.perf.predictor import roofline

ENGINES = ("vllm", "sglang", "trtllm")
SPLITS = ("tokens", "shapes")
THIRD, SECOND = 3, 2
MOST_SHAPES = 80
"""Most shapes of a table that are predicted, evenly spread."""

PLAIN = Corrections(**{entry.name: False for entry in fields(Corrections)})
"""Without the causes that replace table entries in simulations: the tables' own points are predicted."""

Mask = NDArray[np.bool_]


@dataclass(eq=False)
class Without(Database):
    """A database that lacks the rows which a split takes out of one table."""

    source: Source | None = None
    split: str = "tokens"

    def read(self, family: str, table: str, texts: tuple[str, ...], backend: str | None = None) -> Columns | None:
        """As the whole database, less those rows; tables of other engines stay whole, but for the collectives'."""
        source = self.source
        assert source is not None
        wanted = tuple(dict.fromkeys((*texts, *source.texts))) if (family, table) == source.table else texts
        found = super().read(family, table, wanted, backend)
        if found is None or (family, table) != source.table or backend != source.backend:
            return found
        return found.take(~taken_out(with_window(found), source, self.split))

    def versions(
        self, family: str, table: str, texts: tuple[str, ...], backend: str | None = None
    ) -> Iterator[Columns]:
        """As the whole database; of the table that a split takes from the newest version alone, less those rows."""
        assert self.source is not None
        for found in super().versions(family, table, texts, backend):
            if (family, table) != self.source.table or backend != self.source.backend:
                yield found
                continue
            yield found.take(~taken_out(found, self.source, self.split))
            return


def with_window(columns: Columns) -> Columns:
    """The table with the column ``window_size``, which old attention tables lack: all keys are seen."""
    if "window_size" in columns.numbers:
        return columns
    return Columns({**columns.numbers, "window_size": np.zeros(len(columns), dtype=np.int64)}, columns.texts)


def taken_out(columns: Columns, source: Source, split: str) -> Mask:
    """The rows that a split takes out: never the ends of an axis."""
    if split == "tokens":
        values = np.unique(columns[source.axis])
        return np.isin(columns[source.axis], values[1:-1][np.arange(max(len(values) - 2, 0)) % THIRD == 1])
    if source.grid:  # every second value of each axis: three shapes of four
        out = np.zeros(len(columns), dtype=bool)
        for name in source.shape:
            values = np.unique(columns[name])
            out |= np.isin(columns[name], values[1:-1:SECOND])
        return out
    keys = np.stack([columns[name] for name in source.shape], axis=1)
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1].ravel() % SECOND == 1)


@dataclass(frozen=True)
class HeldOut:
    """Points of one kind that were taken out: measured and predicted seconds."""

    system: str
    backend: str
    family: str
    """Kind, and weight or cache format, or the collective's operation."""
    errors_of: str
    """The family of its errors (``Kernel.error_family``)."""
    split: str
    measured: Floats
    predicted: Floats
    sources: NDArray[np.int8]
    interpolated: Floats
    """Plain interpolation in log-log between the neighbours on the axis; NaN without both."""
    roofline: Floats
    regression: Floats
    """Least squares of seconds on FLOPs and bytes."""
    noise: Floats
    """|log| between measurements of one kernel at one point: repeats, or those of several engines."""

    @property
    def compared(self) -> Mask:
        """Points that plain interpolation predicts too; all if it predicts none."""
        answered = np.isfinite(self.interpolated)
        return answered if answered.any() else np.ones_like(answered)


@dataclass(eq=False)
class Bench:
    """The tables of one system and engine."""

    system: str
    backend: str

    @cached_property
    def device(self) -> Device:
        """The specification of the system."""
        return device(self.system)

    def rows(self, source: Source) -> Columns | None:
        """One row for every shape and point of a table, or None without that table."""
        database = self.database()
        columns = database.read(*source.table, (*source.texts, "kernel_source"), source.backend)
        columns = None if columns is None else source.times(columns)
        if columns is None or any(name not in columns.texts for name in source.texts):
            return None
        columns = with_window(columns)
        if source.axis in ("isl", "seq_len"):  # one chunk at a time is asked
            columns = columns.where(batch_size=int(columns["batch_size"].min()))
        names = (*source.shape, source.axis, *source.others)
        keys = [columns[name] for name in names] + [columns.texts[name][0] for name in source.texts]
        lane = columns.texts.get("kernel_source", (np.zeros(len(columns), dtype=np.int64), ()))[0]
        return columns.take(one_per_key(keys, columns["latency"], lane))

    def database(self) -> Database:
        """The whole database. Raises InputError without one."""
        found = open_database(self.system, self.backend)
        if found is None:
            raise InputError(f"{self.system}: the kernel database has no {self.backend} there")
        return found

    def _noise(self, source: Source, text: str) -> Floats:
        """Noise of the kernels with this value of the source's first text."""
        own = self._with(source, text, source.backend)
        if own is None:
            return np.zeros(0)
        engines = [name for name in ENGINES if name != self.backend] if text in source.library else []
        others = [self._with(source, text, name) for name in engines]
        found = between_engines(own, [other for other in others if other is not None], source)
        return np.concatenate([repeats(own, source), found])

    def _with(self, source: Source, text: str, backend: str | None) -> Columns | None:
        columns = self.database().read(*source.table, (*source.texts, "kernel_source"), backend)
        columns = None if columns is None else source.times(columns)
        if columns is None or text not in columns.values(source.texts[0]):
            return None
        return with_window(columns).where(**{source.texts[0]: text})

    def held_out(self, source: Source, split: str) -> Iterator[HeldOut]:
        """Every family of a table under a split."""
        rows, whole = self.rows(source), self.database()
        if rows is None or (source.unless and whole.path(*source.unless) is not None):
            return
        truth = Measured(whole, self.device, PLAIN) if source.table[0] == "mla" else None
        seen = (whole.systems, whole.system, whole.backend, whole.version, whole.rule)
        lacking = Without(*seen, source=source, split=split)
        measured, bound_by = Measured(lacking, self.device, PLAIN), roofline(self.device)
        found: dict[str, list[tuple[Floats, ...]]] = {}
        kernels: dict[str, Kernel] = {}
        texts: dict[str, set[str]] = {}
        out = taken_out(rows, source, split)
        nodes = {"gpus_per_node": self.device.gpus_per_node, "gpus_per_domain": self.device.gpus_per_domain}
        across = AcrossGrid(source, rows, out) if source.grid and split == "shapes" else nothing
        for shape, members in _shapes(rows, source, out):
            kernel = source.kernel({**shape, **nodes})
            if kernel is None:
                continue
            part, kept = rows.take(members & out), rows.take(members & ~out)
            a, b = source.point(part)
            answer = kernel.measured(measured, a, b)
            if answer is None:
                continue
            seconds = part["latency"] * MILLISECONDS
            plain = along_axis(source, part, kept) if split == "tokens" else across(shape, part)
            if truth is not None:  # the tables add what surrounds the kernel in the database, or take it off
                known = kernel.measured(truth, a, b)
                assert known is not None
                plain, seconds = plain + known.seconds - seconds, known.seconds
            model = bound_by.times(kernel, a, b).seconds
            costs = kernel.flops(a, b), kernel.bytes_moved(a, b)
            entry = (seconds, answer.seconds, answer.sources.astype(float), plain, model, *costs)
            found.setdefault(_name(kernel), []).append(entry)
            kernels[_name(kernel)] = kernel
            texts.setdefault(_name(kernel), set()).add(str(shape[source.texts[0]]))
        for name, parts in found.items():
            columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
            seconds, predicted, sources, between, model, work, moved = columns
            yield HeldOut(
                system=self.system,
                backend=self.backend,
                family=name,
                errors_of=kernels[name].error_family,
                split=split,
                measured=seconds,
                predicted=predicted,
                sources=sources.astype(np.int8),
                interpolated=between,
                roofline=model,
                regression=regression(seconds, work, moved),
                noise=np.concatenate([self._noise(source, text) for text in sorted(texts[name])]),
            )


def _name(kernel: Kernel) -> str:
    if isinstance(kernel, Collective):
        return kernel.op
    if isinstance(kernel, Exchange):
        return f"{kernel.phase}_{kernel.mode}"
    if isinstance(kernel, Attention | LatentAttention):
        return f"{kernel.efficiency_family}_{kernel.kv_dtype}"
    if isinstance(kernel, SparseAttention):
        return f"sparse_{kernel.phase}_{kernel.kv_dtype}"
    family = kernel.efficiency_family
    return f"{family.split('_')[0]}_{kernel.dtype}" if isinstance(kernel, Gemm | Experts) else family


def _shapes(rows: Columns, source: Source, out: Mask) -> Iterator[tuple[Row, Mask]]:
    """Shapes with rows that are taken out, at most MOST_SHAPES for each combination of texts, evenly spread."""
    codes = [rows.texts[name][0] for name in source.texts]
    keys = np.stack([*codes, *(rows[name] for name in source.shape)], axis=1)
    shapes, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.ravel()
    has = np.unique(which[out])
    for texts in np.unique(shapes[:, : len(codes)], axis=0):
        these = has[(shapes[has, : len(codes)] == texts).all(axis=1)]
        for place in these[:: max(1, len(these) // MOST_SHAPES)]:
            values = shapes[place]
            row: dict[str, int | str] = {
                name: rows.texts[name][1][int(code)] for name, code in zip(source.texts, values, strict=False)
            }
            row |= dict(zip(source.shape, values[len(codes) :].tolist(), strict=True))
            yield row, which == place


def errors(found: HeldOut, predicted: Floats) -> dict[str, float]:
    """Median and 95th percentile of |predicted / measured − 1| over the points that are compared; NaN where nothing was
    predicted."""
    size = np.abs(predicted / found.measured - 1.0)[found.compared]
    size = size[np.isfinite(size)]
    if not len(size):
        return {"median": float("nan"), "p95": float("nan")}
    return {"median": float(np.median(size)), "p95": float(np.percentile(size, 95))}


def used_sources(found: HeldOut) -> str:
    """Where the predictions came from, most first."""
    counts = np.bincount(found.sources.astype(np.int64), minlength=len(SOURCES))
    return ", ".join(SOURCES[i] for i in np.argsort(-counts, kind="stable") if counts[i])
