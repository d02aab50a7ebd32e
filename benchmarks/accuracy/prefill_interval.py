"""Servers with attention data parallelism that hold prompts back: ``python -m benchmarks.accuracy.prefill_interval``.

Kimi-K2.5 in NVFP4 under 8,192 and 1,024 tokens, served with ``--prefill-schedule-interval 4``: mean TPOT as measured,
simulated with the rule and without, and as AISimulate predicts it (ai-dynamo/aisimulate, "vLLM prefill cadence
qualification" of benchmarks/evidence/accuracy/replay-evidence.md). The flags are those of InferenceX's scripts, which
measured (SemiAnalysisAI/InferenceX, pull requests 2512 and 2513; a nightly of vLLM of August 2026), and lengths are
drawn as its client does. Nothing is fitted to these rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.launch import read_flags
from windtunnel.metrics import request_metrics
from windtunnel.model import load_model
from windtunnel.validation.comparison import PLAIN
from windtunnel.workload.arrivals import AllAtOnce
from windtunnel.workload.lengths import Both, Uniform
from windtunnel.workload.synthetic import generate

MODEL, PRESET = "nvidia/Kimi-K2.5-NVFP4", "vllm-0.32"
"""Of the versions between 0.24 and 0.32 the rule is one, in engines under attention data parallelism only."""
PROMPT, OUTPUT, SHORTEST = 8192, 1024, 0.8
INTERVAL, ROUNDS = 4, 10
"""Of the scripts, and requests for each client."""


@dataclass(frozen=True)
class Row:
    """A measured server and what a rival predicts of it; milliseconds per output token."""

    system: str
    ranks: int
    clients: int
    memory: float
    """``--gpu-memory-utilization``."""
    measured: float
    rival_without: float
    rival_with: float

    def simulated(self, interval: int) -> float:
        """Mean TPOT of as many clients, milliseconds."""
        flags: dict[str, Any] = {
            "data-parallel-size": self.ranks,
            "enable-expert-parallel": True,
            "gpu-memory-utilization": self.memory,
            "max-model-len": 9416,
            "max-num-seqs": 512,
            "kv-cache-dtype": "fp8",
            "max-cudagraph-capture-size": 1024,
            "enable-prefix-caching": False,
            "prefill-schedule-interval": interval,
        }
        engine = Engine(PRESET, **read_flags("vllm", flags, {"engine": PRESET}))
        pool = Pool(load_model(MODEL), device(self.system), engine)
        lengths = Both(*(Uniform(int(SHORTEST * most), most) for most in (PROMPT, OUTPUT)))
        load = generate(AllAtOnce(), lengths, ROUNDS * self.clients, max_concurrency=self.clients)
        run = PLAIN.run(Deployment((pool,)), load, client="inferencex")
        return 1e3 * float(np.nanmean(request_metrics(run.requests).tpot))


ROWS = (
    Row("b200_sxm", 8, 512, 0.9, 89.548, 173.787, 96.173),
    Row("b200_sxm", 8, 1024, 0.9, 143.230, 248.305, 147.367),
    Row("b300_sxm", 4, 128, 0.85, 48.845, 67.754, 57.043),
    Row("b300_sxm", 4, 256, 0.85, 69.027, 100.508, 75.998),
    Row("b300_sxm", 4, 512, 0.85, 109.110, 153.701, 115.119),
)


def main() -> None:
    """Print a line for every server: milliseconds per token, and errors."""
    print("| server | clients | measured | with the interval | without | AISimulate, with | without |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in ROWS:
        found = [row.simulated(interval) for interval in (INTERVAL, 1)]
        cells = [
            f"{value:.1f} ({value / row.measured - 1:+.1%})" for value in (*found, row.rival_with, row.rival_without)
        ]
        print(f"| {row.system} × {row.ranks} | {row.clients} | {row.measured:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
