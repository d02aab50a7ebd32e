"""What each engine is told about handing KV over, as prefill or as decode server, and the front that uses both.

Sources: vLLM's --kv-transfer-config (vllm/config/kv_transfer.py, connectors of vllm/distributed/kv_transfer), the
router of its project (vllm-router 0.1.17, router_args.py) and the proxy of its integration tests; SGLang's flags of PD
disaggregation (sglang/srt/server_args.py) and sglang_router; TensorRT-LLM's cache_transceiver_config
(llmapi/llm_args.py) and ``trtllm-serve disaggregated``.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.deployment import HANDOVERS
from windtunnel.errors import InputError

BOOTSTRAP_PORT, SIDE_CHANNEL_PORT, FRONT_PORT = 8998, 5600, 8000
"""Where prefill servers of SGLang and of Mooncake's connector, and vLLM's NIXL connectors, meet those of the other
side, and where clients ask."""
FRONT_FILE = "front.yaml"
TURNS = {"round_robin": "round_robin"}
SGLANG_POLICIES = TURNS | {"random": "random", "power_of_two": "power_of_two", "prefix_aware": "cache_aware"}
VLLM_POLICIES = SGLANG_POLICIES | {"session_affinity": "consistent_hash"}
TRTLLM_ROUTERS = TURNS | {"least_outstanding": "load_balancing", "prefix_aware": "kv_cache_aware"}
"""Routers by the names of the fronts."""


def is_mooncake(handover: Mapping[str, Any]) -> bool:
    """Whether vLLM's Mooncake connector hands over."""
    return dict(handover) | {"on_expiry": "wait"} == HANDOVERS["vllm-0.32-mooncake"].spec()


def vllm_transfer(role: str, handover: Mapping[str, Any]) -> list[str]:
    """Words of ``vllm serve``."""
    mooncake = is_mooncake(handover)
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
    polls = handover.get("polling_interval") or 1
    return {
        "disaggregation-mode": role,
        "num-reserved-decode-tokens": reserved if keeps else None,
        "disaggregation-decode-polling-interval": polls if role == "decode" and polls > 1 else None,
    }


def trtllm_transfer(role: str) -> list[str]:
    """Lines of TensorRT-LLM's options. A context server has nothing to overlap, as TensorRT-LLM asks for."""
    lines = ["cache_transceiver_config:", "  backend: DEFAULT"]
    return ["disable_overlap_scheduler: true", *lines] if role == "prefill" else lines


def front(
    backend: str,
    routers: tuple[str, str],
    handover: Mapping[str, Any],
    prefills: Sequence[str],
    decodes: Sequence[str],
) -> str:
    """The command before both sides, from the addresses (``host:port``) of their servers. A comment says where the
    front has no such router as was simulated.

    Raises InputError where prompts should stay that this front sends to a prefill server.
    """
    stay = handover.get("max_local_prefill_length") or 0
    if backend == "trtllm":
        return _trtllm_front(routers, stay, prefills, decodes)
    if stay:
        raise InputError(
            f"launch: max_local_prefill_length={stay}: {backend}'s front sends every prompt to a prefill server: "
            "leave it out, or start it by hand"
        )
    if backend == "sglang":
        words = ["python", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        return _router(words, "sglang_router", SGLANG_POLICIES, routers, (_with_bootstrap(prefills), decodes))
    if handover.get("transfer") == "push":
        return _toy_proxy(routers, prefills, decodes)
    words = ["vllm-router", "--vllm-pd-disaggregation", "--kv-connector"]
    if is_mooncake(handover):
        return _router(
            [*words, "mooncake"], "vllm-router", VLLM_POLICIES, routers, (_with_bootstrap(prefills), decodes)
        )
    return _router([*words, "nixl"], "vllm-router", VLLM_POLICIES, routers, (prefills, decodes))


def _with_bootstrap(prefills: Sequence[str]) -> list[str]:
    """Bootstrap ports are as many above the first as the servers' ports are above those of their nodes' first."""
    least = min(int(address.split(":")[1]) for address in prefills)
    return [f"{address} {BOOTSTRAP_PORT + int(address.split(':')[1]) - least}" for address in prefills]


def _named(routers: tuple[str, str], known: Mapping[str, str], who: str) -> tuple[list[str], str]:
    """(The front's names of both sides' routers or of what comes closest, a comment for each that it lacks)."""
    found, notes = [], []
    for router in routers:
        name = router.partition(":")[0]
        closest = "power_of_two" if name in ("least_outstanding", "vllm_dp") else "round_robin"
        found.append(known.get(name) or known.get(closest) or known["round_robin"])
        if name not in known:
            notes.append(f"# simulated with {router}, which {who} lacks: {found[-1]} instead\n")
    return found, "".join(dict.fromkeys(notes))


def _router(
    words: Sequence[str],
    who: str,
    policies: Mapping[str, str],
    routers: tuple[str, str],
    places: tuple[Sequence[str], Sequence[str]],
) -> str:
    """vLLM's router, which was SGLang's once, and that one."""
    (first, second), notes = _named(routers, policies, who)
    words = [*words, "--policy", first, *(["--decode-policy", second] if second != first else [])]
    for side, addresses in zip(("--prefill", "--decode"), places, strict=True):
        words += [f"{side} http://{address}" for address in addresses]
    return notes + " ".join([*words, "--host", "0.0.0.0", "--port", str(FRONT_PORT)])


def _toy_proxy(routers: tuple[str, str], prefills: Sequence[str], decodes: Sequence[str]) -> str:
    words = ["python", "toy_proxy_server.py", "--host", "0.0.0.0", "--port", str(FRONT_PORT)]
    for name, addresses in (("prefiller", prefills), ("decoder", decodes)):
        hosts, ports = zip(*(address.split(":") for address in addresses), strict=True)
        words += [f"--{name}-hosts", *hosts, f"--{name}-ports", *ports]
    where = "# vLLM's tests/v1/kv_connector/nixl_integration/toy_proxy_server.py\n"
    return where + _named(routers, TURNS, "this proxy")[1] + " ".join(words)


def _trtllm_front(routers: tuple[str, str], stay: int, prefills: Sequence[str], decodes: Sequence[str]) -> str:
    lines = ["hostname: 0.0.0.0", f"port: {FRONT_PORT}", "backend: pytorch"]
    kinds, notes = _named(routers, TRTLLM_ROUTERS, "trtllm-serve")
    if stay:
        lines += ["conditional_disagg_config:", f"  max_local_prefill_length: {stay}"]
    sides = ("context_servers", prefills), ("generation_servers", decodes)
    for (name, addresses), kind in zip(sides, kinds, strict=True):
        lines += [f"{name}:", f"  num_instances: {len(addresses)}", "  router:", f"    type: {kind}", "  urls:"]
        lines += [f'  - "{address}"' for address in addresses]
    text = "\n".join(lines)
    return f"{notes}cat > {FRONT_FILE} <<'END'\n{text}\nEND\ntrtllm-serve disaggregated -c {FRONT_FILE}"
