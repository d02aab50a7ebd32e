from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.workload import AllAtOnce, Constant, Poisson, json_traces, load_trace
from windtunnel.workload.csv_traces import wall_clock
from windtunnel.workload.json_traces import shorten
from windtunnel.workload.synthetic import stream

TRACES = Path(__file__).parents[3] / "shared" / "traces"
with_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not beside the repository")

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def write(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def timed(rows: list[dict[str, object]]) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


def test_azure_2023_has_crlf_wall_clock_times_and_no_last_newline(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE
        + "2023-11-16 23:59:59.9799601,4808,10\r\n2023-11-17 00:00:00.0319602,3180,8\r\n2023-11-17 00:00:01,110,27",
    )
    workload = load_trace(path)
    np.testing.assert_allclose(workload.arrival, [0, 0.0520001, 1.0200399], atol=1e-12)
    assert workload.prompt_tokens.tolist() == [4808, 3180, 110]
    assert workload.output_tokens.tolist() == [10, 8, 27]
    assert (workload.name, workload.notes) == ("trace", ())


def test_azure_2024_has_a_time_zone(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n2024-05-10 00:00:01.5Z,7,6\n"
    assert load_trace(write(tmp_path, AZURE + rows)).arrival.tolist() == [0, 0.99007, 1.49007]


def test_burstgpt_failures_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n118.5,GPT-4,417,276,693,API log\n"
    workload = load_trace(write(tmp_path, BURSTGPT + rows))
    assert workload.arrival.tolist() == [0, 113.5]
    assert workload.output_tokens.tolist() == [18, 276]
    assert workload.notes[0].startswith("1 of 3 rows left out")
    assert workload.notes[1] == "times count from the first request, 5 s into the trace"


def test_burstgpt_without_a_success_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="every row has 0 response tokens"):
        load_trace(write(tmp_path, BURSTGPT + "5,ChatGPT,472,0,472,API log\n"))


def test_burstgpt_v2_has_more_columns(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    assert len(load_trace(write(tmp_path, header + '0,s1,1.5,"GPT-4, new",1,2,3,API log\n'))) == 1


def test_vidur_times_start_at_the_first_request(tmp_path: Path) -> None:
    workload = load_trace(write(tmp_path, VIDUR + "10.5,100,20\n10.5,101,21\n12.0,102.0,22\n\n"))
    assert workload.arrival.tolist() == [0, 0, 1.5]
    assert workload.prompt_tokens.tolist() == [100, 101, 102]


def test_lengths_need_arrivals(tmp_path: Path) -> None:
    path = write(
        tmp_path, "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n9,1,10,9\n"
    )
    with pytest.raises(InputError, match="has lengths only: give arrivals"):
        load_trace(path)
    assert load_trace(path, arrivals=Constant(2.0)).arrival.tolist() == [0, 0.5]
    assert load_trace(path, arrivals=Poisson(2.0), seed=1).equals(load_trace(path, arrivals=Poisson(2.0), seed=1))


def test_given_arrivals_replace_a_files_own(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR + "1,100,20\n2,101,21\n")
    assert load_trace(path, arrivals=AllAtOnce(), max_concurrency=3).spec()["max_concurrency"] == 3
    assert load_trace(path, arrivals=AllAtOnce()).arrival.tolist() == [0, 0]


def test_mooncake_counts_in_milliseconds_and_blocks_of_512(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 3000, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 6500, "input_length": 512, "output_length": 7, "hash_ids": [0]},
    ]
    workload = load_trace(write(tmp_path, timed(rows), "m.jsonl"))
    assert workload.arrival.tolist() == [0, 3.5]
    assert workload.hash_block_size == 512
    assert workload.hash_ids is not None
    assert workload.hash_ids[1].tolist() == [0, 1, 2, 0]


def test_timed_trace_counts_in_seconds_and_chunks_of_16(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [0, 1], "chat_id": 4, "turn": 1},
        {"timestamp": 1.5, "input_length": 16, "output_length": 7, "hash_ids": [0], "chat_id": 5, "turn": 1},
    ]
    path = write(tmp_path, timed(rows), "t.jsonl")
    workload = load_trace(path)
    assert (workload.arrival.tolist(), workload.hash_block_size) == ([0, 1.5], 16)
    assert load_trace(path, "timed_trace", hash_block_size=10).hash_block_size == 10


def test_timestamps_of_unknown_unit_ask_for_the_format(tmp_path: Path) -> None:
    path = write(tmp_path, timed([{"timestamp": 2, "input_length": 20, "output_length": 5}]), "t.jsonl")
    with pytest.raises(InputError, match=r"may be ms \(mooncake\) or s \(timed_trace\).*--format mooncake"):
        load_trace(path)
    assert load_trace(path, "mooncake").hash_ids is None


def test_sharegpt_counts_or_estimates_tokens_and_says_so(tmp_path: Path) -> None:
    entries = [
        {"id": "a", "conversations": [{"from": "human", "value": "x" * 9}, {"from": "gpt", "value": "y" * 80}]},
        {"id": "b", "conversations": [{"from": "human", "tokens": 7}, {"from": "gpt", "tokens": 8, "value": "z"}]},
        {"id": "c", "conversations": [{"from": "human", "value": "only one turn"}]},
        {"id": "d", "conversations": [{"from": "human", "value": "hm"}, {"from": "gpt", "value": ""}]},
    ]
    workload = load_trace(write(tmp_path, json.dumps(entries), "s.json"), arrivals=AllAtOnce())
    assert workload.prompt_tokens.tolist() == [3, 7]
    assert workload.output_tokens.tolist() == [20, 8]
    assert workload.notes[0].startswith("2 of 4 conversations left out")
    assert "1 requests are estimated: 4 characters a token" in workload.notes[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \r\n \n", "is empty"),
        (AZURE, "has no rows below its header"),
        (b"\x00\x01\x02\xff" * 99, "neither text nor Parquet: known formats are azure"),
        (b"\xff\xfe\xfd garbage", "is not UTF-8 text .iconv"),
        (b"\x1f\x8b\x08 zipped", "is compressed, and cannot be unpacked"),
        (b"PAR1 is no Parquet", "not a readable Parquet file"),
        ("a,b,c\n1,2,3\n", "columns 'a, b, c' fit no known trace format"),
        ("arrival,prompt_tokens,output_tokens\n0,1_000,5\n", "row 1: prompt_tokens='1_000': must be a whole number"),
        ("ts,prompt_tokens,completion_tokens\n0,0,5\n", "windtunnel trace import finds out which is which"),
        (
            "arrived_at,num_prefill_tokens,num_decode_token\n1,2,3\n",
            "'num_decode_tokens' of the vidur format is missing",
        ),
        ("arrived_at,num_prefill_tokens,num_decode_tokens,x\n1,2,3,4\n", "unknown column of the vidur format 'x'"),
        (AZURE + "yesterday,1,2\n", "row 1: TIMESTAMP='yesterday': must be a time such as"),
        (AZURE + "2023-11-16 18:17:03.9,1,2\nNaT,1,2\n", "row 2: TIMESTAMP='NaT'"),
        (AZURE + "2023-11-16 18:17:03.9,1,2\n2023-11-16 18:17:03.9+02:00,1,2\n", "row 2: TIMESTAMP=.*UTC"),
        (AZURE + "2023-11-16 18:17:03.9,1\n", "row 1: has 2 cells: must have 3"),
        (AZURE + "2023-11-16 18:17:03.9,1,2\n2023-11-16 18:17:03.9,1,2,3\n", "row 2: has 4 cells"),
        (AZURE + "2023-11-16 18:17:03.9,1,2\n2023-11-16 18:17:02.9,1,2\n", "row 2: arrival=0 comes after 1: .*--sort"),
        (AZURE + "2023-11-16 18:17:03.9,1,0\n", "row 1: output_tokens=0: .*--drop-empty"),
        (VIDUR + "-1,2,3\n", "row 1: arrival=-1: must be finite seconds ≥ 0"),
        (VIDUR + "1,2,3\nnan,2,3\n", "row 2: arrival=nan"),
        (VIDUR + "1,2,3\ninf,2,3\n", "row 2: arrival=inf"),
        (VIDUR + "1,2,3\n0.5,2,3\n", "row 2: arrival=0.5 comes after 1"),
        (VIDUR + "1\r2,3\n", "row 1: is no CSV"),
        ('[{"conversations": [{"tokens": 99999999999999999999}, {"tokens": 1}]}]', "row 1: a turn has neither"),
        (VIDUR + "1,two,3\n", "row 1: num_prefill_tokens='two': must be a whole number"),
        (VIDUR + "1,2.5,3\n", "row 1: num_prefill_tokens='2.5': must be a whole number"),
        (VIDUR + "1,-2,3\n", "row 1: prompt_tokens=-2: must be ≥ 1"),
        (VIDUR + "1,99999999999999999999,3\n", "row 1: num_prefill_tokens='9+': must be a whole number"),
        ("{", "row 1: '{': not JSON"),
        ('{"timestamp": 1}\n[1]\n', "row 2: .*must be a JSON object"),
        ("[1, 2]", "row 1: has no list of conversations"),
        ("[", "is not JSON"),
        ("[]", "no conversation has two"),
        ('[{"conversations": [{"from": "human"}, 3]}]', "row 1: a turn has neither"),
        (timed([{"timestamp": 0, "input_length": 1, "output_length": 2, "hash_ids": "x"}]), "row 1: hash_ids='"),
        (
            timed([{"timestamp": 0, "input_length": "1", "output_length": 2, "hash_ids": [1]}]),
            "row 1: input_length='1'",
        ),
        (
            timed([{"timestamp": 0, "input_length": 1, "outputlength": 2, "hash_ids": [1]}]),
            "output_length is missing; did",
        ),
        (timed([{"timestamp": -5, "input_length": 1, "output_length": 2, "hash_ids": [1]}]), "row 1: arrival=-0.005"),
        (timed([{"timestamp": float("nan"), "input_length": 1, "output_length": 2, "hash_ids": [1]}]), "arrival=nan"),
    ],
)
def test_a_bad_file_gives_one_line_that_starts_with_its_path(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_missing_files_directories_and_formats(tmp_path: Path) -> None:
    write(tmp_path, AZURE, "azure_conv.csv")
    with pytest.raises(InputError, match=r"no such file; did you mean 'azure_conv\.csv'\?"):
        load_trace(tmp_path / "azure_conf.csv")
    with pytest.raises(InputError, match=r"trace\.csv: no such file$"):
        load_trace(tmp_path / "nowhere" / "trace.csv")
    with pytest.raises(InputError, match=r"is a folder without \.json or \.json\.gz files"):
        load_trace(tmp_path)
    with pytest.raises(InputError, match="unknown trace format 'azur': did you mean 'azure'"):
        load_trace(tmp_path / "azure_conv.csv", "azur")
    with pytest.raises(InputError, match="fit no known trace format"):
        load_trace(write(tmp_path, AZURE + "2023-11-16 18:17:03.9,1,0\n"), "vidur")


def test_sorting_and_dropping_are_offered_and_work(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR + "3,30,1\n1,10,1\n2,0,1\n2,20,1\n4,40,0\n")
    workload = load_trace(path, sort=True, drop_empty=True)
    assert workload.prompt_tokens.tolist() == [10, 20, 30]
    assert workload.arrival.tolist() == [0, 1, 2]
    assert "2 of 5 rows left out: 0 prompt or output tokens" in workload.notes
    with pytest.raises(InputError, match="every row has 0 prompt or output"):
        load_trace(write(tmp_path, VIDUR + "3,30,0\n"), drop_empty=True)


def test_dropping_keeps_hash_ids_with_their_rows(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 1]},
        {"timestamp": 1, "input_length": 700, "output_length": 1, "hash_ids": [5, 6]},
    ]
    workload = load_trace(write(tmp_path, timed(rows), "m.jsonl"), drop_empty=True)
    assert workload.hash_ids is not None
    assert workload.hash_ids[1].tolist() == [5, 6]


def test_jitter_is_part_of_reading(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR + "0,1,1\n0,1,1\n3,1,1\n")
    moved = load_trace(path, jitter=3.0).arrival
    assert 0 < moved[0] < moved[1] < 3 < moved[2] < 6
    with pytest.raises(InputError, match="jitter=-1"):
        load_trace(path, jitter=-1.0)


@with_traces
@pytest.mark.parametrize(
    ("file", "rows", "duration", "prompt", "output"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19_366, 3501.721937, 1154.697, 211.126),
        ("AzureLLMInferenceTrace_code.csv", 8_819, 3435.948056, 2047.848, 27.883),
        ("conversation_trace.jsonl", 12_031, 3536.999, 12035.061, 342.619),
        ("synthetic_trace.jsonl", 3_993, 1022.025, 15325.477, 149.119),
    ],
)
def test_the_public_traces_have_their_known_rows(
    file: str, rows: int, duration: float, prompt: float, output: float
) -> None:
    workload = load_trace(TRACES / file)
    assert len(workload) == rows
    assert workload.duration == pytest.approx(duration, abs=1e-6)
    assert workload.prompt_tokens.mean() == pytest.approx(prompt, abs=1e-3)
    assert workload.output_tokens.mean() == pytest.approx(output, abs=1e-3)


@with_traces
def test_the_arxiv_lengths_have_their_known_rows() -> None:
    workload = load_trace(TRACES / "arxiv_lengths.csv", arrivals=AllAtOnce())
    assert len(workload) == 28_257
    assert workload.prompt_tokens.mean() == pytest.approx(2588.1, abs=0.1)
    assert workload.output_tokens.mean() == pytest.approx(291.4, abs=0.1)


@with_traces
def test_reading_the_azure_trace_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; from windtunnel.workload import load_trace; t = time.process_time();"
        f"load_trace({str(TRACES / 'AzureLLMInferenceTrace_conv.csv')!r}); print(time.process_time() - t,"
        "*sorted({'pyarrow', 'pandas', 'numba', 'plotly', 'sklearn', 'pydantic'} & set(sys.modules)))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    parts = [run.stdout.split() for run in runs]
    assert all(len(part) == 1 for part in parts)
    assert min(float(part[0]) for part in parts) < 0.06


GATEWAY = """request_id,start_time,input_tokens,completion_tokens
a,1700000000.5,10,1
b,1700000001.5,20,2
c,1700000003.5,30,3
"""
NAMES = {"arrival": "start_time", "prompt_tokens": "input_tokens", "output_tokens": "completion_tokens"}


def as_lines(text: str) -> str:
    head, *rows = (line.split(",") for line in text.splitlines())
    return "".join(json.dumps(dict(zip(head, row, strict=True))) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (GATEWAY, NAMES),
        (GATEWAY.replace(",", ";"), NAMES),
        (GATEWAY.replace(",", "\t"), NAMES),
        (GATEWAY.replace(",", "|"), NAMES),
        (GATEWAY.replace("b,", '"b, too",'), NAMES),
        (as_lines(GATEWAY), NAMES),
        (GATEWAY.replace(".5", "500"), {**NAMES, "arrival_ms": "start_time"}),
        (GATEWAY.replace("17000000", "2023-11-16 18:00:"), NAMES),
        (GATEWAY.replace("17000000", "2023-11-16T18:00:"), NAMES),
    ],
    ids=["comma", "semicolon", "tab", "bar", "quoted", "json lines", "milliseconds", "time of day", "ISO time"],
)
def test_any_columns_that_are_named(tmp_path: Path, text: str, names: dict[str, str]) -> None:
    chosen = {ours: theirs for ours, theirs in names.items() if not (ours == "arrival" and "arrival_ms" in names)}
    found = load_trace(write(tmp_path, text), columns=chosen)
    assert found.arrival.tolist() == pytest.approx([0.0, 1.0, 3.0])
    assert (found.prompt_tokens.tolist(), found.output_tokens.tolist()) == ([10, 20, 30], [1, 2, 3])


def test_our_own_names_and_other_delimiters_need_no_names(tmp_path: Path) -> None:
    own = load_trace(write(tmp_path, "arrival,prompt_tokens,output_tokens,priority\n1,5,6,0\n2.5,7,8,1\n"))
    assert own.arrival.tolist() == [1.0, 2.5]  # our own files keep their times
    assert own.priority.tolist() == [0, 1]
    azure = "TIMESTAMP;ContextTokens;GeneratedTokens\n2023-11-16 18:00:01.0;5;6\n2023-11-16 18:00:02.5;7;8\n"
    assert load_trace(write(tmp_path, azure)).arrival.tolist() == [0.0, 1.5]
    assert load_trace(write(tmp_path, azure.replace(";", "\t"))).prompt_tokens.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"arival": "start_time"}, "unknown column 'arival': did you mean 'arrival'"),
        (NAMES | {"prompt_tokens": "input_token"}, "unknown column of the file 'input_token': did you mean 'input_tok"),
        (NAMES | {"output_tokens": "request_id"}, "none of 3 rows is a request: 3 whose output_tokens is no number"),
    ],
)
def test_names_of_columns_that_cannot_be(tmp_path: Path, names: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_trace(write(tmp_path, GATEWAY), columns=names)


def test_files_without_anything_special_are_read_as_they_are(tmp_path: Path) -> None:
    """No jitter, nothing dropped, nothing sorted, an open loop, seed 0."""
    path = write(tmp_path, VIDUR + "0,1,1\n0,2,1\n3,3,1\n")
    found = load_trace(path)
    assert found.arrival.tolist() == [0, 0, 3]
    assert (found.max_concurrency, found.hash_block_size, found.notes, found.name) == (0, 0, (), path.stem)
    drawn = load_trace(path, arrivals=Poisson(1.0))
    assert drawn.arrival.tolist() == Poisson(1.0).times(3, stream(0, "arrivals")).tolist()


def test_one_bad_time_of_many_is_named(tmp_path: Path) -> None:
    """numpy ends the process where it casts many bytes to times and one is none."""
    lines = "2023-11-16 18:17:03.9799600,10,10\n" * 600 + "2023-13-16 18:17:03.9,10,10\n"
    with pytest.raises(InputError, match=r"row 601: TIMESTAMP='2023-13-16 18:17:03\.9'"):
        load_trace(write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines))


def test_an_origin_is_told_where_it_is_not_the_beginning(tmp_path: Path) -> None:
    late = load_trace(write(tmp_path, VIDUR + "10.5,1,1\n12,2,1\n"))
    assert late.notes == ("times count from the first request, 10.5 s into the trace",)
    assert late.arrival.tolist() == [0.0, 1.5]
    dated = load_trace(write(tmp_path, VIDUR + "1700000000,1,1\n1700000002,2,1\n"))
    assert dated.notes == ("times count from the first request, of 2023-11-14 22:13 UTC",)


HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_failed_requests_of_burstgpt_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = "5,ChatGPT,472,18,490,Conversation log\n6,ChatGPT,30,0,30,API log\n9,GPT-4,7,8,15,API log\n"
    found = load_trace(write(tmp_path, HEADER + rows))
    assert (found.arrival.tolist(), found.prompt_tokens.tolist()) == ([0, 4], [472, 7])
    assert found.notes == (
        "1 of 3 rows left out: 0 response tokens mean that the request failed",
        "times count from the first request, 5 s into the trace",
    )
    assert load_trace(write(tmp_path, HEADER + "0,ChatGPT,472,18,490,API log\n")).notes == ()
    with pytest.raises(InputError, match="every row has 0 response tokens"):
        load_trace(write(tmp_path, HEADER + "5,ChatGPT,472,0,472,API log\n"))


@pytest.mark.parametrize(
    ("line", "shown"), [(b"x" * 40, repr("x" * 40)), (b"x" * 41, repr("x" * 40 + "…")), (b"", "''")]
)
def test_long_lines_are_shown_by_their_beginning(line: bytes, shown: str) -> None:
    assert shorten(line) == shown


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column 'a': stands twice in the header: rename one"):
        load_trace(write(tmp_path, "a,b,a\n1,2,3\n"), columns={"prompt_tokens": "b", "output_tokens": "a"})


@pytest.mark.parametrize(
    ("moment", "seconds"),
    [
        ("2023-11-16 18:17:04", 1.0),
        ("2023-11-16 18:17:03.5", 0.5),
        ("2023-11-16T18:17:03.000000001Z", 1e-9),
        ("2023-11-17 18:17:03.25+00:00", 86_400.25),
    ],
)
def test_times_of_day_by_hand(moment: str, seconds: float) -> None:
    assert wall_clock([b"2023-11-16 18:17:03", moment.encode()]).tolist() == pytest.approx([0.0, seconds], abs=1e-12)


@pytest.mark.parametrize("moment", ["2023-11-16 18:17", "2023-11-16 18:17:03,5", "2023-11-16 18:17:03.5x", "18:17:03"])
def test_what_is_no_time_of_day_is_named(moment: str) -> None:
    with pytest.raises(InputError, match=f"row 2: TIMESTAMP='{moment}': must be a time such as"):
        wall_clock([b"2023-11-16 18:17:03", moment.encode()])


def test_blocks_tell_mooncake_from_timed_traces_only_if_all_do(tmp_path: Path) -> None:
    """600 tokens are 2 blocks of 512 and 38 of 16; one prompt of 16 tokens and one block fits both."""
    both: dict[str, object] = {"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [0]}
    more: dict[str, object] = {"timestamp": 1000, "input_length": 600, "output_length": 1}
    mooncake = load_trace(write(tmp_path, timed([both, {**more, "hash_ids": [0, 1]}]), "m.jsonl"))
    assert (mooncake.arrival.tolist(), mooncake.hash_block_size) == ([0, 1], 512)
    seconds = load_trace(write(tmp_path, timed([both, {**more, "hash_ids": list(range(38))}]), "t.jsonl"))
    assert (seconds.arrival.tolist(), seconds.hash_block_size) == ([0, 1000], 16)
    with pytest.raises(InputError, match="may be ms"):
        load_trace(write(tmp_path, timed([both, {**more, "hash_ids": [0, 1, 2]}]), "x.jsonl"))


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([(3000, 600, [0, 1]), (4500.5, 16, [0])], None),
        ([(3000, 600, [0, 1]), (4500, 16, [0])], "timed_trace"),
        ([(3000, 600, [0, 1, 2]), (4500, 16, [0])], None),
        ([(3000, 600, None), (4500, 16, [0])], "mooncake"),
        ([(3000, 600, None), (4500, 16, None)], "mooncake"),
        ([(3000, 600.5, None), (4500, 16, None)], "mooncake"),
        ([(-3, 600, [2]), (4500, 16, [2])], "mooncake"),
        ([(3000, 600, [1.5]), (4500, 16, [2])], "mooncake"),
    ],
)
def test_timed_columns_say_what_objects_say(tmp_path: Path, rows: list[tuple[Any, ...]], kind: str | None) -> None:
    lines = [
        {"timestamp": time, "input_length": prompt, "output_length": 1, "kind": "x"}
        | ({"hash_ids": ids} if ids else {})
        for time, prompt, ids in rows
    ]
    path, found = write(tmp_path, timed(lines), "m.jsonl"), []
    for large in (2**20, 0):
        with patch.object(json_traces, "LARGE", large):
            try:
                workload = load_trace(path, kind)
                found.append((workload.digest, workload.notes))
            except InputError as error:
                found.append((str(error), ()))
    assert found[0] == found[1]


RAG = [
    {"timestamp": "5", "input_length": 30, "output_length": 3, "session_id": "x",
     "hash_ids": {"sys_prompt": [1], "passages_ids": [7, 8], "history": [], "web_search": [], "user_input": [9]}},
    {"timestamp": "7", "input_length": 40, "output_length": 4, "session_id": "x",
     "hash_ids": {"sys_prompt": [1], "passages_ids": [7, 6], "history": [8], "web_search": [], "user_input": [5]}},
    {"timestamp": "6", "input_length": 12, "output_length": 4, "session_id": "y",
     "hash_ids": {"sys_prompt": [1], "passages_ids": [8], "history": [], "web_search": [], "user_input": []}},
]  # fmt: skip


def test_ragpulse_shares_what_stands_behind_the_same_pieces(tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join(map(json.dumps, RAG)), "rag.jsonl")
    with pytest.raises(InputError, match=r"put rag_parts\.json \(or \.gz\) beside it"):
        load_trace(path)
    pieces = {"1": 10, "5": 4, "6": 5, "7": 8, "8": 6, "9": 6}
    (tmp_path / "rag_parts.json").write_text(json.dumps(pieces))
    workload = load_trace(path)
    assert workload.arrival.tolist() == [0, 1, 2]
    assert workload.begins is not None
    assert [part.tolist() for part in workload.begins] == [[-1, 0, 0], [0, 10, 18]]
    (tmp_path / "rag_parts.json").write_text(json.dumps({"1": 10}))
    with pytest.raises(InputError, match="is not as RAGPulse writes it"):
        load_trace(path)


def test_aiperf_lines_are_turns_of_sessions(tmp_path: Path) -> None:
    """Later lines of a session say what they add to all before; its first one, and others, share by their ids."""
    common = {"input_length": 600, "output_length": 9}
    rows = [
        common | {"timestamp": 1000, "session_id": "a", "hash_ids": [1, 2]},
        common | {"delay": 2500, "session_id": "a", "hash_ids": [7, 3]},
        common | {"timestamp": 3000, "hash_ids": [1, 4]},
    ]
    workload = load_trace(write(tmp_path, "\n".join(map(json.dumps, rows)), "turns.jsonl"), "mooncake")
    assert workload.session.tolist() == [0, -1, 0]
    assert workload.think_time.tolist() == [0, 0, 2.5]
    assert workload.arrival[:2].tolist() == [0.0, 2.0]
    assert workload.prompt_tokens.tolist() == [600, 600, 600 + 9 + 600]
    assert workload.begins is not None
    assert [part.tolist() for part in workload.begins] == [[-1, 0, 0], [0, 512, 609]]
    path = write(tmp_path, "\n".join(json.dumps(common | {"session_id": name}) for name in "aab"), "no_times.jsonl")
    found = load_trace(path)
    assert ((found.arrival == 0).sum(), sorted(found.prompt_tokens.tolist())) == (2, [600, 600, 1209])
    with pytest.raises(InputError, match="delay: counts from the line before"):
        load_trace(write(tmp_path, json.dumps(common | {"delay": 5}), "bad.jsonl"), "mooncake")


def test_the_folder_of_a_proxy_is_a_load(tmp_path: Path) -> None:
    """Requests stand in the order in which they ended."""
    (tmp_path / "run.json").write_text('{"hash_block_size": 32}')
    rows = [(2.5, 40, 3, [7]), (1.0, 50, 9, [7])]
    names = ("arrival_s", "prompt_tokens", "output_tokens", "hash_ids")
    (tmp_path / "requests.jsonl").write_text(
        "".join(json.dumps(dict(zip(names, row, strict=True)) | {"ttft_s": 0.1}) + "\n" for row in rows)
    )
    load = load_trace(tmp_path)
    assert load.arrival.tolist() == [1.0, 2.5]
    assert load.prompt_tokens.tolist() == [50, 40]
    assert load.output_tokens.tolist() == [9, 3]
    assert load.hash_block_size == 32
    (tmp_path / "requests.jsonl").write_text('{"arrival_s": 1.0, "prompt_tokens": 5}\n')
    with pytest.raises(InputError, match="row 1: output_tokens is missing"):
        load_trace(tmp_path)
