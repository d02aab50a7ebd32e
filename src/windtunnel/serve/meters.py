"""/metrics: vLLM's names, of the simulated engines."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from windtunnel.report.prometheus import FIRST_TOKEN, PER_TOKEN, REQUEST, one_two_five
from windtunnel.serve.engine import Engine, Stream

LABELS = ("model_name", "engine")


class Buckets:
    """A histogram for each engine."""

    def __init__(self, engines: int, edges: tuple[float, ...]) -> None:
        self.edges, self._edges = np.array(edges, dtype=np.float64), edges
        self.counts = np.zeros((engines, len(edges) + 1), dtype=np.int64)
        self.sums = np.zeros(engines)

    def observe(self, engine: int, values: NDArray[np.float64]) -> None:
        """Count values."""
        places = np.searchsorted(self.edges, values, side="left")
        self.counts[engine] += np.bincount(places, minlength=len(self.edges) + 1)
        self.sums[engine] += values.sum()

    def observe_one(self, engine: int, value: float) -> None:
        """Count a value; for single ones much faster than ``observe``."""
        self.counts[engine, bisect_left(self._edges, value)] += 1
        self.sums[engine] += value

    def buckets(self, engine: int) -> list[tuple[str, float]]:
        """As the exposition format wants them: how many values are not above each edge."""
        names = [*(repr(edge) for edge in self.edges.tolist()), "+Inf"]
        return list(zip(names, np.cumsum(self.counts[engine]).tolist(), strict=True))


class Meters:
    """Counts what the engines do, and shows it when it is scraped."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        engines = len(engine.deployment.load())
        lengths = one_two_five(engine.deployment.longest)
        self._histograms = {
            name: (text, Buckets(engines, edges))
            for name, text, edges in (
                ("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN),
                ("inter_token_latency_seconds", "Gap between two tokens.", PER_TOKEN),
                ("request_time_per_output_token_seconds", "Time per output token of a request.", PER_TOKEN),
                ("e2e_request_latency_seconds", "End-to-end request latency.", REQUEST),
                ("request_queue_time_seconds", "Time in the WAITING phase.", REQUEST),
                ("request_inference_time_seconds", "Time in the RUNNING phase.", REQUEST),
                ("request_prefill_time_seconds", "Time in the PREFILL phase.", REQUEST),
                ("request_decode_time_seconds", "Time in the DECODE phase.", REQUEST),
                ("request_prompt_tokens", "Prefill tokens of a request.", lengths),
                ("request_generation_tokens", "Generation tokens of a request.", lengths),
                ("request_max_num_generation_tokens", "Most generation tokens of a request's answers.", lengths),
                ("request_params_max_tokens", "Limit that a request declares.", lengths),
            )
        }
        self._counters: dict[str, Counter[int]] = {
            name: Counter()
            for name in (
                "prompt_tokens",
                "generation_tokens",
                "prefix_cache_queries",
                "prefix_cache_hits",
                "num_preemptions",
            )
        }
        self._ended: Counter[tuple[int, str]] = Counter()
        self.turned_away = 0
        """Requests that were answered with 429."""
        self._registry = CollectorRegistry()
        self._registry.register(self)
        engine.observers.append(self.ended)
        engine.gaps.append(self.tokens)

    def tokens(self, engine: int, gaps: NDArray[np.float64]) -> None:
        """Requests of an engine have got a token each, so long after the ones before."""
        self._histograms["inter_token_latency_seconds"][1].observe(engine, gaps)
        self._counters["generation_tokens"][engine] += len(gaps)

    def ended(self, stream: Stream) -> None:
        """A request has ended."""
        engine, asked = stream.replica, stream.arrival
        self._ended[engine, "abort" if stream.aborted else stream.reason] += 1
        if not stream.tokens:
            return
        counters = self._counters
        counters["generation_tokens"][engine] += 1  # its first one, which ends no gap
        counters["prompt_tokens"][engine] += asked.prompt_tokens
        counters["num_preemptions"][engine] += stream.preemptions
        if self._engine.deployment.hash_block_size:
            counters["prefix_cache_queries"][engine] += asked.prompt_tokens
            counters["prefix_cache_hits"][engine] += stream.cached_tokens
        decode = stream.last_token - stream.first_token
        self._observe(
            engine,
            time_to_first_token_seconds=stream.first_token - stream.arrived,
            e2e_request_latency_seconds=stream.last_token - stream.arrived,
            request_queue_time_seconds=stream.scheduled - stream.arrived,
            request_inference_time_seconds=stream.last_token - stream.scheduled,
            request_prefill_time_seconds=stream.first_token - stream.scheduled,
            request_decode_time_seconds=decode,
            request_prompt_tokens=asked.prompt_tokens,
            request_generation_tokens=stream.tokens,
            request_max_num_generation_tokens=stream.tokens,
            request_params_max_tokens=asked.max_tokens,
        )
        if stream.tokens > 1:
            self._observe(engine, request_time_per_output_token_seconds=decode / (stream.tokens - 1))

    def _observe(self, engine: int, **values: float) -> None:
        for name, value in values.items():
            self._histograms[name][1].observe_one(engine, value)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for."""
        load = self._engine.deployment.load()
        for name, text, values in (
            ("num_requests_running", "Requests in model execution batches.", [row[0] for row in load]),
            ("num_requests_waiting", "Requests waiting to be processed.", [row[1] for row in load]),
            ("kv_cache_usage_perc", "KV-cache usage, 1 means 100 percent.", [row[2] for row in load]),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for engine, value in enumerate(values):
                gauge.add_metric(self._labels(engine), value)
            yield gauge
        for name, counts in self._counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", f"Number of {name.replace('_', ' ')}.", labels=LABELS)
            for engine in range(len(load)):
                counter.add_metric(self._labels(engine), counts[engine])
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "Successfully processed requests.", labels=(*LABELS, "finished_reason")
        )
        for engine in range(len(load)):
            for reason in ("stop", "length", "abort"):
                ended.add_metric([*self._labels(engine), reason], self._ended[engine, reason])
        yield ended
        turned = CounterMetricFamily("windtunnel:requests_turned_away", "Requests that were answered with 429.")
        turned.add_metric([], self.turned_away)
        yield turned
        for name, (text, histogram) in self._histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for engine in range(len(load)):
                family.add_metric(self._labels(engine), histogram.buckets(engine), float(histogram.sums[engine]))
            yield family

    def _labels(self, engine: int) -> list[str]:
        return [self._model, str(engine)]

    def text(self) -> bytes:
        """The exposition."""
        found: Any = generate_latest(self._registry)
        return bytes(found)
