"""The endpoint picker of the Gateway API Inference Extension and of llm-d: a router's rule in its plug-ins.

Source: llm-d-inference-scheduler 0.7 (docs/architecture.md): prefill-filter, decode-filter, queue-scorer,
prefix-cache-scorer, random-picker, max-score-picker, pd-profile-handler.
"""

from collections.abc import Mapping
from typing import Any

SCORERS = {
    "least_outstanding": {"queue-scorer": 1},
    "vllm_dp": {"queue-scorer": 1},
    "power_of_two": {"queue-scorer": 1},
    "prefix_aware": {"prefix-cache-scorer": 2, "queue-scorer": 1},
    "dynamo_kv": {"prefix-cache-scorer": 2, "queue-scorer": 1},
    "conductor": {"prefix-cache-scorer": 2, "queue-scorer": 1},
}
"""Routers by the plug-ins that come closest, with their weights; others choose at random."""


def picker(deployment: Mapping[str, Any]) -> dict[str, Any]:
    """An EndpointPickerConfig."""
    router = deployment["router"]
    if deployment.get("handover") is None:
        sides = {"default": (router, "")}
        plugins: list[dict[str, Any]] = [{"type": "single-profile-handler"}]
    else:
        sides = {
            "prefill": (router, "prefill-filter"),
            "decode": (deployment["decode_router"] or router, "decode-filter"),
        }
        handler = {"type": "pd-profile-handler", "parameters": {"threshold": 0}}
        plugins = [{"type": "prefill-header-handler"}, {"type": "prefill-filter"}, {"type": "decode-filter"}, handler]
    profiles, needed = [], []
    for name, (rule, filtered) in sides.items():
        scorers = SCORERS.get(str(rule).partition(":")[0], {})
        chooser = "max-score-picker" if scorers else "random-picker"
        words: list[dict[str, Any]] = [{"pluginRef": filtered}] if filtered else []
        words += [{"pluginRef": scorer, "weight": weight} for scorer, weight in scorers.items()]
        profiles.append({"name": name, "plugins": [*words, {"pluginRef": chooser}]})
        needed += [*scorers, chooser]
    plugins += [{"type": each} for each in dict.fromkeys(needed)]
    head = {"apiVersion": "inference.networking.x-k8s.io/v1alpha1", "kind": "EndpointPickerConfig"}
    return head | {"plugins": plugins, "schedulingProfiles": profiles}
