"""Metrics of HTTP, under the names and buckets of prometheus-fastapi-instrumentator, which vLLM's server uses."""

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

FINE = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0),
    60.0,
)
COARSE = (0.1, 0.5, 1.0)


class Web:
    """Counts the requests that the server answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("handler", "method")
        self._requests = Counter("http_requests", "Answers.", ("method", "status", "handler"), registry=registry)
        self._asked = Summary("http_request_size_bytes", "Bytes of bodies.", ("handler",), registry=registry)
        self._answered = Summary(
            "http_response_size_bytes", "Bytes of answers whose length is known.", ("handler",), registry=registry
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds", "Seconds of an answer.", buckets=FINE, registry=registry
        )
        self._coarse = Histogram(
            "http_request_duration_seconds", "Seconds of an answer.", labels, buckets=COARSE, registry=registry
        )

    def answered(self, path: str, status: int, seconds: float, asked: int, answered: int) -> None:
        """A request to a path was answered in this many seconds; the sizes of both bodies."""
        self._requests.labels("POST", f"{status // 100}xx", path).inc()
        self._asked.labels(path).observe(asked)
        self._answered.labels(path).observe(answered)
        self._fine.observe(seconds)
        self._coarse.labels(path, "POST").observe(seconds)
