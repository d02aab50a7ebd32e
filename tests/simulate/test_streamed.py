"""A run in pieces is the run of all pieces at once: counts are equal, sums but for rounding, percentiles within their
error."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simulate.test_simulate import deployment
from windtunnel.errors import InputError
from windtunnel.metrics import summary, summary_json
from windtunnel.metrics.digest import ERROR
from windtunnel.metrics.streamed import StreamSummary
from windtunnel.scenario.streamed import stream
from windtunnel.simulate import request_files
from windtunnel.simulate import streamed as in_pieces
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Both, Gamma, Lognormal, Workload, generate, sessions
from windtunnel.workload.synthetic import Drawn, cut

LENGTHS = Both(Lognormal(400, 0.8), Lognormal(100, 0.8))
SLO = {"ttft": 0.2, "tpot": 0.02}
LOAD = Drawn(Gamma(40.0, 0.5, exact_duration=True), LENGTHS, 1500, 1, size=1500)
CASES = {
    "one replica": deployment(),
    "round robin": deployment(3),
    "random": deployment(3, "random"),
    "router that looks": deployment(3, "least_outstanding"),
    "few blocks": deployment(2, num_gpu_blocks_override=400),
    "ranks": deployment(2, "vllm_dp", data_parallel_size=2),
    "too long": deployment(2, max_model_len=1200),
}


LONG = {
    "SGLang": deployment(2, "least_outstanding", preset="sglang-0.5"),
    "SGLang, few blocks": deployment(2, preset="sglang-0.5", num_gpu_blocks_override=6400),
}
"""Whose kernels take long to compile."""


def streamed(served: Any, size: int = 97, **more: Any) -> StreamSummary:
    return stream(served, replace(LOAD, size=size), SLO, 3, perf="modelled", **more)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}/{name}")
    else:
        yield path, value


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_pieces_make_the_run_of_all_at_once(case: str) -> None:
    whole = generate(LOAD.arrivals, LENGTHS, 1500, 1)
    served = (CASES | LONG)[case]
    exact = dict(leaves(summary_json(summary(simulate(served, whole, 3, perf="modelled"), SLO))))
    for path, value in leaves(streamed(served).to_json()):
        if path not in ("/percentile_error", "/warnings"):
            percentile = path.split("/")[-1][0] == "p" and path.count("/") == 2
            assert value == pytest.approx(exact[path], rel=ERROR if percentile else 1e-9), path


def test_parts_of_the_replicas_make_all_of_them_to_the_bit() -> None:
    with ThreadPoolExecutor(2) as executor:
        apart = streamed(CASES["random"], executor=executor, workers=2)
    assert apart.to_json() == streamed(CASES["random"]).to_json()


@pytest.mark.parametrize(("case", "files"), [("random", 3), ("ranks", 1), ("too long", 2)])
def test_requests_are_written_in_pieces(case: str, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_files, "ROWS", 100)
    streamed(CASES[case], output=tmp_path / "run")
    parts = [pq.ParquetFile(path) for path in sorted((tmp_path / "run").iterdir())]
    assert len(parts) == files
    assert max(part.num_row_groups for part in parts) > 3
    found = pa.concat_tables(part.read() for part in parts).sort_by("id")
    simulate(CASES[case], generate(LOAD.arrivals, LENGTHS, 1500, 1), 3, perf="modelled").save(tmp_path / "whole")
    whole = pq.ParquetFile(tmp_path / "whole" / "requests.parquet").read()
    assert found.column_names == whole.column_names
    for name in whole.column_names:
        assert repr(found.column(name).to_pylist()) == repr(whole.column(name).to_pylist()), name


def test_the_folder_of_a_stream_is_new(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    with pytest.raises(InputError, match="give the name of a new folder"):
        streamed(CASES["one replica"], output=tmp_path)
    with pytest.raises(InputError, match="a piece begins at"):
        stream(deployment(), [*LOAD, *LOAD], perf="modelled", output=tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_finished_requests_leave_memory() -> None:
    from windtunnel.core.live.stream import Stream

    rooms = []

    class Watched(Stream):
        def finish(self) -> Any:
            rooms.append(len(self.state.requests))
            return super().finish()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(in_pieces, "Stream", Watched)
        stream(CASES["one replica"], Drawn(Gamma(10.0), LENGTHS, 8000, size=100), perf="modelled")
    assert rooms == [1024]


def test_a_drawn_load_is_the_same_in_pieces_of_any_size() -> None:
    parts = list(replace(LOAD, size=211))
    whole = generate(LOAD.arrivals, LENGTHS, 1500, 1)
    for name, column in whole.columns().items():
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), column), name


def test_lengths_that_are_drawn_again_where_they_are_too_long_have_no_pieces() -> None:
    with pytest.raises(InputError, match="cannot be drawn in pieces"):
        replace(LOAD, lengths=Both(Lognormal(400, 0.8, 3000), Lognormal(100, 0.8)))


@pytest.mark.parametrize(
    "served", [deployment(pipeline_parallel_size=2), deployment(stream_interval=4)], ids=["pipeline", "events"]
)
def test_what_needs_the_whole_run_is_refused(served: Any) -> None:
    with pytest.raises(InputError, match="stream: does not go with"):
        streamed(served)


def test_loads_whose_requests_wait_for_each_other_are_refused() -> None:
    load: Workload = sessions(Gamma(1.0), LENGTHS, 5, 0, turns=3)
    with pytest.raises(InputError, match="stream"):
        stream(deployment(), [load], perf="modelled")
    with pytest.raises(InputError, match="do not stream"):
        list(cut(load))
    with pytest.raises(InputError, match="a piece begins at"):
        stream(deployment(), [*LOAD, *LOAD], perf="modelled")
