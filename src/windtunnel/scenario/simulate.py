"""simulate("Qwen/Qwen3-8B", device="h100", request_rate=8): a run from the words of the flags, or from objects."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any, overload

from windtunnel.deployment import Deployment
from windtunnel.errors import InputError, unknown
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.policy import PythonScheduler, Settings
from windtunnel.scenario.load_flags import Load
from windtunnel.scenario.scenario import Scenario, vary, with_words
from windtunnel.simulate.overheads import ENGINE_CLOCK, Overheads
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import simulate as simulate_deployment
from windtunnel.workload import Workload


@overload
def simulate(what: str | Scenario, workload: Workload | str | None = None, seed: int = 0, **words: Any) -> Run: ...


@overload
def simulate(
    what: Deployment,
    workload: Workload | str,
    seed: int = 0,
    *,
    perf: str = "auto",
    cache: bool = True,
    corrections: Corrections = ALL,
    tables: Sequence[Tabulated] | None = None,
    overheads: Overheads = ENGINE_CLOCK,
    policies: Sequence[Settings] | None = None,
    scheduler: Callable[[], PythonScheduler] | None = None,
) -> Run: ...


@with_words
def simulate(
    what: str | Scenario | Deployment, workload: Workload | str | None = None, seed: int | None = None, **words: Any
) -> Run:
    """Simulate every request of a load until the last one has ended.

    >>> run = simulate("Qwen/Qwen3-8B", device="h100", trace="azure-conv", num_prompts=500, request_rate=8)
    >>> run
    Run(Qwen/Qwen3-8B on 1 × H100 SXM, vllm-0.32; azure-conv: 500 requests, 500 finished)

    Args:
        what: a model's name, a scenario, or a deployment.
        workload: what is asked, or the name of a trace or its file; without it, what the words or the scenario say
            (azure-conv where they say nothing).
        seed: of every random stream.
        words: for a model or a scenario, any word of ``windtunnel run`` with underscores for dashes: ``device``,
            ``tensor_parallel_size``, ``request_rate``, …; for a deployment, the arguments of
            ``windtunnel.simulate.simulate.simulate``: ``perf``, ``cache``, ``scheduler``, …

    Raises:
        InputError: the model does not fit, or a name is unknown.
    """
    if isinstance(what, Deployment):
        if isinstance(workload, str):
            workload = Load(trace=workload).workload(seed or 0)
        if workload is None:
            raise InputError("workload is missing: what is the deployment asked? e.g. builtin('azure-conv')")
        known = signature(simulate_deployment).parameters
        for word in words:
            if word not in known:
                raise unknown("argument", word, known)
        return simulate_deployment(what, workload, seed or 0, **words)
    if not isinstance(what, str | Scenario):
        raise InputError(
            f"simulate({type(what).__name__}): must be a model's name, a Scenario or a Deployment, as in "
            "simulate(Deployment(Pool('Qwen/Qwen3-8B', 'h100')), workload)"
        )
    if isinstance(workload, str):
        workload, words = None, words | {"trace": workload}
    elif workload is not None and (more := [word for word in words if word in {each.name for each in fields(Load)}]):
        raise InputError(f"{more[0]}: is of a load, and workload is one already: leave one of them out")
    given = words if seed is None else words | {"seed": seed}
    scenario = vary(Scenario(), {"model": what, **given}) if isinstance(what, str) else vary(what, given)
    asked = scenario.load.workload() if workload is None else workload
    deployment, overheads = scenario.deployment(), scenario.overheads()
    return simulate_deployment(deployment, asked, scenario.load.seed, perf=scenario.server.perf, overheads=overheads)
