"""What each engine is told of the hand-over: whole texts, since each word of them starts something."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import yaml

from windtunnel.deployment import HANDOVERS
from windtunnel.errors import InputError
from windtunnel.report.handover_flags import (
    SGLANG_POLICIES,
    TRTLLM_ROUTERS,
    VLLM_POLICIES,
    front,
    is_mooncake,
    sglang_transfer,
    trtllm_transfer,
    vllm_transfer,
)

PREFILLS, DECODES = ("a:8000", "a:8004", "b:8000"), ("c:8000", "c:8001")
RECOMPUTES = {"kv_load_failure_policy": "recompute"}
EVENLY = "round_robin", "round_robin"


def rules(name: str, **changes: Any) -> dict[str, Any]:
    return replace(HANDOVERS[name], **changes).spec()


def told(role: str, given: dict[str, Any]) -> Any:
    flag, text = vllm_transfer(role, given)
    assert flag == "--kv-transfer-config"
    return json.loads(*shlex.split(text))


@pytest.mark.parametrize(
    ("name", "changes", "connector", "more"),
    [
        ("vllm-0.32-nixl-pull", {}, "NixlConnector", {}),
        ("vllm-0.32-nixl-pull", {"lease": 31.0}, "NixlConnector",
         {"kv_connector_extra_config": {"kv_lease_duration": 31.0}}),
        ("vllm-0.32-nixl-push", {}, "NixlPushConnector", {}),
        ("vllm-0.32-nixl-push", {"lease": 31.0}, "NixlPushConnector", {}),
        ("vllm-0.32-mooncake", {}, "MooncakeConnector", {}),
        ("vllm-0.32-nixl-pull", {"on_expiry": "recompute"}, "NixlConnector", RECOMPUTES),
        ("vllm-0.32-mooncake", {"on_expiry": "recompute"}, "MooncakeConnector", RECOMPUTES),
        ("vllm-0.32-nixl-pull", {"on_expiry": "fail"}, "NixlConnector", {}),
        ("vllm-0.32-mooncake", {"lease": 481.0}, "NixlConnector",
         {"kv_connector_extra_config": {"kv_lease_duration": 481.0}}),
        ("ideal", {}, "NixlConnector", {}),
    ],
)  # fmt: skip
def test_vllms_connectors(name: str, changes: dict[str, Any], connector: str, more: dict[str, Any]) -> None:
    given = rules(name, **changes)
    assert told("decode", given) == {"kv_connector": connector, "kv_role": "kv_consumer", **more}
    more = {key: value for key, value in more.items() if key != "kv_load_failure_policy"}
    assert told("prefill", given) == {"kv_connector": connector, "kv_role": "kv_producer", **more}
    assert is_mooncake(given) == (connector == "MooncakeConnector")


def test_sglang_keeps_tokens_where_they_are_not_its_own_number() -> None:
    usual, other = rules("sglang-0.5-bootstrap"), rules("sglang-0.5-bootstrap", reserved_decode_tokens=513)
    flag = "num-reserved-decode-tokens"
    assert sglang_transfer("decode", usual)[flag] is None
    assert sglang_transfer("decode", other)[flag] == 513
    assert sglang_transfer("prefill", other)[flag] is None
    assert sglang_transfer("decode", {})["num-reserved-decode-tokens"] is None


def test_trtllm_overlaps_on_the_decode_side_alone() -> None:
    lines = ["cache_transceiver_config:", "  backend: DEFAULT"]
    assert trtllm_transfer("decode") == lines
    assert trtllm_transfer("prefill") == ["disable_overlap_scheduler: true", *lines]


VLLM = "vllm-router --vllm-pd-disaggregation --kv-connector"
SIDES = "--decode http://c:8000 --decode http://c:8001 --host 0.0.0.0 --port 8000"
MET = "--prefill http://a:8000 8998 --prefill http://a:8004 9002 --prefill http://b:8000 8998"


@pytest.mark.parametrize(
    ("backend", "name", "text"),
    [
        ("vllm", "vllm-0.32-nixl-pull",
         f"{VLLM} nixl --policy round_robin --prefill http://a:8000 --prefill http://a:8004 --prefill http://b:8000 "
         f"{SIDES}"),
        ("vllm", "vllm-0.32-mooncake", f"{VLLM} mooncake --policy round_robin {MET} {SIDES}"),
        ("vllm", "vllm-0.32-nixl-push",
         "# vLLM's tests/v1/kv_connector/nixl_integration/toy_proxy_server.py\n"
         "python toy_proxy_server.py --host 0.0.0.0 --port 8000 --prefiller-hosts a a b "
         "--prefiller-ports 8000 8004 8000 --decoder-hosts c c --decoder-ports 8000 8001"),
        ("sglang", "sglang-0.5-bootstrap",
         f"python -m sglang_router.launch_router --pd-disaggregation --policy round_robin {MET} {SIDES}"),
    ],
)  # fmt: skip
def test_fronts(backend: str, name: str, text: str) -> None:
    assert front(backend, EVENLY, rules(name), PREFILLS, DECODES) == text


def test_trtllms_front_reads_a_file() -> None:
    text = front("trtllm", ("prefix_aware:queue=2", "least_outstanding"), rules("trtllm-1.0"), PREFILLS, DECODES)
    first, *lines, end, command = text.splitlines()
    assert (first, end) == ("cat > front.yaml <<'END'", "END") and command == "trtllm-serve disaggregated -c front.yaml"
    assert yaml.safe_load("\n".join(lines)) == {
        "hostname": "0.0.0.0",
        "port": 8000,
        "backend": "pytorch",
        "context_servers": {"num_instances": 3, "router": {"type": "kv_cache_aware"}, "urls": [*PREFILLS]},
        "generation_servers": {"num_instances": 2, "router": {"type": "load_balancing"}, "urls": [*DECODES]},
    }


def test_prompts_that_stay() -> None:
    """TensorRT-LLM's front keeps short prompts with the servers that decode; those of other engines cannot."""
    given = rules("trtllm-1.0", max_local_prefill_length=1)
    document = front("trtllm", EVENLY, given, PREFILLS, DECODES).split("END'\n")[1].split("\nEND")[0]
    assert yaml.safe_load(document)["conditional_disagg_config"] == {"max_local_prefill_length": 1}
    for backend, name in (("vllm", "vllm-0.32-nixl-pull"), ("sglang", "sglang-0.5-bootstrap")):
        with pytest.raises(InputError, match=f"max_local_prefill_length=1: {backend}'s front sends every prompt"):
            front(backend, EVENLY, rules(name, max_local_prefill_length=1), PREFILLS, DECODES)


@pytest.mark.parametrize(
    ("backend", "name", "who", "known"),
    [
        ("vllm", "vllm-0.32-nixl-pull", "vllm-router", VLLM_POLICIES),
        ("vllm", "vllm-0.32-mooncake", "vllm-router", VLLM_POLICIES),
        ("vllm", "vllm-0.32-nixl-push", "this proxy", {"round_robin": "round_robin"}),
        ("sglang", "sglang-0.5-bootstrap", "sglang_router", SGLANG_POLICIES),
        ("trtllm", "trtllm-1.0", "trtllm-serve", TRTLLM_ROUTERS),
    ],
)
def test_each_front_names_what_it_lacks(backend: str, name: str, who: str, known: dict[str, str]) -> None:
    """Of all routers on both sides; where two differ in name alone one policy is enough."""
    names = ("round_robin", "random", "power_of_two", "prefix_aware:queue=2", "session_affinity", "least_outstanding",
             "vllm_dp", "dynamo_kv")  # fmt: skip
    for first in names:
        for second in names:
            text = front(backend, (first, second), rules(name), PREFILLS, DECODES)
            said = [line for line in text.splitlines() if line.startswith("# simulated")]
            lacks = [each for each in dict.fromkeys((first, second)) if each.partition(":")[0] not in known]
            assert [line.split()[3].rstrip(",") for line in said] == lacks
            least = known.get("power_of_two", "round_robin")
            closest = {"least_outstanding": least, "vllm_dp": least}
            for line, each in zip(said, lacks, strict=True):
                assert line.endswith(f"which {who} lacks: {closest.get(each, 'round_robin')} instead")
            if "--policy" in text:
                words = shlex.split(text.splitlines()[-1])
                chosen = [
                    known.get(each.partition(":")[0], closest.get(each, "round_robin")) for each in (first, second)
                ]
                assert words[words.index("--policy") + 1] == chosen[0]
                assert ("--decode-policy" in words) == (chosen[0] != chosen[1])
                if chosen[0] != chosen[1]:
                    assert words[words.index("--decode-policy") + 1] == chosen[1]
