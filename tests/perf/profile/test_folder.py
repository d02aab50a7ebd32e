"""Profile folders: Vidur's and our own are read, and what is wrong with one is said in a line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from profiling.handmade import LLAMA_8B, seconds, write_profile

from windtunnel.errors import InputError
from windtunnel.perf.profile.folder import read_profile
from windtunnel.perf.profile.shapes import HOST

VIDUR = Path(__file__).parents[4] / "shared" / "vidur" / "profiling"


def edit(path: Path, change: Callable[[list[list[str]]], list[list[str]]]) -> None:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    path.write_text("\n".join(",".join(row) for row in change(rows)) + "\n")


def with_time(value: str) -> Callable[[list[list[str]]], list[list[str]]]:
    def change(rows: list[list[str]]) -> list[list[str]]:
        column = rows[0].index("time_stats.mlp_up_proj.median")
        rows[3][column] = value
        return rows

    return change


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    write_profile(tmp_path)
    found = read_profile(tmp_path)
    assert (found.device, found.shape, found.shards) == ("h100_sxm", LLAMA_8B, (1, 2))
    points = found.points["attn_decode", 2]
    for a, b, time in zip(points.a, points.b, points.seconds, strict=True):
        assert time == pytest.approx(seconds("attn_decode", 2, int(a), int(b)), rel=1e-12)
    assert found.points["all_reduce", 2].a.tolist() == [float(2**i) for i in range(10)]
    assert found.about["host"] == {"step": 1e-3, "request": 1e-5}


@pytest.mark.skipif(not VIDUR.is_dir(), reason="Vidur's profile is not here")
def test_vidur_s_folder_is_read() -> None:
    found = read_profile(VIDUR)
    assert (found.device, found.shards, found.about) == ("a100", (2,), {})
    assert all((name, 2) in found.points for name in found.shape.needed)
    prefill = found.points["attn_prefill", 2]
    here = (prefill.a == 64) & (prefill.b == 0)
    assert here.sum() == 1
    assert 1e-5 < prefill.seconds[here][0] < 3e-5
    assert {tp for _, tp in found.points} == {1, 2, 4, 8}
    near, far = (found.points["send_recv", group].seconds for group in (2, 1))
    assert (len(near), 0 < near[0] < near[-1]) == (len(far), True)
    assert [tp for name, tp in found.points if name in HOST] == [4] * len(HOST)
    assert 5e-4 < found.points["cpu_schedule", 4].seconds[-1] < 5e-3


def test_columns_of_operators_that_are_missing(tmp_path: Path) -> None:
    place = write_profile(tmp_path)
    (place / "attention.csv").unlink()
    with pytest.raises(InputError, match="lacks attn_prefill, attn_decode"):
        read_profile(tmp_path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-1.0", r"mlp_up_proj takes -1\.0 ms: must be ≥ 0"),
        ("inf", "takes inf ms"),
        ("fast", "what is no number"),
        ("nan", "row 4: time_stats.mlp_up_proj.median is nan: measure it again"),
    ],
)
def test_impossible_times(tmp_path: Path, value: str, words: str) -> None:
    edit(write_profile(tmp_path) / "mlp.csv", with_time(value))
    with pytest.raises(InputError, match=words):
        read_profile(tmp_path)


def test_a_row_without_a_time_is_left_out_and_a_column_without_any_is_refused(tmp_path: Path) -> None:
    place = write_profile(tmp_path)
    edit(place / "mlp.csv", with_time(""))
    assert len(read_profile(tmp_path).points["mlp_up_proj", 1]) == 9

    def all_missing(rows: list[list[str]]) -> list[list[str]]:
        column = rows[0].index("time_stats.mlp_up_proj.median")
        return [rows[0], *([*row[:column], "", *row[column + 1 :]] for row in rows[1:])]

    edit(place / "mlp.csv", all_missing)
    with pytest.raises(InputError, match="mlp_up_proj: every time is NaN"):
        read_profile(tmp_path)


def test_units_and_devices_of_the_manifest(tmp_path: Path) -> None:
    write_profile(tmp_path)
    path = tmp_path / "profile.json"
    document = json.loads(path.read_text())
    for change, words in (
        ({"units": "us"}, "units 'us'"),
        ({"device": "a100"}, "mixed devices"),
        ({"format": "x"}, "not a man"),
    ):
        path.write_text(json.dumps(document | change))
        with pytest.raises(InputError, match=words):
            read_profile(tmp_path)


def test_several_devices_need_a_choice(tmp_path: Path) -> None:
    for name in ("h100_sxm", "a100_sxm"):
        write_profile(tmp_path / name, name)
        (tmp_path / "both" / "compute").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "compute" / name).rename(tmp_path / "both" / "compute" / name)
    with pytest.raises(InputError, match=r"mixed devices \(a100_sxm, h100_sxm\)"):
        read_profile(tmp_path / "both")
    assert read_profile(tmp_path / "both", ("A100-SXM",)).device == "a100_sxm"


def test_folders_that_hold_no_profile(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no mlp\.csv"):
        read_profile(tmp_path)
    (tmp_path / "mlp.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="has no column 'n_head'"):
        read_profile(tmp_path)


def test_rows_of_two_models_are_refused(tmp_path: Path) -> None:
    place = write_profile(tmp_path)

    def other(rows: list[list[str]]) -> list[list[str]]:
        rows[2][rows[0].index("n_embd")] = "8192"
        return rows

    edit(place / "mlp.csv", other)
    with pytest.raises(InputError, match="rows of 2 models"):
        read_profile(tmp_path)
