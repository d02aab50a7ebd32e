from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.kernel_tables import full_database
from windtunnel.deployment import Engine, Pool, capture_sizes
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.database import find_systems
from windtunnel.perf.explain import Batch, explain
from windtunnel.perf.kernel_times import SOURCES
from windtunnel.perf.tabulate.by_operator import by_operator, bytes_by_operator
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.operator import GROUPS
from windtunnel.perf.tabulate.operators import operators
from windtunnel.perf.tabulate.tables import PARTS, Tabulated, axes, octave_knots

real = pytest.mark.skipif(find_systems() is None, reason="the kernel database is not installed")
POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen/Qwen3-8B", {}),
    "sharded": ("meta-llama/Llama-3.1-70B", {"tensor_parallel_size": 4}),
    "eager": ("Qwen/Qwen3-8B", {"enforce_eager": True, "async_scheduling": False}),
    "windows": ("google/gemma-3-27b-it", {"tensor_parallel_size": 2}),
    "lockstep": ("Qwen/Qwen3-30B-A3B", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    "latent": ("deepseek-ai/DeepSeek-V2-Lite", {}),
}


def pool(name: str, gpu: str = "h100_sxm") -> Pool:
    model, engine = POOLS[name]
    limits: dict[str, Any] = {"max_model_len": 3000, "max_num_seqs": 40, "max_num_batched_tokens": 700}
    return Pool(load_model(model), device(gpu), Engine(**{**limits, **engine}))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDTUNNEL_KERNELS", str(full_database(tmp_path_factory.mktemp("systems"))))
        yield


@pytest.fixture(scope="module", params=POOLS)
def built(request: pytest.FixtureRequest, database: None) -> tuple[Pool, Tabulated]:  # noqa: ARG001
    return pool(request.param), tabulate(pool(request.param))


def test_operators_add_up_to_their_groups(built: tuple[Pool, Tabulated]) -> None:
    """All but "other", which holds waits for the host as well."""
    of, tables = built
    groups = {operator.name: operator.group for operator in operators(of)}
    parts = by_operator(of)
    assert set(parts) == set(groups)
    for group in set(GROUPS) - {"other"}:
        for part in PARTS:
            whole = getattr(tables.groups[group], part)
            total = sum((getattr(parts[name], part) for name in parts if groups[name] == group), np.zeros_like(whole))
            np.testing.assert_allclose(total, whole, rtol=1e-9, atol=1e-15, err_msg=f"{group} {part}")


@pytest.mark.parametrize("name", ["dense", "sharded", "latent"])
@pytest.mark.parametrize("batch", [(8, 8 * 512, []), (0, 0, [(512, 0)])])
def test_bytes_are_those_that_explain_counts(
    database: None,  # noqa: ARG001
    name: str,
    batch: tuple[int, int, list[tuple[int, int]]],
) -> None:
    of, (decodes, kv, chunks) = pool(name), batch
    tables = bytes_by_operator(of)
    rows = [row for row in explain(of, Batch(decodes, kv, tuple(chunks))).rows if row.group != "host"]
    assert {row.name for row in rows} <= set(tables)
    for row in rows:
        assert tables[row.name].rank(*batch) == pytest.approx(row.bytes, rel=0.01), row.name


def test_shares_by_source_and_by_group_add_up(built: tuple[Pool, Tabulated]) -> None:
    of, tables = built
    assert tuple(tables.sources) == SOURCES
    assert tuple(tables.groups) == GROUPS
    for split in (tables.sources, tables.groups):
        for part in PARTS:
            total = sum(getattr(times, part) for times in split.values())
            np.testing.assert_allclose(total, getattr(tables.times, part), rtol=1e-12, atol=1e-15, err_msg=part)
        assert sum(times.prefill_base for times in split.values()) == pytest.approx(tables.times.prefill_base)
        batch = (3, 3000, [(200, 16), (90, 0)])
        assert sum(times.rank(*batch) for times in split.values()) == pytest.approx(tables.times.rank(*batch))
    assert of.engine.resolved("max_num_seqs") == tables.times.max_num_seqs


def test_more_work_takes_longer(built: tuple[Pool, Tabulated]) -> None:
    _, tables = built
    times = tables.times
    assert (np.diff(times.decode_attention, axis=1) >= -1e-12).all()
    prefills = times.prefill_attention[1:]  # the rate rises with the length, by a step where a window fills
    assert (np.diff(prefills, axis=1) >= -0.005 * prefills[:, :-1]).all()
    assert (np.diff(times.sequences[1:]) > 0).all()
    at = np.unique(times.padded)
    assert (np.diff(times.decode_tokens[at]) > -1e-12).mean() > 0.95  # leaving the graphs may cost a step
    assert (times.mixed_tokens >= times.decode_tokens).all()
    assert times.decode_tokens[0] == times.mixed_tokens[0] == times.sequences[0] == 0.0
    assert (times.decode_attention[0] == 0).all()
    assert (times.prefill_attention[0] == 0).all()


def test_the_tables_cover_the_engine(built: tuple[Pool, Tabulated]) -> None:
    of, tables = built
    times, engine = tables.times, of.engine
    assert times.max_num_batched_tokens == engine.resolved("max_num_batched_tokens")
    assert times.context_knots[-1] >= engine.resolved("max_model_len")
    assert times.chunk_knots[-1] >= engine.resolved("max_num_batched_tokens")
    ranks = engine.data_parallel_size if of.lockstep else 1
    assert len(times.expert_tokens) == (ranks * engine.resolved("max_num_batched_tokens") + 1 if ranks > 1 else 1)


def test_batches_are_padded_to_their_graph(built: tuple[Pool, Tabulated]) -> None:
    of, tables = built
    sizes, times = capture_sizes(of.engine, of.device), tables.times
    assert times.graph_tokens == (sizes[-1] if sizes else 0)
    for below, size in pairwise((0, *sizes)):
        assert (times.decode_tokens[below + 1 : size + 1] == times.decode_tokens[size]).all()
        assert (times.padded[below + 1 : size + 1] == size).all()
    assert (times.padded[times.graph_tokens + 1 :] == np.arange(times.graph_tokens + 1, len(times.padded))).all()


def test_chunks_share_the_launch(built: tuple[Pool, Tabulated]) -> None:
    _, tables = built
    times = tables.times

    def attention(chunks: list[tuple[int, int]]) -> float:
        return times.prefill_base + sum(times.prefill(*chunk) for chunk in chunks)

    assert times.prefill_base > 0
    assert attention([(1, 0)] * 8) < 2 * attention([(1, 0)])
    assert attention([(256, 0), (256, 0)]) <= attention([(512, 0)]) * 1.15  # the curve between points is a power law


def test_every_operator_is_in_the_provenance(built: tuple[Pool, Tabulated]) -> None:
    _, tables = built
    rows = [row for row in tables.provenance if "operator" in row]
    assert {row["operator"] for row in rows} >= {"o_proj", "lm_head", "sampling", "norm", "embedding"}
    assert all(row["sources"] and set(row["sources"]) <= set(SOURCES) for row in rows)
    assert tables.provenance[0]["version_rule"] == "exact" or tables.provenance[0]["version_rule"] == "current"


def test_windows_cap_what_decode_reads(database: None) -> None:  # noqa: ARG001
    times = tabulate(pool("windows")).times
    long = times.decode(16, 16 * 2900) - times.decode(16, 16 * 2000)
    short = times.decode(16, 16 * 1000) - times.decode(16, 16 * 100)
    assert 0 < long < 0.4 * short  # 5 of 6 layers see 1024 tokens


def test_lockstep_keeps_experts_out_of_the_token_tables(database: None) -> None:  # noqa: ARG001
    tables = tabulate(pool("lockstep"))
    assert not tables.groups["experts"].decode_tokens.any()
    assert tables.groups["experts"].expert_tokens[1:].all()
    assert tables.groups["communication"].expert_tokens[1:].all()
    alone = tables.times.lockstep([(8, 800, []), (0, 0, [])])
    assert alone == tables.times.lockstep(
        [(8, 800, []), (8, 800, [])]
    )  # an idle rank runs a dummy batch of the same padded size


@pytest.mark.parametrize("gpu", ["a10", "mi300x", "rtx_4090"])
def test_a_device_without_measurements_is_modelled_and_says_so(gpu: str) -> None:
    of = Pool(load_model("Qwen/Qwen3-0.6B"), device(gpu), Engine(max_model_len=2048))
    tables = tabulate(of)
    assert tables.sources["modelled"].rank(8, 8000, []) == tables.times.rank(8, 8000, [])
    assert tables.provenance[0]["source"] == "roofline"
    assert any(gpu in note and "modelled" in note for note in tables.notes)


def test_roofline_may_be_asked_for_and_measured_insisted_on(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", f"{tmp_path}/none")
    tables = tabulate(pool("dense"), "modelled")
    assert not tables.sources["measured"].decode_tokens.any()
    with pytest.raises(InputError, match="not installed"):
        tabulate(pool("dense"), "measured")
    with pytest.raises(InputError, match="did you mean 'measured'"):
        tabulate(pool("dense"), "measuerd")


@given(st.integers(1, 200_000), st.sampled_from([1, 16]))
def test_knots_cover_their_range_finely(last: int, step: int) -> None:
    knots = octave_knots(last, step)
    assert knots[0] == 0
    assert last <= knots[-1] < last + step or (last < step and knots[-1] == step)
    assert (np.diff(knots) > 0).all()
    assert not (knots % step).any()
    large = knots[knots >= 32 * step]
    assert (np.diff(large) <= large[:-1] / 16 + step).all()


def test_axes_without_graphs_do_not_pad() -> None:
    ax = axes(pool("eager"))
    assert ax.graph_tokens == 0
    assert (ax.padded == np.arange(701)).all()


def h100(model: str, tp: int = 1) -> tuple[Tabulated, BatchTimes]:
    tables = tabulate(Pool(load_model(model), device("h100_sxm"), Engine(tensor_parallel_size=tp, max_model_len=16384)))
    return tables, tables.times


@real
def test_llama_8b_on_h100_decodes_near_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 GB of weights take 4.5 ms at full bandwidth; vLLM reports 6.5 to 8 ms per token."""
    monkeypatch.delenv("WINDTUNNEL_KERNELS", raising=False)
    tables, times = h100("meta-llama/Llama-3.1-8B")
    assert 5.5e-3 < times.batch(1, 1000, []) < 8e-3
    assert tables.sources["modelled"].rank(1, 1000, []) < 0.2 * times.rank(1, 1000, [])
    assert 1.0 < times.batch(64, 64000, []) / times.batch(1, 1000, []) < 2.5


@real
def test_qwen_32b_on_two_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINDTUNNEL_KERNELS", raising=False)
    tables, times = h100("Qwen/Qwen3-32B", 2)
    assert 11e-3 < times.batch(1, 1000, []) < 17e-3
    rate = 2 * 32e9 * 2048 / times.batch(0, 0, [(2048, 0)]) / (2 * 989e12)
    assert 0.4 < rate < 0.8  # of the peak in prefill
    assert tables.sources["modelled"].rank(64, 64000, []) < 0.2 * times.rank(64, 64000, [])
