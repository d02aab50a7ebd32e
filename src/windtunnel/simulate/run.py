"""Run: what a simulation recorded, as columns, with a manifest that says how it was made."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment.title import title
from windtunnel.errors import InputError, unknown
from windtunnel.files import whole_folder
from windtunnel.perf.batch_times import BatchTimes, StageTimes, Times, whole

if TYPE_CHECKING:
    from windtunnel.core.rebuild import IterationTimes, StepEnds

SCHEMA_VERSION = 1
PAGES = "windtunnel.report"
"""Where runs are drawn. Named, as pandas names what draws its plots: a record knows no pages."""
STATUSES = ("finished", "rejected", "aborted", "unfinished")
FINISHED, REJECTED, ABORTED, UNFINISHED = range(4)
UNLIKE = ("id", "kv_tokens")
"""Columns of integers that hardly repeat."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def data_frame(columns: Mapping[str, Any], index: Sequence[str] | None = None) -> Any:
    """A pandas DataFrame of columns. Raises InputError where pandas is not installed."""
    try:
        import pandas as pd  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise InputError("to_pandas: pandas is not installed: pip install pandas") from error
    return pd.DataFrame(columns, index=index)


class _Table:
    """Columns of equal length, as a data frame as well."""

    def __repr__(self) -> str:
        names = [entry.name for entry in fields(cast(Any, self))]
        return f"{type(self).__name__}({len(self):,} rows: {', '.join(names)})"

    def __len__(self) -> int:
        return len(getattr(self, fields(cast(Any, self))[0].name))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Its rows: ``pandas.DataFrame(run.requests)`` is ``run.requests.to_pandas()``."""
        columns = self._named()
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return (dict(zip(columns, row, strict=True)) for row in rows)

    def to_pandas(self) -> Any:
        """The columns as a pandas DataFrame. Raises InputError where pandas is not installed."""
        return data_frame(self._named())

    def _named(self) -> dict[str, Any]:
        columns = {entry.name: getattr(self, entry.name) for entry in fields(cast(Any, self))}
        if "status" in columns:
            columns["status"] = np.array(STATUSES)[columns["status"]]
        return columns


@dataclass(frozen=True, eq=False, repr=False)
class Requests(_Table):
    """One entry per request, in order of id; times in seconds, NaN where the event did not happen."""

    id: Integers
    arrival: Floats
    """When the request reached the deployment (in a closed loop: when it was sent)."""
    prompt_tokens: Integers
    output_tokens: Integers
    max_tokens: Integers
    pool: Integers
    replica: Integers
    """Index of the replica that served it, -1 if none."""
    lane: Integers
    """Which of the replica's lanes (data-parallel ranks), -1 if none."""
    status: Integers
    """Index into STATUSES."""
    scheduled: Floats
    """Start of the first step that computed a token of it."""
    first_token: Floats
    finish: Floats
    preemptions: Integers
    cached_tokens: Integers


@dataclass(frozen=True, eq=False, repr=False)
class Iterations(_Table):
    """One entry per run of ``steps`` equal steps of one lane, in the order in which they were simulated.

    A lane is a data-parallel rank, or one of as many lanes of a rank as its pipeline has stages: rank · stages + n mod
    stages for the rank's n-th step. Runs of its lanes that follow each other, with as many steps, take turns.

    ``decodes`` requests emit a token in each step; ``kv_tokens`` is what they have in the cache before the first step
    together, and grows by ``decodes`` a step, or by what drafts yield (``gains``). ``chunk_tokens`` > 0 is a prefill
    chunk at ``chunk_context``, which grows by ``chunk_tokens`` a step. Further chunks of the same step follow as rows
    with ``steps`` = 0. Lanes in lockstep have a row for every step together, idle ones too: each a new one only where
    it changes, or begins after a pause of all of them. ``used_blocks`` and ``waiting`` hold after the first step was
    scheduled. What an idle lane holds for others is a row with ``steps`` = 0, too, from ``start`` to the start of the
    next step in the table: no tokens, and in ``transfer`` seconds times the share of its blocks.
    """

    replica: Integers
    lane: Integers
    start: Floats
    steps: Integers
    decodes: Integers
    kv_tokens: Integers
    chunk_tokens: Integers
    chunk_context: Integers
    used_blocks: Integers
    waiting: Integers
    discarded: Integers
    """Decodes that are no gap of this step's length: their token is not wanted, because the request had ended before
    its declared limit, which an asynchronous scheduler learns one step late; or it follows a pause, and is a stall."""
    transfer: Floats
    """Seconds that each step takes longer than its batch, because blocks move between device and host."""
    unfilled: Integers
    """Where another lane of the group has a row that begins within this one, after j steps: ``used_blocks`` are then
    ⌈(j · (decodes + chunk_tokens) − unfilled) / block_size⌉ more."""

    @classmethod
    def of(cls, rows: NDArray[Any], gains: NDArray[np.int32] | None = None) -> Self:
        """Views of the records that the core wrote, of its sizes of integers."""
        found = cls(**{entry.name: rows[entry.name] for entry in fields(cls)})
        vars(found)["rows"] = rows
        return found if gains is None else found.with_gains(gains, rows["gains"])

    def with_gains(self, gains: NDArray[np.int32], gained_from: Integers) -> Self:
        """The same, of rows that have them."""
        vars(self).update(gains=gains, gained_from=gained_from)
        return self

    @cached_property
    def gains(self) -> NDArray[np.int32]:
        """[m, 2] of steps that verify drafts: tokens in the cache and blocks in use, beyond those of their row."""
        return np.zeros((0, 2), dtype=np.int32)

    @cached_property
    def gained_from(self) -> Integers:
        """[rows] 1 + where the gains of each row's steps begin; 0: a decode gains a token a step."""
        return np.zeros(len(self.steps), dtype=np.int64)

    @cached_property
    def rows(self) -> NDArray[Any]:
        """The columns as the core's records."""
        from windtunnel.core.rebuild import rows_of

        return rows_of(tuple(getattr(self, entry.name) for entry in fields(self)))


@dataclass(frozen=True, eq=False, repr=False)
class Stalls(_Table):
    """One entry per token that followed a preemption, or a pause of this request alone: the gap between ``last_token``
    and ``resumed_token`` (s)."""

    request: Integers
    last_token: Floats
    resumed_token: Floats


@dataclass(frozen=True, eq=False, repr=False)
class Handovers(_Table):
    """What prefill and decode pools add to ``Requests``, one entry per request: how it went from one to the other.

    The ``ttft_`` columns are the parts of the time to first token, in seconds: they add up to first_token − arrival, in
    any order and to the last bit. A part that does not exist is 0; all are NaN without a first token. On disk they are
    further columns of requests.parquet.
    """

    prefill_pool: Integers
    prefill_replica: Integers
    """Index of the replica that computed its prompt, -1 if none; ``Requests.replica`` decoded it."""
    kv_bytes: Floats
    """Moved over the link."""
    ttft_queue: Floats
    """Until the first step of its prompt."""
    ttft_prefill: Floats
    """Until its prompt was computed."""
    ttft_held: Floats
    """Until the decode replica was asked for memory; with a client's clock also the client's path."""
    ttft_admission: Floats
    """Until the decode replica had memory for it; before the prompt, where that waits for it."""
    ttft_transfer: Floats
    """Until its KV was there, waiting for the link included."""
    ttft_join: Floats
    """Until the decode replica gave the client a token."""


@dataclass(frozen=True, eq=False)
class Run:
    """The record of one simulation: the document that metrics, reports and comparisons read."""

    requests: Requests
    iterations: Iterations
    stalls: Stalls
    manifest: dict[str, Any]
    """JSON-able: schema_version, version, deployment, workload, seed, replicas (pool and lanes of each), provenance,
    warnings."""
    times: tuple[Times, ...]
    """The batch-time tables of each pool, or those of its stages."""
    sources: tuple[dict[str, BatchTimes], ...] = ()
    """For each pool: measured, interpolated, modelled → the part of ``times`` that comes from it."""
    groups: tuple[dict[str, BatchTimes], ...] = ()
    """For each pool: gemm, attention, communication, … → the part of ``times`` that it takes."""
    doubts: tuple[dict[str, BatchTimes], ...] = ()
    """For each pool: error → seconds times their relative error, beyond → seconds beyond the data."""
    handovers: Handovers | None = None
    """Of prefill and decode pools."""

    def __repr__(self) -> str:
        deployment, load = self.manifest.get("deployment"), self.manifest.get("workload", {})
        if not deployment:
            return f"Run({len(self.requests.id):,} requests)"
        finished = int((self.requests.status == FINISHED).sum())
        served = f"{load['name']}: {len(self.requests.id):,} requests, {finished:,} finished"
        return f"Run({title(deployment['pools'])}; {served})"

    def _repr_html_(self) -> str:
        """Key figures as cards, for notebooks."""
        html: str = import_module(PAGES).cards(self)
        return html

    def plot(self, name: str = "timeline", slo: Any = None) -> Any:
        """One of the plots of ``windtunnel.plots`` as a plotly figure: requests-cdf, tokens-cdf, timeline, breakdown, …

        Raises InputError for an unknown name.
        """
        found: dict[str, Any] = import_module(PAGES).plots(self, slo)
        if name not in found:
            raise unknown("plot", name, found)
        return found[name]

    def report(self, path: "str | os.PathLike[str]", slo: Any = None) -> Path:
        """Write the run's page, as ``windtunnel.report``; its path. Raises InputError where it cannot be written."""
        written: Path = import_module(PAGES).report(self, path, slo)
        return written

    def iteration_times(self, times: tuple[Times, ...] | None = None) -> "IterationTimes":
        """Every single step of every lane with its start and duration, rebuilt from the rows (bit-equal to the
        engine's)."""
        from windtunnel.core.rebuild import iteration_times

        rows, of = self._unfolded()
        found = iteration_times(rows, *self._log(times)[1:])
        return found if rows is self.iterations.rows else found._replace(row=of[found.row].astype(np.int32))

    def unfolded(self) -> Self:
        """The same run with a row for each lane of a group wherever one of its lanes begins a row: ``used_blocks`` and
        ``waiting`` of all of them are known there. Steps with gains have a row each."""
        rows, _ = self._unfolded()
        if rows is self.iterations.rows:
            return self._one_by_one()
        return replace(self, iterations=Iterations.of(rows, self.iterations.gains))._one_by_one()

    def _one_by_one(self) -> Self:
        """The same run without gains, with a row for each step of those that have some."""
        from windtunnel.core.log import one_by_one

        log = self.iterations
        if not log.gained_from.any():
            return self
        ends = self.step_ends()
        return replace(self, iterations=Iterations.of(one_by_one(log.rows, log.gains, ends.first, ends.end)))

    def _unfolded(self) -> tuple[NDArray[Any], Integers]:
        from windtunnel.core.rebuild import unfold

        rows, _, _, lanes, _ = self._log(None)
        if self.piped or not (lanes > 1).any() or len(rows) == 0:
            return rows, np.zeros(0, dtype=np.int64)
        pools = self.manifest["pools"]
        blocks = np.array([pools[replica["pool"]]["block_size"] for replica in self.manifest["replicas"]])
        return unfold(rows, self.step_ends(), blocks)

    def durations(self, times: tuple[Times, ...]) -> Floats:
        """How long every single step of every lane would take under these tables."""
        from windtunnel.core.rebuild import durations

        return durations(*self._log(times))

    @property
    def piped(self) -> bool:
        """Whether any replica has several stages."""
        return any(replica.get("stages", 1) > 1 for replica in self.manifest["replicas"])

    def step_ends(self) -> "StepEnds":
        """When every step of each group of lanes ends, where no replica has several stages."""
        return self.walked([])[0]

    def walked(self, tables: Sequence[tuple[BatchTimes, ...]]) -> "tuple[StepEnds, list[float]]":
        """``step_ends``, and ``seconds`` under these tables."""
        from windtunnel.core.rebuild import step_ends_of_rows

        log, _, pools, lanes, gains = self._log(None)
        ends, found = step_ends_of_rows(log, (tuple(map(whole, self.times)), *tables), pools, lanes, gains)
        return ends, found[1:].tolist()

    def seconds(self, tables: Sequence[tuple[BatchTimes, ...]]) -> list[float]:
        """What all steps of all lanes take together under each of these tables (one for each pool)."""
        from windtunnel.core.rebuild import seconds

        if self.piped or not tables:
            return [float(self.durations(of_pools).sum()) for of_pools in tables]
        log, _, pools, lanes, gains = self._log(None)
        found: list[float] = seconds(log, tuple(tables), pools, lanes, gains).tolist()
        return found

    def _log(
        self, times: tuple[Times, ...] | None
    ) -> tuple[NDArray[Any], tuple[Times, ...], Integers, Integers, NDArray[np.int32]]:
        """What steps are rebuilt from."""
        pool_of_replica = np.array([replica["pool"] for replica in self.manifest["replicas"]], dtype=np.int64)
        lanes = np.array(
            [replica["lanes"] if replica.get("lockstep") else 1 for replica in self.manifest["replicas"]],
            dtype=np.int64,
        )
        return self.iterations.rows, times or self.times, pool_of_replica, lanes, self.iterations.gains

    def save(self, directory: Path) -> None:
        """Write run.json, requests.parquet, iterations.parquet, stalls.parquet and times.npz; all of it or nothing.

        Raises:
            InputError: the directory cannot be written, or holds something that is not a run.
        """
        directory = Path(os.path.realpath(directory))
        require_place(directory)
        with whole_folder(directory) as scratch:
            self._write(scratch)
            if directory.exists():
                _keep_what_is_not_ours(directory, scratch)
                shutil.rmtree(directory)

    def _write(self, directory: Path) -> None:
        tables: dict[str, Requests | Iterations | Stalls] = {
            "requests": self.requests,
            "iterations": self._one_by_one().iterations,
            "stalls": self.stalls,
        }
        for name, table in tables.items():
            more = self.handovers if table is self.requests else None
            _write_parquet(directory / f"{name}.parquet", table, more)
        arrays: dict[str, Any] = {}
        for pool, times in enumerate(self.times):
            arrays |= _flatten(f"{pool}/times", times)
        for kind, parts in (("sources", self.sources), ("groups", self.groups), ("doubts", self.doubts)):
            for pool, by_name in enumerate(parts):
                for name, part in by_name.items():
                    arrays |= _flatten(f"{pool}/{kind}/{name}", part)
        np.savez_compressed(directory / "times.npz", allow_pickle=False, **arrays)
        text = json.dumps({**self.manifest, "schema_version": SCHEMA_VERSION}, indent=1, allow_nan=False)
        (directory / "run.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a run that ``save`` wrote.

        Raises:
            InputError: not a run, not a whole one, or written by a newer version.
        """
        directory = Path(directory)
        if not _is_run(directory):
            raise InputError(
                f"{str(directory)!r}: not a run (no run.json): give the --output directory of `windtunnel run`"
            )
        try:
            manifest = json.loads((directory / "run.json").read_text(encoding="utf-8"))
            if manifest.get("schema_version") != SCHEMA_VERSION:
                found = manifest.get("schema_version")
                raise InputError(f"{str(directory)!r}: schema_version {found}: this version reads {SCHEMA_VERSION}")
            if not isinstance(manifest.get("replicas"), list):
                raise InputError(f"{str(directory)!r}: unreadable run (run.json lists no replicas): simulate it again")
            with np.load(directory / "times.npz", allow_pickle=False) as arrays:
                times, sources, groups, doubts = _unflatten(dict(arrays))
            return cls(
                requests=Requests(**_read_parquet(directory / "requests.parquet", Requests)),
                iterations=Iterations(**_read_parquet(directory / "iterations.parquet", Iterations)),
                stalls=Stalls(**_read_parquet(directory / "stalls.parquet", Stalls)),
                manifest=manifest,
                times=times,
                sources=sources,
                groups=groups,
                doubts=doubts,
                handovers=_read_handovers(directory / "requests.parquet"),
            )
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{str(directory)!r}: unreadable run ({error}): simulate it again") from error


def require_place(directory: Path) -> None:
    """Raise InputError unless a run can stand there: nothing does, an empty folder or an older run."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"output {str(directory)!r}: is a file: give the name of a folder")
    if directory.is_dir() and any(directory.iterdir()) and not _is_run(directory):
        raise InputError(f"output {str(directory)!r}: holds something that is not a run: choose another folder")


def _keep_what_is_not_ours(directory: Path, new: Path) -> None:
    """Move what else stands in a run's folder, such as its page, into the one that takes its place."""
    ours = {path.name for path in new.iterdir()}
    for path in directory.iterdir():
        if path.name not in ours:
            path.rename(new / path.name)


def _is_run(directory: Path) -> bool:
    return (directory / "run.json").is_file()


def _write_parquet(path: Path, table: Requests | Iterations | Stalls, more: Handovers | None = None) -> None:
    import pyarrow.parquet as pq

    found = arrow_table(table, more)
    pq.write_table(found, path, **encoding(found))


def encoding(table: Any) -> dict[str, Any]:
    """How Parquet writes such a table: times byte by byte, and what hardly repeats without a dictionary, which it would
    fill and give up. Files are a quarter smaller."""
    times = [field.name for field in table.schema if str(field.type) == "double"]
    repeats = [name for name in table.column_names if name not in (*times, *UNLIKE)]
    split = dict.fromkeys(times, "BYTE_STREAM_SPLIT")
    return {"compression": "zstd", "use_dictionary": repeats, "column_encoding": split}


def arrow_table(table: Requests | Iterations | Stalls, more: Handovers | None = None) -> Any:
    """As pyarrow's table, with the columns that stand in the file."""
    import pyarrow as pa

    tables: list[Any] = [table, more] if more else [table]
    columns = {field.name: pa.array(getattr(part, field.name)) for part in tables for field in fields(part)}
    if isinstance(table, Requests):
        columns["status"] = pa.DictionaryArray.from_arrays(pa.array(table.status.astype(np.int8)), list(STATUSES))
    return pa.table(columns).replace_schema_metadata({"schema_version": str(SCHEMA_VERSION)})


def _read_handovers(path: Path) -> Handovers | None:
    import pyarrow.parquet as pq

    apart = "prefill_pool" in pq.read_schema(path).names
    return Handovers(**_read_parquet(path, Handovers)) if apart else None


def _read_parquet(path: Path, kind: type[Requests | Iterations | Stalls | Handovers]) -> dict[str, Any]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(path).read()
    names = [field.name for field in fields(kind)]
    columns = {}
    for name in names:
        if name == "unfilled" and name not in table.column_names:  # before logs were folded
            columns[name] = np.zeros(len(table), dtype=np.int16)
            continue
        column = table.column(name).combine_chunks()
        if kind is Requests and name == "status":
            texts = column.to_pylist()
            columns[name] = np.array([STATUSES.index(text) for text in texts], dtype=np.int64)
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    return columns


def _flatten(prefix: str, times: Times) -> dict[str, Any]:
    """Arrays by name; those of a pipeline's stages have the number of the stage before it."""
    if isinstance(times, StageTimes):
        if times.end is not None:
            raise InputError("stage_end: a run with a function of yours cannot be written: its steps need the function")
        arrays: dict[str, Any] = {f"{prefix}/sends": times.sends}
        for stage, table in enumerate(times.stages):
            arrays |= _flatten(f"{prefix}/{stage}", table)
        return arrays
    return {f"{prefix}/{field.name}": np.asarray(getattr(times, field.name)) for field in fields(BatchTimes)}


Parts = tuple[dict[str, BatchTimes], ...]


def _unflatten(arrays: dict[str, Any]) -> tuple[tuple[Times, ...], Parts, Parts, Parts]:
    by_prefix: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        prefix, name = key.rsplit("/", 1)
        by_prefix.setdefault(prefix, {})[name] = array if array.ndim else array.item()
    pools = range(1 + max(int(prefix.split("/", 1)[0]) for prefix in by_prefix))
    prefixes = [prefix for prefix in by_prefix if prefix.rsplit("/", 1)[0] not in by_prefix]
    tables = {prefix: _table(by_prefix, prefix) for prefix in prefixes}

    def parts(kind: str) -> Parts:
        starts = [f"{pool}/{kind}/" for pool in pools]
        found = [
            {name[len(at) :]: whole(table) for name, table in tables.items() if name.startswith(at)} for at in starts
        ]
        return tuple(found)

    return tuple(tables[f"{pool}/times"] for pool in pools), parts("sources"), parts("groups"), parts("doubts")


def _table(by_prefix: dict[str, dict[str, Any]], prefix: str) -> Times:
    columns = by_prefix[prefix]
    if "sends" not in columns:
        return BatchTimes(**columns)
    stages = range(len(columns["sends"]) + 1)
    return StageTimes(tuple(BatchTimes(**by_prefix[f"{prefix}/{stage}"]) for stage in stages), columns["sends"])
