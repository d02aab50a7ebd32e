"""KServe: an LLMInferenceService, with its own router, and a proxy in the pod of each decode server.

Source: KServe's API serving.kserve.io/v1alpha2 (LLMInferenceService) and its templates config/llmisvcconfig, which
start ``vllm serve`` with the flags of the variable VLLM_ADDITIONAL_ARGS.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.errors import InputError
from windtunnel.launch.facts import written
from windtunnel.report.manifests.endpoint_picker import picker
from windtunnel.report.manifests.pods import GPU, to_yaml, token
from windtunnel.report.manifests.servers import Node, Server, name_of, servers_of


def kserve(deployment: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, str]:
    """A file for kubectl. Raises InputError for what KServe does not start, and as ``servers_of``."""
    servers = [
        vllm_alone(server.whole("this LLMInferenceService").counted, "KServe")
        for server in servers_of(deployment, nodes, inside=False)
    ]
    first, last = servers[0], servers[-1]
    if len(servers) > 1 and first.role == "mixed":
        raise InputError("launch: KServe has one kind of mixed servers: take --format kubernetes")
    name = name_of(deployment["pools"][0], {"pools": [None]})
    scheduler = {"scheduler": {"config": {"inline": picker(deployment)}}}
    spec: dict[str, Any] = {
        "model": {"uri": f"hf://{last.model}", "name": last.model},
        "replicas": last.replicas,
        "router": {"route": {}, "gateway": {}, **scheduler},
        "annotations": {"windtunnel": written(last.facts)},
        "template": _pod(last),
    }
    if len(servers) > 1:
        spec["prefill"] = {
            "replicas": first.replicas,
            "annotations": {"windtunnel": written(first.facts)},
            "template": _pod(first),
        }
    service = {"apiVersion": "serving.kserve.io/v1alpha2", "kind": "LLMInferenceService", "metadata": {"name": name}}
    return {"kserve.yaml": to_yaml([service | {"spec": spec}], "kubectl apply -f kserve.yaml")}


def vllm_alone(server: Server, who: str) -> Server:
    """This server. Raises InputError unless it is vLLM's, with a hand-over that llm-d's proxy knows."""
    if server.backend != "vllm":
        raise InputError(f"launch: {who} is written for vLLM here, not for {server.backend}: take --format kubernetes")
    if "MooncakeConnector" in server.command or "NixlPushConnector" in server.command:
        raise InputError(f"launch: the proxy of {who} pulls by NIXL: take --handover vllm-0.32-nixl-pull")
    return server


def _pod(server: Server) -> dict[str, Any]:
    before, _, after = server.command.partition("vllm serve ")
    _, _, flags = after.partition(" ")
    gpus = {GPU[server.node.vendor]: str(server.gpus)}
    env = [token(), {"name": "VLLM_ADDITIONAL_ARGS", "value": flags}]
    env += [{"name": name, "value": value} for name, _, value in (word.partition("=") for word in before.split())]
    if "NixlConnector" in server.command:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        env.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address})
    one = {"name": "main", "env": env, "resources": {"limits": gpus, "requests": gpus}}
    return {"containers": [one]}
