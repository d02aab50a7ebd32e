"""Kernels that the next release timed again: what is compared, and what is not."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy.kernel_noise import again, main, noise, releases, report
from windtunnel.errors import InputError

pq = pytest.importorskip("pyarrow.parquet")


def write(systems: Path, release: str, factor: float, kernels: int = 60, engine: str = "vllm") -> None:
    """A table of products whose times are those of release 1 times a factor; one column is empty."""
    import pyarrow as pa

    folder = systems / "data" / "h100_sxm" / "gemm" / engine / release
    folder.mkdir(parents=True)
    sizes = np.arange(1, kernels + 1)
    columns = {"version": [release] * kernels, "m": sizes, "layout": [None] * kernels, "latency": factor * 1e-3 * sizes}
    pq.write_table(pa.table(columns), folder / "gemm_perf.parquet")


def test_each_release_is_compared_with_the_one_before_in_the_order_of_versions(tmp_path: Path) -> None:
    for release in ("0.9.0", "0.10.0", "0.24.0", "dev-1aa0"):
        write(tmp_path, release, 1.0)
    write(tmp_path, "0.9.0", 1.0, engine="sglang")
    found = [(family, engine, one.parent.name, then.parent.name) for family, engine, one, then in releases(tmp_path)]
    assert found == [("gemm", "vllm", "0.9.0", "0.10.0"), ("gemm", "vllm", "0.10.0", "0.24.0")]


def test_kernels_of_both_tables_are_joined_by_their_shapes(tmp_path: Path) -> None:
    write(tmp_path, "1.0", 1.0)
    write(tmp_path, "1.1", 1.1, kernels=70)
    ((_, _, one, following),) = releases(tmp_path)
    assert again(one, following) == pytest.approx([np.log(1.1)] * 60)


def test_the_report_has_the_median_and_how_far_half_and_nine_tenths_lie_apart(tmp_path: Path) -> None:
    write(tmp_path, "1.0", 1.0)
    write(tmp_path, "1.1", 1.1)
    lines = report(noise(tmp_path)).splitlines()
    assert lines[2:] == [f"| {name} | 60 | 1.100 | 10.0% | 10.0% |" for name in ("gemm | vllm", "all | all")]


def test_a_database_of_one_release_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "1.0", 1.0)
    with pytest.raises(InputError, match="add a newer database"):
        noise(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
