"""Store: the studies and simulations of a file, each simulation once. SQLite, numbers and JSON; nothing is unpickled.

Only the process of the search writes, one transaction a report, so that a killed search or worker loses only what was
not yet reported. Several searches may share a store: a candidate that one of them is asking is claimed, and the others
wait for its answer instead of simulating it too.
"""

import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from windtunnel.errors import InputError, unknown
from windtunnel.plan.bound import Bound
from windtunnel.plan.elimination import Asked
from windtunnel.plan.outcome import Outcome

APPLICATION, VERSION = 0x77696E64, 1
"""``PRAGMA application_id`` (the letters "wind") and ``user_version`` of our files."""
PATIENCE = 30.0
"""Seconds for which a transaction waits for another process's."""
LEASE = 60.0
"""Seconds after which a claim lapses unless renewed; at once if its process is gone."""

SCHEMA = """
CREATE TABLE studies (
  name TEXT PRIMARY KEY, created REAL NOT NULL, question TEXT NOT NULL, objective TEXT NOT NULL, spec TEXT NOT NULL,
  answer TEXT);
CREATE TABLE trials (
  key TEXT PRIMARY KEY, question TEXT NOT NULL, pools TEXT NOT NULL, rate REAL, replicas INTEGER NOT NULL,
  met INTEGER NOT NULL, outcome TEXT NOT NULL, cpu_seconds REAL NOT NULL, recorded REAL NOT NULL);
CREATE INDEX trials_of_pools ON trials (question, pools);
CREATE TABLE bounds (
  question TEXT NOT NULL, candidate TEXT NOT NULL, pools TEXT NOT NULL, rate REAL NOT NULL, stretch REAL NOT NULL,
  replicas INTEGER NOT NULL, PRIMARY KEY (question, candidate));
CREATE TABLE claims (
  question TEXT NOT NULL, pools TEXT NOT NULL, host TEXT NOT NULL, process INTEGER NOT NULL, renewed REAL NOT NULL,
  PRIMARY KEY (question, pools));
"""


class Stored(NamedTuple):
    """One study of a store."""

    name: str
    created: float
    """Seconds since 1970."""
    question: str
    objective: str
    spec: dict[str, Any]
    answer: dict[str, Any] | None
    """None while it is not finished."""


class Store:
    """An open file of studies. ``:memory:`` keeps nothing."""

    def __init__(self, path: Path | str = ":memory:") -> None:
        self.path = str(path)
        with self._complaints():
            if self.path != ":memory:":
                _check(Path(path))
            self._connection = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
            if self._pragma("application_id") != APPLICATION:
                self._create()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release every claim of this process and close the file."""
        with suppress(InputError):
            self.release_all()
        self._connection.close()

    def begin(self, name: str, question: str, objective: str, spec: Mapping[str, Any]) -> None:
        """Start a study, or resume the one of this name.

        Raises:
            InputError: the name belongs to another question or space.
        """
        with self._transaction() as connection:
            text = json.dumps(spec, sort_keys=True)
            row = connection.execute("SELECT question, objective, spec FROM studies WHERE name = ?", (name,)).fetchone()
            if row is None:
                values = (name, time.time(), question, objective, text)
                connection.execute("INSERT INTO studies VALUES (?, ?, ?, ?, ?, NULL)", values)
            elif row[:2] != (question, objective):
                raise InputError(
                    f"study {name!r} in {self.path} asks something else (other load, limits or objective): "
                    "choose another name; simulations are shared by all studies of the store"
                )
            else:
                connection.execute("UPDATE studies SET spec = ?, answer = NULL WHERE name = ?", (text, name))

    def finish(self, name: str, answer: Mapping[str, Any]) -> None:
        """Store the answer of a study."""
        with self._transaction() as connection:
            connection.execute("UPDATE studies SET answer = ? WHERE name = ?", (json.dumps(answer), name))

    def studies(self) -> list[Stored]:
        """All studies, the oldest first."""
        with self._complaints():
            rows = self._connection.execute("SELECT * FROM studies ORDER BY created, name").fetchall()
            return [
                Stored(name, created, question, objective, _parsed(spec) or {}, _parsed(answer))
                for name, created, question, objective, spec, answer in rows
            ]

    def study(self, name: str) -> Stored:
        """One study. Raises InputError with the nearest name."""
        by_name = {study.name: study for study in self.studies()}
        if name not in by_name:
            raise unknown("study", name, by_name)
        return by_name[name]

    def record(self, question: str, asked: Mapping[str, Asked]) -> None:
        """Keep new trials; one whose key is there already stays as it is."""
        rows = [
            (
                key,
                question,
                one.pools,
                one.outcome.rate,
                one.replicas,
                one.outcome.met,
                json.dumps(one.outcome.to_json()),
                one.cpu_seconds,
                time.time(),
            )
            for key, one in asked.items()
        ]
        with self._transaction() as connection:
            connection.executemany("INSERT OR IGNORE INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def known(self, question: str, pools: Iterable[str]) -> dict[str, Outcome]:
        """All trials of these pools under a question, by key."""
        found: dict[str, Outcome] = {}
        with self._complaints():
            for one in set(pools):
                sql = "SELECT key, outcome FROM trials WHERE question = ? AND pools = ?"
                for key, text in self._connection.execute(sql, (question, one)):
                    found[key] = Outcome.from_json(json.loads(text))
        return found

    def trials(self, question: str | None = None) -> list[dict[str, Any]]:
        """Every trial as a row (of one question): key, question, pools, rate, replicas, met, cpu_seconds, recorded and
        the outcome's numbers."""
        names = ("key", "question", "pools", "rate", "replicas", "met", "cpu_seconds", "recorded")
        sql = f"SELECT {', '.join(names)}, outcome FROM trials"
        where, values = ("", ()) if question is None else (" WHERE question = ?", (question,))
        with self._complaints():
            rows = self._connection.execute(f"{sql}{where} ORDER BY recorded, key", values).fetchall()
        return [dict(zip(names, row[:-1], strict=True)) | {"outcome": json.loads(row[-1])} for row in rows]

    def record_bounds(self, question: str, bounds: Mapping[str, tuple[str, Bound]]) -> None:
        """Keep bounds: key of the candidate → (key of its pools, bound)."""
        rows = [(question, key, pools, b.rate, b.stretch, b.replicas) for key, (pools, b) in bounds.items()]
        with self._transaction() as connection:
            connection.executemany("INSERT OR IGNORE INTO bounds VALUES (?, ?, ?, ?, ?, ?)", rows)

    def bounds(self, question: str) -> dict[str, tuple[str, Bound]]:
        """The bounds that are known under a question."""
        with self._complaints():
            sql = "SELECT candidate, pools, rate, stretch, replicas FROM bounds WHERE question = ?"
            rows = self._connection.execute(sql, (question,)).fetchall()
        return {key: (pools, Bound(rate, stretch, replicas)) for key, pools, rate, stretch, replicas in rows}

    def claim(self, question: str, pools: Sequence[str]) -> set[str]:
        """Take these pools for this process, and return those that were free; they stay taken until ``release``."""
        host, process = _owner()
        with self._transaction() as connection:
            taken = set()
            for one in pools:
                sql = "SELECT host, process, renewed FROM claims WHERE question = ? AND pools = ?"
                row = connection.execute(sql, (question, one)).fetchone()
                if row is None or not _alive(*row) or row[:2] == (host, process):
                    values = (question, one, host, process, time.time())
                    connection.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?, ?)", values)
                    taken.add(one)
        return taken

    def renew(self) -> None:
        """Extend the claims of this process."""
        with self._transaction() as connection:
            sql = "UPDATE claims SET renewed = ? WHERE host = ? AND process = ?"
            connection.execute(sql, (time.time(), *_owner()))

    def release(self, question: str, pools: Iterable[str]) -> None:
        """Release claims."""
        with self._transaction() as connection:
            rows = [(question, one, *_owner()) for one in pools]
            sql = "DELETE FROM claims WHERE question = ? AND pools = ? AND host = ? AND process = ?"
            connection.executemany(sql, rows)

    def release_all(self) -> None:
        """Release every claim of this process."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM claims WHERE host = ? AND process = ?", _owner())

    def _create(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        with self._transaction() as connection:
            if self._pragma("application_id") == APPLICATION:
                return
            for statement in SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._complaints():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @contextmanager
    def _complaints(self) -> Iterator[None]:
        """Turn SQLite's errors into an InputError."""
        try:
            yield
        except (sqlite3.Error, json.JSONDecodeError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"store {self.path!r}: {reason}: nothing was changed; use another file") from error


def _check(path: Path) -> None:
    """Refuse a file that is not ours, is newer or is damaged, before anything is written."""
    if path.is_dir():
        raise InputError(f"store {str(path)!r}: is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise InputError(f"store {str(path)!r}: there is no folder {str(path.parent)!r}")
    if not path.exists() or path.stat().st_size == 0:
        return
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=PATIENCE)
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if application == 0 and empty:  # another search is about to fill it
            return
        if application != APPLICATION:
            raise InputError(f"store {str(path)!r}: is not a store of studies: choose another file")
        if version != VERSION:
            raise InputError(f"store {str(path)!r}: has version {version}, this windtunnel reads {VERSION}")
        if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise InputError(
                f"store {str(path)!r}: is damaged ({' '.join(found.split())}): nothing was changed; use another file"
            )
    finally:
        connection.close()


def _parsed(text: str | None) -> dict[str, Any] | None:
    document: dict[str, Any] | None = json.loads(text) if text else None
    return document


def _owner() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _alive(host: str, process: int, renewed: float) -> bool:
    """Whether the owner of a claim is still at work."""
    if time.time() - renewed > LEASE:
        return False
    if host != socket.gethostname():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
