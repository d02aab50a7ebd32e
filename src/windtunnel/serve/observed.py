"""The load that is there: the last window of what a proxy or a server wrote, or of what a server's metrics count."""

import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

from windtunnel.errors import InputError
from windtunnel.validation.measured_run import read_measured_run
from windtunnel.workload import Workload, load_trace
from windtunnel.workload.drift import FEWEST, Fit

Scrape = dict[str, float]


def last_window(path: Path, seconds: float) -> Workload:
    """The requests of the last seconds of a measured run's folder, or of a trace.

    Raises InputError for what cannot be read, and for fewer requests than tell anything.
    """
    found = read_measured_run(path).measurement.workload if path.is_dir() else load_trace(path)
    arrival = found.arrival
    kept = np.flatnonzero(arrival > float(np.nanmax(arrival)) - seconds)
    if len(kept) < FEWEST:
        raise InputError(f"{str(path)!r}: {len(kept)} requests in the last {seconds:g} s: widen --window")
    return found.take(kept)


def scraped(url: str) -> Scrape:
    """vLLM's counters at a server, all engines added up. Raises InputError where none answers."""
    address = f"{url.rstrip('/').removesuffix('/metrics')}/metrics"
    try:
        with urlopen(address, timeout=10) as answer:  # a URL that the user gives
            lines = answer.read().decode().splitlines()
    except (URLError, OSError, ValueError) as error:
        raise InputError(f"{address}: no metrics ({getattr(error, 'reason', error)}): is a server there?") from error
    found: Scrape = {}
    for line in lines:
        if line.startswith("vllm:"):
            key, _, value = line.rpartition(" ")
            name, _, labels = key.partition("{")
            edge = next((part for part in labels.rstrip("}").split(",") if part.startswith("le=")), "")
            found[name + edge] = found.get(name + edge, 0.0) + float(value)
    if not found:
        raise InputError(f"{address}: no metrics of vLLM's names: watch a vLLM server, or windtunnel serve")
    return found


def watched(url: str, seconds: float, sleep: Callable[[float], None] = time.sleep) -> Fit:
    """What a server's metrics count in the next seconds. Raises InputError as ``scraped``, and for too few requests."""
    before, begun = scraped(url), time.monotonic()
    sleep(seconds)
    return between(before, scraped(url), time.monotonic() - begun)


def between(before: Scrape, after: Scrape, seconds: float) -> Fit:
    """What was counted between two scrapes."""
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    count = grown.get("vllm:request_prompt_tokens_count", 0.0)
    if count < FEWEST:
        raise InputError(f"{count:g} requests ended in {seconds:.3g} s: widen --window")
    prompt, prompt_sd = _spread(grown, "vllm:request_prompt_tokens", count)
    output, output_sd = _spread(grown, "vllm:request_generation_tokens", count)
    hits, asked = grown.get("vllm:prefix_cache_hits_total", 0.0), grown.get("vllm:prefix_cache_queries_total", 0.0)
    return Fit(int(count), seconds, prompt, prompt_sd, output, output_sd, sharing=hits / asked if asked else None)


def _spread(grown: Scrape, name: str, count: float) -> tuple[float, float]:
    """Mean and standard deviation of a histogram; values lie in the middle of their buckets."""
    mean = grown[f"{name}_sum"] / count
    edges = sorted(
        (float(key.split('"')[1]), value) for key, value in grown.items() if key.startswith(f"{name}_bucketle=")
    )
    below, last, squares = 0.0, 0.0, 0.0
    for edge, reached in edges:
        upper = edge if np.isfinite(edge) else 2 * last
        squares += (reached - below) * ((upper + last) / 2 - mean) ** 2
        below, last = reached, upper
    return mean, float(np.sqrt(squares / count))
