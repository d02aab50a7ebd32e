"""What is simulated: an engine's settings, pools of replicas on devices, and the objectives they should meet."""

from windtunnel.deployment.engine import Engine
from windtunnel.deployment.engine_scheduler import engine_scheduler
from windtunnel.deployment.handover import HANDOVERS, Handover, find_handover, usual_handover
from windtunnel.deployment.links import LINKS, Link, find_link
from windtunnel.deployment.pools import Deployment, Pool, network, require_pool, stage_pools, warnings
from windtunnel.deployment.presets import PRESETS, EnginePreset, preset
from windtunnel.deployment.resolve import capture_sizes, effective_model, resolve_engine
from windtunnel.deployment.slo import SLO, PercentileLimit, limits_of, parse_goodput, parse_slo
from windtunnel.deployment.store import Store

__all__ = [
    "HANDOVERS",
    "LINKS",
    "PRESETS",
    "SLO",
    "Deployment",
    "Engine",
    "EnginePreset",
    "Handover",
    "Link",
    "PercentileLimit",
    "Pool",
    "Store",
    "capture_sizes",
    "effective_model",
    "engine_scheduler",
    "find_handover",
    "find_link",
    "limits_of",
    "network",
    "parse_goodput",
    "parse_slo",
    "preset",
    "require_pool",
    "resolve_engine",
    "stage_pools",
    "usual_handover",
    "warnings",
]
