"""A model in stages: layers as vLLM divides them, nothing lost and nothing twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.model import load_model
from windtunnel.model.spec import layers_of_stages, stages


@pytest.mark.parametrize(
    ("layers", "count", "wanted"),
    [
        (80, 1, (80,)),
        (80, 4, (20, 20, 20, 20)),
        (61, 2, (31, 30)),
        (61, 4, (15, 15, 16, 15)),
        (62, 4, (15, 16, 16, 15)),
        (63, 4, (16, 16, 16, 15)),
        (5, 5, (1, 1, 1, 1, 1)),
    ],
)
def test_layers_left_over_go_to_the_stages_before_the_last(layers: int, count: int, wanted: tuple[int, ...]) -> None:
    assert layers_of_stages(layers, count) == wanted


@given(st.integers(1, 200), st.integers(1, 200))
def test_stages_are_equal_but_for_one_layer(layers: int, count: int) -> None:
    if count > layers:
        with pytest.raises(InputError, match=f"pipeline_parallel_size={count}: the model has {layers} layers"):
            layers_of_stages(layers, count)
        return
    found = layers_of_stages(layers, count)
    assert sum(found) == layers
    assert max(found) - min(found) <= 1
    assert found[-1] == layers // count


@pytest.mark.parametrize("name", ["Llama-3.1-70B", "DeepSeek-V3", "gemma-3-27b-it"])
def test_stages_hold_the_model_once(name: str) -> None:
    model = load_model(name)
    parts = stages(model, 4)
    assert [layer for part in parts for layer in part] == list(model)
    assert [part.embeds for part in parts] == [True, False, False, False]
    assert [part.samples for part in parts] == [False, False, False, True]
    held = [part.gpu_parameters() for part in parts]
    once = model.gpu_parameters()
    for component in once:
        copies = 2 if component == "embedding" and model.tie_word_embeddings else 1  # the head is the embedding
        assert sum(part[component] for part in held) == copies * once[component], component
    assert held[1]["embedding"] == held[1]["lm_head"] == 0


def test_one_stage_is_the_model() -> None:
    model = load_model("Llama-3.1-8B")
    assert stages(model, 1) == (model,)


def test_own_cut_points() -> None:
    assert [len(list(part)) for part in stages(load_model("Llama-3.1-70B"), 3, (30, 30, 20))] == [30, 30, 20]
    for own in ((30, 50), (30, 30, 21)):
        with pytest.raises(InputError, match="must be pipeline_parallel_size=3 numbers that add up to the model's 80"):
            layers_of_stages(80, 3, own)
