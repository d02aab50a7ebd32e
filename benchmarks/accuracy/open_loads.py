"""Servers under open loads, by device and number of GPUs: ``python -m benchmarks.accuracy.open_loads FOLDER``.

FOLDER holds ``points.jsonl`` in the form of ``windtunnel validate FILE.jsonl``, with a ``rate``: points above 16
requests per second (whole bursts) are left out. The servers are taken for vLLM's image, whose FlashInfer samples: with
PyTorch's sampler three calm ones have no room for their requests.

Prompts and answers were ShareGPT's, of which the points know the means alone. Requests that are all as long as the mean
are in flight together, and a server that is nearly full is predicted saturated; lengths are drawn instead, DRAWS times,
as the built-in workload ``sharegpt`` draws them.
"""

import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.metrics import request_metrics
from windtunnel.validation.comparison import PLAIN
from windtunnel.validation.measured_points import MeasuredPoint, read_measured_points
from windtunnel.validation.point_replay import Replayed
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Lognormal

Integers = NDArray[np.int64]

FASTEST = 16.0
"""Requests per second of the fastest points."""
DRAWS = 3
"""Times that the lengths of a point are drawn; latencies are means over all."""
SIGMA = 1.0
"""Of the logarithm of lengths, as assumed for ``sharegpt``."""
LONGEST = 1024
"""Tokens of the longest prompt and answer: what vLLM's benchmark keeps of ShareGPT has at most as many in a prompt."""
CALM, SATURATED = 1.0, 3.0
"""a calm server gives first tokens within a second in the mean; it is predicted saturated where the simulated
mean is beyond that, and so many times the measured one."""


def points_of(folder: Path) -> list[MeasuredPoint]:
    """The points of a folder, without the fastest."""
    lines = (folder / "points.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [json.loads(line) for line in lines if json.loads(line)["rate"] <= FASTEST]
    for point in kept:
        point["requests"] = str((folder / point["requests"]).resolve())
        point["engine"]["flashinfer_sampler"] = True
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "points.jsonl"
        file.write_text("".join(json.dumps(point) + "\n" for point in kept), encoding="utf-8")
        return read_measured_points(file)


def with_lengths(point: MeasuredPoint, draw: int) -> MeasuredPoint:
    """The point with other lengths of the same means."""
    workload, random = point.workload, np.random.default_rng(draw)
    prompts, answers = (
        around(float(np.mean(tokens)), len(workload), random)
        for tokens in (workload.prompt_tokens, workload.output_tokens)
    )
    drawn = Workload.from_columns(arrival=workload.arrival, prompt_tokens=prompts, output_tokens=answers)
    return replace(point, workload=drawn)


def around(tokens: float, requests: int, random: np.random.Generator) -> Integers:
    """Lengths with a mean of so many tokens."""
    drawn = Lognormal(tokens, SIGMA, LONGEST).draw(requests, random)
    scaled: Integers = np.maximum(np.rint(drawn * (tokens / drawn.mean())), 2).astype(np.int64)
    return scaled


def replayed(folder: Path) -> list[Replayed]:
    """The points of a folder with their simulations."""
    return [simulated(point) for point in points_of(folder)]


def simulated(point: MeasuredPoint) -> Replayed:
    """A point and the means of its requests, as vLLM's benchmark takes them, over all draws."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": []}
    for draw in range(DRAWS):
        one = with_lengths(point, draw)
        try:
            run = PLAIN.run(Deployment((one.pool(),)), one.workload, one.client)
        except InputError as reason:
            return Replayed(point, reason=str(reason))
        metrics = request_metrics(run.requests)
        for name, values in found.items():
            values.append(float(np.mean(getattr(metrics, name))))
    return Replayed(point, {name: fmean(values) for name, values in found.items()})


def falsely_saturated(result: Replayed) -> bool:
    """Whether a calm server is predicted to be saturated."""
    measured, simulated = result.point.measured["ttft"], result.simulated["ttft"]
    return measured < CALM < simulated and simulated > SATURATED * measured


def main() -> None:
    """Print a line for every device and number of GPUs, and the points that are predicted saturated."""
    found: dict[str, list[Replayed]] = defaultdict(list)
    for result in replayed(Path(sys.argv[1])):
        point = result.point
        if result.reason:
            print(f"{point.id}: {result.reason}")
            continue
        found[f"{point.device} × {point.settings.get('tensor_parallel_size', 1)}"].append(result)
        if falsely_saturated(result):
            print(
                f"{point.id}: first tokens after {point.measured['ttft']:.2g} s, here {result.simulated['ttft']:.2g} s"
            )
    for name, results in sorted(found.items()):
        errors = [result.error("tpot") for result in results]
        first = median(abs(result.error("ttft")) for result in results)
        print(
            f"{name}: {len(results)} points, TPOT median {median(map(abs, errors)):.1%}, bias {median(errors):+.1%}; "
            f"TTFT median {first:.1%}; {sum(map(falsely_saturated, results))} calm ones predicted saturated"
        )


if __name__ == "__main__":
    main()
