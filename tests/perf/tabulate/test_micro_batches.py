"""Two micro-batches: what a split step takes, by hand, by its bounds, and in the tables."""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.kernel_tables import with_exchanges
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.perf.corrections import ALL
from windtunnel.perf.explain import explain, parse_batch
from windtunnel.perf.kinds.exchange import SMS
from windtunnel.perf.predictor import predictor
from windtunnel.perf.tabulate.cache import cache_key
from windtunnel.perf.tabulate.grid import operator_times, tabulate
from windtunnel.perf.tabulate.micro_batches import (
    AFTER,
    ALTERNATING,
    BEFORE,
    BUSY,
    COMBINE,
    CORE,
    DISPATCH,
    EXPERTS,
    FIVE_STAGES,
    SHARED,
    Halves,
    lasting,
    overlap,
    rooms,
    shared_out,
)
from windtunnel.perf.tabulate.operators import operators
from windtunnel.perf.tabulate.tables import PARTS, axes

COMPUTED = (BEFORE, CORE, AFTER, EXPERTS, SHARED)
AROUND = ("embedding", "final_norm")
"""Of a step's operators by tokens: those of no layer."""
RANKS = 8
DECODES, PROMPTS = 16, 256
SETTINGS: dict[str, Any] = {
    "data_parallel_size": RANKS,
    "enable_expert_parallel": True,
    "all2all_backend": "deepep_low_latency",
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "cudagraph_capture_sizes": None,
}
SPLIT = {"enable_dbo": True, "dbo_decode_token_threshold": DECODES, "dbo_prefill_token_threshold": PROMPTS}
SGLANG = {"preset": "sglang-0.5", "all2all_backend": "deepep_auto", "enable_dbo": True}
HIGH = {"all2all_backend": "deepep_high_throughput"}


def pool(**engine: Any) -> Pool:
    return Pool(load_model("Qwen/Qwen3-30B-A3B"), device("h100"), Engine(**{**SETTINGS, **engine}))


@pytest.fixture(scope="module", autouse=True)
def systems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = with_exchanges(tmp_path_factory.mktemp("systems"), factor=5.0)
        patch.setenv("WINDTUNNEL_KERNELS", str(folder))
        yield folder


@cache
def tables(**engine: Any) -> BatchTimes:
    return tabulate(pool(**engine)).times


def step(times: BatchTimes, decodes: int, context: int, chunks: tuple[tuple[int, int], ...] = ()) -> float:
    return times.lockstep([(decodes, decodes * context, list(chunks))] * RANKS)


def parts(**seconds: float) -> dict[str, np.ndarray]:
    return {name: np.array([seconds.get(name, 0.0)]) for name in (*COMPUTED, DISPATCH, COMBINE)}


@pytest.mark.parametrize("schedule", [ALTERNATING, FIVE_STAGES])
def test_a_layer_runs_everything_once_for_each_half(schedule: tuple[Any, ...]) -> None:
    computed = [name for slot in schedule for name in slot.computed]
    assert sorted(computed) == sorted(2 * COMPUTED)
    exchanged = [slot.exchanged for slot in schedule if slot.exchanged]
    assert sorted(exchanged) == sorted(2 * (DISPATCH, COMBINE))


def test_schedules_by_hand() -> None:
    """About DeepSeek's own decode: attention is longer than the exchange beside it, and experts wait for nothing."""
    case = parts(before=50, core=240, after=80, experts=115, shared=18, dispatch=60, combine=100)
    assert lasting(FIVE_STAGES, case)[0] == 2 * (68 + 115 + 320)
    assert lasting(ALTERNATING, case)[0] == 370 + 115 + 133 + 388
    slow = parts(before=50, core=240, after=80, experts=115, shared=18, dispatch=200, combine=500)
    assert lasting(FIVE_STAGES, slow)[0] == 2 * (200 + 115 + 500)
    assert lasting(ALTERNATING, slow)[0] == 370 + 200 + 500 + 500


seconds = st.floats(0, 1e3)


@pytest.mark.parametrize("schedule", [ALTERNATING, FIVE_STAGES])
@given(case=st.fixed_dictionaries(dict.fromkeys((*COMPUTED, DISPATCH, COMBINE), seconds)))
def test_between_the_longer_of_the_two_and_both_after_each_other(
    schedule: tuple[Any, ...], case: dict[str, float]
) -> None:
    found = float(lasting(schedule, parts(**case))[0])
    computed, exchanged = (2 * sum(case[name] for name in names) for names in (COMPUTED, (DISPATCH, COMBINE)))
    assert max(computed, exchanged) - 1e-6 <= found <= computed + exchanged + 1e-6
    free = case | {DISPATCH: 0.0, COMBINE: 0.0}
    assert lasting(schedule, parts(**free))[0] == pytest.approx(computed)
    idle = case | dict.fromkeys(COMPUTED, 0.0)
    assert lasting(schedule, parts(**idle))[0] == pytest.approx(exchanged)


@pytest.mark.parametrize("schedule", [ALTERNATING, FIVE_STAGES])
@given(case=st.fixed_dictionaries(dict.fromkeys((*COMPUTED, DISPATCH, COMBINE), seconds)))
def test_rooms_say_what_the_attention_kernel_hides(schedule: tuple[Any, ...], case: dict[str, float]) -> None:
    without = float(lasting(schedule, parts(**case | {CORE: 0.0}))[0])
    hidden = sum(float(np.minimum(case[CORE], room)[0]) for room in rooms(schedule, parts(**case)))
    assert lasting(schedule, parts(**case))[0] == pytest.approx(without + 2 * case[CORE] - hidden)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=60), st.data())
def test_the_chunks_of_no_batch_hide_more_than_it_has_room_for(room: list[float], data: st.DataObject) -> None:
    share, largest = shared_out(np.array(room)), len(room) - 1
    chunks: list[int] = []
    while sum(chunks) < largest and data.draw(st.booleans()):
        chunks.append(data.draw(st.integers(1, largest - sum(chunks))))
    assert sum(share[n] for n in chunks) <= room[sum(chunks)] + 1e-9 or not chunks
    assert share[largest] == pytest.approx(room[largest])


def halves(**engine: Any) -> Halves:
    """Operators of a pool at half the tokens, with their shares."""
    of = pool(**engine)
    ax, ops = axes(of), operators(of)
    layered = {op: 0.0 if op.name in AROUND else 1.0 for op in ops}
    return Halves(of, ax, ops, layered, cache(partial(operator_times, ax=ax, predictor=predictor(of))))


@pytest.mark.parametrize("engine", [SPLIT, SPLIT | HIGH, SGLANG], ids=["low", "high", "sglang"])
def test_a_decode_step_is_what_its_schedule_lasts(engine: dict[str, Any]) -> None:
    """Layers by the schedule, and around them what is not split."""
    times = tabulate(pool(**engine), corrections=ALL.without("launch_gaps")).times
    both, n, context = halves(**engine), 64, 1024
    at = int(np.flatnonzero(both.ax.context_knots == context)[0])
    (attention,) = (op for op in both.operators if op.phase == "decode")
    core = attention.count * both.slower(attention, False) * both.seconds(attention, "decode_attention", 2)[n, at]
    case = {name: value[n : n + 1] for name, value in both.parts("decode_tokens").items() if name != CORE}
    schedule = FIVE_STAGES if "preset" in engine else ALTERNATING
    layers = float(lasting(schedule, case | {CORE: np.array([core])})[0])
    posted = [op for op in both.operators if op.name in ("expert_dispatch", "expert_combine")]
    busy = sum(2 * op.count * both.busy(op, "decode_tokens", both.seconds(op, "decode_tokens", 2))[n] for op in posted)
    assert 0 < busy <= 4 * 48 * BUSY or engine.get("all2all_backend") == "deepep_high_throughput"
    around = sum(both.seconds(op, "decode_tokens", 1)[n] for op in both.operators if op.name in AROUND)
    gpu = times.rank(n, n * context, []) + times.expert_tokens[RANKS * int(times.padded[n])] - times.sequences[n]
    assert gpu == pytest.approx(layers + busy + around)


def test_a_free_exchange_leaves_only_the_cost_of_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(with_exchanges(tmp_path, factor=1e-9)))
    free = ALL.without("graph_gaps")
    whole, split = (tabulate(pool(**engine), corrections=free).times for engine in ({}, SPLIT))
    both = {n: (step(whole, n, 1024), step(split, n, 1024)) for n in (8, 16, 32, 64)}
    assert both[8][0] == both[8][1]
    assert all(one < two < 2 * one for n, (one, two) in both.items() if n >= DECODES)
    prompt = [step(times, 0, 0, ((1024, 0),)) for times in (whole, split)]
    assert prompt[0] <= prompt[1] < 1.5 * prompt[0]


def test_a_dominating_exchange_hides_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(with_exchanges(tmp_path, factor=1e4)))
    times, whole = (tabulate(pool(**engine)).times for engine in (SPLIT, {}))
    assert step(times, 64, 1900) == pytest.approx(step(times, 64, 100), rel=1e-3)  # attention is hidden, too
    assert step(whole, 64, 1900) > step(whole, 64, 100)
    assert times.prefill(1024, 1024) == pytest.approx(0.0, abs=1e-6)
    sent = sum(
        row.seconds for row in explain(pool(**SPLIT), parse_batch("decode=64@1000")).rows if "expert_" in row.name
    )
    assert sent > 0.99 * step(times, 64, 1000)


def test_small_batches_stay_whole() -> None:
    whole, split = tables(), tables(**SPLIT)
    for n in range(1, DECODES):
        assert step(split, n, 1000) == step(whole, n, 1000)
    assert step(split, DECODES, 1000) != step(whole, DECODES, 1000)
    for tokens in (1, PROMPTS - 1):
        assert split.mixed_tokens[tokens] == whole.mixed_tokens[tokens]
    assert split.mixed_tokens[PROMPTS] != whole.mixed_tokens[PROMPTS]
    all_of_it = tables(**SPLIT | {"dbo_decode_token_threshold": 0})
    assert step(all_of_it, 2, 1000) != step(whole, 2, 1000)
    assert step(all_of_it, 1, 1000) == step(whole, 1, 1000)


def test_defaults_are_the_engines() -> None:
    whole, split = tables(), tables(enable_dbo=True)
    assert step(split, 31, 1000) == step(whole, 31, 1000)
    assert step(split, 32, 1000) != step(whole, 32, 1000)
    assert (split.mixed_tokens[:512] == whole.mixed_tokens[:512]).all()
    assert split.mixed_tokens[512] != whole.mixed_tokens[512]
    sglang = {**SGLANG, "enable_dbo": False}
    assert step(tables(**SGLANG), 2, 1000) != step(tables(**sglang), 2, 1000)
    low = {**SGLANG, "all2all_backend": "deepep_low_latency"}
    assert (tables(**low).mixed_tokens == tables(**low | {"enable_dbo": False}).mixed_tokens).all()


@pytest.mark.parametrize("engine", [SPLIT, SPLIT | HIGH, SGLANG], ids=["low", "high", "sglang"])
@settings(max_examples=25, deadline=None)
@given(decodes=st.integers(1, 61), context=st.integers(0, 1700), chunks=st.lists(st.integers(1, 300), max_size=3))
def test_never_longer_than_one_half_after_the_other(
    engine: dict[str, Any], decodes: int, context: int, chunks: list[int]
) -> None:
    of = pool(**engine)
    batch = parse_batch(",".join([f"decode={decodes}@{context}", *(f"prefill=1x{n}@{context}" for n in chunks)]))
    rows = explain(of, batch).rows
    times = tables(**engine)
    spent = step(times, batch.decodes, context, batch.chunks)
    assert sum(row.seconds for row in rows) == pytest.approx(spent, rel=1e-9)
    assert all(row.seconds >= 0 and row.hidden >= 0 for row in rows)
    computed = sum(row.seconds + row.hidden for row in rows if row.group not in ("communication", "host"))
    exchanged = sum(row.seconds + row.hidden for row in rows if row.group == "communication")
    gpu = sum(row.seconds for row in rows if row.group != "host")
    assert max(computed, exchanged) <= gpu * (1 + 1e-9)
    assert sum(row.hidden for row in rows) <= min(computed, exchanged) * (1 + 1e-9)


def test_both_halves_are_shown() -> None:
    def at(batch: str) -> dict[str, str]:
        return {row.name: row.at for row in explain(pool(**SPLIT), parse_batch(batch)).rows}

    rows = at("decode=50@1000")
    assert rows["o_proj"] == "2 × 28 tokens (6 padding)"
    assert rows["experts"] == "2 × 224 tokens of 8 ranks"
    assert rows["decode_attention"] == "2 × 25 × 1001 keys"
    assert rows["embedding"] == "56 tokens (6 padding)"
    assert at("decode=8@1000")["o_proj"] == "8 tokens"
    assert at("prefill=600")["o_proj"] == "2 × 300 tokens"
    assert at("decode=4@100,prefill=600")["decode_attention"] == "4 × 101 keys"


def test_shares_by_source_and_by_group_add_up() -> None:
    found = tabulate(pool(**SPLIT | HIGH))
    for split in (found.sources, found.groups):
        for part in PARTS:
            total = sum(getattr(times, part) for times in split.values())
            np.testing.assert_allclose(total, getattr(found.times, part), rtol=1e-12, atol=1e-15, err_msg=part)


def test_the_overlap_is_a_cause_that_can_be_switched_off() -> None:
    off = tabulate(pool(**SPLIT), corrections=ALL.without("micro_batch_overlap")).times
    for part in PARTS:
        assert (getattr(off, part) == getattr(tables(), part)).all()
    of = pool(**SPLIT)
    assert (
        overlap(
            of,
            axes(of),
            partial(operator_times, ax=axes(of), predictor=predictor(of)),
            ALL.without("micro_batch_overlap"),
        )
        is None
    )


def test_kernels_that_hold_multiprocessors_slow_down_the_others() -> None:
    low, high = halves(**SPLIT), halves(**SPLIT | HIGH)
    product = next(op for op in high.operators if op.group == "gemm")
    norm = next(op for op in high.operators if op.group == "other")
    assert high.slower(product, False) == pytest.approx(132 / (132 - SMS))
    assert high.slower(norm, False) == low.slower(product, False) == 1.0
    either = halves(**SGLANG)
    assert either.slower(product, False) == 1.0
    assert either.slower(product, True) == pytest.approx(132 / 112)


def test_an_overlap_that_keeps_what_is_not_in_layers_of_experts() -> None:
    """Of DeepSeek's 61 layers the first 3 have none; they, embedding and head run whole."""
    engine: dict[str, Any] = {**SETTINGS, **SPLIT, "max_num_seqs": 32}
    of = Pool(load_model("deepseek-ai/DeepSeek-V3"), device("h100"), Engine(**engine))
    ax = axes(of)
    found = overlap(of, ax, cache(partial(operator_times, ax=ax, predictor=predictor(of))))
    assert found is not None
    factor = {op.name: found.factors[op, "decode_tokens"][32] for op in operators(of) if op.phase == "tokens"}
    assert factor["embedding"] == factor["final_norm"] == factor["gate_up_proj"] == 1.0
    assert factor["o_proj"] > 1.0
    assert factor["router"] > 1.0


def test_settings_have_tables_of_their_own_in_the_cache() -> None:
    variants: list[dict[str, Any]] = [
        {},
        SPLIT,
        SPLIT | HIGH,
        SPLIT | {"dbo_decode_token_threshold": 17},
        {"all2all_backend": "allgather_reducescatter"},
    ]
    keys = {cache_key(pool(**engine), "auto", None) for engine in variants}
    keys.add(cache_key(pool(**SPLIT), "auto", None, ALL.without("micro_batch_overlap")))
    assert len(keys) == 6


def test_speculation_splits_by_the_tokens_that_are_verified() -> None:
    drafts = {"num_speculative_tokens": 3, "acceptance_length": 2.0}
    whole, split = tables(**drafts), tables(**SPLIT | drafts)
    assert step(split, 3, 1000) == step(whole, 3, 1000)
    assert step(split, 4, 1000) != step(whole, 4, 1000)
