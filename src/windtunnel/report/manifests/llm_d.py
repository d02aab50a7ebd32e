"""llm-d: values for the charts of its servers and of its router.

Sources: llm-d-modelservice's values.yaml and _helpers.tpl; the chart inferencepool of the Gateway API Inference
Extension.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.errors import InputError
from windtunnel.report.launch_files import PORT
from windtunnel.report.manifests.endpoint_picker import picker
from windtunnel.report.manifests.kserve import vllm_alone
from windtunnel.report.manifests.pods import PRODUCTS, container, to_yaml
from windtunnel.report.manifests.servers import Node, Server, name_of, servers_of

BEHIND_PROXY = 8200
"""Where a decode server listens: its proxy has the address."""
IMAGE = {"hub": "ghcr.io/llm-d", "name": "llm-d-inference-scheduler", "tag": "v0.7.1"}
CHARTS = (
    "helm install {name} -f llm-d.yaml llm-d-modelservice/llm-d-modelservice",
    "helm install {name}-router -f llm-d-router.yaml oci://registry.k8s.io/gateway-api-inference-extension/charts/inferencepool",
)


def llm_d(deployment: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, str]:
    """Values of two charts. Raises InputError for what llm-d does not start, and as ``servers_of``."""
    servers = [
        vllm_alone(server.whole("this chart").counted, "llm-d")
        for server in servers_of(deployment, nodes, inside=False)
    ]
    if len(servers) > 1 and servers[0].role == "mixed":
        raise InputError("launch: llm-d's chart has one kind of mixed servers: take --format kubernetes")
    name = name_of(deployment["pools"][0], {"pools": [None]})
    labels = {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": name}
    last, apart = servers[-1], len(servers) > 1
    values = {
        "modelArtifacts": {"name": last.model, "uri": f"hf://{last.model}", "labels": labels, "size": "200Gi"},
        "routing": {
            "servicePort": PORT,
            "proxy": {"enabled": apart, "targetPort": BEHIND_PROXY, "connector": "nixlv2"},
        },
        "decode": _side(last, BEHIND_PROXY if apart else PORT),
        "prefill": _side(servers[0], PORT) if apart else {"create": False},
    }
    router = {
        "inferencePool": {"targetPorts": [{"number": PORT}], "modelServers": {"matchLabels": labels}},
        "inferenceExtension": {
            "replicas": 1,
            "image": IMAGE,
            "pluginsConfigFile": "fleet.yaml",
            "pluginsCustomConfig": {"fleet.yaml": to_yaml([picker(deployment)])},
        },
        "provider": {"name": "none"},
    }
    servers_how, router_how = (chart.format(name=name) for chart in CHARTS)
    return {"llm-d.yaml": to_yaml([values], servers_how), "llm-d-router.yaml": to_yaml([router], router_how)}


def _side(server: Server, port: int) -> dict[str, Any]:
    one = container(server, server.script(port), port)
    mounts = one.pop("volumeMounts")
    one |= {"modelCommand": "custom", "mountModelVolume": True, "volumeMounts": mounts[:1]}
    product = PRODUCTS.get(server.node.device)
    return {
        "create": True,
        "replicas": server.replicas,
        "nodeSelector": {"nvidia.com/gpu.product": product} if product else {},
        "parallelism": {"tensor": server.gpus, "data": 1, "dataLocal": 1, "workers": 1},
        "containers": [one],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
