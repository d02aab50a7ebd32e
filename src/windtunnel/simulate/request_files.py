"""What became of the requests of a streamed run, as Parquet files, of which only the last rows are in memory."""

from dataclasses import field
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.simulate.run import Requests, arrow_table, encoding

ROWS = 1 << 14
"""Requests that are written at once."""


@dataclass(eq=False)
class RequestFiles:
    """A file for each part of the replicas, with the columns of requests.parquet; its rows are in the order in which
    they became known, and ``id`` says which one of the load each is. Close it when all are there."""

    folder: Path
    _waiting: dict[int, list[Any]] = field(default_factory=dict)
    _writers: dict[int, Any] = field(default_factory=dict)

    def add(self, part: int, requests: Requests) -> None:
        """Requests of a part that have ended."""
        if len(requests.id):
            waiting = self._waiting.setdefault(part, [])
            waiting.append(arrow_table(requests))
            if sum(map(len, waiting)) >= ROWS:
                self._write(part)

    def close(self) -> None:
        """Write the rest."""
        for part in self._waiting:
            self._write(part)
        for writer in self._writers.values():
            writer.close()

    def _write(self, part: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables, self._waiting[part] = self._waiting[part], []
        if tables:
            table = pa.concat_tables(tables).unify_dictionaries()
            if part not in self._writers:
                self._writers[part] = pq.ParquetWriter(
                    self.folder / f"requests-{part:05}.parquet", table.schema, **encoding(table)
                )
            self._writers[part].write_table(table)
