"""Settings of pipelines."""

from dataclasses import replace

from windtunnel.policy import Settings, VllmV1


def settled(settings: Settings, shares_prompts: bool) -> Settings:
    """The settings of a pipeline without a prefix cache in which only preempted requests would find anything."""
    if isinstance(settings, VllmV1) and settings.pipeline_parallel_size > 1 and not shares_prompts:
        return replace(settings, prefix_caching=False)
    return settings
