"""What each engine is told about handing KV over, as prefill or as decode server, and the front that uses both.

Sources: vLLM's --kv-transfer-config (vllm/config/kv_transfer.py, connectors of vllm/distributed/kv_transfer) and the
proxy of its integration tests; SGLang's flags of PD disaggregation (sglang/srt/server_args.py) and sglang_router;
TensorRT-LLM's cache_transceiver_config (llmapi/llm_args.py) and ``trtllm-serve disaggregated``.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.deployment import HANDOVERS
from windtunnel.errors import InputError

BOOTSTRAP_PORT, SIDE_CHANNEL_PORT, FRONT_PORT = 8998, 5600, 8000
"""Where SGLang's prefill servers and vLLM's NIXL connectors meet those of the other side, and where clients ask."""
FRONT_FILE = "front.yaml"
SGLANG_POLICIES = {"random": "random", "power_of_two": "power_of_two", "prefix_aware": "cache_aware"}
TRTLLM_ROUTERS = {"least_outstanding": "load_balancing", "prefix_aware": "kv_cache_aware"}
"""Routers by the names of the fronts; both take turns otherwise."""


def vllm_transfer(role: str, handover: Mapping[str, Any]) -> list[str]:
    """Words of ``vllm serve``."""
    mooncake = dict(handover) | {"on_expiry": "wait"} == HANDOVERS["vllm-0.32-mooncake"].spec()
    push = handover.get("transfer") == "push"
    config: dict[str, Any] = {
        "kv_connector": "MooncakeConnector" if mooncake else "NixlPushConnector" if push else "NixlConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
    }
    lease = handover.get("lease")
    if not (mooncake or push) and lease not in (None, HANDOVERS["vllm-0.32-nixl-pull"].lease):
        config["kv_connector_extra_config"] = {"kv_lease_duration": lease}
    if role == "decode" and handover.get("on_expiry") == "recompute":
        config["kv_load_failure_policy"] = "recompute"
    return ["--kv-transfer-config", shlex.quote(json.dumps(config))]


def sglang_transfer(role: str, handover: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of SGLang's ``launch_server`` and their values."""
    reserved = handover.get("reserved_decode_tokens")
    keeps = role == "decode" and reserved not in (None, HANDOVERS["sglang-0.5-bootstrap"].reserved_decode_tokens)
    return {"disaggregation-mode": role, "num-reserved-decode-tokens": reserved if keeps else None}


def trtllm_transfer(role: str) -> list[str]:
    """Lines of TensorRT-LLM's options. A context server has nothing to overlap, as TensorRT-LLM asks for."""
    lines = ["cache_transceiver_config:", "  backend: DEFAULT"]
    return ["disable_overlap_scheduler: true", *lines] if role == "prefill" else lines


def front(
    backend: str, router: str, handover: Mapping[str, Any], prefills: Sequence[str], decodes: Sequence[str]
) -> str:
    """The command before both sides, from the addresses (``host:port``) of their servers.

    Raises InputError where prompts should stay that this front sends to a prefill server.
    """
    stay = handover.get("max_local_prefill_length") or 0
    if backend == "trtllm":
        return _trtllm_front(router, stay, prefills, decodes)
    if stay:
        raise InputError(
            f"launch: max_local_prefill_length={stay}: {backend}'s front sends every prompt to a prefill server: "
            "leave it out, or start it by hand"
        )
    if backend == "sglang":
        return _sglang_front(router, prefills, decodes)
    words = ["python", "toy_proxy_server.py", "--host", "0.0.0.0", "--port", str(FRONT_PORT)]
    for name, addresses in (("prefiller", prefills), ("decoder", decodes)):
        hosts, ports = zip(*(address.split(":") for address in addresses), strict=True)
        words += [f"--{name}-hosts", *hosts, f"--{name}-ports", *ports]
    return "# vLLM's tests/v1/kv_connector/nixl_integration/toy_proxy_server.py, in turns\n" + " ".join(words)


def _sglang_front(router: str, prefills: Sequence[str], decodes: Sequence[str]) -> str:
    """Bootstrap ports are as many above the first as the servers' ports are above those of their nodes' first."""
    least = min(int(address.split(":")[1]) for address in prefills)
    words = ["python", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    words += ["--policy", SGLANG_POLICIES.get(router, "round_robin")]
    for address in prefills:
        words += ["--prefill", f"http://{address}", str(BOOTSTRAP_PORT + int(address.split(":")[1]) - least)]
    for address in decodes:
        words += ["--decode", f"http://{address}"]
    return " ".join([*words, "--host", "0.0.0.0", "--port", str(FRONT_PORT)])


def _trtllm_front(router: str, stay: int, prefills: Sequence[str], decodes: Sequence[str]) -> str:
    lines = ["hostname: 0.0.0.0", f"port: {FRONT_PORT}", "backend: pytorch"]
    if stay:
        lines += ["conditional_disagg_config:", f"  max_local_prefill_length: {stay}"]
    for name, addresses in (("context_servers", prefills), ("generation_servers", decodes)):
        lines += [f"{name}:", f"  num_instances: {len(addresses)}", "  router:"]
        lines += [f"    type: {TRTLLM_ROUTERS.get(router, 'round_robin')}", "  urls:"]
        lines += [f'  - "{address}"' for address in addresses]
    text = "\n".join(lines)
    return f"cat > {FRONT_FILE} <<'END'\n{text}\nEND\ntrtllm-serve disaggregated -c {FRONT_FILE}"
