"""windtunnel: simulate LLM inference serving request by request.

>>> import windtunnel as wt
>>> run = wt.simulate("Qwen/Qwen3-8B", device="h100", trace="azure-conv", num_prompts=500, request_rate=8)
>>> result = wt.summary(run, wt.SLO(ttft=0.3, tpot=0.05))
>>> print(result.attainment, result.latencies["ttft"].percentile(99))
>>> run.requests.to_pandas()

The names below are imported when they are first used, so that ``import windtunnel`` costs next to nothing.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from windtunnel.version import __version__ as __version__

if TYPE_CHECKING:
    from windtunnel.deployment import SLO, Deployment, Engine, Pool
    from windtunnel.errors import InputError
    from windtunnel.hardware import Device, device, load_devices
    from windtunnel.metrics import Bands, Comparison, Summary, bands, comparison_json, spread, summary, summary_json
    from windtunnel.model import Model, load_model, model_names
    from windtunnel.plan.capacity import capacity
    from windtunnel.plan.objective import EnergyPerToken, LeastForRate, RatePerDollar
    from windtunnel.plan.question import Question
    from windtunnel.plan.search import search
    from windtunnel.plan.space import Constraints, Space, load_space
    from windtunnel.policy import Decision
    from windtunnel.report import plots, report
    from windtunnel.scenario import Load, Scenario, Server, load_scenario
    from windtunnel.scenario.compare import compare
    from windtunnel.scenario.grid import grid
    from windtunnel.scenario.simulate import simulate
    from windtunnel.scenario.streamed import stream
    from windtunnel.scenario.sweep import sweep
    from windtunnel.simulate.run import Run
    from windtunnel.simulate.try_out import Ask, printing, step
    from windtunnel.workload import Workload, builtin, builtin_names, generate, load_trace

_MODULES = {
    "deployment": ("SLO", "Deployment", "Engine", "Pool"),
    "errors": ("InputError",),
    "hardware": ("Device", "device", "load_devices"),
    "metrics": ("Bands", "Comparison", "Summary", "bands", "comparison_json", "spread", "summary", "summary_json"),
    "model": ("Model", "load_model", "model_names"),
    "plan.capacity": ("capacity",),
    "plan.objective": ("EnergyPerToken", "LeastForRate", "RatePerDollar"),
    "plan.question": ("Question",),
    "plan.search": ("search",),
    "plan.space": ("Constraints", "Space", "load_space"),
    "policy": ("Decision",),
    "report": ("plots", "report"),
    "scenario": ("Load", "Scenario", "Server", "load_scenario"),
    "scenario.compare": ("compare",),
    "scenario.grid": ("grid",),
    "scenario.simulate": ("simulate",),
    "scenario.streamed": ("stream",),
    "scenario.sweep": ("sweep",),
    "simulate.run": ("Run",),
    "simulate.try_out": ("Ask", "printing", "step"),
    "workload": ("Workload", "builtin", "builtin_names", "generate", "load_trace"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "SLO",
    "Ask",
    "Bands",
    "Comparison",
    "Constraints",
    "Decision",
    "Deployment",
    "Device",
    "EnergyPerToken",
    "Engine",
    "InputError",
    "LeastForRate",
    "Load",
    "Model",
    "Pool",
    "Question",
    "RatePerDollar",
    "Run",
    "Scenario",
    "Server",
    "Space",
    "Summary",
    "Workload",
    "bands",
    "builtin",
    "builtin_names",
    "capacity",
    "compare",
    "comparison_json",
    "device",
    "generate",
    "grid",
    "load_devices",
    "load_model",
    "load_scenario",
    "load_space",
    "load_trace",
    "model_names",
    "plots",
    "printing",
    "report",
    "search",
    "simulate",
    "spread",
    "step",
    "stream",
    "summary",
    "summary_json",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """Where a function is named like its module (simulate), the name means the function, always."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
