"""What is simulated: an engine's settings, pools of replicas on devices, and the objectives they should meet."""

from windtunnel.deployment.capture import capture_sizes
from windtunnel.deployment.engine import Engine
from windtunnel.deployment.own_scheduler import own_scheduler
from windtunnel.deployment.pools import Deployment, Pool, stage_pools, warnings
from windtunnel.deployment.presets import PRESETS, EnginePreset, preset
from windtunnel.deployment.resolve import effective_model, resolve_engine
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
    "own_scheduler",
    "parse_goodput",
    "parse_slo",
    "preset",
    "resolve_engine",
    "stage_pools",
    "warnings",
]
