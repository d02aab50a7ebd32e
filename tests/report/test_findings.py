"""Findings: worked out by hand on a few capacities."""

from math import inf

from windtunnel.metrics import Interval
from windtunnel.report.findings import findings


def case(capacity: float, per_dollar: float | None = None) -> dict[str, Interval]:
    found = {"capacity": capacity} | ({} if per_dollar is None else {"capacity_per_dollar": per_dollar})
    return {name: Interval(value, inf, 1) for name, value in found.items()}


CASES: dict[tuple[str, ...], dict[str, Interval]] = {
    ("chat", "a", "big"): case(8.0, 1.0),
    ("chat", "b", "big"): case(4.0, 0.5),
    ("chat", "a", "small"): case(2.0, 2.0),
    ("chat", "b", "small"): case(2.0, 2.0),
    ("code", "a", "big"): case(0.0, 0.0),
    ("code", "b", "big"): case(0.0, 0.0),
}


def test_the_best_of_each_load_and_what_each_axis_decides() -> None:
    chat, code, server, device = findings(("load", "server", "device"), (0,), CASES)
    assert chat.startswith("chat: most a big (8") and "most for its price b small (2" in chat
    assert code == "code: nothing keeps the limits"
    assert server.endswith("a 100 %, b 71 %")  # the square root of 1/2 × 1
    assert device.endswith("big 100 %, small 35 %")  # the square root of 1/4 × 1/2


def test_a_case_that_fails_is_counted() -> None:
    (said, *_) = findings(("load", "device"), (0,), {("chat", "x"): case(1.0), ("chat", "y"): case(0.0)})
    assert said == "chat: most x (1.00 requests/s); 1 of 2 keep the limits at no rate"


def test_other_benches_have_none() -> None:
    assert findings(("device",), (), {("h100",): {"ttft.mean": Interval(1.0, 0.0, 1)}}) == []
