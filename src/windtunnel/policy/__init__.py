"""Policy: what a scheduler is, as data. ``reference`` runs it object by object, ``core`` runs it compiled."""

from windtunnel.policy.named import PRESETS, scheduler
from windtunnel.policy.settings import Limits, Settings, can_ever_run, generated
from windtunnel.policy.sglang import Sglang
from windtunnel.policy.trtllm import Trtllm
from windtunnel.policy.unified import Policy
from windtunnel.policy.user_scheduler import ColumnScheduler, Decision, PythonScheduler, RequestView, UserScheduler
from windtunnel.policy.vllm_v0 import VllmV0
from windtunnel.policy.vllm_v1 import VllmV1
from windtunnel.policy.whole_batches import WholeBatches

__all__ = [
    "PRESETS",
    "ColumnScheduler",
    "Decision",
    "Limits",
    "Policy",
    "PythonScheduler",
    "RequestView",
    "Settings",
    "Sglang",
    "Trtllm",
    "UserScheduler",
    "VllmV0",
    "VllmV1",
    "WholeBatches",
    "can_ever_run",
    "generated",
    "scheduler",
]
