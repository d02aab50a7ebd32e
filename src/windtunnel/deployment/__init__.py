"""What is simulated: an engine's settings, pools of replicas on devices, and the objectives they should meet."""

from windtunnel.deployment.engine import Engine
from windtunnel.deployment.engine_scheduler import engine_scheduler
from windtunnel.deployment.pools import Deployment, Pool, stage_pools, warnings
from windtunnel.deployment.presets import PRESETS, EnginePreset, preset
from windtunnel.deployment.resolve import capture_sizes, effective_model, resolve_engine
from windtunnel.deployment.slo import SLO, PercentileLimit, parse_goodput, parse_slo

__all__ = [
    "PRESETS",
    "SLO",
    "Deployment",
    "Engine",
    "EnginePreset",
    "PercentileLimit",
    "Pool",
    "capture_sizes",
    "effective_model",
    "engine_scheduler",
    "parse_goodput",
    "parse_slo",
    "preset",
    "resolve_engine",
    "stage_pools",
    "warnings",
]
