import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf.kernel_tables import full_database, gemm_rows, write_table
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.database import open_database
from windtunnel.perf.sources import predictor_from
from windtunnel.perf.tabulate.cache import cache_key
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import PARTS, Tabulated


def pool(**engine: object) -> Pool:
    limits = {"max_model_len": 1000, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    return Pool(load_model("Qwen/Qwen3-0.6B"), device("h100_sxm"), Engine(**{**limits, **engine}))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path / "systems"))
    return full_database(tmp_path / "systems")


def same(one: Tabulated, two: Tabulated) -> None:
    for a, b in zip(
        (one.times, *one.sources.values(), *one.groups.values()),
        (two.times, *two.sources.values(), *two.groups.values()),
        strict=True,
    ):
        for name in (*PARTS, "host_overlapped", "host_serial", "padded", "context_knots", "chunk_knots"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert (a.prefill_base, a.graph_tokens) == (b.prefill_base, b.graph_tokens)
    assert json.dumps(one.provenance) == json.dumps(two.provenance)
    assert tuple(one.sources) == tuple(two.sources)


def test_the_cache_gives_back_what_was_built(tmp_path: Path) -> None:
    fresh = tabulate(pool(), cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    kept = tabulate(pool(), cache=tmp_path / "cache")
    same(fresh, kept)
    same(fresh, tabulate(pool()))
    assert file.suffix == ".npz"
    assert kept.notes == fresh.notes


LIMITS = ((16, 256), (16, 128), (4, 256), (12, 100), (32, 512))


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B"])
def test_a_predictor_shared_by_pools_of_other_limits_gives_the_tables_of_one_for_each(model: str) -> None:
    def of(seqs: int, tokens: int, **engine: Any) -> Pool:
        settings = Engine(max_model_len=1000, max_num_seqs=seqs, max_num_batched_tokens=tokens, **engine)
        return Pool(load_model(model), device("h100_sxm"), settings)

    several: list[dict[str, object]] = [
        {},
        {"num_speculative_tokens": 2, "acceptance_length": 2.1},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2, "enable_expert_parallel": True}
        if "A3B" in model
        else {"cudagraph_mode": "FULL_DECODE_ONLY"},
    ]
    for engine in several:
        shared = predictor_from(of(16, 256, **engine))
        for seqs, tokens in LIMITS:
            alone = tabulate(of(seqs, tokens, **engine))
            together = tabulate(of(seqs, tokens, **engine), predictor=shared)
            same(alone, together)
            assert alone.notes == together.notes


def test_equal_tables_are_kept_once(tmp_path: Path) -> None:
    whole = tabulate(pool(), cache=tmp_path / "cache")
    assert np.array_equal(whole.times.decode_attention, whole.times.mixed_attention)
    with np.load(next((tmp_path / "cache").iterdir())) as file:
        kept = [file[name].tobytes() for name in file.files if file[name].ndim == 2]
    assert len(set(kept)) == len(kept)


def test_reading_the_cache_does_not_load_pyarrow(tmp_path: Path) -> None:
    tabulate(pool(), cache=tmp_path / "cache")
    code = (
        "import sys\nfrom pathlib import Path\nfrom perf.tabulate.test_cache import pool\n"
        "from windtunnel.perf.tabulate.grid import tabulate\n"
        "for name in [n for n in sys.modules if n.startswith('pyarrow')]:\n"
        "    del sys.modules[name]\n"
        f"tabulate(pool(), cache=Path({str(tmp_path / 'cache')!r}))\nassert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_key_changes_with_everything_that_matters(systems: Path) -> None:
    database = open_database("h100_sxm", "vllm")
    keys = {cache_key(pool(), "auto", database), cache_key(pool(), "roofline", None)}
    keys |= {cache_key(pool(**{name: value}), "auto", database) for name, value in CHANGES}
    other = Pool(load_model("Qwen/Qwen3-1.7B"), device("h100_sxm"), pool().engine)
    keys.add(cache_key(other, "auto", database))
    keys.add(cache_key(Pool(load_model("Qwen/Qwen3-0.6B"), device("h200_sxm"), pool().engine), "auto", database))
    write_table(systems, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows(dtypes=("bfloat16", "fp8")))
    keys.add(cache_key(pool(), "auto", open_database("h100_sxm", "vllm")))
    assert len(keys) == 5 + len(CHANGES)


CHANGES = [
    ("max_num_seqs", 17),
    ("max_num_batched_tokens", 257),
    ("max_model_len", 1001),
    ("kv_cache_dtype", "fp8"),
    ("enforce_eager", True),
    ("quantization", "fp8"),
    ("async_scheduling", False),
    ("tensor_parallel_size", 2),
]
BESIDE_THE_TIMES = [
    {"gpu_memory_utilization": 0.5},
    {"num_gpu_blocks_override": 77},
    {"watermark": 0.1},
    {"scheduler": "vllm-0.32"},
    {"scheduler_reserve_full_isl": False},
    {"scheduling_policy": "priority"},
    {"long_prefill_token_threshold": 64},
    {"enable_prefix_caching": False},
]


@pytest.mark.parametrize("change", BESIDE_THE_TIMES, ids=str)
def test_what_only_memory_and_scheduling_depend_on_shares_tables(change: dict[str, Any]) -> None:
    database = open_database("h100_sxm", "vllm")
    assert cache_key(pool(**change), "auto", database) == cache_key(pool(), "auto", database)
    same(tabulate(pool(**change)), tabulate(pool()))


@pytest.mark.parametrize("damage", [b"", b"not a zip", None])
def test_an_unreadable_cache_is_rebuilt_and_said_once(tmp_path: Path, damage: bytes | None) -> None:
    fresh = tabulate(pool(), cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:5000] if damage is None else damage)
    rebuilt = tabulate(pool(), cache=tmp_path / "cache")
    same(fresh, rebuilt)
    assert sum("rebuilt" in note for note in rebuilt.notes) == 1
    again = tabulate(pool(), cache=tmp_path / "cache")
    same(fresh, again)
    assert not [note for note in again.notes if "rebuilt" in note]


def test_a_folder_that_cannot_be_written_costs_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    built = tabulate(pool(), cache=tmp_path / "file" / "cache")
    assert built.times.batch(1, 10, []) > 0
    assert any("cannot be cached" in note for note in built.notes)


def test_many_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: tabulate(pool(), cache=tmp_path / "cache"), range(8)))
    for one in found:
        same(found[0], one)
        assert not [note for note in one.notes if "cache" in note]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_oldest_tables_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.perf.tabulate.cache.SWEPT", "0123456789abcdef")
    names: list[set[str]] = []
    for seqs in (4, 5, 6):
        tabulate(pool(max_num_seqs=seqs), cache=tmp_path / "cache")
        if not names:
            (first,) = (tmp_path / "cache").iterdir()
            monkeypatch.setattr("windtunnel.perf.tabulate.cache.KEPT", int(2.5 * first.stat().st_size))
        names.append({path.name for path in (tmp_path / "cache").iterdir()})
    assert len(names[1]) == len(names[2]) == 2
    assert names[0] & names[1] and not names[0] & names[2]
