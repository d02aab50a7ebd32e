"""Links and rules of hand-overs: what they say of times, and the ones that contradict themselves."""

from math import inf
from typing import Any

import pytest

from windtunnel.deployment import HANDOVERS, LINKS, Handover, Link, find_handover, find_link, usual_handover
from windtunnel.errors import InputError


def test_bytes_or_descriptors_whichever_takes_longer() -> None:
    link = Link(bandwidth=100.0, per_request=0.5, per_descriptor=0.01, latency=7.0)
    assert link.work(200.0, 10) == 0.5 + 2.0
    assert link.work(200.0, 1000) == 0.5 + 10.0
    assert Link().work(1e12, 1e6) == 0


def test_the_published_transfers_are_met() -> None:
    """Mooncake's tables: 4.5 GB between H800s in 32 ms, and 12.62 GB between H20s in 77 ms, within 7 %."""
    for name, size, seconds in (("vllm-mooncake-8x400g", 4.5e9, 32e-3), ("sglang-mooncake-4x400g", 12.62e9, 77e-3)):
        link = find_link(name)
        assert link.latency + link.work(size) == pytest.approx(seconds, rel=0.07)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (Link, {"bandwidth": 0.0}, "bandwidth=0.0: must be > 0"),
        (Link, {"bandwidth": float("nan")}, "bandwidth=nan: must be > 0"),
        (Link, {"latency": -1.0}, "latency=-1.0: must be seconds ≥ 0"),
        (Link, {"per_descriptor": inf}, "per_descriptor=inf: must be seconds ≥ 0"),
        (Link, {"sharing": "fare"}, "did you mean 'fair'"),
        (Link, {"contention": "sources"}, "did you mean 'source'"),
        (Handover, {"transfer": "pulled"}, "did you mean 'pull'"),
        (Handover, {"transfer": "pull", "lease": 0.0}, "lease=0.0: must be seconds > 0"),
        (Handover, {"transfer": "pull", "on_expiry": "fail"}, "on_expiry='fail': nothing runs out: give lease=… or"),
        (
            Handover,
            {"transfer": "pull", "first_token": "relayed", "lease": 9.0, "on_expiry": "recompute"},
            "the engines that relay it give up: use on_expiry=fail",
        ),
        (Handover, {"proxy": -1.0}, "proxy=-1.0"),
        (Handover, {"reserved_decode_tokens": -1}, "must be an integer ≥ 0"),
        (Handover, {"transfer": "chunked"}, "needs gate='before_prefill'"),
        (Handover, {"first_token": "decode"}, "needs a transfer"),
        (Handover, {"gate": "before_prefill"}, "without a transfer"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(kind: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as error:
        kind(**values)
    assert "\n" not in str(error.value)


def test_names() -> None:
    assert find_link("free") == Link()
    assert find_handover("ideal") == Handover()
    assert {usual_handover(backend) for backend in ("vllm", "sglang", "trtllm")} <= set(HANDOVERS)
    with pytest.raises(InputError, match="did you mean 'sglang-0"):
        find_handover("sglang-0.5")
    with pytest.raises(InputError, match="unknown link"):
        find_link("x")


DEFAULTS = {
    **{"transfer": "none", "first_token": "prefill", "gate": "after_prefill", "reserved_decode_tokens": 0},
    **{
        "reservation": "memory",
        "polling_interval": 1,
        "max_local_prefill_length": 0,
        "proxy": 0.0,
        "lease": None,
        "timeout": None,
    },
    "on_expiry": "wait",
}
"""vLLM: VLLM_NIXL_ABORT_REQUEST_TIMEOUT and the leases of its connectors; SGLang: SGLANG_DISAGGREGATION_*_TIMEOUT and
num_reserved_decode_tokens; TensorRT-LLM: kv_transfer_timeout_ms."""
BESIDES: dict[str, dict[str, Any]] = {
    "ideal": {},
    "vllm-0.32-nixl-pull": {"transfer": "pull", "first_token": "decode", "lease": 30.0},
    "vllm-0.32-nixl-push": {"transfer": "push", "first_token": "decode", "lease": 480.0},
    "vllm-0.32-mooncake": {"transfer": "pull", "first_token": "decode", "lease": 480.0},
    "sglang-0.5-bootstrap": {
        **{"transfer": "chunked", "first_token": "relayed", "gate": "before_prefill", "reserved_decode_tokens": 512},
        **{"reservation": "seats_and_few", "timeout": 300.0},
    },
    "trtllm-1.0": {"transfer": "pull", "first_token": "relayed", "reservation": "seats", "timeout": 60.0},
    "distserve": {"transfer": "pull"},
    "simdistserve": {},
}
FREE = {"bandwidth": None, "latency": 0.0, "per_request": 0.0, "per_descriptor": 0.0, "sharing": "fair",
        "contention": "source"}  # fmt: skip


def test_what_each_name_stands_for() -> None:
    """Written once more: a slip in one of the two tables is noticed."""
    assert {name: rules.spec() for name, rules in HANDOVERS.items()} == {
        name: DEFAULTS | besides for name, besides in BESIDES.items()
    }
    assert {name: link.spec() for name, link in LINKS.items()} == {
        "free": FREE,
        "vllm-mooncake-8x400g": FREE | {"bandwidth": 146.1e9, "latency": 0.38e-3},
        "sglang-mooncake-4x400g": FREE | {"bandwidth": 171.1e9, "latency": 1.84e-3},
    }
    usual = {"vllm": "vllm-0.32-nixl-pull", "sglang": "sglang-0.5-bootstrap", "trtllm": "trtllm-1.0"}
    assert {backend: usual_handover(backend) for backend in usual} == usual


@pytest.mark.parametrize("name", ["latency", "per_request", "per_descriptor"])
def test_a_link_is_free_where_nothing_takes_time(name: str) -> None:
    assert Link().free and not Link(bandwidth=1e30).free
    assert Link(**{name: 0.0}).free and not Link(**{name: 1e-9}).free  # type: ignore[arg-type]
    assert Link(bandwidth=100.0, per_request=0.5, per_descriptor=0.1).work(200.0, 10, 0.5) == 0.5 + 0.5 * 2.0
    assert Link(bandwidth=100.0).work(200.0) == 2.0


def test_both_sides_of_each_bound() -> None:
    for values in ({"proxy": 0.0}, {"reserved_decode_tokens": 0}, {"max_local_prefill_length": 0}, {"lease": 1e-9}):
        Handover("pull", **values)
    Handover("pull", lease=9.0, on_expiry="fail")
    Handover("pull", timeout=9.0, on_expiry="fail")
    Handover("pull", lease=9.0, on_expiry="recompute")
    Handover("pull", "relayed", lease=9.0, on_expiry="fail")
    Handover("pull", gate="before_prefill")
    Handover("pull", "decode")
    Handover("push")
    for transfer in ("chunked", "layerwise"):
        Handover(transfer, gate="before_prefill")
        with pytest.raises(InputError, match=f"transfer='{transfer}' sends before the prompt ends"):
            Handover(transfer)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"proxy": inf}, "proxy=inf"),
        ({"timeout": 0.0}, "timeout=0.0: must be seconds > 0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"max_local_prefill_length": -1}, "max_local_prefill_length=-1"),
    ]
    for values, words in wrong:
        with pytest.raises(InputError, match=words):
            Handover("pull", **values)
    for name in ("latency", "per_request", "per_descriptor"):
        with pytest.raises(InputError, match=f"{name}=-0.1"):
            Link(**{name: -0.1})  # type: ignore[arg-type]


def test_all_named_values_are_json() -> None:
    assert all(value.spec()["lease"] != inf for value in HANDOVERS.values())
    assert all(value.spec()["bandwidth"] != inf for value in LINKS.values())
