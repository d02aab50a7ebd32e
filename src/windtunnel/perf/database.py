"""The kernel database: where it is, which version answers, how its tables are read, and what it knows of a device.

The tables come with the package aiconfigurator-core (Apache-2.0) as
``systems/data/<system>/<family>/<backend>/<version>/<table>.parquet``. The package is located, never imported:
importing it loads compiled code that is not needed to read Parquet files.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment.versions import version_key
from windtunnel.files import data_folder
from windtunnel.hardware import Device
from windtunnel.perf.corrections import ALL, Corrections

KEPT = 32
"""Tables that a process keeps decoded: building batch times asks for a dozen, for every configuration."""
PLACE = "WINDTUNNEL_KERNELS"
"""Environment variable: another ``systems`` folder to read instead of the package's."""


def find_systems() -> Path | None:
    """The ``systems`` folder: the variable's, else the user's own database (``perf.user_kernels``), else the package's;
    None where there is none (the roofline answers then)."""
    if os.environ.get(PLACE):
        path = Path(os.environ[PLACE])
        return path if path.is_dir() else None
    return own_systems() if own_systems().is_dir() else packaged_systems()


def own_systems() -> Path:
    """Where ``windtunnel kernels add`` keeps the user's own database."""
    return data_folder() / "kernels" / "systems"


def packaged_systems() -> Path | None:
    """The ``systems`` folder of the installed package, or None without it."""
    spec = find_spec("aiconfigurator_core")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "systems"
        if path.is_dir():
            return path
    return None


@dataclass(frozen=True, eq=False)
class Columns:
    """Some columns of a table: numbers as arrays, texts as codes with their names."""

    numbers: Mapping[str, NDArray[Any]]
    texts: Mapping[str, tuple[NDArray[np.int64], tuple[str, ...]]]

    def __len__(self) -> int:
        return len(next(iter(self.numbers.values())))

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.numbers[name]

    def values(self, name: str) -> tuple[str, ...]:
        """The different texts of a column that occur, sorted."""
        codes, names = self.texts[name]
        return tuple(sorted({names[code] for code in np.unique(codes)}))

    def where(self, **equal: str | int) -> "Columns":
        """The rows whose columns equal these values."""
        keep = np.ones(len(self), dtype=bool)
        for name, value in equal.items():
            if name in self.texts:
                codes, names = self.texts[name]
                keep &= codes == (names.index(str(value)) if value in names else -1)
            else:
                keep &= self.numbers[name] == value
        return self.take(keep)

    def of_kernel(self, *words: str) -> NDArray[np.bool_]:
        """Which rows have one of these words in their ``kernel_source``, be its letters large or small."""
        codes, names = self.texts["kernel_source"]
        return np.array([any(word in name.lower() for word in words) for name in names], dtype=bool)[codes]

    def take(self, keep: NDArray[Any]) -> "Columns":
        """The rows of a mask or an index."""
        texts = {name: (codes[keep], names) for name, (codes, names) in self.texts.items()}
        return Columns({name: column[keep] for name, column in self.numbers.items()}, texts)


@dataclass(eq=False)
class Database:
    """The tables of one system and backend, seen from one version.

    A table that this version does not hold is taken from the newest older version that does, never from a newer one.
    ``opened`` lists every table that answered, with its version.
    """

    systems: Path
    system: str
    backend: str
    version: str
    rule: str
    """How the version was chosen: ``exact``, ``current``, or ``nearest older``."""
    opened: dict[str, str] = field(default_factory=dict)
    """table -> path of the file below the systems folder."""
    _read: dict[tuple[Any, ...], Columns | None] = field(default_factory=dict)

    def path(self, family: str, table: str, backend: str | None = None) -> Path | None:
        """The file that answers for a table, or None."""
        files = self._files(family, table, backend)
        if not files:
            return None
        self.opened[table if backend is None else f"{table} ({backend})"] = str(files[-1].relative_to(self.systems))
        return files[-1]

    def read(self, family: str, table: str, texts: tuple[str, ...], backend: str | None = None) -> Columns | None:
        """A table's number columns and the named text columns, or None where it was not measured."""
        key = (family, table, texts, backend)
        if key not in self._read:
            path = self.path(family, table, backend)
            self._read[key] = _read_once(path, texts, _state(path)) if path else None
        return self._read[key]

    def read_of(self, engine: str, family: str, table: str, texts: tuple[str, ...]) -> Columns | None:
        """An engine's table on this device. The first version that has it also stands for older ones of this engine."""
        own = self.read(family, table, texts) if engine == self.backend else None
        return own if own is not None else self.read(family, table, texts, engine)

    def versions(
        self, family: str, table: str, texts: tuple[str, ...], backend: str | None = None
    ) -> Iterator[Columns]:
        """The table of every version that may answer, newest first: later versions may hold fewer shapes."""
        for path in reversed(self._files(family, table, backend)):
            self.opened[f"{table} ({path.parent.parent.name} {path.parent.name})"] = str(path.relative_to(self.systems))
            yield _read_once(path, texts, _state(path))

    def _files(self, family: str, table: str, backend: str | None) -> list[Path]:
        folder = self.systems / "data" / self.system / family / (backend or self.backend)
        files = sorted(folder.glob(f"*/{table}.parquet"), key=lambda file: version_key(file.parent.name))
        if backend is None:
            files = [file for file in files if version_key(file.parent.name) <= version_key(self.version)]
        return files

    @cached_property
    def stamp(self) -> str:
        """Names, sizes and times of all files of this system: changes when any table does."""
        root = self.systems / "data" / self.system
        return ";".join(
            f"{file.relative_to(root)}:{file.stat().st_size}:{file.stat().st_mtime_ns}"
            for file in sorted(root.glob("*/*/*/*.parquet"))
        )


T = TypeVar("T")


@dataclass(eq=False)
class Measured:
    """What one database knows about one device. Each kind of kernel reads its table when it is first asked."""

    database: Database
    device: Device
    corrections: Corrections = ALL
    _tables: dict[Any, Any] = field(default_factory=dict)

    def table(self, kind: Callable[["Measured"], T]) -> T:
        """The table of a kind of kernel, made once from all this."""
        if kind not in self._tables:
            self._tables[kind] = kind(self)
        found: T = self._tables[kind]
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What tables took from other shapes and engines, in the order in which they were first asked."""
        return tuple(note for table in self._tables.values() for note in getattr(table, "notes", ()))


@dataclass(eq=False)
class Table:
    """What a kind of kernel reads in one database, on one device."""

    known: Measured
    notes: list[str] = field(default_factory=list)
    """What was taken from other shapes and engines, for the provenance."""
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def database(self) -> Database:
        """Whose tables answer."""
        return self.known.database

    @property
    def device(self) -> Device:
        """Where they were measured."""
        return self.known.device

    @property
    def backend(self) -> str:
        """The deployment's own engine."""
        return self.known.database.backend

    def once(self, make: Callable[..., T], *key: Any) -> T:
        """``make(*key)``, made when it is first asked."""
        place = (make.__name__, *key)
        if place not in self._made:
            self._made[place] = make(*key)
        found: T = self._made[place]
        return found

    def engines(self, *others: str) -> tuple[str, ...]:
        """Whose tables are asked: the deployment's own engine, then these others."""
        return tuple(dict.fromkeys((self.backend, *others)))

    def note(self, text: str) -> None:
        """Say where times come from, once."""
        if text not in self.notes:
            self.notes.append(text)


def medians(x: NDArray[Any], values: NDArray[np.float64]) -> dict[int, float]:
    """Points of an axis, ascending, and the median of what was measured at each."""
    return {int(at): float(np.median(values[x == at])) for at in np.unique(x)}


def open_database(system: str, backend: str, wanted: str | None = None) -> Database | None:
    """The database of a system and backend, or None where there is none.

    Version rule: the wanted one if it holds gemm tables, else the current one (``query_versions.yaml``; the newest with
    gemm tables where that file has no entry), unless the wanted one is older than it: then the nearest older.
    """
    systems = find_systems()
    if systems is None:
        return None
    folder = systems / "data" / system / "gemm" / backend
    versions = sorted((file.parent.name for file in folder.glob("*/gemm_perf.parquet")), key=version_key)
    if not versions:
        return None
    if wanted in versions:
        return Database(systems, system, backend, str(wanted), "exact")
    current = _current(systems, system, backend)
    chosen = current if current in versions else versions[-1]
    older = [version for version in versions if wanted and version_key(version) < version_key(wanted)]
    if wanted and version_key(wanted) < version_key(chosen) and older:
        return Database(systems, system, backend, older[-1], "nearest older")
    return Database(systems, system, backend, chosen, "current")


def measured_systems(backend: str) -> list[str]:
    """Systems with gemm tables of a backend."""
    systems = find_systems()
    if systems is None:
        return []
    return sorted({file.parents[3].name for file in systems.glob(f"data/*/gemm/{backend}/*/gemm_perf.parquet")})


def _current(systems: Path, system: str, backend: str) -> str | None:
    """What ``query_versions.yaml`` calls current. Its two levels are read with patterns: YAML libraries are slow to
    import."""
    path = systems / "query_versions.yaml"
    if not path.is_file():
        return None
    section, block, found = "", "", {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line[:1].isalpha():
            section, block = line.split(":")[0], ""
        elif match := re.match(r"  (\w+):\s*$", line):
            block = match.group(1)
        elif match := re.match(r"\s+(\w+):.*current:\s*[\"']?([^\"',}\s]+)", line):
            found[section, block, match.group(1)] = match.group(2)
    return found.get(("overrides", system, backend)) or found.get(("defaults", "", backend))


def _state(path: Path) -> tuple[int, int]:
    """Changes when the file does."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=KEPT)
def _read_once(path: Path, texts: tuple[str, ...], state: tuple[int, int]) -> Columns:  # noqa: ARG001 - part of the key
    """As ``read_columns``; a file that has changed is read again."""
    return read_columns(path, texts)


def read_columns(path: Path, texts: tuple[str, ...]) -> Columns:
    """Number columns and the named text columns of one file. Only columns that are used are decoded."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    file = pq.ParquetFile(path, read_dictionary=[name for name in texts if name in schema.names])
    wanted = [
        name
        for name, kind in zip(schema.names, schema.types, strict=True)
        if name in texts or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    ]
    table = file.read(columns=wanted)
    numbers: dict[str, NDArray[Any]] = {}
    coded: dict[str, tuple[NDArray[np.int64], tuple[str, ...]]] = {}
    for name in wanted:
        column = table.column(name).combine_chunks()
        if name in texts:
            column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
            column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
            coded[name] = (
                _array(column.indices).astype(np.int64),
                tuple(map(str, column.dictionary.to_pylist())),
            )
        else:
            numbers[name] = _array(column)
    return Columns(numbers, coded)


def release_what_was_read() -> None:
    """What Arrow has read and nobody holds any more goes back to the system: 25 MB for a table of batch times."""
    if arrow := sys.modules.get("pyarrow"):
        arrow.default_memory_pool().release_unused()


def _array(column: Any) -> NDArray[Any]:
    """The numbers of a column. Its ``to_numpy`` imports pandas where there is one, 60 MB for nothing."""
    return np.from_dlpack(column) if column.null_count == 0 else column.to_numpy(zero_copy_only=False)


def one_per_key(keys: list[NDArray[Any]], seconds: NDArray[np.float64], lane: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of one row per key: of the lane with most rows, among its repeats the median.

    Lanes are different kernels for one shape; ``lane`` holds their codes. A key that the densest lane lacks falls to
    the next: engines choose kernels by shape. Non-finite and non-positive times are dropped.
    """
    good = np.flatnonzero(np.isfinite(seconds) & (seconds > 0))
    if not len(good):
        return good
    counts = np.bincount(lane[good])
    rank = np.empty(len(counts), dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    order = good[np.lexsort((seconds[good], rank[lane[good]], *(key[good] for key in reversed(keys))))]
    new_key = np.zeros(len(order), dtype=bool)
    new_lane = np.zeros(len(order), dtype=bool)
    new_key[0] = new_lane[0] = True
    for key in keys:
        new_key[1:] |= key[order][1:] != key[order][:-1]
    new_lane[1:] = new_key[1:] | (lane[order][1:] != lane[order][:-1])
    starts = np.flatnonzero(new_lane)
    sizes = np.diff(np.append(starts, len(order)))
    first = new_key[starts]
    chosen: NDArray[np.int64] = order[starts[first] + (sizes[first] - 1) // 2]
    return chosen
