"""Served points: how a row is read as a server."""

import csv
from pathlib import Path

import pytest

from windtunnel.validation import served_points
from windtunnel.validation.served_points import COLUMNS, read_points


def point(**values: str) -> dict[str, str]:
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "model_path", "precision", "backend")
    return dict.fromkeys((*names, "silicon_data_source"), "") | values


GENERATED = {"backend": "vllm", "silicon_data_source": "source_file=data/aic-auto-gap-analysis/a.csv"}


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        (point(tp_size="4.0", attention_dp_size="1.0", moe_tp_size="4.0", moe_ep_size="1.0"), (4, 1, False)),
        (point(tp_size="4.0", attention_dp_size="1.0", moe_tp_size="1.0", moe_ep_size="4.0"), (4, 1, True)),
        (point(tp_size="4.0", attention_dp_size="4.0", moe_tp_size="1.0", moe_ep_size="16.0"), (4, 1, True)),
        (point(tp_size="2.0", moe_tp_size="4.0", moe_ep_size="1.0"), (2, 2, False)),
        (point(tp_size="8.0", moe_tp_size="0.0", moe_ep_size="0.0"), (8, 1, False)),
        (point(tp_size="2.0", moe_tp_size="1.0", moe_ep_size="2.0"), (2, 1, True)),
        (point(tp_size="2.0", moe_tp_size="1.0", moe_ep_size="2.0", **GENERATED), (2, 1, False)),
        (
            point(tp_size="8.0", attention_dp_size="1.0", moe_tp_size="8.0", precision="fp8", model_path="MiniMaxAI/M"),
            (8, 1, True),
        ),
    ],
)
def test_parallelism_of_a_served_point(row: dict[str, str], layout: tuple[int, int, bool]) -> None:
    assert served_points.parallelism(row) == layout


@pytest.mark.parametrize(
    ("recorded", "source", "found"),
    [
        ("0.19.0", "", "0.19.0"),
        ("", "image=vllm/vllm-openai:v0.17.0-cu130", "0.17.0"),
        ("nightly-5b8c", "measured=2026-04-03; image=vllm/vllm-openai:nightly-5b8c", "0.19.0"),
        ("", "measured=2025-10-29T00:00:00.000Z", "0.10.0"),
    ],
)
def test_version_of_a_served_point(recorded: str, source: str, found: str) -> None:
    row = {"backend": "vllm", "backend_version": recorded, "silicon_data_source": source}
    assert served_points.version(row) == found


def test_rows_that_repeat_a_measurement_count_once(tmp_path: Path) -> None:
    one = dict.fromkeys(COLUMNS, "") | {
        "backend": "vllm",
        "system": "h100_sxm",
        "mode": "agg",
        "isl": "10",
        "osl": "20",
    }
    one |= {"id": "a", "silicon_ttft_ms": "5", "silicon_tpot_ms": "2"}
    rows = [one, one | {"id": "b", "model_path": "m/other"}, one | {"id": "c", "silicon_tpot_ms": "3"}]
    file = tmp_path / "sample.csv"
    with file.open("w", encoding="utf-8", newline="") as text:
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    assert [point.scored for point in read_points(file)] == [True, False, True]
