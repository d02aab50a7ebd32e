"""/metrics: vLLM's names, of the simulated engines."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from windtunnel.report.prometheus import FIRST_TOKEN, PER_TOKEN, REQUEST, one_two_five
from windtunnel.serve.engine import Engine, Gaps, Stream
from windtunnel.serve.web_metrics import Web

LABELS = ("model_name", "engine")
LATENESS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Edges of the buckets of how late tokens are handed out, seconds."""
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Edges of the buckets of a step's tokens, as vLLM has them."""
SMALL = (0, 1, 2, 5, 10, 20)
"""Edges of the buckets of how many answers a request asks for, and of its preemptions."""
ALWAYS_ZERO = ("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits")
"""Counters of what is not simulated live: no KV connector, no images."""
TIERS = ("device", "host", "disk", "p2p", "external_unspecified")
ADMISSION = ("max_num_queued_reqs", "max_num_queued_tokens")
MOST_UNCOUNTED = 256
"""Requests that have ended, and steps, that are kept until they are counted together."""


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

    def observe_alike(self, value: float, count: int) -> None:
        """Count a value of the first engine this many times."""
        self.counts[0, bisect_left(self._edges, value)] += count
        self.sums[0] += value * count

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
                ("request_params_n", "Answers that a request asks for.", SMALL),
                ("request_num_preemptions", "Times that a request was preempted.", SMALL),
                ("request_prefill_kv_computed_tokens", "Prompt tokens that were computed, not cached.", lengths),
                ("iteration_tokens_total", "Tokens of an engine step.", ITERATION),
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
                "prompt_tokens_cached",
            )
        }
        self._uncounted: list[Stream] = []
        self._gaps: Gaps = []
        self._ended: Counter[tuple[int, str]] = Counter()
        self.turned_away = 0
        """Requests that were answered with 429."""
        self._late = Buckets(1, LATENESS)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        engine.observers.append(self.ended)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._web = Web(self._registry)
        engine.gaps.append(self.tokens)
        engine.steps.append(self._count_step)
        engine.late.append(self._late.observe_alike)

    def tokens(self, found: Gaps) -> None:
        """Requests of these engines have got a token each, so long after the ones before."""
        self._gaps += found
        if len(self._gaps) >= MOST_UNCOUNTED:
            self._count_gaps()

    def _count_step(self, tokens: NDArray[np.float64]) -> None:
        counted = self._histograms["iteration_tokens_total"][1]
        for engine in np.flatnonzero(tokens).tolist():
            counted.observe(engine, tokens[engine : engine + 1])

    def web(self, path: str, status: int, seconds: float, asked: int, answered: int) -> None:
        """A request to a path was answered."""
        self._web.answered(path, status, seconds, asked, answered)

    def _count_gaps(self) -> None:
        if not self._gaps:
            return
        engines, gaps = (np.concatenate(columns) for columns in zip(*self._gaps, strict=True))
        self._gaps = []
        for engine in np.unique(engines).tolist():
            mine = gaps[engines == engine]
            self._histograms["inter_token_latency_seconds"][1].observe(engine, mine)
            self._counters["generation_tokens"][engine] += len(mine)

    def ended(self, stream: Stream) -> None:
        """A request has ended; many are counted at once, which costs a tenth."""
        self._uncounted.append(stream)
        if len(self._uncounted) >= MOST_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        """Count the requests that have ended."""
        streams, self._uncounted = self._uncounted, []
        for stream in streams:
            self._ended[stream.replica, "abort" if stream.aborted else stream.reason] += 1
        for engine in sorted({stream.replica for stream in streams}):
            if answered := [stream for stream in streams if stream.replica == engine and stream.tokens]:
                self._count_answered(engine, answered)

    def _count_answered(self, engine: int, streams: Sequence[Stream]) -> None:
        rows = np.array([_row(stream) for stream in streams], dtype=np.float64)
        arrived, scheduled, first, last, prompt, tokens, most, cached, preemptions = rows.T
        self._counters["generation_tokens"][engine] += len(streams)  # their first ones, which end no gap
        self._counters["prompt_tokens"][engine] += int(prompt.sum())
        self._counters["prompt_tokens_cached"][engine] += int(cached.sum())
        self._counters["num_preemptions"][engine] += int(preemptions.sum())
        if self._engine.deployment.hash_block_size:
            self._counters["prefix_cache_queries"][engine] += int(prompt.sum())
            self._counters["prefix_cache_hits"][engine] += int(cached.sum())
        several = tokens > 1
        for name, values in {
            "time_to_first_token_seconds": first - arrived,
            "e2e_request_latency_seconds": last - arrived,
            "request_queue_time_seconds": scheduled - arrived,
            "request_inference_time_seconds": last - scheduled,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": last - first,
            "request_prompt_tokens": prompt,
            "request_generation_tokens": tokens,
            "request_max_num_generation_tokens": tokens,
            "request_params_max_tokens": most,
            "request_time_per_output_token_seconds": (last - first)[several] / (tokens[several] - 1),
            "request_params_n": np.ones(len(streams)),
            "request_num_preemptions": preemptions,
            "request_prefill_kv_computed_tokens": prompt - cached,
        }.items():
            self._histograms[name][1].observe(engine, values)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for."""
        self._count()
        self._count_gaps()
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
        yield from self._by_label(load)
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
        text = "How much later than the simulated engines tokens were handed out, in simulated seconds."
        family = HistogramMetricFamily("windtunnel:token_lateness_seconds", text)
        family.add_metric([], self._late.buckets(0), float(self._late.sums[0]))
        yield family

    def _by_label(self, load: Sequence[tuple[int, int, float]]) -> Iterator[Metric]:
        """What vLLM exports besides: the same counts by reason or source, and what is always so here."""
        cached, computed = self._counters["prompt_tokens_cached"], self._counters["prompt_tokens"]
        engines = range(len(load))
        waiting = {"capacity": [row[1] for row in load], "deferred": [0 for _ in load]}
        yield self._labelled(GaugeMetricFamily, "num_requests_waiting_by_reason", "reason", waiting)
        level = self._engine.sleep_level
        states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
        asleep = {name: [float(value) for _ in load] for name, value in states.items()}
        yield self._labelled(GaugeMetricFamily, "engine_sleep_state", "sleep_state", asleep)
        sources = {
            "local_compute": [computed[engine] - cached[engine] for engine in engines],
            "local_cache_hit": [cached[engine] for engine in engines],
            "external_kv_transfer": [0 for _ in engines],
        }
        yield self._labelled(CounterMetricFamily, "prompt_tokens_by_source", "source", sources)
        tiers = {tier: [cached[engine] if tier == "device" else 0 for engine in engines] for tier in TIERS}
        yield self._labelled(CounterMetricFamily, "prompt_tokens_cached_by_source", "source", tiers)
        for name in ALWAYS_ZERO:
            zero = CounterMetricFamily(f"vllm:{name}", f"Number of {name.replace('_', ' ')}.", labels=LABELS)
            for engine in engines:
                zero.add_metric(self._labels(engine), 0)
            yield zero
        rejected = CounterMetricFamily(
            "vllm:admission_rejections", "Number of admission rejections.", labels=("model_name", "reason")
        )
        for reason in ADMISSION:
            rejected.add_metric([self._model, reason], 0)
        yield rejected
        known = self._engine.deployment.cache_config()
        names = ["engine", *known[0]]
        cache = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=names)
        for engine, facts in enumerate(known):
            cache.add_metric([str(engine), *facts.values()], 1)
        yield cache

    def _labelled(
        self, family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, label: str,
        values: Mapping[str, Sequence[float]],
    ) -> Metric:  # fmt: skip
        found = family(f"vllm:{name}", f"Number of {name.replace('_', ' ')}.", labels=(*LABELS, label))
        for value, counts in values.items():
            for engine, count in enumerate(counts):
                found.add_metric([*self._labels(engine), value], count)
        return found

    def _labels(self, engine: int) -> list[str]:
        return [self._model, str(engine)]

    def text(self) -> bytes:
        """The exposition."""
        found: Any = generate_latest(self._registry)
        return bytes(found)


def _row(stream: Stream) -> tuple[float, ...]:
    """What is counted of a request that was answered."""
    asked = stream.arrival
    return (
        *(stream.arrived - stream.held, stream.scheduled, stream.first_token, stream.last_token),
        *(asked.prompt_tokens, stream.tokens, asked.max_tokens, stream.cached_tokens, stream.preemptions),
    )
