"""windtunnel: simulate LLM inference serving request by request.

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
    from windtunnel.metrics import Comparison, Summary, comparison_json, spread, summary, summary_json
    from windtunnel.model import Model, load_model, model_names
    from windtunnel.plan.capacity import capacity
    from windtunnel.plan.objective import EnergyPerToken, LeastForRate, RatePerDollar
    from windtunnel.plan.question import Question
    from windtunnel.plan.search import search
    from windtunnel.plan.space import Constraints, Space, load_space
    from windtunnel.reference.custom import Decision
    from windtunnel.scenario import Load, Scenario, load_scenario
    from windtunnel.scenario.compare import compare
    from windtunnel.simulate.run import Run
    from windtunnel.simulate.simulate import simulate
    from windtunnel.workload import Workload, builtin, builtin_names, generate, load_trace

_MODULES = {
    "deployment": ("SLO", "Deployment", "Engine", "Pool"),
    "errors": ("InputError",),
    "hardware": ("Device", "device", "load_devices"),
    "metrics": ("Comparison", "Summary", "comparison_json", "spread", "summary", "summary_json"),
    "model": ("Model", "load_model", "model_names"),
    "plan.capacity": ("capacity",),
    "plan.objective": ("EnergyPerToken", "LeastForRate", "RatePerDollar"),
    "plan.question": ("Question",),
    "plan.search": ("search",),
    "plan.space": ("Constraints", "Space", "load_space"),
    "reference.custom": ("Decision",),
    "scenario": ("Load", "Scenario", "load_scenario"),
    "scenario.compare": ("compare",),
    "simulate.run": ("Run",),
    "simulate.simulate": ("simulate",),
    "workload": ("Workload", "builtin", "builtin_names", "generate", "load_trace"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "SLO",
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
    "Space",
    "Summary",
    "Workload",
    "builtin",
    "builtin_names",
    "capacity",
    "compare",
    "comparison_json",
    "device",
    "generate",
    "load_devices",
    "load_model",
    "load_scenario",
    "load_space",
    "load_trace",
    "model_names",
    "search",
    "simulate",
    "spread",
    "summary",
    "summary_json",
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
