"""Served points of separate prefill and decode workers: how layouts, flags and rows are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.validation.pool_points import PoolsPoint, holds_pool_points, of_columns, read_pool_points
from windtunnel.validation.recipes import Side, engine
from windtunnel.validation.served_points import read_points
from windtunnel.validation.served_replay import lengths, workload

POINTS = Path(__file__).parents[3] / "shared" / "truth" / "disagg" / "points.jsonl"


def line(**values: Any) -> str:
    layout = {"workers": 2, "tp": 8, "pp": 1, "ep": 8, "dp_attention": True, "attention_dp": 8}
    usual: dict[str, Any] = {
        "id": "a",
        "duplicate_of": None,
        "topology": "x",
        "model": "deepseek-ai/DeepSeek-R1",
        "system": "b200_sxm",
        "engine": "trtllm",
        "engine_version": "0.8.1",
        "precision": "fp4",
        "isl": 1024,
        "osl": 1024,
        "concurrency": 64,
        "ttft_ms": 500.0,
        "tpot_ms": 10.0,
        "prefill": layout | {"workers": 1},
        "decode": layout,
        "flags": {
            "prefill": {"max_batch_size": 8, "max_num_tokens": 10240, "kv_dtype": "fp8", "cuda_graphs": False},
            "decode": {"max_batch_size": 128, "max_num_tokens": 128, "kv_dtype": "fp8", "stream_interval": 100},
        },
        "join": {"confidence": "firm"},
        "client": {"prompts_per_concurrency": 5},
    }
    return json.dumps(usual | values)


def point(tmp_path: Path, **values: Any) -> PoolsPoint:
    (tmp_path / "points.jsonl").write_text(line(**values) + "\n", encoding="utf-8")
    return read_pool_points(tmp_path / "points.jsonl")[0]


def test_a_line_becomes_two_pools(tmp_path: Path) -> None:
    found = point(tmp_path).deployment()
    prefill, decode = found.pools
    assert [(pool.role, pool.replicas, pool.gpus) for pool in found.pools] == [("prefill", 1, 8), ("decode", 2, 16)]
    assert (prefill.engine.max_num_seqs, prefill.engine.max_num_batched_tokens, prefill.engine.enforce_eager) == (
        8,
        10240,
        True,
    )
    assert (decode.engine.max_num_seqs, decode.engine.tensor_parallel_size, decode.engine.data_parallel_size) == (
        128,
        1,
        8,
    )
    assert decode.engine.enable_expert_parallel
    assert decode.model.name == "nvidia/DeepSeek-R1-NVFP4"
    assert (found.handover.transfer, found.handover.first_token) == ("pull", "relayed")


def test_its_clients(tmp_path: Path) -> None:
    found = point(tmp_path)
    assert (len(workload(found)), workload(found).max_concurrency) == (320, 64)
    assert found.deployment().pools[-1].engine.stream_interval == 100
    assert lengths(found) == ((0.8 * found.isl, found.isl), (0.8 * found.osl, found.osl))


def test_what_is_scored(tmp_path: Path) -> None:
    assert point(tmp_path).scored
    assert not point(tmp_path, duplicate_of="b").scored
    assert not point(tmp_path, join={"confidence": "doubtful"}).scored


def test_sglang_divides_its_limits_over_the_ranks() -> None:
    flags = {"max_running_requests": 1024, "chunked_prefill_size": 65536, "all_to_all": "deepep"}
    found = engine(Side("prefill", 1, 8, ep=8, ranks=8, flags=flags | {"deepep_mode": "normal"}), "sglang-0.5", 4096)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (128, 8192)
    assert found.all2all_backend == "deepep_high_throughput"
    decode = engine(Side("decode", 1, 8, flags=flags), "sglang-0.5", 4096)
    assert (decode.max_num_seqs, decode.max_num_batched_tokens) == (1024, 65536)
    assert engine(Side("decode", 1, 8), "sglang-0.5", 4096).max_num_batched_tokens == 512
    assert decode.all2all_backend == "allgather_reducescatter"


def test_prompts_that_are_not_cut_need_a_batch_that_holds_them() -> None:
    found = engine(Side("prefill", 1, 4, flags={"chunked_prefill_size": -1}), "sglang-0.5", 9416)
    assert found.max_num_batched_tokens == 16384
    longer = engine(Side("prefill", 1, 4, flags={"chunked_prefill_size": -1}), "sglang-0.5", 33_000)
    assert longer.max_num_batched_tokens == 33_000


def test_captured_graphs() -> None:
    def sizes(**flags: Any) -> tuple[int, ...] | None:
        return engine(Side("decode", 1, 8, flags=flags), "trtllm-1.1", 4096).cudagraph_capture_sizes

    assert sizes(cuda_graph_batch_sizes=[1, 2, 4]) == (1, 2, 4)
    assert sizes(cuda_graph_max_batch_size=16) == (1, 2, 4, 8, 16)
    assert sizes(cuda_graph_max_batch_size=1) == (1,)
    assert sizes(cuda_graph_max_batch_size=16, cuda_graphs=False) is None


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="decode: tp=8 with attention_dp=1 and ep=4"):
        engine(Side("decode", 1, 8, ep=4), "trtllm-1.1", 4096)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"concurrency": 0}, "how many clients"),
        ({"ttft_ms": float("nan")}, "no latencies"),
        ({"decode": {"workers": 0, "tp": 8}}, "how many prefill and decode workers"),
    ],
)
def test_a_point_that_cannot_be_simulated_says_why(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        point(tmp_path, **values).deployment()


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "points.jsonl").write_text(line() + "\n" + line(isl=None) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"points.jsonl:2: .*must be like a line"):
        read_pool_points(tmp_path / "points.jsonl")


def test_other_points_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "batches.jsonl").write_text('{"batch": 1}\n', encoding="utf-8")
    (tmp_path / "points.jsonl").write_text("\n" + line() + "\n", encoding="utf-8")
    assert [holds_pool_points(tmp_path / name) for name in ("batches.jsonl", "points.jsonl")] == [False, True]


def test_columns_of_a_row_state_the_size_of_a_rank() -> None:
    sizes = {"num_workers": "2", "tp_size": "1", "pp_size": "1", "attention_dp_size": "8", "moe_ep_size": "8"}
    row = {f"{role}_{name}": value for role in ("prefill", "decode") for name, value in sizes.items()}
    shared: dict[str, Any] = dict.fromkeys(("id", "backend", "version", "model_path", "precision", "system"), "")
    shared |= dict.fromkeys(("isl", "osl", "concurrency", "ttft", "tpot"), 1)
    found = of_columns(row, **shared).decode
    assert (found.workers, found.tp, found.ranks, found.ep, found.gpus) == (2, 8, 8, 8, 16)


HEADER = (
    "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,tp_size,attention_dp_size,"
    "moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms,prefill_num_workers,prefill_tp_size,decode_num_workers,"
    "decode_tp_size"
)


def test_rows_without_flags_have_likely_seats(tmp_path: Path) -> None:
    """Five workers that were run with up to 180 clients had 32 seats each."""
    row = "r{0},silicon_concurrency={0};,trtllm,1.1,m,h200_sxm,fp8,disagg,1024,1024,,,,,1,1,1,8,5,8"
    (tmp_path / "rows.csv").write_text("\n".join([HEADER, row.format(10), row.format(180)]) + "\n", encoding="utf-8")
    points = [each for each in read_points(tmp_path / "rows.csv") if isinstance(each, PoolsPoint)]
    seats = [each.decode.flags["max_batch_size"] for each in points]
    assert seats == [32, 32]


@pytest.mark.skipif(not POINTS.is_file(), reason="the points are not beside the checkout")
def test_most_points_can_be_simulated() -> None:
    points = [each for each in read_pool_points(POINTS) if each.scored]
    refused = []
    for each in points:
        try:
            each.deployment()
        except InputError as reason:
            refused.append(str(reason))
    assert len(points) == 173
    assert refused == []
