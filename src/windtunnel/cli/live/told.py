"""Who is told what watch finds: Prometheus by a file, and its Alertmanager.

Sources: Prometheus' text format and the textfile collector of its node exporter; Alertmanager's API v2
(POST /api/v2/alerts), in which an alert that has an end is resolved.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from windtunnel.errors import InputError
from windtunnel.files import write_whole
from windtunnel.scenario import Scenario

if TYPE_CHECKING:
    from windtunnel.metrics import Summary
    from windtunnel.workload.drift import Fit

ALERT = "WindtunnelPlanBroken"
LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue")
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class Told:
    """Where results are written, besides the screen."""

    metrics: Path | None = None
    """File in Prometheus' text format, for node exporter's textfile collector: whether the plan holds, replicas that
    would meet the goals, and the simulated latencies, to be drawn next to the measured ones."""
    alertmanager: str | None = None
    """URL of Prometheus' Alertmanager: it is told that the plan is broken, and when it holds again."""

    def tell(
        self, scenario: Scenario, seen: "Fit", broken: list[str], simulated: "Summary", enough: int | None
    ) -> None:
        """Write and send what was asked for. Raises InputError for a file or an address that does not take it."""
        if self.metrics is not None:
            write_whole(self.metrics, [exposition(scenario, seen, broken, simulated, enough)])
        if self.alertmanager is not None:
            post(self.alertmanager, [alert(scenario, seen, broken, enough)])


def exposition(scenario: Scenario, seen: "Fit", broken: list[str], simulated: "Summary", enough: int | None) -> str:
    """The findings as gauges."""
    model = scenario.server.model.replace("\\", "\\\\").replace('"', '\\"')
    plain = {
        "plan_holds": float(not broken),
        "plan_replicas": float(scenario.replicas),
        "plan_replicas_needed": float(enough or (0 if broken else scenario.replicas)),
        "seen_request_rate": seen.rate,
        "simulated_output_throughput": simulated.output_throughput,
        "simulated_kv_usage": simulated.usage.kv,
    }
    lines = []
    for name, value in plain.items():
        lines += [f"# TYPE windtunnel:{name} gauge", f'windtunnel:{name}{{model_name="{model}"}} {value:.9g}']
    for name in LATENCIES:
        found = simulated.latencies[name]
        lines.append(f"# TYPE windtunnel:simulated_{name}_seconds gauge")
        lines += [
            f'windtunnel:simulated_{name}_seconds{{model_name="{model}",quantile="{share:g}"}} '
            f"{found.percentile(100 * share):.9g}"
            for share in QUANTILES
        ]
    return "\n".join(lines) + "\n"


def alert(scenario: Scenario, seen: "Fit", broken: list[str], enough: int | None) -> dict[str, Any]:
    """The alert as Alertmanager takes it; with an end where the plan holds."""
    enough_words = f"{enough} replicas would meet the goals" if enough else "no number of replicas meets the goals"
    found: dict[str, Any] = {
        "labels": {"alertname": ALERT, "severity": "warning", "model_name": scenario.server.model},
        "annotations": {
            "summary": f"the plan for {scenario.server.model} no longer holds at {seen.rate:.3g} requests/s",
            "description": "; ".join([*broken, enough_words]),
        },
    }
    return found if broken else found | {"endsAt": datetime.now(UTC).isoformat()}


def post(url: str, alerts: list[dict[str, Any]]) -> None:
    """Send alerts. Raises InputError where nobody takes them."""
    address = f"{url.rstrip('/')}/api/v2/alerts"
    asked = Request(address, json.dumps(alerts).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(asked, timeout=10):
            return
    except (URLError, OSError, ValueError) as error:
        raise InputError(f"alertmanager {url!r}: takes no alerts ({getattr(error, 'reason', error)})") from error
