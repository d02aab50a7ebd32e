"""Engine presets run the rules of their own engine."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import PRESETS as ENGINES
from windtunnel.deployment import Deployment, Engine, Pool, engine_scheduler
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.policy import PRESETS, Policy, Sglang, VllmV0, VllmV1
from windtunnel.simulate.run import FINISHED, REJECTED, Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import AllAtOnce, Both, Uniform, Workload, generate

DENSE = "meta-llama/Llama-3.1-8B-Instruct"


def served(model: str = DENSE, **settings: Any) -> Deployment:
    return Deployment((Pool(load_model(model), device("h100"), Engine(**settings)),))


def engine(**settings: Any) -> Engine:
    return served(**settings).pools[0].engine


def load(requests: int = 40, prompts: int = 3000, outputs: int = 60) -> Workload:
    return generate(AllAtOnce(), Both(Uniform(prompts, prompts), Uniform(outputs, outputs)), requests)


def run(deployment: Deployment, workload: Workload) -> Run:
    return simulate(deployment, workload, perf="modelled", cache=False)


def test_every_engine_names_a_scheduler() -> None:
    assert {name: type(PRESETS[found.rules]) for name, found in ENGINES.items()} == {
        **{name: VllmV1 for name in ENGINES if name.startswith("vllm")},
        "vllm-0.6": VllmV0,
        "sglang-0.5": Sglang,
        "sglang-0.4.6": Sglang,
        "trtllm-0.11": Policy,
        "trtllm-1.0": Policy,
        "trtllm-1.1": Policy,
    }


def test_sglang_prefills_alone() -> None:
    steps = run(served(preset="sglang-0.5"), load()).iterations
    assert not ((steps.decodes > 0) & (steps.chunk_tokens > 0)).any()
    assert steps.chunk_tokens.max() <= 8192  # chunked_prefill_size


def test_tensorrt_llm_mixes_whole_prompts_with_decodes() -> None:
    found = run(served(preset="trtllm-1.0", max_num_seqs=4), load())
    steps = found.iterations
    assert set(steps.chunk_tokens.tolist()) == {0, 3000}  # two fit max_num_tokens, the third does not
    assert ((steps.decodes > 0) & (steps.chunk_tokens > 0)).any()
    assert (found.requests.status == FINISHED).all()


def test_tensorrt_llm_refuses_prompts_beyond_a_step() -> None:
    found = run(served(preset="trtllm-1.0"), load(requests=2, prompts=9000))
    assert (found.requests.status == REJECTED).all()
    assert any("their prompts the 8,192 tokens of a step" in text for text in found.manifest["warnings"])
    cut = run(served(preset="trtllm-1.0", enable_chunked_prefill=True), load(requests=2, prompts=9000))
    assert (cut.requests.status == FINISHED).all()


def test_settings_reach_the_rules() -> None:
    assert engine_scheduler(engine(preset="sglang-0.5")) == Sglang()
    assert engine_scheduler(engine(preset="sglang-0.4.6")) == Sglang(version="0.4.6")
    plain = engine_scheduler(engine(preset="sglang-0.5", enable_prefix_caching=False, enable_chunked_prefill=False))
    assert plain == Sglang(radix_cache=False, chunked_prefill=False)
    assert engine_scheduler(engine(preset="trtllm-1.0")) == PRESETS["trtllm-guaranteed-no-evict"]
    assert engine_scheduler(engine(preset="trtllm-1.0", enable_chunked_prefill=True)) == Policy(
        allocation="prompt_and_output", preemption="none", chunked_prefill=True, places_per_step=True
    )


@pytest.mark.parametrize(
    ("preset", "setting"),
    [
        ("sglang-0.5", {"scheduling_policy": "priority"}),
        ("sglang-0.5", {"long_prefill_token_threshold": 512}),
        ("trtllm-1.0", {"scheduler_reserve_full_isl": False}),
        ("trtllm-1.0", {"enable_prefix_caching": True}),
    ],
)
def test_what_the_rules_do_not_know_is_refused(preset: str, setting: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not simulated with the scheduler of"):
        engine(preset=preset, **setting)


def test_ranks_of_attention_share_sglangs_limits() -> None:
    shared = served("deepseek-ai/DeepSeek-V2-Lite", preset="sglang-0.5", data_parallel_size=4).pools[0].engine
    assert (shared.resolved("max_num_batched_tokens"), shared.resolved("max_num_seqs")) == (8192 // 4, 2048 // 4)
    assert engine(preset="sglang-0.5", data_parallel_size=4).resolved("max_num_batched_tokens") == 8192


@pytest.mark.parametrize("preset", ["sglang-0.5", "trtllm-1.0"])
def test_ranks_run_in_lockstep(preset: str) -> None:
    deployment = served("deepseek-ai/DeepSeek-V2-Lite", preset=preset, data_parallel_size=2, max_num_seqs=8)
    found = run(deployment, load(requests=24, prompts=800))
    assert (found.requests.status == FINISHED).all()
    steps = found.unfolded().iterations
    assert set(np.unique(steps.lane).tolist()) == {0, 1}
    firsts = steps.start[(steps.lane == 0) & (steps.steps > 0)]
    assert set(steps.start[(steps.lane == 1) & (steps.steps > 0)].tolist()) <= set(firsts.tolist())


def test_work_ahead_of_the_gpu_stays_with_another_scheduler_of_the_engine() -> None:
    assert engine(preset="trtllm-1.0", scheduler="trtllm-max-utilization").async_scheduling
    assert not engine(preset="trtllm-1.0", scheduler="vllm-0.12").async_scheduling
    late = "decides on a step while the one before it runs"
    assert any(late in text for text in served(preset="trtllm-1.0").pools[0].warnings())
    assert not any(late in text for text in served(preset="trtllm-1.0", async_scheduling=False).pools[0].warnings())


@pytest.mark.parametrize(("chosen", "ranks", "said"), [("trtllm-1.0", 2, 1), ("trtllm-1.0", 1, 0), ("vllm-0.33", 2, 0)])
def test_tensorrt_llms_router_is_not_simulated_and_runs_say_so(chosen: str, ranks: int, said: int) -> None:
    found = served(preset=chosen, data_parallel_size=ranks).pools[0].warnings()
    assert sum("hands new requests out" in text for text in found) == said


def test_sglangs_overlap_schedule_is_its_schedulers_setting() -> None:
    alone = engine(preset="sglang-0.5", async_scheduling=False)
    assert engine_scheduler(alone) == Sglang(disable_overlap_schedule=True)
    assert not served(preset="sglang-0.5").pools[0].warnings()
    off = "sglang-0.4.6:disable_overlap_schedule=true"
    assert engine(preset="sglang-0.5", scheduler="sglang-0.4.6").async_scheduling
    assert not engine(preset="sglang-0.5", scheduler=off).async_scheduling
    with pytest.raises(InputError, match="async_scheduling=True: is a setting of the engine's own scheduler"):
        engine(preset="sglang-0.5", scheduler=off, async_scheduling=True)
    for preset, overlap in product(("sglang-0.5", "sglang-0.4.6"), (True, False)):
        steps = run(served(preset=preset, async_scheduling=overlap), load(requests=1)).iterations
        late = overlap and preset == "sglang-0.4.6"  # alone, a request decodes once more than it needs
        assert (steps.steps.sum(), steps.discarded.sum()) == (60 + late, late)
