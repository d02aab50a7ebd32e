"""Logs of other tools become workloads at the first command, or are refused with the one that works."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.cli import DONE, WRONG, main
from windtunnel.errors import InputError
from windtunnel.workload import load_trace
from windtunnel.workload.logs import import_logs
from windtunnel.workload.transforms import head

Capture = pytest.CaptureFixture[str]
NS = 1_762_761_600_000_000_000
TIMES = (0.0, 0.25, 1.5)
TOKENS = ((100, 10), (200, 20), (300, 30))


def spans() -> dict[str, object]:
    found = [
        {
            "name": "chat",
            "startTimeUnixNano": str(NS + int(1e9 * at)),
            "attributes": [
                {"key": "gen_ai.usage.input_tokens", "value": {"intValue": str(prompt)}},
                {"key": "gen_ai.usage.output_tokens", "value": {"intValue": str(output)}},
            ],
        }
        for at, (prompt, output) in zip(TIMES, TOKENS, strict=True)
    ]
    return {"resourceSpans": [{"scopeSpans": [{"spans": found}]}]}


def records(make: str) -> list[Any]:
    """The same three requests in another tool's words."""
    words: list[Any] = []
    for at, (prompt, output) in zip(TIMES, TOKENS, strict=True):
        second = int(at)
        iso = f"2025-11-10T08:00:{second:02d}.{int(1000 * (at - second)):03d}"
        epoch = 1762761600 + at
        plain = {"input_tokens": prompt, "output_tokens": output}
        words.append(
            {
                "openai": {
                    "id": "x",
                    "created": 1762761600 + at,
                    "usage": {"prompt_tokens": prompt, "completion_tokens": output},
                },
                "otel": {
                    "timestamp": f"{iso}+01:00",
                    "gen_ai.usage.input_tokens": prompt,
                    "gen_ai.usage.output_tokens": output,
                },
                "litellm": {
                    "startTime": f"{iso}Z",
                    "prompt_tokens": prompt,
                    "completion_tokens": output,
                    "status": "success",
                },
                "langfuse": {"startTime": f"{iso}Z", "usage": {"input": prompt, "output": output}},
                "sglang": {
                    "created_at": 1762761600 + at,
                    "meta_info": {"prompt_tokens": prompt, "completion_tokens": output},
                },
                "millis": {"ts": 1e3 * epoch, **plain},
                "micros": {
                    "ts": 1762761600000000 + 1e6 * at,
                    "input_tokens": str(prompt),
                    "output_tokens": str(output),
                },
            }[make]
        )
    return words


def holds(path: Path) -> None:
    found = import_logs([path]).workload
    assert found.arrival.tolist() == pytest.approx(TIMES, abs=1e-3)
    assert list(zip(found.prompt_tokens.tolist(), found.output_tokens.tolist(), strict=True)) == list(TOKENS)


@pytest.mark.parametrize("make", ["openai", "otel", "litellm", "langfuse", "sglang", "millis", "micros"])
@pytest.mark.parametrize("form", ["lines", "array", "data", "gz", "folder"])
def test_the_words_of_other_tools(tmp_path: Path, make: str, form: str) -> None:
    rows = records(make)
    lines = "\n".join(map(json.dumps, rows))
    path = tmp_path / "log.jsonl"
    if form == "gz":
        path = tmp_path / "log.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode()))
    elif form == "folder":
        (tmp_path / "logs").mkdir()
        for number, row in enumerate(rows):
            (tmp_path / "logs" / f"{number}.json").write_text(json.dumps(row))
        path = tmp_path / "logs"
    else:
        path.write_text({"lines": lines, "array": json.dumps(rows), "data": json.dumps({"data": rows})}[form])
    holds(path)


def test_spans_of_otlp(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(spans()))
    holds(path)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_a_gateways_table_with_rows_that_are_no_requests(
    tmp_path: Path, separator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        ["ts", "status", "prompt_tokens", "completion_tokens"],
        ["2025-11-10T08:00:01.500+01:00", "200", "300", "30"],
    ]
    rows += [["2025-11-10T08:00:00+01:00", "200", "100", "10"], ["2025-11-10T08:00:00.250+01:00", "200", "200", "20"]]
    rows += [["2025-11-10T08:00:02+01:00", "500", "50", "0"], ["2025-11-10T08:00:02+01:00", "200", "", "5"]]
    rows += [["2025-11-10T08:00:02+01:00", "200", "null", "5"]]
    path, out = tmp_path / "gateway.csv", tmp_path / "load.parquet"
    path.write_text("\n".join(separator.join(row) for row in rows))
    holds(path)
    assert main(["trace", "import", str(path), "--out", str(out)]) == DONE
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "3 requests",
        "arrival = ts",
        "3 of 6 rows",
        "with 0 output_tokens (status 500)",
        "2 without prompt_tokens",
        "row 4",
        "sorted",
    ):
        assert text in said
    assert load_trace(out).prompt_tokens.tolist() == [100, 200, 300]


def test_whole_seconds_are_said_and_spread(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "created,input_tokens,output_tokens\n" + "\n".join(f"{1762761600 + i // 5},10,5" for i in range(50))
    )
    plain, apart = import_logs([path]), import_logs([path], jitter=1.0)
    assert any("--jitter 1" in note for note in plain.notes)
    assert len(np.unique(apart.workload.arrival)) == 50


def test_dates_that_may_be_either(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("time,input_tokens,output_tokens\n10/11/2026 08:00,10,5\n11/11/2026 08:00,10,5\n")
    with pytest.raises(InputError, match="--dates dmy or --dates mdy"):
        import_logs([path])
    assert import_logs([path], dates="dmy").workload.arrival.tolist() == [0.0, 86400.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "which column is arrival? add --columns arrival=NAME; there are a, b"),
        ("ts,input_tokens,output_tokens\n1,0,0\n", "none of 1 rows is a request"),
        ("hello", "no header of columns"),
        ('{"a": 1}\n{oops\n', "line 2: not JSON"),
    ],
)
def test_what_cannot_be_read_says_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    assert main(["trace", "import", str(path), "--out", str(tmp_path / "x.jsonl")]) == WRONG
    assert says in capsys.readouterr().err


def test_a_row_that_is_no_csv_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"ts,prompt_tokens,comp\rletion_tokens\n0,1,1\n")
    with pytest.raises(InputError, match="line 1: is no CSV"):
        import_logs([path])


def test_columns_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("when,in,out\n0,10,5\n1.5,20,5\n")
    found = import_logs([path], {"arrival": "when", "prompt_tokens": "in", "output_tokens": "out"})
    assert found.workload.arrival.tolist() == [0.0, 1.5]


CHATS = """ts,chat,prompt_tokens,completion_tokens,latency_ms,priority,limit
0,a,10,5,2000,0,8
1,b,20,5,500,1,
4,a,30,5,1000,0,2
4.5,a,31,5,9000,0,7
9,b,40,5,100,2,5
10,,50,5,100,0,5
"""
"""Two chats, one of which has two requests at once, and a request of none."""


def test_turns_of_a_log_wait_for_the_answer_before_them(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(CHATS)
    names = {"session": "chat", "duration": "latency_ms", "max_tokens": "limit", "priority": "priority"}
    found = import_logs([path], names)
    load = found.workload
    assert load.arrival[:3].tolist() == [0.0, 1.0, 10.0]
    assert load.prompt_tokens.tolist() == [10, 20, 50, 30, 31, 40]
    assert load.session.tolist() == [0, 1, -1, 0, 0, 1]
    assert load.max_tokens.tolist() == [8, 5, 5, 5, 7, 5]
    assert load.priority.tolist() == [0, 1, 0, 0, 0, 2]
    assert load.think_time[3:].tolist() == [2.0, 2.5, 7.5]
    assert load.waits[1].tolist() == [0, 0, 1]
    assert "2 sessions: 3 requests wait for the answer before them" in found.notes
    assert load_trace(path, columns=names).digest == load.digest


@pytest.mark.parametrize(("name", "seconds"), [("took_µs", 2e-3), ("tookNs", 2e-6), ("took_ms", 2.0), ("took s", 2000)])
def test_the_unit_of_a_duration_is_the_end_of_its_name(tmp_path: Path, name: str, seconds: float) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"ts,chat,prompt_tokens,completion_tokens,{name}\n0,a,10,5,2000\n9000,a,10,5,2000\n")
    load = import_logs([path], {"session": "chat", "duration": name}).workload
    assert load.think_time[1] == pytest.approx(9000 - seconds)


def test_dates_that_are_named_as_milliseconds_are_dates(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("ts,prompt_tokens,completion_tokens\n2026-11-27T10:00:00,1,1\n2026-11-27T10:00:05,1,1\n")
    assert load_trace(path, columns={"arrival_ms": "ts"}).arrival.tolist() == [0.0, 5.0]
    path.write_text("ts,prompt_tokens,completion_tokens\n0,1,1\n1500,1,1\n")
    assert import_logs([path], {"arrival_ms": "ts"}).workload.arrival.tolist() == [0.0, 1.5]


def test_without_durations_each_request_of_a_chat_keeps_its_time(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(CHATS)
    load = load_trace(path, columns={"session": "chat"})
    assert load.arrival.tolist() == [0.0, 1.0, 4.0, 4.5, 9.0, 10.0]
    assert load.session.tolist() == [0, 1, 0, 0, 1, -1]
    assert head(load, 3).arrival.tolist() == [0.0, 1.0, 4.0]
    assert any("2 sessions, of which each request keeps its time" in note for note in load.notes)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"sesion": "chat"}, "unknown column 'sesion': did you mean 'session'"),
        ({"session": "chats"}, "unknown column of the file 'chats': did you mean 'chat'"),
        ({"duration": "latency_ms"}, "name the session, too"),
        ({"session": "chat", "duration": "limit"}, "in which unit"),
    ],
)
def test_named_columns_of_a_log_that_cannot_be(tmp_path: Path, columns: dict[str, str], says: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(CHATS)
    for read in (lambda: import_logs([path], columns), lambda: load_trace(path, columns=columns)):
        with pytest.raises(InputError, match=says):
            read()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ts,user,prompt_tokens,completion_tokens\n5,a,10,3\n6,b,,\n7.5,a,20,4\n", "log.csv"),
        (
            "\n".join(
                json.dumps({"created": at, "usage": {"prompt_tokens": prompt, "completion_tokens": output}})
                for at, prompt, output in ((5, 10, 3), (6, 0, 0), (7.5, 20, 4))
            ),
            "log.jsonl",
        ),
        (
            json.dumps(
                [
                    {"ts": 5, "input_tokens": 10, "output_tokens": 3},
                    {"ts": 6},
                    {"ts": 7.5, "input_tokens": 20, "output_tokens": 4},
                ]
            ),
            "log.json",
        ),
    ],
)
def test_a_log_is_read_where_a_trace_is(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    found, asked = load_trace(path), import_logs([path])
    assert found.digest == asked.workload.digest
    assert found.arrival.tolist() == [0.0, 2.5]
    assert any("read as a log: arrival = " in note for note in found.notes)
    assert any("left out 1 of 3 rows" in note for note in found.notes)
    with pytest.raises(InputError, match="log"):
        load_trace(path, "vidur" if name.endswith("csv") else "jsonl")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arrival,prompt_tokens,output_tokens,prioritty\n0,1,2,3\n", "unknown column of the csv format 'prioritty'"),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 2, "prioritty": 3}\n', "unknown column 'prioritty'"),
        ('{"schema_version": 1}\n{"ts": 0, "input_tokens": 1, "completion_tokens": 2}\n', "unknown column 'ts'"),
        ("arrived_at,num_prefill_tokens,num_decode_token\n1,2,3\n", "'num_decode_tokens' of the vidur format"),
    ],
)
def test_a_misspelt_trace_is_no_log(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        load_trace(path)
