from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_tables import full_database

from perf.tabulate.test_grid import POOLS, pool, real
from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.explain import Batch, Explanation, explain, parse_batch
from windtunnel.perf.kernel_times import SOURCES
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import Tabulated


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("decode=32@4096,prefill=2x1024@8192", Batch(32, 32 * 4096, ((1024, 8192), (1024, 8192)))),
        ("decode=1", Batch(1, 0)),
        ("prefill=2048", Batch(chunks=((2048, 0),))),
        ("prefill=1x7@16, decode=2@10, decode=3@20", Batch(5, 80, ((7, 16),))),
    ],
)
def test_the_grammar(text: str, batch: Batch) -> None:
    assert parse_batch(text) == batch


@given(
    st.integers(0, 50), st.integers(0, 5000), st.lists(st.tuples(st.integers(1, 999), st.integers(0, 999)), max_size=4)
)
def test_a_batch_reads_back_from_its_own_words(decodes: int, context: int, chunks: list[tuple[int, int]]) -> None:
    if decodes or chunks:
        batch = Batch(decodes, decodes * context, tuple(chunks))
        assert parse_batch(str(batch)) == batch
        assert batch.tokens == decodes + sum(n for n, _ in chunks)
        assert batch.sequences == decodes + len(chunks)


@pytest.mark.parametrize(
    "text",
    ["", "decode", "decode=x", "decode=2x3@4", "decoed=3", "prefill=0", "prefill=2x0", "decode=0", "decode=-1", "1"],
)
def test_what_is_not_a_batch_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(InputError, match="batch"):
        parse_batch(text)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Tabulated]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDTUNNEL_KERNELS", str(full_database(tmp_path_factory.mktemp("systems"))))
        yield {name: tabulate(pool(name)) for name in POOLS}


def step(of: Pool, tabulated: Tabulated, batch: Batch) -> float:
    rank = (batch.decodes, batch.kv_tokens, list(batch.chunks))
    if of.lockstep:
        return tabulated.times.lockstep([rank] * of.engine.data_parallel_size)
    return tabulated.times.batch(*rank)


BATCHES = st.builds(
    lambda decodes, mean, rest, chunks: Batch(decodes, decodes * mean + rest % max(decodes, 1), tuple(chunks)),
    st.integers(0, 30),
    st.integers(0, 2900),
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 2700)), min_size=1, max_size=3),
) | st.builds(
    lambda decodes, mean, rest: Batch(decodes, decodes * mean + rest % decodes),
    st.integers(1, 40),
    st.integers(0, 2900),
    st.integers(0, 1000),
)


@pytest.mark.parametrize("name", POOLS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(batch=BATCHES)
def test_the_rows_add_up_to_the_time_that_the_core_uses(tables: dict[str, Tabulated], name: str, batch: Batch) -> None:
    found = explain(pool(name), batch)
    assert found.total_seconds == pytest.approx(step(pool(name), tables[name], batch), rel=1e-9)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)
    for row in found.rows:
        assert row.seconds > 0
        assert row.source in SOURCES
        assert row.bound in ("compute", "memory", "latency", "communication", "host")


def test_what_limits_what(tables: dict[str, Tabulated]) -> None:
    assert tables
    rows = {row.name: row for row in explain(pool("sharded"), parse_batch("decode=32@2000,prefill=600")).rows}
    assert rows["gate_up_proj"].bound == "compute"
    assert rows["decode_attention"].bound == "memory"
    assert rows["mlp_all_reduce"].bound == "communication"
    assert rows["host_serial"].bound == "host"
    rows = {row.name: row for row in explain(pool("dense"), parse_batch("decode=1@100")).rows}
    assert rows["gate_up_proj"].bound == "memory"
    assert rows["norm"].bound == "latency"
    assert rows["gate_up_proj"].bandwidth_share < 1


def test_padding_is_shown(tables: dict[str, Tabulated]) -> None:
    assert tables
    (row,) = [row for row in explain(pool("dense"), parse_batch("decode=9@100")).rows if row.name == "o_proj"]
    assert row.at == "16 tokens (7 padding)"


@pytest.mark.parametrize(
    ("batch", "limit"),
    [
        ("prefill=701", "max_num_batched_tokens"),
        ("decode=41@1", "max_num_seqs"),
        ("decode=1@3000", "max_model_len"),
        ("prefill=1x500@2501", "max_model_len"),
    ],
)
def test_a_batch_beyond_the_engine_is_refused(batch: str, limit: str) -> None:
    with pytest.raises(InputError, match=limit):
        explain(pool("dense"), parse_batch(batch))


@real
def test_llama_70b_on_four_h100_has_a_source_for_every_operator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WINDTUNNEL_KERNELS", raising=False)
    of = Pool(load_model("meta-llama/Llama-3.1-70B"), device("h100"), Engine(tensor_parallel_size=4))
    batch = parse_batch("decode=32@4096,prefill=1x2048")
    found: Explanation = explain(of, batch)
    assert found.total_seconds == pytest.approx(step(of, tabulate(of, cache=tmp_path), batch), rel=1e-9)
    assert all(row.source in SOURCES for row in found.rows)
    modelled = sum(row.share for row in found.rows if row.source == "modelled")
    assert modelled < 0.2
    assert {row.source for row in found.rows if row.group == "gemm"} <= {"measured", "interpolated"}


@pytest.mark.parametrize("words", ["decode=32@1000", "decode=9@100,prefill=1x300@64"])
def test_stages_are_explained_one_after_the_other(tables: dict[str, Tabulated], words: str) -> None:
    assert tables
    limits: dict[str, Any] = {"max_model_len": 3000, "max_num_seqs": 40, "max_num_batched_tokens": 700}
    of = Pool(load_model("Llama-3.1-8B"), device("h100"), Engine(pipeline_parallel_size=3, **limits))
    batch = parse_batch(words)
    staged = tabulate(of).pipeline
    assert staged is not None
    stages, sends = staged.passage(batch.decodes, batch.kv_tokens, list(batch.chunks))
    found = explain(of, batch)
    for stage, (seconds, sent) in enumerate(zip(stages, [*sends, 0.0], strict=True), 1):
        rows = [row for row in found.rows if row.stage == stage]
        assert sum(row.seconds for row in rows) == pytest.approx(seconds + sent, rel=1e-9)
        assert [row.seconds for row in rows if row.name == "send"] == pytest.approx([sent] if sent else [])
    assert found.total_seconds == pytest.approx(sum(stages) + sum(sends), rel=1e-9)
    assert [row.stage for row in found.rows] == sorted(row.stage for row in found.rows)
    assert {row.stage for row in found.rows if row.name == "lm_head"} == {3}


def test_a_step_is_no_shorter_than_the_host_prepares_the_next() -> None:
    """64 decodes of a small model take less than the 1.5 ms and 64 × 12 µs of vLLM's host; 0.2 ms and 64 × 0.5 µs
    follow."""
    small = Pool(load_model("Qwen/Qwen3-0.6B"), device("h100"), Engine(max_model_len=4096))
    found = explain(small, Batch(64, 640), "modelled")
    rows = {row.name: row for row in found.rows}
    assert found.gpu_seconds < 2.268e-3
    assert rows["host_wait"].seconds == pytest.approx(2.268e-3 - found.gpu_seconds)
    assert rows["host_serial"].seconds == pytest.approx(0.232e-3)
    assert found.total_seconds == pytest.approx(2.5e-3)


def test_flops_and_bytes_of_a_row_are_those_of_all_its_launches() -> None:
    """28 layers, hidden 1024, 3072 between the two products of the network, gate and up together; eight tokens."""
    small = Pool(load_model("Qwen/Qwen3-0.6B"), device("h100"), Engine(max_model_len=4096))
    (row,) = [row for row in explain(small, Batch(8, 800), "modelled").rows if row.name == "gate_up_proj"]
    assert row.count == 28
    assert row.flops == pytest.approx(28 * 2 * 8 * 1024 * 6144)
    assert row.bytes == pytest.approx(28 * 2 * (1024 * 6144 + 8 * (1024 + 6144)))
    peak, bandwidth = device("h100").peak_flops("bfloat16"), device("h100").memory_bandwidth
    assert row.compute_share == pytest.approx(row.flops / row.seconds / peak)
    assert row.bandwidth_share == pytest.approx(row.bytes / row.seconds / bandwidth)
