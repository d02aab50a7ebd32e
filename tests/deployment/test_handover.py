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


def test_all_named_values_are_json() -> None:
    assert all(value.spec()["lease"] != inf for value in HANDOVERS.values())
    assert all(value.spec()["bandwidth"] != inf for value in LINKS.values())
