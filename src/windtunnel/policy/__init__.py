"""Policy: what a scheduler is, as data. ``reference`` runs it object by object, ``core`` runs it compiled."""

from windtunnel.policy.limits import Limits, can_ever_run, generated
from windtunnel.policy.vllm_v1 import VllmV1

__all__ = ["Limits", "VllmV1", "can_ever_run", "generated"]
