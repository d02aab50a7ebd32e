"""Exchanges of experts: the bytes they send, the tables that time them, and the operators that they replace."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.kernel_tables import H100, exchange, exchange_rows, full_database, with_exchanges, write_table
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.database import Database, Measured
from windtunnel.perf.kernel_errors import family_errors
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED, Sources
from windtunnel.perf.kinds.collective import CROSSING
from windtunnel.perf.kinds.exchange import Exchange
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.predictor import predictor, roofline
from windtunnel.perf.tabulate.operator import Operator
from windtunnel.perf.tabulate.operators import operators

MODES = ("low_latency", "high_throughput")
PHASES = (("dispatch", "fp8"), ("combine", "bfloat16"))
DEEPEP = {"data_parallel_size": 8, "enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"}


def opened(systems: Path, backend: str = "sglang", corrections: Corrections = ALL) -> Measured:
    return Measured(
        Database(systems, "h100_sxm", backend, "0.5.12" if backend == "sglang" else "0.24.0", ""), H100, corrections
    )


def ask(measured: Measured, kernel: Exchange, tokens: Sequence[float]) -> tuple[Floats, Sources, Floats]:
    found = kernel.measured(measured, np.array(tokens, dtype=float), np.zeros(len(tokens)))
    assert found is not None
    return found.seconds, found.sources, found.distance


def steps(kernel: Exchange, tokens: float) -> float:
    """A made-up measurement that no rule would guess."""
    return {"dispatch": 10.0, "combine": 17.0}[kernel.phase] + kernel.ranks + 0.1 * tokens


@pytest.mark.parametrize(
    ("ranks", "domain", "top_k"), [(2, 2, 1), (3, 3, 2), (4, 2, 2), (4, 2, 3), (6, 3, 2), (4, 4, 3)]
)
def test_copies_are_counted_over_all_choices(ranks: int, domain: int, top_k: int) -> None:
    """Every way in which ``top_k`` choices can fall on the ranks, for a token of rank 0."""
    link = dict.fromkeys(MODES, 0.0)
    network = dict.fromkeys(MODES, 0.0)
    for chosen in product(range(ranks), repeat=top_k):
        link["low_latency"] += sum(0 < rank < domain for rank in chosen)
        network["low_latency"] += sum(rank >= domain for rank in chosen)
        entered = {rank // domain for rank in chosen} - {0}
        network["high_throughput"] += len(entered)
        # a node's copy arrives at the sender's twin, which hands it on: over the link it goes to all but the twin
        link["high_throughput"] += sum(rank % domain != 0 for rank in set(chosen))
    ways = ranks**top_k
    for mode in MODES:
        kernel = exchange("dispatch", mode, ranks, domain=domain, top_k=top_k)
        assert kernel.copies() == pytest.approx((link[mode] / ways, network[mode] / ways))


@given(st.integers(2, 64), st.integers(1, 16), st.sampled_from([2, 4, 8, 72]))
def test_high_throughput_never_sends_a_token_twice_to_a_gpu(ranks: int, top_k: int, domain: int) -> None:
    one, two = (exchange("combine", mode, ranks, top_k=top_k, domain=domain) for mode in MODES)
    assert two.copies()[1] <= one.copies()[1] + 1e-9
    assert sum(one.copies()) == pytest.approx(top_k * (ranks - 1) / ranks)
    if ranks <= domain:
        assert two.copies()[0] <= min(top_k, ranks - 1)


def test_one_sided_kernels_send_a_token_once_to_each_gpu() -> None:
    kernel = exchange("dispatch", "one_sided", 4, top_k=2, dtype="nvfp4")
    ways = [{first, second} - {0} for first, second in product(range(4), repeat=2)]
    assert kernel.copies() == pytest.approx((sum(map(len, ways)) / len(ways), 0.0))
    assert kernel.row_bytes == 2048 * (4 + 8 / 16) / 8


def test_one_sided_kernels_take_what_tensorrt_llm_measured(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "topk": 8, "num_experts": 128, "moe_ep_size": 8, "num_tokens": [1, 64, 256]}
    texts = {"kernel_source": "NVLinkOneSided", "moe_dtype": "nvfp4"}
    for backend, factor in (("trtllm", 1.0), ("sglang", 9.0)):
        columns = sizes | texts | {"op_name": "alltoall_combine", "latency": [factor * ms for ms in (0.02, 0.03, 0.06)]}
        write_table(tmp_path, f"h100_sxm/comm/{backend}/1.3.0/trtllm_alltoall_perf", columns)
    known = Measured(Database(tmp_path, "h100_sxm", "trtllm", "1.1.0", ""), H100)
    seconds, sources, _ = ask(known, exchange("combine", "one_sided", 8), [64, 256])
    assert seconds == pytest.approx([30e-6, 60e-6])
    assert set(sources) == {MEASURED}
    assert exchange("dispatch", "one_sided", 8, dtype="nvfp4").measured(known, np.ones(1), np.zeros(1)) is None


def test_eight_bits_and_shared_tokens_halve_what_is_sent() -> None:
    wide, a = exchange("dispatch", "low_latency", 16), np.array([100.0])
    assert replace(wide, dtype="fp8").network_bytes(a) / wide.network_bytes(a) == pytest.approx((1 + 4 / 128) / 2)
    assert replace(wide, tp=2).link_bytes(a) == pytest.approx(wide.link_bytes(a) / 2)
    assert wide.bytes_moved(a, a) == wide.network_bytes(a)
    near = replace(wide, ranks=8)
    assert near.bytes_moved(a, a) == near.link_bytes(a)
    assert near.network_bytes(a) == 0.0
    assert wide.bound(H100, a, a)[0] == pytest.approx(float(wide.network_bytes(a)[0]) / H100.network_bandwidth)
    assert "16 GPUs" in wide.describe()


def test_without_a_table_the_link_is_as_good_as_for_gathers() -> None:
    model, a = roofline(H100), np.array([1.0, 1000.0])
    for ranks, latency in ((8, 0.0), (16, CROSSING)):
        kernel, gather = exchange("combine", "low_latency", ranks), model.efficiencies["gather"]
        expected = kernel.bound(H100, a, a) / gather.memory + gather.latency + latency
        np.testing.assert_allclose(model.times(kernel, a, np.zeros(2)).seconds, expected)


@pytest.fixture
def systems(tmp_path: Path) -> Path:
    """Two versions: the newer one knows a single node, the older one two."""
    for mode, table in zip(MODES, ("wideep_deepep_ll_perf", "wideep_deepep_normal_perf"), strict=True):
        write_table(tmp_path, f"h100_sxm/comm/sglang/0.5.12/{table}", exchange_rows(steps, mode))
        older = exchange_rows(lambda kernel, tokens: 2 * steps(kernel, tokens), mode, (1, 2))
        write_table(tmp_path, f"h100_sxm/comm/sglang/0.5.6/{table}", older)
    return tmp_path


@pytest.mark.parametrize(("phase", "dtype"), PHASES)
@pytest.mark.parametrize("mode", MODES)
def test_measured_exchanges_come_back_exactly(systems: Path, mode: str, phase: str, dtype: str) -> None:
    tokens = [1, 8, 64, 256, 1024, 8192]
    for ranks, factor in ((8, 1), (16, 2)):  # the version that has two nodes took twice as long
        kernel = exchange(phase, mode, ranks, dtype=dtype)
        seconds, sources, distance = ask(opened(systems), kernel, tokens)
        notified = 1.0 if mode == "high_throughput" else 0.0
        np.testing.assert_allclose(seconds, [1e-6 * (factor * steps(kernel, n) + notified) for n in tokens], rtol=1e-9)
        assert (sources == MEASURED).all() and (distance == 0).all()


def test_other_engines_call_the_same_library(systems: Path) -> None:
    kernel = exchange("combine", "low_latency", 8)
    seconds, sources, _ = ask(opened(systems, "vllm"), kernel, [64])
    assert seconds[0] == pytest.approx(1e-6 * steps(kernel, 64))
    assert sources[0] == INTERPOLATED
    called = {"comm_backend": "deepep_ll", "phase": ["combine", "combine"], "ep_size": 8, "hidden_size": 2048}
    called |= {"topk": 8, "num_experts": 128, "num_tokens": [64, 128], "latency": [500.0, 600.0]}
    write_table(systems, "h100_sxm/comm/vllm/0.24.0/moe_a2a_perf", called)
    seconds, sources, _ = ask(opened(systems, "vllm", ALL.without("kernel_choice")), kernel, [64])
    assert (seconds[0], sources[0]) == (pytest.approx(500e-6), MEASURED)


def test_between_and_beyond_the_points(systems: Path) -> None:
    kernel, measured = exchange("combine", "low_latency", 8), opened(systems)
    seconds, sources, distance = ask(measured, kernel, [512, 8192, 16384])
    assert sources.tolist() == [INTERPOLATED, MEASURED, MODELLED]
    assert seconds[0] == pytest.approx(1e-6 * steps(kernel, 512), rel=0.15)
    assert seconds[2] == pytest.approx(2 * seconds[1])
    assert distance.tolist() == [1.0, 0.0, 1.0]


def test_another_shape_takes_as_long_for_as_many_bytes(systems: Path) -> None:
    measured, known = opened(systems), exchange("dispatch", "low_latency", 8, dtype="fp8")
    for change, bytes_ in (({"dtype": "bfloat16"}, 2 / (1 + 4 / 128)), ({"hidden": 4096}, 2.0), ({"top_k": 4}, 0.5)):
        seconds, sources, distance = ask(measured, replace(known, **change), [64])
        assert seconds == pytest.approx(ask(measured, known, [64 * bytes_])[0])
        assert (sources[0], bool(distance[0] >= 1)) == (MODELLED, True)
    shared = ask(measured, replace(known, tp=2), [128])
    assert (shared[0][0], shared[1][0]) == (pytest.approx(1e-6 * steps(known, 64)), MEASURED)
    few = ask(measured, replace(known, tp=8), [1])[0]
    assert few[0] == pytest.approx(1e-6 * steps(known, 1))  # the least message is all latency


def test_nobody_measured_any(tmp_path: Path) -> None:
    measured = opened(full_database(tmp_path), "vllm")
    assert exchange("combine", "low_latency", 8).measured(measured, np.ones(1), np.zeros(1)) is None


def test_measurements_that_failed_are_left_out(tmp_path: Path) -> None:
    rows = exchange_rows(lambda kernel, tokens: float("nan") if tokens == 64 else steps(kernel, tokens), "low_latency")
    write_table(tmp_path, "h100_sxm/comm/sglang/0.5.12/wideep_deepep_ll_perf", rows)
    _, sources, _ = ask(opened(tmp_path), exchange("combine", "low_latency", 8), [8, 64, 256])
    assert sources.tolist() == [MEASURED, INTERPOLATED, MEASURED]


def test_exchanges_have_errors_of_their_own() -> None:
    kernel = exchange("combine", "low_latency", 8)
    assert kernel.error_family == "exchange"
    errors = family_errors("exchange")
    assert errors != family_errors("other")
    assert 0 < errors.measured < errors.interpolated <= errors.modelled <= errors.roofline


def pool(model: str = "Qwen/Qwen3-30B-A3B", **engine: object) -> Pool:
    limits = {"max_model_len": 2048, "max_num_batched_tokens": 1024, "max_num_seqs": 64}
    return Pool(load_model(model), device("h100"), Engine(**{**limits, **DEEPEP, **engine}))  # type: ignore[arg-type]


def named(of: Pool) -> dict[str, Operator]:
    return {op.name: op for op in operators(of)}


def test_a_rank_sends_its_own_tokens_and_gathers_nobodys() -> None:
    ops = named(pool())
    assert not [name for name in ops if "gather" in name or "scatter" in name]
    there, back = ops["expert_dispatch"], ops["expert_combine"]
    assert (there.phase, there.group, there.count) == ("tokens", "communication", 48)
    assert there.kernel == Exchange("dispatch", "low_latency", 2048, 8, 128, 8, 8)
    assert back.kernel == replace(there.kernel, phase="combine")
    assert "expert_all_gather" in named(pool(all2all_backend="allgather_reducescatter"))


def test_tokens_travel_in_eight_bits_where_experts_multiply_so() -> None:
    ops = named(pool("deepseek-ai/DeepSeek-V3", data_parallel_size=16))
    sent = [op.kernel for op in ops.values() if isinstance(op.kernel, Exchange)]
    assert [(kernel.phase, kernel.dtype, kernel.ranks, kernel.crosses) for kernel in sent] == [
        ("dispatch", "fp8", 16, True),
        ("combine", "bfloat16", 16, True),
    ]
    shared = named(pool(tensor_parallel_size=2, data_parallel_size=4))["expert_dispatch"].kernel
    assert isinstance(shared, Exchange)
    assert (shared.ranks, shared.tp) == (8, 2)


def test_experts_lie_as_the_exchange_leaves_them() -> None:
    layouts = {"deepep_low_latency": "masked", "deepep_high_throughput": "contiguous", "allgather_reducescatter": ""}
    for backend, layout in layouts.items():
        kernel = named(pool(all2all_backend=backend))["experts"].kernel
        assert isinstance(kernel, Experts)
        assert kernel.layout == layout
    either = named(pool(preset="sglang-0.5", all2all_backend="deepep_auto"))
    chosen = [either["experts"].kernel.resolved(prompts) for prompts in (False, True)]
    assert [kernel.layout for kernel in chosen if isinstance(kernel, Experts)] == ["masked", "contiguous"]
    sent = [either["expert_dispatch"].kernel.resolved(prompts) for prompts in (False, True)]
    assert [kernel.mode for kernel in sent if isinstance(kernel, Exchange)] == ["low_latency", "high_throughput"]


def wide_rows(table: str) -> dict[str, object]:
    points = list(product((8, 16), (1, 64, 1024)))
    return {
        "moe_dtype": "bfloat16",
        "distribution": "power_law_1.2",
        "hidden_size": 2048,
        "inter_size": 768,
        "topk": 8,
        "num_experts": 128,
        "moe_tp_size": 1,
        "moe_ep_size": [ep for ep, _ in points],
        "num_tokens": [ep * n for ep, n in points],
        "latency": [(1.0 if table.endswith("context") else 2.0) + 0.01 * n + 1 / ep for ep, n in points],
    }


def test_wide_experts_come_from_their_own_tables(tmp_path: Path) -> None:
    full_database(tmp_path)
    for name in ("context", "generation"):
        write_table(tmp_path, f"h100_sxm/moe/sglang/0.5.10/wideep_{name}_moe_perf", wide_rows(f"wideep_{name}"))
    measured, zero = opened(tmp_path), np.zeros(2)
    for layout, base in (("contiguous", 1.0), ("masked", 2.0)):
        kernel = Experts(2048, 768, 8, 128, ep=8, layout=layout)
        found = kernel.measured(measured, np.array([8.0, 512.0]), zero)
        assert found is not None
        np.testing.assert_allclose(found.seconds, [1e-3 * (base + 0.01 * n + 0.125) for n in (1, 64)])
        assert (found.sources == MEASURED).all()
        more = replace(kernel, ep=32).measured(measured, np.array([32.0, 2048.0]), zero)
        assert more is not None
        assert (more.sources == MODELLED).all()
        assert (more.seconds < found.seconds).all()  # fewer experts each
    other = Experts(2048, 768, 4, 64, ep=8, layout="masked").measured(measured, np.ones(2), zero)
    plain = Experts(2048, 768, 4, 64, ep=8).measured(measured, np.ones(2), zero)
    assert (other is None) == (plain is None)
    assert other is None or plain is None or (other.seconds == plain.seconds).all()


def test_prices_follow_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(with_exchanges(tmp_path)))
    of = pool()
    found = predictor(of).times(named(of)["expert_combine"].kernel, np.array([64.0]), np.zeros(1))
    assert found.sources[0] == INTERPOLATED
    assert found.error[0] == family_errors("exchange").interpolated
