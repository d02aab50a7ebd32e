"""Bench results: what ``vllm bench serve --save-result`` writes, with or without ``--save-detailed``."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.validation.measured_run import parse_object, read_text
from windtunnel.validation.measurement import (
    METRICS,
    STATISTICS,
    Floats,
    Measurement,
    Requests,
    Side,
    check_requests,
    check_unit,
    doubts,
)
from windtunnel.workload.arrivals import AllAtOnce, Arrivals, Gamma
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Both, Uniform
from windtunnel.workload.synthetic import generate, stream

REQUIRED = ("completed", "total_input_tokens", "total_output_tokens", "mean_ttft_ms", "mean_tpot_ms")
BENCH = "vllm-bench"
DETAILS = ("input_lens", "output_lens", "ttfts", "itls")


def read_bench_result(path: Path, seed: int = 0) -> tuple[Measurement, str]:
    """A result file and the model that it names ("" if none). Raises InputError naming what is missing or wrong.

    With the arrays of ``--save-detailed`` every request is replayed as it was sent: at its ``start_times`` if it has
    them, except in a closed loop (``max_concurrency``), whose sends follow from its completions. Without, as many
    requests of the mean lengths are drawn by ``request_rate`` and ``burstiness``, and only statistics are compared.
    """
    document = parse_object(read_text(path), str(path))
    for key in REQUIRED:
        value = document.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise InputError(f"{path}: {key}={value!r}: must be a number ≥ 0; is it a --save-result file?")
    if document["completed"] < 1:
        raise InputError(f"{path}: completed={document['completed']}: no request finished")
    detailed = all(isinstance(document.get(key), list) for key in DETAILS)
    found = (_detailed if detailed else _summarised)(path, document, seed)
    return found, str(document.get("model_id") or "")


def _detailed(path: Path, document: Mapping[str, Any], seed: int) -> Measurement:
    prompts, outputs, ttft, e2el = _columns(path, document)
    ended = (outputs > 0) & (ttft > 0)
    if not ended.any():
        raise InputError(f"{path}: output_lens: no request finished")
    notes, at = [], document.get("start_times")
    if not ended.all():
        notes.append(f"{int((~ended).sum())} of {len(ended)} requests failed: they are not replayed")
    if isinstance(at, list) and len(at) == len(ended):
        sent = np.array(at, dtype=float)[ended]
        sent -= sent.min()
    else:
        sent = _arrivals(document).times(int(ended.sum()), stream(seed, "arrivals"))
        notes.append("the file holds no start_times: arrivals are drawn by its request_rate and burstiness")
    order = np.argsort(sent, kind="stable")
    found = Requests(sent[order], outputs[ended][order], ttft[ended][order], e2el[ended][order])
    check_requests(found, str(path), "ttfts and itls")
    limit = int(document.get("max_concurrency") or 0)
    notes += doubts(found) if limit == 0 else []
    return Measurement(
        name=path.stem,
        workload=Workload.from_columns(
            arrival=np.zeros(len(sent)) if limit else found.arrival,
            prompt_tokens=prompts[ended][order],
            output_tokens=found.output_tokens,
            max_concurrency=limit,
            name=path.stem,
        ),
        side=found.side(),
        requests=found,
        client=BENCH,
        notes=tuple(notes),
    )


def _columns(path: Path, document: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats, Floats]:
    """Prompt and output tokens, seconds to the first and to the last token of every request."""
    lengths = {key: len(document[key]) for key in DETAILS}
    if len(set(lengths.values())) != 1:
        said = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise InputError(f"{path}: arrays of different lengths ({said}): the file is cut or was edited")
    try:
        prompts, outputs = (np.array(document[key], dtype=np.int64) for key in ("input_lens", "output_lens"))
        ttft = np.array(document["ttfts"], dtype=float)
        gaps = np.array([float(np.sum(gaps)) for gaps in document["itls"]])
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: the arrays of --save-detailed must hold numbers ({error})") from error
    return prompts, outputs, ttft, ttft + gaps


def _summarised(path: Path, document: Mapping[str, Any], seed: int) -> Measurement:
    count = int(document["completed"])
    lengths = [max(1, round(document[f"total_{kind}_tokens"] / count)) for kind in ("input", "output")]
    side = Side(
        latencies={name: _statistics(document, name) for name in METRICS},
        output_throughput=float(document.get("output_throughput") or "nan"),
    )
    check_unit(side.latencies["tpot"]["mean"], str(path), "latencies", "milliseconds")
    workload = generate(
        _arrivals(document),
        Both(*(Uniform(tokens, tokens) for tokens in lengths)),
        count,
        seed,
        max_concurrency=int(document.get("max_concurrency") or 0),
        name=path.stem,
    )
    note = (
        f"no arrays of --save-detailed: {count} requests of the mean lengths ({lengths[0]} in, {lengths[1]} out) are "
        "replayed, and only statistics are compared"
    )
    return Measurement(path.stem, workload, side, None, client=BENCH, notes=(note,))


def _statistics(document: Mapping[str, Any], name: str) -> dict[str, float]:
    """Mean and percentiles that the file holds, in seconds; NaN where it holds none."""
    keys = {key: [f"{key}_{name}_ms"] for key in STATISTICS}
    keys["p50"].append(f"median_{name}_ms")
    found = {}
    for statistic, names in keys.items():
        value = next((document[key] for key in names if isinstance(document.get(key), int | float)), float("nan"))
        found[statistic] = float(value) * 1e-3
    return found


def _arrivals(document: Mapping[str, Any]) -> Arrivals:
    rate = document.get("request_rate")
    if rate in (None, "inf") or not isfinite(float(rate)):
        return AllAtOnce()
    return Gamma(float(rate), float(document.get("burstiness") or 1.0))
