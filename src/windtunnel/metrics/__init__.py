"""Metrics: pure functions from a Run to tables. Definitions: docs/metrics.md."""

from windtunnel.metrics.bands import Bands, bands
from windtunnel.metrics.comparison import Comparison, Interval, Measure, Variant, comparison_json, paired_spread, spread
from windtunnel.metrics.distribution import PERCENTILES, Distribution
from windtunnel.metrics.gaps import token_gaps, token_gaps_by_request
from windtunnel.metrics.overload import Growth, delay_growth, overload_warning, overloaded, queue_growth
from windtunnel.metrics.requests import RequestMetrics, Verdict, good_requests, request_metrics, verdicts, waits
from windtunnel.metrics.steps import Steps, unroll
from windtunnel.metrics.summary import LATENCIES, Summary, clean, client_json, output_tokens, summary, summary_json
from windtunnel.metrics.timeline import Timeline, timeline
from windtunnel.metrics.usage import (
    ReplicaUsage,
    Uncertainty,
    Usage,
    group_bytes,
    group_seconds,
    group_share,
    time_share,
    uncertainty,
    usage,
)
from windtunnel.metrics.window import WARMUP_SHARE, Window, measured_window, trimmed_window, window_of

__all__ = [
    "LATENCIES",
    "PERCENTILES",
    "WARMUP_SHARE",
    "Bands",
    "Comparison",
    "Distribution",
    "Growth",
    "Interval",
    "Measure",
    "ReplicaUsage",
    "RequestMetrics",
    "Steps",
    "Summary",
    "Timeline",
    "Uncertainty",
    "Usage",
    "Variant",
    "Verdict",
    "Window",
    "bands",
    "clean",
    "client_json",
    "comparison_json",
    "delay_growth",
    "good_requests",
    "group_bytes",
    "group_seconds",
    "group_share",
    "measured_window",
    "output_tokens",
    "overload_warning",
    "overloaded",
    "paired_spread",
    "queue_growth",
    "request_metrics",
    "spread",
    "summary",
    "summary_json",
    "time_share",
    "timeline",
    "token_gaps",
    "token_gaps_by_request",
    "trimmed_window",
    "uncertainty",
    "unroll",
    "usage",
    "verdicts",
    "waits",
    "window_of",
]
