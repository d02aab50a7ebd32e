"""The result file of ``vllm bench serve``: same keys, same units, so that tools for real runs read simulated ones."""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from windtunnel.metrics import Distribution, Steps, Summary, request_metrics, token_gaps_by_request
from windtunnel.simulate.run import FINISHED

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def vllm_bench(
    steps: Steps,
    summary: Summary,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    detailed: bool = False,
    date: datetime | None = None,
) -> dict[str, Any]:
    """The document that ``--save-result`` writes with all four ``--percentile-metrics``.

    ``detailed`` adds the arrays of ``--save-detailed``: one entry per request, with all gaps between its tokens. Times
    are in milliseconds in names that say so, else in seconds. A statistic of nothing is 0, as there.
    """
    requests = steps.run.requests
    workload, pool = steps.run.manifest.get("workload", {}), steps.run.manifest["pools"][0]
    finished = requests.status == FINISHED
    model = str(pool.get("model", ""))
    document: dict[str, Any] = {
        "date": (date or datetime.now()).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "windtunnel",
        "backend": "windtunnel",
        "label": "windtunnel",
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(requests.arrival),
        "request_rate": workload.get("request_rate") or "inf",
        "burstiness": workload.get("burstiness") or 1.0,
        "max_concurrency": workload.get("max_concurrency") or None,
        "duration": summary.window.seconds,
        "completed": int(finished.sum()),
        "failed": int((~finished).sum()),
        "total_input_tokens": int(requests.prompt_tokens[finished].sum()),
        "total_output_tokens": int(requests.output_tokens[finished].sum()),
        "request_throughput": _number(summary.request_throughput),
        "request_goodput": None if math.isnan(summary.goodput) else summary.goodput,
        "output_throughput": _number(summary.output_throughput),
        "total_token_throughput": _number(summary.total_token_throughput),
    }
    if detailed:
        document |= _arrays(steps)
    document |= {
        "max_output_tokens_per_s": _busiest_second(steps),
        "max_concurrent_requests": _peak(requests.arrival[finished], requests.finish[finished]),
        "rtfx": 0.0,
    }
    for name in METRICS:
        document |= _statistics(name, summary.latencies[name], percentiles)
    return document


def _statistics(name: str, values: Distribution, percentiles: Sequence[float]) -> dict[str, float]:
    found = {f"mean_{name}_ms": values.mean, f"median_{name}_ms": values.percentile(50), f"std_{name}_ms": values.std}
    for percent, value in zip(percentiles, values.percentiles(percentiles).tolist(), strict=True):
        found[f"p{percent:g}_{name}_ms"] = value
    return {key: _number(value * 1000) for key, value in found.items()}


def _number(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _arrays(steps: Steps) -> dict[str, Any]:
    requests = steps.run.requests
    metrics = request_metrics(requests)
    finished = requests.status == FINISHED
    failure = [("", "rejected", "aborted", "unfinished")[status] for status in requests.status.tolist()]
    gaps = token_gaps_by_request(steps)
    return {
        "input_lens": requests.prompt_tokens.tolist(),
        "output_lens": np.where(finished, requests.output_tokens, 0).tolist(),
        "ttfts": np.where(finished, metrics.ttft, 0.0).tolist(),
        "itls": [gap.tolist() for gap in gaps],
        "latencies": np.where(finished, metrics.e2el, 0.0).tolist(),
        "start_times": requests.arrival.tolist(),
        "queue_times": [0.0] * len(failure),
        "generated_texts": [""] * len(failure),
        "errors": failure,
    }


def _busiest_second(steps: Steps) -> float:
    """Most tokens in a second, in one-second buckets from the first arrival."""
    run = steps.run
    first = run.requests.first_token[~np.isnan(run.requests.first_token)]
    times = np.concatenate((steps.ends, first, run.stalls.resumed_token))
    if len(times) == 0:
        return 0.0
    counts = np.concatenate((steps.emitted * steps.tokens_of_decode, np.ones(len(times) - len(steps.ends))))
    buckets = np.maximum(times - run.requests.arrival.min(), 0.0).astype(np.int64)
    return float(np.bincount(buckets, weights=counts).max())


def _peak(begin: np.ndarray[Any, np.dtype[np.float64]], end: np.ndarray[Any, np.dtype[np.float64]]) -> int:
    """Most requests in the system at once; at equal times those that leave go first."""
    times = np.concatenate((end, begin))
    deltas = np.concatenate((-np.ones(len(end), dtype=np.int64), np.ones(len(begin), dtype=np.int64)))
    order = np.argsort(times, kind="stable")
    return int(np.cumsum(deltas[order]).max(initial=0))
