import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perf.kernel_tables import full_database
from perf.tabulate.test_grid import POOLS, pool, real
from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.explain import Batch, Explanation, Row, _worst, explain, parse_batch, usual_batch
from windtunnel.perf.kernel_times import SOURCES, KernelTimes
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


def test_prompts_that_no_graph_holds_are_not_padded() -> None:
    """TensorRT-LLM captures decodes alone: 300 tokens are no 512, and move as many bytes."""
    served = Pool(load_model(LLAMA), device("h100"), Engine(preset="trtllm-1.1", max_model_len=4096))
    for batch, at in (("decode=9@100", "16 tokens (7 padding)"), ("decode=9@100,prefill=291", "300 tokens")):
        (row,) = [row for row in explain(served, parse_batch(batch), "modelled").rows if row.name == "o_proj"]
        assert row.at == at
        assert row.flops == 32 * 2 * 4096 * 4096 * int(at.split()[0])


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


def rows_of(of: Pool, words: str, source: str = "modelled") -> dict[str, Row]:
    return {row.name: row for row in explain(of, parse_batch(words), source).rows}


SMALL = Pool(load_model("Qwen/Qwen3-0.6B"), device("h100"), Engine(max_model_len=4096))


def test_a_row_says_at_which_points_its_kernels_run() -> None:
    """Three decodes and four chunks: 263 tokens, of which the graph for 272 pads nine."""
    rows = rows_of(SMALL, "decode=3@100,prefill=1x50@7,prefill=60,prefill=70,prefill=1x80@9")
    assert rows["decode_attention"].at == "3 × 101 keys"
    assert rows["prefill_attention"].at == "50 at 7, 60 at 0, 70 at 0 …"
    assert rows["o_proj"].at == "272 tokens (9 padding)"
    assert rows["lm_head"].at == rows["host_serial"].at == "7 requests"
    fewer = rows_of(SMALL, "prefill=1x50@7,prefill=60,prefill=70")
    assert fewer["prefill_attention"].at == "50 at 7, 60 at 0, 70 at 0"
    moe = Engine(max_model_len=4096, data_parallel_size=2, enable_expert_parallel=True)
    both = Pool(load_model("Qwen/Qwen3-30B-A3B"), device("h100"), moe)
    assert rows_of(both, "decode=9@100")["experts"].at == "32 tokens of 2 ranks"  # 16 each with padding
    assert rows_of(both, "decode=9@100,prefill=1500")["experts"].at == "3018 tokens of 2 ranks"


def test_what_waits_for_launches_is_told_from_what_waits_for_memory() -> None:
    """Of 272 rows of 12,288 bytes at 3.35 TB/s, 1 µs, a rotation takes 3.9 µs and two norms 6.5 µs."""
    rows = rows_of(SMALL, "decode=3@100,prefill=260")
    assert rows["rotary_embedding"].seconds / 28 == pytest.approx(3.9e-6, rel=0.05)
    assert rows["qk_norm"].seconds / 28 == pytest.approx(6.5e-6, rel=0.05)
    assert (rows["rotary_embedding"].bound, rows["qk_norm"].bound) == ("memory", "latency")


def row(name: str, seconds: float, error: float, **more: Any) -> Row:
    return Row(name, "gemm", "", "", 1, seconds, 0.0, 0.0, 0.0, 0.0, 0.0, "memory", "measured", 0.0, error, **more)


def test_errors_add_up_by_their_share_of_the_step() -> None:
    found = Explanation((row("a", 0.3, 0.1, hidden=0.2), row("b", 0.1, 0.5, hidden=0.05)), 0.4, 0.4)
    assert found.error == pytest.approx(0.75 * 0.1 + 0.25 * 0.5)
    assert found.hidden_seconds == pytest.approx(0.25)
    assert found.rows[0].busy == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("decodes", "kv_tokens", "chunks", "why"),
    [
        (-1, 0, (), "counts must be ≥ 0"),
        (1, -1, (), "counts must be ≥ 0"),
        (0, 1, ((5, 0),), "batch of 0 decodes over 1 tokens"),
        (1, 0, ((0, 5),), "at least 1 token"),
        (1, 0, ((5, 0), (5, -1)), "context ≥ 0"),
        (0, 0, (), "empty: write decode=REQUESTS@CONTEXT"),
    ],
)
def test_batches_that_cannot_be_are_refused(decodes: int, kv_tokens: int, chunks: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        Batch(decodes, kv_tokens, chunks)


@pytest.mark.parametrize("batch", ["prefill=700", "decode=40@1", "decode=1@2999", "prefill=1x500@2500"])
def test_a_batch_may_reach_the_limits_of_the_engine(batch: str) -> None:
    assert explain(pool("dense"), parse_batch(batch), "modelled").total_seconds > 0


def test_a_refusal_says_what_is_needed_and_what_there_is() -> None:
    words = "batch decode=1@3000 needs max_model_len ≥ 3001: the engine has 3000; give a larger max_model_len"
    with pytest.raises(InputError, match=words):
        explain(pool("dense"), parse_batch("decode=1@3000"), "modelled")
    speculative = replace(SMALL, engine=replace(SMALL.engine, num_speculative_tokens=2, acceptance_length=2))
    with pytest.raises(InputError, match="without speculation"):
        explain(speculative, parse_batch("decode=1@3"), "modelled")


@pytest.mark.parametrize(
    ("length", "tokens", "seqs", "batch"),
    [
        (8192, 4096, 64, "decode=32@4096,prefill=1x2048@0"),
        (2048, 1024, 16, "decode=15@2047,prefill=1x1009@0"),
        (512, 8, 1, "prefill=1x8@0"),
    ],
)
def test_the_usual_batch_is_one_that_the_engine_takes(length: int, tokens: int, seqs: int, batch: str) -> None:
    engine = Engine(max_model_len=length, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    found = usual_batch(engine)
    assert str(found) == batch
    assert explain(replace(SMALL, engine=engine), found, "modelled").total_seconds > 0


LLAMA = "meta-llama/Llama-3.1-8B"


def test_the_host_before_v1_pays_for_blocks_and_answers() -> None:
    """1.1 ms, and for each of eight requests 35 µs, 0.3 ms for its answer and 100 blocks of 0.24 µs."""
    old = Pool(load_model(LLAMA), device("h100"), Engine(preset="vllm-0.6", max_model_len=4096))
    found = explain(old, parse_batch("decode=8@1600"), "modelled")
    (host,) = [row for row in found.rows if row.bound == "host"]
    assert (host.name, host.at, host.count, host.group) == ("host_serial", "8 requests", 1, "host")
    assert host.seconds == pytest.approx(1.1e-3 + 8 * (35e-6 + 0.3e-3 + 100 * 0.24e-6))
    assert found.gpu_seconds == pytest.approx(found.total_seconds - host.seconds)
    assert (host.flops, host.bytes, host.compute_share, host.bandwidth_share) == (0, 0, 0, 0)


def test_prompts_wait_until_the_host_has_launched_every_module() -> None:
    """Of TensorRT-LLM, 32 layers of 0.65 ms; attention and the head are no part of what is launched meanwhile."""
    served = Pool(load_model(LLAMA), device("h100"), Engine(preset="trtllm-1.1", max_model_len=4096))
    found = explain(served, parse_batch("prefill=300"), "modelled")
    rows = {row.name: row for row in found.rows}
    meanwhile = sum(row.seconds for row in found.rows if " tokens" in row.at)
    assert rows["launch_wait"].seconds == pytest.approx(32 * 0.65e-3 - meanwhile)
    assert rows["launch_wait"].at == "layers that the host launches"
    assert found.gpu_seconds == pytest.approx(found.total_seconds - rows["host_serial"].seconds)
    assert "launch_wait" not in rows_of(served, "decode=300@10")  # more than a graph holds, of many times the work


def test_decodes_that_no_graph_holds_wait_for_the_host() -> None:
    """Whatever engine: vLLM's modules, 32 layers of 0.42 ms."""
    eager = Engine(enforce_eager=True, max_model_len=4096)
    served = Pool(load_model(LLAMA), device("h100"), eager)
    rows = rows_of(served, "decode=2@10")
    meanwhile = sum(row.seconds for row in rows.values() if row.at == "2 tokens")
    assert rows["launch_wait"].seconds == pytest.approx(32 * 0.42e-3 - meanwhile)
    assert "launch_wait" not in rows_of(replace(served, engine=Engine(max_model_len=4096)), "decode=2@10")


def test_perfect_kernels_wait_for_no_host() -> None:
    served = Pool(load_model(LLAMA), device("h100"), Engine(enforce_eager=True, max_model_len=4096))
    rows = rows_of(served, "decode=2@10", "roofline")
    assert not {"launch_wait", "host_wait"} & set(rows)
    assert rows["host_serial"].seconds == 0.0


def test_a_product_at_peak_is_bound_by_what_it_has_more_of() -> None:
    """Perfect kernels take the larger of FLOPs at peak and bytes at full bandwidth: that share is 1."""
    rows = rows_of(SMALL, "decode=8@800,prefill=2000", "roofline")
    assert (rows["gate_up_proj"].bound, rows["norm"].bound) == ("compute", "memory")
    assert rows["gate_up_proj"].compute_share == pytest.approx(1.0)
    assert rows["norm"].bandwidth_share == pytest.approx(1.0)
    assert rows["norm"].compute_share == 0.0


def test_a_row_is_as_certain_as_the_least_certain_of_its_points(tables: dict[str, Tabulated]) -> None:
    """Products of 4,096 × 4,096 were measured with 16 rows, not with 24; norms never were."""
    assert tables
    at_16, at_24 = (rows_of(pool("dense"), f"decode={n}@1023", "auto") for n in (16, 24))
    assert (at_16["o_proj"].source, at_24["o_proj"].source) == ("measured", "interpolated")
    assert (at_16["o_proj"].distance, at_24["o_proj"].distance) == pytest.approx((0.0, math.log2(4 / 3)))
    assert at_24["norm"].source == "modelled"
    assert math.isnan(at_24["norm"].distance)


def test_what_a_stage_sends_is_for_the_next() -> None:
    engine = Engine(pipeline_parallel_size=3, max_model_len=4096)
    found = explain(Pool(load_model(LLAMA), device("h100"), engine), parse_batch("decode=6@100"), "modelled")
    sent = [(row.stage, row.at, row.group, row.bound) for row in found.rows if row.name == "send"]
    assert sent == [(n, f"6 tokens to stage {n + 1}", "communication", "communication") for n in (1, 2)]
    assert [row.stage for row in found.rows if row.name == "host_serial"] == [1]  # the others are told early
    whole = explain(Pool(load_model(LLAMA), device("h100"), Engine(max_model_len=4096)), Batch(6, 600), "modelled")
    assert {row.stage for row in whole.rows} == {0}


def test_knots_of_no_weight_make_nothing_less_certain() -> None:
    """At a measured knot the modelled one beside it does not count; between the two it does."""
    found = KernelTimes(np.ones(2), np.array([0, 2], dtype=np.int8), np.array([0.0, 3.0]), np.array([0.1, 0.4]))
    assert _worst(found, np.array([1.0, 0.0])) == (0, 0.0, 0.1)
    assert _worst(found, np.array([0.9, 0.1])) == (2, 3.0, 0.4)
