"""Step records: both forms, and what is wrong with a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.perf.explain import Batch
from windtunnel.validation.step_records import read_step_records


def written(folder: Path, *lines: Any) -> Path:
    file = folder / "steps.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def test_both_forms_of_a_step(tmp_path: Path) -> None:
    sums = {"num_prefill_requests": 2, "sum_prefill_tokens": 301, "sum_prefill_kv_tokens": 64}
    decoding = {"num_decode_requests": 3, "sum_decode_kv_tokens": 900, "var_decode_kv_tokens": 5.0}
    file = written(
        tmp_path,
        {"decodes": 4, "kv_tokens": 500, "chunks": [[128, 0], [16, 512]], "seconds": 0.01},
        {"chunks": [[1, 0]], "seconds": 0.5},
        {"version": 1, "wall_time": 0.02, "scheduled_requests": sums | decoding, "queued_requests": {}},
        {"version": 1, "wall_time": 0.0, "scheduled_requests": {}},
    )
    found = read_step_records(file)
    assert [one.batch for one in found] == [
        Batch(4, 500, ((128, 0), (16, 512))),
        Batch(0, 0, ((1, 0),)),
        Batch(3, 900, ((151, 32), (150, 32))),
    ]
    assert [one.seconds for one in found] == [0.01, 0.5, 0.02]
    assert found[1].where == f"{file}:2"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"decode": 1, "seconds": 1.0}, "decodes"),
        ({"decodes": 1, "seconds": 0.0}, "seconds=0.0: must be a number of seconds > 0"),
        ({"decodes": 1.5, "seconds": 1.0}, "decodes=1.5: must be an integer"),
        ({"chunks": [4], "seconds": 1.0}, "chunks=[4]: must be a list of [tokens, context]"),
        ({"chunks": [[0, 4]], "seconds": 1.0}, "at least 1 token"),
        ({"seconds": 1.0}, "batch is empty"),
        ({"scheduled_requests": 4, "wall_time": 1.0}, "scheduled_requests=4: must be a JSON object"),
        ({"scheduled_requests": {"num_decode_requests": 1}}, "wall_time=None"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        read_step_records(written(tmp_path, line))
    assert "steps.jsonl:1" in str(error.value)
    assert said in str(error.value)


def test_a_file_without_steps(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no steps"):
        read_step_records(written(tmp_path))
