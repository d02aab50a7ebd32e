"""Logs of gateways, proxies and tracing tools → a workload: columns and units are guessed, useless rows left out.

Names are those of OpenAI's ``usage``, OpenTelemetry's GenAI conventions (flat, or as OTLP JSON), LiteLLM's spend logs,
Langfuse's exports, vLLM's and SGLang's request dumps, and what clouds and gateways call the same numbers.
"""

import csv
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.files import parse_json
from windtunnel.workload import graph
from windtunnel.workload.agents.messages import MESSAGE
from windtunnel.workload.columns import Workload
from windtunnel.workload.csv_traces import check_names
from windtunnel.workload.transforms import spread

Row = dict[str, Any]
NAMES: Mapping[str, tuple[str, ...]] = {
    "arrival": (
        "arrival", "arrival_time", "received_at", "request_time", "start_time_unix_nano", "start_time", "started_at",
        "starttime", "start_ns", "timestamp", "timestamp_ms", "ts", "created_at", "created", "create_time",
        "time_generated", "time_generated_utc", "logging_time", "datetime", "time", "date",
    ),
    "prompt_tokens": (
        "prompt_tokens", "input_tokens", "num_prompt_tokens", "prompttokens", "inputtokens", "tokens_in", "prompt_len",
        "input_len", "input_length", "contexttokens", "num_prefill_tokens", "usage_input", "usagedetails_input",
        "input_token_count", "prompt_token_count", "token_count_prompt", "tokens_prompt", "request_tokens",
        "prompt_eval_count", "input_sequence_length_value", "req_units",
    ),
    "output_tokens": (
        "completion_tokens", "output_tokens", "num_generation_tokens", "completiontokens", "outputtokens", "tokens_out",
        "generatedtokens", "output_len", "output_length", "num_decode_tokens", "usage_output", "usagedetails_output",
        "output_token_count", "candidates_token_count", "token_count_completion", "tokens_completion",
        "response_tokens", "generated_tokens", "eval_count", "output_sequence_length_value", "res_units",
    ),
}  # fmt: skip
"""Our column → names it has elsewhere, the most telling first; also as the last part of a nested name."""
NEEDED = ("arrival", "prompt_tokens", "output_tokens")
CHOSEN = ("arrival_ms", "max_tokens", "priority", "session", "duration", "think_time")
"""More of our columns, which are only read where they are named: what they mean cannot be guessed from a word."""
STATUS = ("status_code", "http_status", "response_status", "status")
DURATIONS = {
    ("s", "sec", "secs", "seconds"): 1.0,
    ("ms", "millis", "milliseconds"): 1e-3,
    ("us",): 1e-6,
    ("ns", "nano"): 1e-9,
}
"""Ends of the names of durations → seconds."""
UNITS = ((1e17, 1e-9, "ns"), (1e14, 1e-6, "µs"), (1e11, 1e-3, "ms"), (-np.inf, 1.0, "s"))
"""Times above this are in that unit: factor to seconds, and its name."""
ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".log")
ORDERS = {"dmy": "%d/%m/%Y", "mdy": "%m/%d/%Y"}
TELLING = {"prompt_tokens": "prompt|input|request", "output_tokens": "output|completion|response|generat"}
"""What the names of columns of tokens have in common, for a proposal."""
OF_TRACES = {"hash_ids", "hash_id_scope", "orchestrator", "prompt_0"}
"""Keys of requests that say what they share, and of conversations: no log has them."""
LISTS = ("input_lens", "output_lens", "start_times")
"""Columns of the detailed results of ``vllm bench serve``, one number a request."""


@dataclass(frozen=True)
class Imported:
    """A log as a workload, and what became of its rows."""

    workload: Workload
    columns: Mapping[str, str]
    """Our column → the log's."""
    rows: int
    dropped: Mapping[str, int]
    """Why rows were left out → how many."""
    first_dropped: int | None
    """The number of the first row that was left out, from 1."""
    notes: tuple[str, ...] = field(default=())

    @property
    def left_out(self) -> str:
        """How many rows were left out and why; empty if none was."""
        why = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
        first = self.first_dropped
        return f"{sum(self.dropped.values()):,} of {self.rows:,} rows: {why}; the first is row {first:,}" if why else ""

    @property
    def matched(self) -> str:
        """Which column of the log was taken for which of ours."""
        return ", ".join(f"{ours} = {theirs}" for ours, theirs in self.columns.items())

    @property
    def said(self) -> list[str]:
        """All of it, for a reader who did not ask for an import."""
        left_out = [f"left out {self.left_out}"] if self.dropped else []
        return [f"read as a log: {self.matched}; {'; '.join(self.notes)}", *left_out]


def import_logs(
    paths: Sequence[Path], columns: Mapping[str, str] | None = None, *, jitter: float = 0.0, dates: str | None = None
) -> Imported:
    """Read log files, or all in folders, as one workload in the order of arrival.

    Args:
        paths: CSV with any separator, JSON lines, a JSON array or document, OTLP JSON; .gz too.
        columns: our column → the log's, where the guess is wrong. Also ``arrival_ms``, ``max_tokens`` (at least the
            output's), ``priority``, ``session`` (any text), and ``duration`` (its name ends in its unit, ``_ms``). With
            both, a turn waits for the last one of its session that had ended before it; with ``think_time`` in s, for
            the one before; with the session alone, each request keeps its time.
        jitter: seconds over which requests that share a time are spread.
        dates: ``dmy`` or ``mdy``, where days and months are written as 10/11/2026.

    Raises:
        InputError: nothing to read, no column for the times or tokens (with those there are), or no usable row.
    """
    rows = [_flat(row) for path in _files(paths) for row in _rows(path)]
    if not rows:
        raise InputError(f"{', '.join(map(str, paths))}: has no rows")
    found = _columns(rows, columns or {})
    kept, dropped, first = _usable(rows, found)
    if not kept:
        why = "; ".join(f"{count:,} {reason}" for reason, count in dropped.most_common(3))
        raise InputError(f"none of {len(rows):,} rows is a request: {why}: name other columns with --columns")
    times, unit = _seconds([row[found["arrival"]] for row in kept], dates, "arrival_ms" in (columns or {}))
    order = np.argsort(times, kind="stable")
    arrival, notes = times[order] - times.min(), [f"times in {unit}"]
    if (np.diff(times) < 0).any():
        notes.append("rows were not in the order of their times: sorted")
    if jitter:
        arrival = spread(arrival, jitter, np.random.default_rng(0))
    elif len(arrival) > 1 and len(np.unique(arrival)) < len(arrival) and (arrival == np.round(arrival)).all():
        notes.append("all times are whole seconds, which makes bursts: windtunnel trace import --jitter 1 spreads them")
    kept = [kept[place] for place in order]
    more = _more(kept, found, arrival, notes)
    workload = Workload.from_columns(arrival=arrival.tolist(), name=Path(paths[0]).name.split(".")[0], **more)
    return Imported(workload, found, len(rows), dict(dropped), first, tuple(notes))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.name.removesuffix(".gz").endswith(ENDINGS))
            if not inside:
                raise InputError(f"{str(path)!r}: no file in this folder ends in {', '.join(ENDINGS)} (or .gz)")
            yield from inside
        else:
            yield path


def _rows(path: Path) -> Iterator[Row]:
    """The records of a file, nested as they are."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r}: is not UTF-8 text (iconv -f latin1 -t utf-8 converts it)") from error
    except OSError as error:
        raise InputError(f"{str(path)!r}: cannot be read: {error.strerror or error}") from error
    begin = text.lstrip()[:1]
    if begin not in ("{", "["):
        yield from _table(path, text)
        return
    try:
        documents = [json.loads(text)]
    except ValueError:
        documents = [_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    for document in documents:
        yield from _records(document)


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return parse_json(line)
    except InputError as error:
        raise InputError(f"{str(path)!r}: line {number}: {error}") from error


def _records(document: Any) -> Iterator[Row]:
    """The records in a JSON document: a list, an export's ``data``, the spans of OTLP, or the object itself."""
    if isinstance(document, list):
        for one in document:
            yield from _records(one)
    elif isinstance(document, dict) and isinstance(document.get("data"), list):
        yield from _records(document["data"])
    elif isinstance(document, dict) and all(isinstance(document.get(name), list) for name in LISTS):
        for values in zip(*(document[name] for name in LISTS), strict=False):
            yield dict(zip(("prompt_tokens", "output_tokens", "arrival"), values, strict=True))
    elif isinstance(document, dict) and "resourceSpans" in document:
        for resource in document["resourceSpans"]:
            for scope in resource.get("scopeSpans", ()):
                yield from scope.get("spans", ())
    elif isinstance(document, dict):
        yield document


def _table(path: Path, text: str) -> Iterator[Row]:
    head = text.partition("\n")[0]
    separator = max(",;\t|", key=head.count)
    if not head.count(separator):
        raise InputError(f"{str(path)!r}: its first line is no header of columns and no JSON")
    table = csv.DictReader(io.StringIO(text), delimiter=separator)
    try:
        check_names(table.fieldnames or ())
        for row in table:
            yield {str(key): value for key, value in row.items() if key is not None}
    except csv.Error as error:
        why = str(error).partition(" - ")[0]
        raise InputError(f"{str(path)!r}: line {table.line_num + 1}: is no CSV: {why}") from None


def _flat(row: Row, before: str = "") -> Row:
    """Nested keys joined by dots; OTLP's attributes as keys."""
    found: Row = {}
    for key, value in row.items():
        if key == "attributes" and isinstance(value, list):
            for one in value:
                (inner,) = list(one.get("value", {"": None}).values())[:1] or (None,)
                found[f"{before}{one.get('key')}"] = inner
        elif isinstance(value, dict):
            found |= _flat(value, f"{before}{key}.")
        elif isinstance(value, str) and value.startswith("{") and (inner := _document(value)):
            found |= _flat(inner, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def _document(text: str) -> Row:
    """An object written into a field as text; empty for other text."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _columns(rows: Sequence[Row], given: Mapping[str, str]) -> dict[str, str]:
    keys = list(dict.fromkeys(key for row in rows[:1000] for key in row))
    telling = {key.partition(".")[0] for key in keys} & OF_TRACES
    if not given and isinstance(rows[0].get("turns"), list):
        telling.add("turns")
    if telling or (not given and set(MESSAGE) <= set(keys)):
        raise InputError(f"has {min(telling, default=MESSAGE[-1])}: is a trace, not a log: give it to --trace as it is")
    for ours, theirs in given.items():
        if ours not in (*NEEDED, *CHOSEN):
            raise unknown("column", ours, (*NEEDED, *CHOSEN))
        if theirs not in keys:
            raise unknown("column of the file", theirs, keys)
    found = {}
    for name in NEEDED:
        chosen = given.get(name) or (name == "arrival" and given.get("arrival_ms")) or _match(keys, NAMES[name])
        if chosen is None:
            shown = ", ".join(keys[:20])
            likely = _likely(rows[0], name) or "NAME"
            raise InputError(f"which column is {name}? add --columns {name}={likely}; there are {shown}")
        found[name] = chosen
    found |= {ours: given[ours] for ours in CHOSEN if ours in given and ours != "arrival_ms"}
    if status := _match(keys, STATUS):
        found["status"] = status
    return found


def _likely(row: Row, name: str) -> str | None:
    """The column that looks like it: times by how they are written, tokens by what their names have in common."""
    for key, value in row.items():
        text = str(value or "")
        if name == "arrival" and len(text) >= len("2026-11-10") and not text.isdigit():
            try:
                _moment(text, "dmy")
            except InputError:
                continue
            return key
        if name != "arrival" and re.search(TELLING[name], _plain(key)) and text.isdigit():
            return key
    return None


def _match(keys: Iterable[str], names: Sequence[str]) -> str | None:
    """The first key that is one of the names, or whose last part is one; case and separators do not matter."""
    plain = {key: _plain(key) for key in keys}
    for name in names:
        for before in ("", "_"):
            for key, text in plain.items():
                spellings = (text, text.replace("_", ""))
                if name in spellings or (before and any(one.endswith(before + name) for one in spellings)):
                    return key
    return None


def _plain(key: str) -> str:
    """``gen_ai_usage_input_tokens`` of ``gen_ai.usage.input_tokens``, ``start_time`` of ``startTime``."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()).strip("_")


def _usable(rows: Sequence[Row], found: Mapping[str, str]) -> tuple[list[Row], Counter[str], int | None]:
    """Rows with a time and tokens both ways, why the others are none, and the first of those."""
    kept, dropped, first = list[Row](), Counter[str](), None
    checked = [name for name in (*NEEDED, "max_tokens", "priority", "duration", "think_time") if name in found]
    for number, row in enumerate(rows, 1):
        reason = next(filter(None, (_wrong(row, name, found) for name in checked)), "")
        if not reason:
            kept.append(row)
            continue
        status = str(row.get(found.get("status", ""), "") or "")
        dropped[f"{reason} (status {status})" if status not in ("", "200", "OK", "success") else reason] += 1
        first = first or number
    return kept, dropped, first


def _wrong(row: Row, name: str, found: Mapping[str, str]) -> str:
    value = row.get(found[name])
    if _blank(value):
        return "" if name == "max_tokens" else f"without {name}"
    if name == "arrival":
        return ""
    try:
        amount = float(str(value))
    except (TypeError, ValueError):
        return f"whose {name} is no number"
    if name in ("duration", "think_time"):
        return "" if 0 <= amount < np.inf else f"with {amount:g} {name}"
    whole = amount.is_integer()
    return "" if whole and (amount >= 1 or name == "priority") else f"with {amount:g} {name}"


def _blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "null", "none", "nan", "-"))


def _more(rows: Sequence[Row], found: Mapping[str, str], arrival: np.ndarray, notes: list[str]) -> dict[str, Any]:
    """The columns besides the times, of rows in the order of their times."""
    columns: dict[str, Any] = {
        name: [int(float(row[found[name]])) for row in rows]
        for name in ("prompt_tokens", "output_tokens", "priority")
        if name in found
    }
    if "max_tokens" in found:
        said = [row.get(found["max_tokens"]) for row in rows]
        columns["max_tokens"] = [
            tokens if _blank(limit) else max(int(float(str(limit))), tokens)
            for limit, tokens in zip(said, columns["output_tokens"], strict=True)
        ]
    if "session" in found:
        names: dict[str, int] = {}
        keys = [row.get(found["session"]) for row in rows]
        session = np.array([-1 if _blank(key) else names.setdefault(str(key), len(names)) for key in keys])
        columns["session"] = session
        if "think_time" in found:
            columns["think_time"] = [float(row[found["think_time"]]) for row in rows]
        elif "duration" in found:
            factor = _unit_of(found["duration"])
            ends = arrival + factor * np.array([float(row[found["duration"]]) for row in rows])
            columns["after"], columns["think_time"] = graph.by_times(session, arrival, ends)
            later = sum(map(bool, columns["after"]))
            notes.append(f"{len(names):,} sessions: {later:,} requests wait for the answer before them")
        else:
            columns["after"] = [[] for _ in rows]
            notes.append(
                f"{len(names):,} sessions, of which each request keeps its time: with --columns duration=NAME, turns "
                "wait for the answer before them"
            )
    elif "duration" in found:
        raise InputError("duration: only tells which turns of a session wait: name the session, too, session=NAME")
    return columns


def _unit_of(name: str) -> float:
    """Seconds of one unit of a column of durations, by the end of its name."""
    last = _plain(name.replace("µ", "u").replace("μ", "u")).split("_")[-1]
    for endings, factor in DURATIONS.items():
        if last in endings:
            return factor
    raise InputError(f"duration={name}: in which unit? rename the column so that it ends in _s, _ms, _us or _ns")


def _seconds(values: Sequence[Any], dates: str | None, in_ms: bool) -> tuple[np.ndarray, str]:
    """Seconds of numbers in s, ms, µs or ns, or of times of day; and what they were."""
    try:
        numbers = np.array([float(value) for value in values])
    except (TypeError, ValueError):
        return np.array([_moment(str(value).strip(), dates) for value in values]), "dates"
    _, factor, unit = next(one for one in UNITS if (one[2] == "ms" if in_ms else float(np.median(numbers)) > one[0]))
    return numbers * factor, unit


def _moment(text: str, dates: str | None) -> float:
    """Seconds since 1970 of an ISO 8601 time, with or without an offset (UTC), or of a web server's."""
    short = re.sub(r"(\.\d{6})\d+", r"\1", text.replace(" UTC", "Z"))
    try:
        found = datetime.fromisoformat(short)
    except ValueError:
        found = _written(text, dates)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _written(text: str, dates: str | None) -> datetime:
    for form in ("%d/%b/%Y:%H:%M:%S %z", "%d/%b/%Y:%H:%M:%S", "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M"):
        try:
            return datetime.strptime(text.strip("[]"), form)
        except ValueError:
            pass
    if re.match(r"\d{1,2}/\d{1,2}/\d{4}", text):
        text = text.replace(",", "")
        dates = dates or ("mdy" if text.endswith(("AM", "PM")) else None)  # who counts to twelve puts the month first
        if dates is None:
            raise InputError(f"time {text!r}: is that day/month or month/day? add --dates dmy or --dates mdy")
        for clock in ("%H:%M:%S.%f", "%H:%M:%S", "%H:%M", "%I:%M:%S.%f %p", "%I:%M:%S %p", "%I:%M %p"):
            try:
                return datetime.strptime(text, f"{ORDERS[dates]} {clock}")
            except ValueError:
                pass
    raise InputError(f"time {text!r}: must be a number or ISO 8601: name another column, --columns arrival=NAME")
