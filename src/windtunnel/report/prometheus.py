"""Prometheus text with vLLM's metric names: what a scrape at the end of the run would show, one engine per replica."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics import Distribution, Steps, request_metrics
from windtunnel.metrics.steps import Counts
from windtunnel.simulate.run import FINISHED, UNFINISHED

Floats = NDArray[np.float64]

BELOW_A_SECOND = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
FIRST_TOKEN = (*BELOW_A_SECOND, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TRANSFER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
TRANSFER_BYTES = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

OF_PROMPTS = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_prompt_tokens")
"""Histograms of the engine that computes the prompt."""

Labelled = list[tuple[int, Distribution]]


def prometheus(steps: Steps) -> Iterator[str]:
    """The exposition text, line by line. Counters end in _total, histograms use vLLM's buckets."""
    requests, computed, engines = steps.run.requests, _computed_by(steps), range(len(steps.run.manifest["replicas"]))
    finished = requests.status == FINISHED
    started = ~np.isnan(requests.scheduled)
    open_ = requests.status == UNFINISHED
    caching = bool(requests.cached_tokens.any())
    model = _escape(str(steps.run.manifest["pools"][0].get("model", "")))

    def count(
        mask: NDArray[np.bool_], values: NDArray[np.int64] | None = None, owner: NDArray[np.int64] = requests.replica
    ) -> list[tuple[int, float]]:
        served = mask & (owner >= 0)
        weights = None if values is None else values[served]
        totals = np.bincount(owner[served], weights=weights, minlength=len(engines))
        return list(enumerate(totals.tolist()))

    for name, kind, text, values in (
        ("num_requests_running", "gauge", "Requests in model execution batches.", count(open_ & started)),
        ("num_requests_waiting", "gauge", "Requests waiting to be processed.", count(open_ & ~started)),
        ("kv_cache_usage_perc", "gauge", "KV-cache usage, 1 means 100 percent.", _kv_at_end(steps)),
        (
            "prefix_cache_queries_total",
            "counter",
            "Prefix cache queries, in tokens.",
            count(started & caching, requests.prompt_tokens, computed),
        ),
        (
            "prefix_cache_hits_total",
            "counter",
            "Prefix cache hits, in tokens.",
            count(started, requests.cached_tokens, computed),
        ),
        ("num_preemptions_total", "counter", "Preemptions.", count(started, requests.preemptions)),
        (
            "prompt_tokens_total",
            "counter",
            "Prefill tokens processed.",
            count(started, requests.prompt_tokens, computed),
        ),
        ("generation_tokens_total", "counter", "Generation tokens processed.", count(finished, requests.output_tokens)),
    ):
        yield _head(name, kind, text)
        yield from (f'vllm:{name}{{engine="{engine}",model_name="{model}"}} {value:.17g}\n' for engine, value in values)
    yield _head("request_success_total", "counter", "Successfully processed requests.")
    for engine, value in count(finished):
        labels = f'engine="{engine}",finished_reason="length",model_name="{model}"'
        yield f"vllm:request_success_total{{{labels}}} {value:g}\n"
    for name, text, edges, labelled in _histograms(steps):
        yield _head(name, "histogram", text)
        for engine, values_ in labelled:
            yield from _histogram(name, f'engine="{engine}",model_name="{model}"', edges, values_)


def _histograms(steps: Steps) -> Iterator[tuple[str, str, tuple[float, ...], Labelled]]:
    requests, metrics = steps.run.requests, request_metrics(steps.run.requests)
    ended, computed = requests.status == FINISHED, _computed_by(steps)
    decode = np.where(ended, requests.finish - requests.first_token, np.nan)
    inference = np.where(ended, requests.finish - requests.scheduled, np.nan)
    lengths = one_two_five(int(max(requests.prompt_tokens.max(initial=1), requests.output_tokens.max(initial=1))))
    for name, text, edges, values in (
        ("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN, metrics.ttft),
        ("request_time_per_output_token_seconds", "Time per output token of a request.", PER_TOKEN, metrics.tpot),
        ("e2e_request_latency_seconds", "End-to-end request latency.", REQUEST, metrics.e2el),
        ("request_queue_time_seconds", "Time in the WAITING phase.", REQUEST, metrics.queue),
        ("request_inference_time_seconds", "Time in the RUNNING phase.", REQUEST, inference),
        ("request_prefill_time_seconds", "Time in the PREFILL phase.", REQUEST, metrics.prefill),
        ("request_decode_time_seconds", "Time in the DECODE phase.", REQUEST, decode),
        ("request_prompt_tokens", "Prefill tokens of a request.", lengths, requests.prompt_tokens),
        ("request_generation_tokens", "Generation tokens of a request.", lengths, requests.output_tokens),
    ):
        kept = np.where(ended | np.isin(name, ("time_to_first_token_seconds",)), values.astype(np.float64), np.nan)
        yield name, text, edges, _by_engine(steps, computed if name in OF_PROMPTS else requests.replica, kept, None)
    yield from _transfers(steps)
    owner = steps.run.iterations.replica
    gaps = _by_engine(steps, owner[steps.row], steps.duration, steps.decodes, stalls=True)
    yield "inter_token_latency_seconds", "Gap between two tokens.", PER_TOKEN, gaps
    tokens = steps.tokens.astype(np.float64)
    counts = steps.run.iterations.steps[steps.heads] * (steps.batch > 0)
    yield (
        "iteration_tokens_total",
        "Tokens per step.",
        STEP_TOKENS,
        _by_engine(steps, owner[steps.heads], tokens, counts),
    )


def _computed_by(steps: Steps) -> NDArray[np.int64]:
    """The replica that computed the prompt of each request."""
    apart = steps.run.handovers
    return steps.run.requests.replica if apart is None else apart.prefill_replica


def _transfers(steps: Steps) -> Iterator[tuple[str, str, tuple[float, ...], Labelled]]:
    """What vLLM's NIXL connector tells of the engine that receives (NixlPromMetrics), of pools apart."""
    apart, receiver = steps.run.handovers, steps.run.requests.replica
    if apart is None:
        return
    size = np.where(apart.kv_bytes > 0, apart.kv_bytes, np.nan)
    seconds = np.where(apart.kv_bytes > 0, apart.ttft_transfer, np.nan)
    text = "Duration of a KV cache transfer, waiting for the link included."
    yield "nixl_xfer_time_seconds", text, TRANSFER, _by_engine(steps, receiver, seconds, None)
    text = "Bytes of a KV cache transfer."
    yield "nixl_bytes_transferred", text, TRANSFER_BYTES, _by_engine(steps, receiver, size, None)


def _by_engine(
    steps: Steps, owner: NDArray[np.int64], values: Floats, weights: Counts | None, stalls: bool = False
) -> Labelled:
    """One distribution per replica."""
    found = []
    gaps = steps.run.stalls
    stalled = steps.run.requests.replica[np.searchsorted(steps.run.requests.id, gaps.request)]
    for engine in range(len(steps.run.manifest["replicas"])):
        mine = owner == engine
        if weights is None:
            found.append((engine, Distribution(values[mine])))
            continue
        singles = (gaps.resumed_token - gaps.last_token)[stalled == engine] if stalls else np.zeros(0)
        found.append((engine, Distribution.pooled(values[mine], weights[mine], singles)))
    return found


def _histogram(name: str, labels: str, edges: tuple[float, ...], values: Distribution) -> Iterator[str]:
    for edge, count in zip(edges, values.histogram(np.array(edges, dtype=np.float64)).tolist(), strict=True):
        yield f'vllm:{name}_bucket{{le="{float(edge)!r}",{labels}}} {count}\n'
    yield f'vllm:{name}_bucket{{le="+Inf",{labels}}} {values.count}\n'
    yield f"vllm:{name}_count{{{labels}}} {values.count}\n"
    yield f"vllm:{name}_sum{{{labels}}} {values.total!r}\n"


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP vllm:{name} {text}\n# TYPE vllm:{name} {kind}\n"


def _kv_at_end(steps: Steps) -> list[tuple[int, float]]:
    """Blocks that unfinished requests hold at the end, as a share: 0 when the run drained."""
    run = steps.unfolded.run
    engines = len(run.manifest["replicas"])
    if not (run.requests.status == UNFINISHED).any():
        return [(engine, 0.0) for engine in range(engines)]
    last = np.zeros(engines)
    last[run.iterations.replica] = run.iterations.used_blocks
    blocks = [run.manifest["pools"][replica["pool"]]["kv_blocks"] for replica in run.manifest["replicas"]]
    return [(engine, float(last[engine]) / blocks[engine]) for engine in range(engines)]


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to ``largest``."""
    found = [float(mantissa * 10**power) for power in range(12) for mantissa in (1, 2, 5)]
    return tuple(value for value in found if value <= largest) or (1.0,)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
