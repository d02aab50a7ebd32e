"""Images in prompts: what vLLM's encoder may compute in a step and keep holds prompts up."""

from dataclasses import replace

import numpy as np
import pytest
from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.model.vision import Vision
from windtunnel.perf.encoder import encoder_seconds
from windtunnel.perf.sources import predictor_from
from windtunnel.scenario.load_flags import Load
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload
from windtunnel.workload.prompts import with_images


def served(workload: Workload, budget: int = 512, preset: str = "vllm-0.33") -> Run:
    engine = Engine(preset=preset, max_num_batched_tokens=budget, max_model_len=8192)
    return simulate(Deployment((Pool(load_model("Qwen/Qwen3-8B"), device("h100"), engine),)), workload, perf="roofline")


def prompts(tokens: int, count: int = 1) -> Workload:
    return Workload.from_columns(arrival=np.zeros(count), prompt_tokens=np.full(count, tokens), output_tokens=2)


@IN_PLAIN_PYTHON
def test_a_prompt_waits_for_room_in_the_encoders_cache() -> None:
    # one image is in the cache at a time; the second begins at 576, when 512 tokens of the first are computed
    images, text = served(with_images(prompts(100), 2, 576)), served(prompts(1252))
    assert text.iterations.chunk_tokens.tolist()[:3] == [512, 512, 228]
    assert images.iterations.chunk_tokens.tolist()[:4] == [512, 64, 512, 164]
    waits = [float(run.requests.first_token[0]) for run in (images, text)]
    assert 1.05 < waits[0] / waits[1] < 2
    blind, note = (note for note in images.manifest["warnings"] if "images" in note)
    assert blind == "Qwen/Qwen3-8B: its config.json has no encoder, so the engine would refuse images"
    assert load_model("google/gemma-3-27b-it").has_encoder
    assert note.startswith("2 images of 576 tokens before each prompt: the encoder computes at most 576 embeddings")
    assert "its own time is not simulated" in note


@IN_PLAIN_PYTHON
def test_images_that_fit_hold_nobody_up() -> None:
    images, text = served(with_images(prompts(100, 3), 1, 200), 2048), served(prompts(300, 3), 2048)
    assert images.requests.finish.tolist() == text.requests.finish.tolist()


@IN_PLAIN_PYTHON
@pytest.mark.parametrize(
    ("budget", "drafts", "in_steps"),
    [(512, {}, [1, 0, 1, 0]), (1300, {}, [2]), (1300, {"num_speculative_tokens": 2, "acceptance_length": 2.0}, [2])],
)
def test_the_encoder_runs_before_the_step(budget: int, drafts: dict[str, float], in_steps: list[int]) -> None:
    vision = Vision(4, 512, 8, mlp_size=2048, patch_values=588, merge=2, out_size=4096, full_layers=4)
    models = [replace(load_model("Qwen/Qwen3-8B"), vision=one) for one in (vision, None)]
    engine = replace(Engine(preset="vllm-0.33", max_num_batched_tokens=budget), **drafts)  # type: ignore[arg-type]
    pools = [Pool(model, device("h100"), engine) for model in models]
    asked = with_images(prompts(100), 2, 576)
    seen, blind = (simulate(Deployment((pool,)), asked, perf="roofline") for pool in pools)
    seconds = encoder_seconds(pools[0], predictor_from(pools[0], "roofline"), 576, 2).tolist()
    assert 0 < seconds[1] < seconds[2] < 0.1
    takes = [seconds[images] for images in in_steps]
    assert seen.iterations.transfer[: len(takes)].tolist() == takes
    later = seen.requests.first_token - blind.requests.first_token
    assert later.tolist() == pytest.approx([sum(takes)])
    assert seen.iteration_times().duration[0] == pytest.approx(blind.iteration_times().duration[0] + takes[0])
    note = next(note for note in seen.manifest["warnings"] if note.startswith("2 images of 576 tokens"))
    assert f"it takes {1e3 * seconds[1]:.1f} ms for one" in note


def test_where_images_are_not_simulated() -> None:
    for preset in ("sglang-0.5", "trtllm-1.0"):
        with pytest.raises(InputError, match="images_per_prompt=1: simulated with vLLM's v1 scheduler in mixed pools"):
            served(with_images(prompts(100), 1, 50), preset=preset)
    shared = Workload.from_columns(arrival=0.0, prompt_tokens=[32], output_tokens=1, hash_ids=[[1]], hash_block_size=32)
    with pytest.raises(InputError, match="not simulated where prompts share text"):
        with_images(shared, 1, 50)
    with pytest.raises(InputError, match="both are ≥ 1, or left out"):
        Load(images_per_prompt=2)


def test_a_load_with_images() -> None:
    found = Load(random_input_len=100, random_output_len=5, num_prompts=3, images_per_prompt=2, image_tokens=50)
    workload = found.workload()
    assert (workload.images, workload.prompt_tokens.tolist()) == ((2, 50), [200, 200, 200])


@WITH_THE_COMPILER
def test_in_plain_python() -> None:
    in_plain_python(1, __file__)
