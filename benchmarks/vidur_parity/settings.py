"""Five settings of Vidur from its profile alone: ``python -m benchmarks.vidur_parity.settings [SHARED]``.

Loads and settings are drawn as Vidur draws them (given.py), its schedulers run on the oracle, and operators take what
our estimators make of its profile folder. Beside them stands what Vidur itself printed (microsoft/vidur at 7d47513, of
Llama-2-70b on A100, two shards; ../shared/notes/vidur.md, section 15). Its run in two stages was on a DGX, whose
all-reduce the profile folder lacks: here it takes that of a pair. The exit code is 1 if a mean end-to-end latency is
more than a tenth off.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.vidur_parity.given import Given, drawn, read
from benchmarks.vidur_parity.times import StageSeconds

ALLOWED = 0.1


@dataclass(frozen=True)
class Setting:
    """A run of Vidur, and what it printed."""

    name: str
    scheduler: dict[str, Any]
    lengths: dict[str, Any]
    rate: float
    """Requests/s; 0: all at once."""
    requests: int
    seconds: tuple[float, float, float]
    """Mean end to end, median and 90th percentile to the first token."""
    restarts: int = 0
    stages: int = 1


CONVERSATIONS = {"trace_file": "splitwise_conv.csv"}
UNIFORM = {"name": "uniform", "min_tokens": 256, "max_tokens": 4096, "prefill_to_decode_ratio": 3.0}
FIXED = {"name": "fixed", "prefill_tokens": 512, "decode_tokens": 64}
SARATHI = {"name": "sarathi", "chunk_size": 256, "num_blocks": 1500}
SETTINGS = (
    Setting("vllm, conversations", {}, CONVERSATIONS, 1.0, 512, (27.466, 0.568, 1.897)),
    Setting(
        "sarathi 512 in two stages, arXiv",
        {"name": "sarathi", "chunk_size": 512},
        {"trace_file": "arxiv_lengths.csv"},
        1.0,
        512,
        (38.854, 1.599, 2.539),
        stages=2,
    ),
    Setting("orca, conversations", {"name": "orca"}, CONVERSATIONS, 0.5, 384, (16.893, 0.452, 1.552)),
    Setting("sarathi 256, little memory", SARATHI, UNIFORM, 0.5, 256, (269.289, 240.933, 452.579), 63),
    Setting("vllm, all at once", {}, FIXED, 0.0, 128, (24.964, 12.135, 27.396), 10),
)


def given_by(setting: Setting, base: Given, folder: Path) -> Given:
    """The run with these settings, whose other ones are those of ``base``; traces lie in ``folder``."""
    config = copy.deepcopy(base.config)
    cluster, generator = config["cluster_config"], config["request_generator_config"]
    cluster["replica_config"]["num_pipeline_stages"] = setting.stages
    cluster["replica_scheduler_config"] |= setting.scheduler
    generator["length_generator_config"] |= setting.lengths
    stream, time, arrivals = Random(generator["seed"]), 0.0, []
    for _ in range(setting.requests):
        if setting.rate:  # clipped, as in poisson_request_interval_generator.py
            time += min(-log(1.0 - stream.random()) / setting.rate, 3.0 / setting.rate)
        if setting.lengths is UNIFORM:
            stream.random()
        arrivals.append(time)
    count = np.arange(setting.requests, dtype=np.float64)
    asked = Given(
        folder / "run", config, {"id": count, "arrived_at": np.array(arrivals), "num_restarts": 0 * count}, {}
    )
    prompts, outputs = np.array(drawn(asked)[: setting.requests], dtype=np.float64).T
    asked.requests.update(num_prefill_tokens=prompts, num_decode_tokens=outputs)
    return asked


def row(setting: Setting, asked: Given, profile: Path) -> tuple[str, float]:
    """(What stands in the table, how far the mean is from Vidur's)."""
    from benchmarks.vidur_parity.estimated import estimated
    from benchmarks.vidur_parity.serve import serve

    served = serve(asked, StageSeconds(asked, estimated(asked, profile)))
    arrival = asked.requests["arrived_at"]
    first, end = (
        np.array([getattr(one, name) for one in served.requests]) - arrival for name in ("first_token", "finish")
    )
    mine = float(end.mean()), *np.quantile(first, [0.5, 0.9]).tolist()
    errors = [found / theirs - 1.0 for found, theirs in zip(mine, setting.seconds, strict=True)]
    restarts = sum(request.preemptions for request in served.requests)
    cells = " | ".join(f"{found:.2f} ({error:+.1%})" for found, error in zip(mine, errors, strict=True))
    return f"| {setting.name} | {cells} | {restarts} ({setting.restarts}) |", errors[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    words = sys.argv[1:] if argv is None else argv
    shared = Path(words[0] if words else "../shared")
    base = read(shared / "vidur" / "reference" / "vllm-conv-q1")
    print("| setting | mean e2e, s (error) | ttft p50, s (error) | ttft p90, s (error) | restarts (Vidur's) |")
    print("|---|---:|---:|---:|---:|")
    worst = 0.0
    for setting in SETTINGS:
        place = shared / ("traces" if "arxiv" in setting.lengths.get("trace_file", "") else "vidur")
        text, error = row(setting, given_by(setting, base, place), shared / "vidur" / "profiling")
        print(text, flush=True)
        worst = max(worst, abs(error))
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
