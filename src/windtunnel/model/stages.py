"""Stages: a model's layers divided among the groups of GPUs of a pipeline, as vLLM divides them."""

from dataclasses import replace

from windtunnel.errors import InputError
from windtunnel.model.layers import Layer
from windtunnel.model.spec import Model


def layers_of_stages(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers in each stage: equal numbers; what is left over goes one each to the stages before the last, from the back
    (get_pp_indices in vllm/distributed/utils.py, 0.10 to 0.32).

    Raises InputError if there are fewer layers than stages.
    """
    if stages > num_layers:
        raise InputError(f"pipeline_parallel_size={stages}: the model has {num_layers} layers; use ≤ {num_layers}")
    each, left = divmod(num_layers, stages)
    return tuple(each + (stages - 1 - left <= stage < stages - 1) for stage in range(stages))


def stages(model: Model, count: int) -> tuple[Model, ...]:
    """The model in ``count`` parts: the first embeds tokens, the last has final norm, output head and sampling.

    Raises InputError if there are fewer layers than stages, or if layers attend to the cache of an earlier one.
    """
    if count == 1:
        return (model,)
    if any(getattr(layer.attention, "shares_cache", False) for _, layer in model.layers):
        raise InputError(
            f"pipeline_parallel_size={count}: layers of {model.name} share caches across stages; use 1, or tensor "
            "parallelism"
        )
    runs, found = list(model.layers), []
    for stage, wanted in enumerate(layers_of_stages(model.num_layers, count)):
        mine: list[tuple[int, Layer]] = []
        while (missing := wanted - sum(number for number, _ in mine)) > 0:
            number, layer = runs.pop(0)
            taken = min(number, missing)
            mine.append((taken, layer))
            if number > taken:
                runs.insert(0, (number - taken, layer))
        found.append(replace(model, layers=tuple(mine), embeds=stage == 0, samples=stage == count - 1))
    return tuple(found)
