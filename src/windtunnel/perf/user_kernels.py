"""The user's own kernel database: the installed package's tables and those of newer packages, merged into one folder.

Nothing is fetched: ``add`` takes a wheel or a folder that is already here. Of a table that several databases hold, that
of the newest one counts; versions of engines that only older ones hold stay. ``kernels.json`` beside the tables says
where each is from, under which licence and of which day. Without an own database the installed package answers.
"""

import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment.versions import version_key
from windtunnel.errors import InputError
from windtunnel.files import parse_json, read_text
from windtunnel.perf.database import own_systems, packaged_systems

TABLE = re.compile(r"data(/[A-Za-z0-9][\w.+-]*){4}/[\w.+-]+\.(parquet|yaml)|[\w-]+\.yaml")
"""Files of a database, below its ``systems`` folder."""
NAMES = "kernels.json"
UNSTATED = "licence not stated"


@dataclass(frozen=True)
class Kernels:
    """A database that tables are from."""

    name: str
    version: str
    licence: str
    date: str
    """Of its newest table, YYYY-MM-DD; empty where that is not known, as of an installed package."""
    tables: int = 0
    """Of the merged database that are its own."""

    @property
    def words(self) -> str:
        """``aisimulate 0.13.0 of 2026-10-27 (Apache-2.0)``."""
        of = f" of {self.date}" if self.date else ""
        return f"{self.name} {self.version}".rstrip() + f"{of} ({self.licence})"

    @property
    def age(self) -> tuple[Any, ...]:
        """Sort key: newer ones are larger."""
        return version_key(self.version), self.version, self.date


@dataclass(frozen=True)
class Source:
    """Where a database lies: a folder, or a wheel and the folder in it."""

    path: Path
    root: str
    """Of a wheel: what the names of the files begin with."""
    about: Kernels

    def files(self) -> Iterator[str]:
        """Names below the ``systems`` folder."""
        if self.path.is_file():
            with zipfile.ZipFile(self.path) as wheel:
                names = [name.removeprefix(self.root) for name in wheel.namelist() if name.startswith(self.root)]
        else:
            names = [path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()]
        yield from sorted(name for name in names if TABLE.fullmatch(name))

    def copy(self, names: list[str], folder: Path) -> None:
        """Copy files into a folder, their times kept: the cache of batch times tells tables apart by them."""
        if self.path.is_dir():
            for name in names:
                _place(folder, name)
                shutil.copy2(self.path / name, folder / name)
            return
        with zipfile.ZipFile(self.path) as wheel:
            for name in names:
                _place(folder, name)
                (folder / name).write_bytes(wheel.read(self.root + name))
                stamp = datetime(*wheel.getinfo(self.root + name).date_time, tzinfo=UTC).timestamp()
                os.utime(folder / name, (stamp, stamp))


def _place(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)


def databases() -> list[Kernels]:
    """What the user's own database is made of, newest first; nothing without one."""
    path = own_systems() / NAMES
    if not path.is_file():
        return []
    try:
        document = parse_json(read_text(path))
        found = [Kernels(**entry) for entry in document["databases"]]
    except (InputError, TypeError, KeyError) as error:
        raise InputError(f"{path}: not written by windtunnel kernels add: use windtunnel kernels remove") from error
    return sorted(found, key=lambda one: one.age, reverse=True)


def packaged() -> list[Kernels]:
    """The installed package's database; nothing without it."""
    systems = packaged_systems()
    if systems is None:
        return []
    source = source_of(systems)
    return _counted([source.about], dict.fromkeys(source.files(), 0))


def add(target: Path) -> list[Kernels]:
    """Merge the database of a wheel or folder into the user's own, which begins as the installed package's.

    Returns what it is made of now. Raises InputError for what holds no tables, or cannot be written.
    """
    source, own = source_of(target), own_systems()
    own.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kernels-", dir=own.parent) as place:
        merged = Path(place) / "systems"
        of, known = _begun(merged)
        if any((one.name, one.version) == (source.about.name, source.about.version) for one in known):
            raise InputError(f"{str(target)!r}: {source.about.words} is there already: see windtunnel kernels show")
        newer = [name for name in source.files() if name not in of or source.about.age >= known[of[name]].age]
        source.copy(newer, merged)
        known.append(source.about)
        of |= dict.fromkeys(newer, len(known) - 1)
        found = _counted(known, of)
        document = {"schema_version": 1, "databases": [asdict(one) for one in found], "of": of}
        (merged / NAMES).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        shutil.rmtree(own, ignore_errors=True)
        merged.rename(own)
    return databases()


def remove() -> list[Kernels]:
    """Forget the user's own database, and return what it was made of; the installed package answers again."""
    try:
        found = databases()
    except InputError:  # what it was made of is lost
        found = []
    shutil.rmtree(own_systems(), ignore_errors=True)
    return found


def _counted(known: list[Kernels], of: dict[str, int]) -> list[Kernels]:
    tables = [sum(index == at and name.endswith(".parquet") for name, at in of.items()) for index in range(len(known))]
    return [
        Kernels(one.name, one.version, one.licence, one.date, count) for one, count in zip(known, tables, strict=True)
    ]


def _begun(merged: Path) -> tuple[dict[str, int], list[Kernels]]:
    """A copy of the user's own database, or of the installed package's, and which database each file is from."""
    own, packaged = own_systems(), packaged_systems()
    if (own / NAMES).is_file():
        shutil.copytree(own, merged)
        document = parse_json(read_text(own / NAMES))
        return dict(document["of"]), [Kernels(**entry) for entry in document["databases"]]
    merged.mkdir()
    if packaged is None:
        return {}, []
    shutil.copytree(packaged, merged, dirs_exist_ok=True)
    source = source_of(packaged)
    return dict.fromkeys(source.files(), 0), [source.about]


def source_of(target: Path) -> Source:
    """The database in a wheel, in a ``systems`` folder, or below a package's folder."""
    if target.is_file() and zipfile.is_zipfile(target):
        return _in_wheel(target)
    if target.is_file() or not target.exists():
        raise InputError(f"{str(target)!r}: must be a wheel or a folder with a kernel database")
    roots = [target, target / "systems", *sorted(target.glob("*/systems"))]
    folder = next((root for root in roots if any(root.glob("data/*/gemm/*/*/gemm_perf.parquet"))), None)
    if folder is None:
        raise InputError(f"{str(target)!r}: no kernel tables: must hold systems/data/DEVICE/gemm/…/gemm_perf.parquet")
    package = folder.parent if folder.name == "systems" else folder
    infos = sorted(package.parent.glob(f"{package.name.removesuffix('_core')}*.dist-info/METADATA"))
    if infos:
        return Source(folder, "", _described(infos[-1].read_text(encoding="utf-8"), [], ""))
    newest = max(path.stat().st_mtime for path in folder.glob("data/*/*/*/*/*.parquet"))
    day = datetime.fromtimestamp(newest, UTC).date().isoformat()
    return Source(folder, "", Kernels(package.name, "", _licence_in(folder), day))


def _in_wheel(path: Path) -> Source:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        tables = [name for name in names if re.search(r"systems/data/.+/gemm/.+/gemm_perf\.parquet$", name)]
        metadata = next((name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)), None)
        if not tables or metadata is None:
            raise InputError(f"{str(path)!r}: no kernel tables: must be a wheel with systems/data/DEVICE/gemm/…")
        day = datetime(*max(wheel.getinfo(name).date_time for name in tables), tzinfo=UTC).date().isoformat()
        licences = [name for name in names if PurePosixPath(name).name in ("LICENSE", "LICENSE.txt")]
        texts = [wheel.read(name).decode(errors="replace") for name in licences]
        about = _described(wheel.read(metadata).decode(), texts, day)
    return Source(path, tables[0].partition("systems/data/")[0] + "systems/", about)


def _described(metadata: str, licences: list[str], day: str) -> Kernels:
    """From a package's METADATA (core metadata 2.4) and the texts of its licences."""
    from email.parser import HeaderParser  # imports twelve modules

    fields = HeaderParser().parsestr(metadata)
    stated = fields.get("License-Expression") or fields.get("License") or ""
    if not stated and any("Apache License" in text for text in licences):
        stated = "Apache-2.0"
    return Kernels(str(fields["Name"]), str(fields["Version"]), stated.splitlines()[0] if stated else UNSTATED, day)


def _licence_in(folder: Path) -> str:
    """What the tables' own notes say (SPDX)."""
    for path in sorted(folder.glob("data/*/*/*/*/*.yaml")):
        if found := re.search(r"SPDX-License-Identifier:\s*(\S+)", path.read_text(encoding="utf-8")):
            return found.group(1)
    return UNSTATED
