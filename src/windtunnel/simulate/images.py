"""Images in prompts: what vLLM's encoder may compute in a step, and keep."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from windtunnel.core.engine import Integers
from windtunnel.deployment import Deployment, Pool
from windtunnel.errors import InputError
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.encoder import encoder_seconds
from windtunnel.perf.sources import predictor_from
from windtunnel.policy import Settings, VllmV1
from windtunnel.policy.encoder import Encoder
from windtunnel.workload import Workload


def with_images(
    deployment: Deployment,
    workload: Workload,
    policies: Sequence[Settings],
    perf: str = "auto",
    corrections: Corrections = ALL,
) -> list[Settings]:
    """The schedulers, with an encoder where prompts have images: it computes as many embeddings in a step as the step
    may have tokens, and keeps as many, or those of one image if that is more (vLLM 0.33: max_num_encoder_input_tokens
    and encoder_cache_size of config/scheduler.py, which are max_num_batched_tokens). Where the sizes of the encoder are
    known, its steps take longer.

    Raises InputError where images are not simulated.
    """
    count, tokens = workload.images
    if not count:
        return list(policies)
    found: list[Settings] = []
    for pool, policy in zip(deployment.pools, policies, strict=True):
        if not isinstance(policy, VllmV1) or pool.role != "mixed" or pool.stores:
            raise InputError(
                f"images_per_prompt={count}: simulated with vLLM's v1 scheduler in mixed pools without KV stores: "
                "leave it out, or take engine=vllm-0.33"
            )
        most = max(pool.engine.resolved("max_num_batched_tokens"), tokens)
        times = (
            encoder_seconds(pool, predictor_from(pool, perf, corrections), tokens, most // tokens)
            if timed(pool)
            else ()
        )
        found.append(replace(policy, encoder=Encoder(most, most, input_size=tokens, seconds=tuple(map(float, times)))))
    return found


def timed(pool: Pool) -> bool:
    """Whether the encoder's time is simulated: its sizes are known, and the model is no pipeline."""
    return pool.model.vision is not None and pool.engine.pipeline_parallel_size == 1


def about_images(deployment: Deployment, workload: Workload, policies: Sequence[Settings]) -> list[str]:
    """What is not simulated of them, and which models take none."""
    encoders = {policy.encoder for policy in policies if isinstance(policy, VllmV1) and policy.encoder}
    count, tokens = workload.images
    blind = {pool.model.name for pool in deployment.pools if encoders and not pool.model.has_encoder}
    found = [f"{name}: its config.json has no encoder, so the engine would refuse images" for name in sorted(blind)]
    return found + [
        f"{count} images of {tokens:,} tokens before each prompt: the encoder computes at most "
        f"{one.compute_budget:,} embeddings in a step and keeps as many, by vLLM 0.33's rules; {_said(one)}"
        for one in sorted(encoders, key=lambda one: one.compute_budget)
    ]


def _said(encoder: Encoder) -> str:
    """Of its time."""
    if encoder.seconds:
        return f"it takes {1e3 * encoder.seconds[1]:.1f} ms for one and {1e3 * encoder.seconds[-1]:.1f} ms for the most"
    return "its own time is not simulated: config.json has no vision_config with a spatial_merge_size, or stages"


def inputs_of(workload: Workload) -> tuple[Integers, ...] | None:
    """The images as of ``Demand``: no two are alike."""
    count, tokens = workload.images
    if not count:
        return None
    n = len(workload)
    offsets = np.tile(np.arange(count) * tokens, n)
    return np.arange(n + 1) * count, offsets, np.full(n * count, tokens), np.arange(n * count)
