"""Stage tables and sends of a pool: what they add up to, and which links they cross."""

from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Engine, Pool, stage_pools
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.batch_times import StageTimes
from windtunnel.perf.predictor import predictor
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import across_nodes, activations, axes, sends

SMALL: dict[str, Any] = {"max_model_len": 3000, "max_num_seqs": 40, "max_num_batched_tokens": 700}


def pool(name: str = "Llama-3.1-8B", on: str = "h100", **engine: Any) -> Pool:
    return Pool(load_model(name), device(on), Engine(**(SMALL | engine)))


def of(pool: Pool) -> StageTimes:
    times = tabulate(pool, "modelled").pipeline
    assert times
    return times


@pytest.mark.parametrize("engine", [{}, {"enforce_eager": True, "tensor_parallel_size": 2}])
def test_the_stages_together_are_the_whole_model(engine: dict[str, Any]) -> None:
    """Token-level work, attention, head and host work are divided; only waits for launches may add up to more."""
    alone = tabulate(pool(**engine), "modelled").times
    times = of(pool(pipeline_parallel_size=3, **engine))
    parts = times.together
    for name in ("decode_attention", "mixed_attention", "prefill_attention", "sequences", "host_serial"):
        np.testing.assert_allclose(getattr(parts, name), getattr(alone, name), rtol=1e-9, err_msg=name)
    graphs = slice(1, alone.graph_tokens + 1)
    np.testing.assert_allclose(parts.decode_tokens[graphs], alone.decode_tokens[graphs], rtol=1e-9)
    assert (parts.mixed_tokens >= alone.mixed_tokens * (1 - 1e-9)).all()


def test_only_the_first_stage_embeds_and_only_the_last_samples() -> None:
    first, middle, last = of(pool(pipeline_parallel_size=3)).stages
    assert not first.sequences.any() and not middle.sequences.any()
    assert (last.sequences[1:] > 0).all()
    assert first.host_serial[1:].all() and not middle.host_serial.any() and not last.host_serial.any()
    assert (middle.host_overlapped[1:] > 0).all()


def test_shares_of_stages_add_up() -> None:
    found = tabulate(pool(pipeline_parallel_size=2), "modelled")
    assert found.pipeline
    assert np.array_equal(found.times.mixed_tokens, found.pipeline.together.mixed_tokens)
    for split in (found.sources, found.groups):
        together = np.sum([part.mixed_tokens for part in split.values()], axis=0)
        np.testing.assert_allclose(together, found.times.mixed_tokens, rtol=1e-9)
    assert {row["stage"] for row in found.provenance if "operator" in row} == {0, 1}


def test_stages_are_cached_one_by_one(tmp_path: Any) -> None:
    first = tabulate(pool(pipeline_parallel_size=2), "modelled", tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 2
    again = tabulate(pool(pipeline_parallel_size=2), "modelled", tmp_path)
    assert first.pipeline and again.pipeline
    for one, other in zip(first.pipeline.stages, again.pipeline.stages, strict=True):
        assert np.array_equal(one.mixed_tokens, other.mixed_tokens)
        assert np.array_equal(one.host_serial, other.host_serial)


def test_without_a_pipeline_the_tables_are_plain() -> None:
    assert tabulate(pool(), "modelled").pipeline is None


def test_activations_are_two_rows_per_token_over_the_link() -> None:
    served = pool(pipeline_parallel_size=2)
    found = predictor(served, "modelled")
    ax = axes(served)
    row = sends(served, ax, found)[0]
    attained = found.roofline.efficiencies["gather"]
    tokens = ax.padded[700]
    seconds = 2 * 2 * 4096 * tokens / (served.device.link_bandwidth * attained.memory) + attained.latency
    assert row[0] == 0
    assert row[700] == pytest.approx(seconds)
    assert row[1] == row[int(np.flatnonzero(ax.padded == ax.padded[1])[-1])]


@pytest.mark.parametrize(
    ("engine", "crossed"),
    [
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, [False]),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 2}, [True]),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 4}, [False, True, False]),
        ({"pipeline_parallel_size": 3, "data_parallel_size": 3}, [False, True]),
    ],
)
def test_stages_beyond_a_node_send_over_the_network(engine: dict[str, Any], crossed: list[bool]) -> None:
    served = pool("Llama-3.1-70B", **engine)
    assert across_nodes(served) == crossed
    rows = sends(served, axes(served), predictor(served, "modelled"))
    assert [bool(row[700] > 1.5 * rows[:, 700].min()) for row in rows] == (
        crossed if any(not x for x in crossed) else [False]
    )


def test_a_rack_is_one_domain() -> None:
    served = pool("Llama-3.1-70B", "gb200", tensor_parallel_size=4, pipeline_parallel_size=4)
    assert across_nodes(served) == [False] * 3


def test_pools_of_stages_keep_the_engine() -> None:
    served = pool("DeepSeek-V3", enable_expert_parallel=True, tensor_parallel_size=8, pipeline_parallel_size=4)
    parts = stage_pools(served)
    assert [part.model.num_layers for part in parts] == [15, 15, 16, 15]
    assert all(part.engine == served.engine for part in parts)
    assert served.model.num_layers == 61


def test_attention_residuals_travel_with_the_hidden_state() -> None:
    kimi = Pool(
        load_model("moonshotai/Kimi-K3"), device("h200"), Engine(tensor_parallel_size=8, pipeline_parallel_size=3)
    )
    assert activations(kimi) == [1 + 3, 1 + 6]  # stages of 31 layers: the sums of 12 layers each, begun ones included
    assert activations(pool(pipeline_parallel_size=3)) == [2, 2]
    first, second = sends(kimi, axes(kimi), predictor(kimi, "modelled"))[:, 4096]
    assert second > first


@pytest.mark.parametrize(
    ("engine", "equal"),
    [
        ({"preset": "vllm-0.16"}, 700),
        ({"preset": "vllm-0.16", "enforce_eager": True}, 0),
        ({"preset": "vllm-0.16", "num_speculative_tokens": 1, "acceptance_length": 1.5}, 80),
        ({"preset": "vllm-0.17"}, 80),
    ],
)
def test_ranks_of_old_vllm_are_padded_to_the_largest(engine: dict[str, Any], equal: int) -> None:
    served = pool("Qwen/Qwen3-30B-A3B", data_parallel_size=2, **engine)
    assert axes(served).equal_tokens == equal
    times = tabulate(served, "modelled").times
    assert times.graph_tokens == equal
    ranks: list[Any] = [(0, 0, [(600, 0)]), (1, 100, [])]
    slowest = max(times.rank(*each) for each in ranks)
    tokens = 1200 if equal == 700 else 601
    assert times.lockstep(ranks) == times.step(slowest + float(times.expert_tokens[tokens]), 1)
