"""Figures: what the page shows of a run, from the functions that ``windtunnel run`` calls."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Deployment
from windtunnel.deployment.title import title
from windtunnel.metrics import Bands, Steps, Summary, Timeline, clean, group_share, summary_json, timeline
from windtunnel.plan.bottleneck import bottlenecks
from windtunnel.report.figures import rounded
from windtunnel.simulate.notes import QUIET

CURVES = ("ttft", "tpot", "itl", "e2el")
POINTS = np.unique(np.concatenate((np.linspace(0, 100, 81), np.linspace(95, 100, 26))))
"""Per cent at which distributions are drawn."""
BINS = 240
"""Of the lines over time."""
LEVEL = "90"


def figures(steps: Steps, result: Summary, deployment: Deployment) -> dict[str, Any]:
    """What is drawn at once: the document of ``run --json``, distributions and prices."""
    run = steps.run
    found: dict[str, Any] = clean(
        {
            "title": title(run.manifest["deployment"]["pools"]),
            "window_s": [result.window.start, result.window.end],
            "gpus": deployment.gpus,
            "price_per_hour": deployment.price_per_hour or None,
            "request_rate": run.manifest["workload"]["request_rate"],
            "load": run.manifest["workload"]["name"],
            "usd_per_million": result.per_million_output_tokens(result.usage.cost_usd),
            "verdicts": [
                {
                    "name": f"{verdict.metric}_p{verdict.percentile:g}",
                    "met": verdict.met,
                    "value": verdict.value,
                    "limit": verdict.limit,
                }
                for verdict in result.verdicts
            ],
            "pools": [_pool(pool) for pool in run.manifest["pools"]],
            "quiet": [text for text in result.warnings if text.endswith(QUIET)],
        }
    )
    curves = {name: _curve(result, name) for name in CURVES}
    return {"document": summary_json(result), "curves": curves, **found}


def causes(steps: Steps) -> dict[str, Any]:
    """What is drawn when the whole load is simulated: what limits the run, where its time goes, and lines over time."""
    found: dict[str, Any] = clean(
        {
            "bottlenecks": [
                {"name": each.name, "share": each.share, "evidence": each.evidence, "advice": each.advice}
                for each in bottlenecks(steps.run, steps=steps)
            ],
            "time": group_share(steps),
        }
    )
    return found | {"lines": lines_over_time(timeline(steps, BINS))}


def judged(found: Bands) -> dict[str, Any]:
    """What is drawn of bands: factors on the curves, and what is known to be wrong with such simulations."""
    document = found.to_json()
    factors = {name: ends[LEVEL] for name, ends in document["factors"].items()}
    return {"factors": factors, "known_bad": document["known_bad"]}


def _pool(pool: Mapping[str, Any]) -> dict[str, Any]:
    """A pool's GPUs, the memory of one of them in bytes, and how many tokens its cache holds."""
    memory, engine = pool["memory"], pool["engine"]
    return {
        "name": pool["name"],
        "replicas": pool["replicas"],
        "gpus": pool["gpus"],
        "device": pool["device"],
        "kv_tokens": pool["kv_blocks"] * pool["block_size"] * engine["data_parallel_size"],
        "max_num_seqs": pool["max_num_seqs"],
        "max_num_batched_tokens": engine["max_num_batched_tokens"],
        "memory": {
            "weights": memory["weight_bytes"],
            "activations": memory["activation_bytes"],
            "CUDA graphs": memory["graph_bytes"],
            "reserve": memory["reserve_bytes"] + memory["window_bytes"] + memory["state_bytes"],
            "KV cache": memory["available_bytes"],
        },
    }


def _curve(result: Summary, name: str) -> dict[str, Any]:
    """A latency's distribution: seconds at which the given per cent of values are no longer."""
    values = result.latencies[name]
    return {"seconds": rounded(values.percentiles(POINTS)) if values.count else [], "percent": POINTS.tolist()}


def lines_over_time(lines: Timeline) -> dict[str, Any]:
    """Levels over time, each the exact mean of its bin."""
    columns: dict[str, NDArray[np.float64]] = {
        "running": lines.running,
        "waiting": lines.waiting,
        "kv": lines.kv,
        "output": lines.output_throughput,
    }
    drawn = {name: rounded(values) for name, values in columns.items()}
    return {"start": float(lines.edges[0]), "end": float(lines.edges[-1]), **drawn}
