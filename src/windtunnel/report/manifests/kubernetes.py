"""Kubernetes: a StatefulSet for each pool, so that every server has a name, and a router before them.

Sources: Kubernetes' StatefulSet, Service, ConfigMap and Deployment (v1.37); nginx's ``resolve`` of an upstream's server
(ngx_http_upstream_module, 1.27.3) and the templates and resolvers of its image; LeaderWorkerSet's API
(leaderworkerset.x-k8s.io/v1).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.report.launch_files import PORT, nginx_servers
from windtunnel.report.manifests.pods import container, image, pod, scraped, to_yaml
from windtunnel.report.manifests.servers import Node, Server, front_of, name_of, servers_of

NGINX_IMAGE = "nginx:1.29"
SHARED = "  zone fleet 64k;\n  resolver ${NGINX_LOCAL_RESOLVERS} valid=5s;\n"
ROUTERS = {"vllm": "vllm-router==0.1.17", "sglang": "sglang-router"}
"""Programs that stand before both sides, from PyPI."""
HEADING = (
    "kubectl apply -f {file}; models are fetched from Hugging Face, gated ones with the Secret hf-token (key token)"
)


def kubernetes(deployment: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, str]:
    """A file for kubectl. Raises InputError for servers that span nodes, and as ``servers_of``."""
    servers = [server.whole("a StatefulSet").counted for server in servers_of(deployment, nodes)]
    objects = [each for server in servers for each in (headless(server), _stateful_set(server))]
    return {"kubernetes.yaml": to_yaml([*objects, *front(deployment, servers)], HEADING.format(file="kubernetes.yaml"))}


def leaderworkerset(deployment: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, str]:
    """A file for kubectl, for servers that may span nodes. Raises InputError as ``servers_of``."""
    servers = [server.counted for server in servers_of(deployment, nodes)]
    objects = [_groups(server) for server in servers]
    file = "leaderworkerset.yaml"
    return {file: to_yaml([*objects, *front(deployment, servers)], HEADING.format(file=file))}


def labels_of(server: Server) -> dict[str, str]:
    """Labels that tell the pods of a pool."""
    return {"app": server.name}


def meta(name: str) -> dict[str, Any]:
    """Metadata of an object."""
    return {"name": name, "labels": {"app": name}}


def headless(server: Server) -> dict[str, Any]:
    """The Service that gives each server a name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(server.name),
        "spec": {"clusterIP": "None", "selector": labels_of(server), "ports": [{"name": "http", "port": PORT}]},
    }


def _stateful_set(server: Server) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta(server.name),
        "spec": {
            "replicas": server.replicas,
            "serviceName": server.name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels_of(server)},
            "template": {
                "metadata": scraped(labels_of(server)),
                "spec": pod(server, container(server, server.script())),
            },
        },
    }


def _groups(server: Server) -> dict[str, Any]:
    """A LeaderWorkerSet: of one pod for a server within a node, else of a leader and its workers."""
    if server.nodes == 1:
        alone = pod(server, container(server, server.script()))
        template: dict[str, Any] = {
            "size": 1,
            "workerTemplate": {"metadata": scraped(labels_of(server)), "spec": alone},
        }
    else:
        leader = pod(server, container(server, server.part(leads=True)))
        worker = pod(server, container(server, server.part(leads=False), answers=False))
        template = {
            "size": server.nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": {"metadata": scraped(labels_of(server)), "spec": leader},
            "workerTemplate": {"spec": worker},
        }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": meta(server.name),
        "spec": {"replicas": server.replicas, "leaderWorkerTemplate": template},
    }


def places_of(server: Server, domain: str = "") -> list[str]:
    """The address of every server, or leader, of a pool."""
    return [f"{server.name}-{index}.{server.name}{domain}:{PORT}" for index in range(server.replicas)]


def front(deployment: Mapping[str, Any], servers: Sequence[Server]) -> list[dict[str, Any]]:
    """The router and the address that clients use; of a server that is alone, that address."""
    name = f"{name_of(deployment['pools'][0], {'pools': [None]})}-front"
    if len(servers) == 1 and servers[0].replicas == 1:
        return [_address(name, labels_of(servers[0]))]
    command = front_of(deployment, servers, [places_of(server) for server in servers])
    if command:
        return [_router(name, servers[-1], command), _address(name, {"app": name})]
    domain = ".${NAMESPACE}.svc.cluster.local"
    places = [place for server in servers for place in places_of(server, domain)]
    text = nginx_servers(deployment["router"], places, PORT, SHARED, " resolve")
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta(name),
        "data": {"default.conf.template": text},
    }
    return [settings, _nginx(name), _address(name, {"app": name})]


def _address(name: str, selector: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(name),
        "spec": {"selector": dict(selector), "ports": [{"name": "http", "port": 80, "targetPort": PORT}]},
    }


def _one(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A Deployment of one pod."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta(name),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": dict(spec)},
        },
    }


def _router(name: str, server: Server, command: str) -> dict[str, Any]:
    """The engine's own router: from PyPI, or of TensorRT-LLM's image."""
    install = f"pip install {ROUTERS[server.backend]}\n" if server.backend in ROUTERS else ""
    notes = "".join(f"{line}\n" for line in command.splitlines() if line.startswith("# "))
    lines = [line for line in command.splitlines() if not line.startswith("# ")]
    text = "\n".join([*lines[:-1], f"exec {lines[-1]}"])
    one = {
        "name": "front",
        "image": "python:3.12-slim" if server.backend == "vllm" else image(server),
        "command": ["/bin/bash", "-c"],
        "args": [f"{notes}{install}{text}\n"],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
    }
    return _one(name, {"containers": [one]})


def _nginx(name: str) -> dict[str, Any]:
    field = {"fieldRef": {"fieldPath": "metadata.namespace"}}
    one = {
        "name": "front",
        "image": NGINX_IMAGE,
        "env": [
            {"name": "NAMESPACE", "valueFrom": field},
            {"name": "NGINX_ENTRYPOINT_LOCAL_RESOLVERS", "value": "1"},
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "1", "memory": "256Mi"}},
        "volumeMounts": [{"name": "settings", "mountPath": "/etc/nginx/templates"}],
    }
    return _one(name, {"containers": [one], "volumes": [{"name": "settings", "configMap": {"name": name}}]})
