"""What each feature costs with each engine: ``python -m benchmarks.features [ENGINE …]``.

Prints a Markdown table: requests per CPU-second of ``simulate`` with tables at hand, and their share of those of the
same pools without the feature. A feature that an engine does not have says why.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.scenario.scenario import Scenario, vary
from windtunnel.simulate.simulate import batch_times, simulate

ENGINES: dict[str, dict[str, Any]] = {
    "vllm-0.33": {"engine": "vllm-0.33"},
    "sglang-0.5": {"engine": "sglang-0.5"},
    "trtllm-1.0": {"engine": "trtllm-1.0"},
    "vllm-0.6": {"engine": "vllm-0.6"},
    "sarathi": {"engine": "vllm-0.33", "scheduler": "sarathi"},
}
"""The words that choose an engine, or its scheduler."""
LEASES = {
    "sglang-0.5": "sglang-0.5-bootstrap timeout=20 on_expiry=fail",
    "trtllm-1.0": "trtllm-1.0 timeout=20 on_expiry=fail",
}
LEASE = "vllm-0.32-nixl-pull lease=20 on_expiry=fail"
LOAD: dict[str, Any] = {
    "random_input_len": 1000,
    "random_output_len": 200,
    "random_range_ratio": 0.3,
    "request_rate": 60,
    "replicas": 4,
}
POOLS: dict[str, Any] = {"prefill": ["replicas=2"], "decode": ["replicas=2"]}
SCALED = "policy=thresholds least=1 interval=30 startup=10"
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix_aware": {"router": "prefix_aware"},
    "power_of_two": {"router": "power_of_two"},
    "session_affinity": {"router": "session_affinity"},
    "closed loop": {"max_concurrency": 256, "request_rate": "inf"},
    "failures": {"fail": ["mtbf=60 down=10"]},
    "autoscaling": {"autoscale": [f"{SCALED} most=4"]},
    "KV store": {"store": ["tier=host capacity=30e9"]},
    "pipeline of 2": {"pipeline_parallel_size": 2},
    "pipeline and failures": {"pipeline_parallel_size": 2, "fail": ["mtbf=60 down=10"]},
    "scheduler in Python": {"scheduler": f"{Path(__file__).with_name('in_turn.py')}:InTurn"},
    "P/D": POOLS,
    "P/D, power_of_two": {**POOLS, "router": "power_of_two"},
    "P/D, prefix_aware": {**POOLS, "router": "prefix_aware", "decode_router": "least_outstanding"},
    "P/D, session_affinity": {**POOLS, "router": "session_affinity", "decode_router": "least_outstanding"},
    "P/D, a lease or timeout": {**POOLS, "handover": LEASE},
    "P/D, failures": {**POOLS, "fail": ["pool=decode mtbf=60 down=10"]},
    "P/D, autoscaling": {**POOLS, "autoscale": [f"pool=prefill most=2 {SCALED}"]},
    "P/D, KV store": {**POOLS, "store": ["tier=host capacity=30e9"]},
    "P/D, scheduler in Python, failures": {
        **POOLS,
        "scheduler": f"{Path(__file__).with_name('in_turn.py')}:InTurn",
        "fail": ["pool=decode mtbf=60 down=10"],
    },
}
BASES = {"pipeline": "pipeline of 2", "P/D": "P/D"}
"""What features of these pools are compared with; others with ``plain``."""
MODEL = "Qwen/Qwen3-8B"


def words_of(engine: str, feature: str) -> dict[str, Any]:
    """The words of a scenario."""
    words = LOAD | ENGINES[engine] | FEATURES[feature]
    if "prefill" in words:
        del words["replicas"]
    if "handover" in words:
        words["handover"] = LEASES.get(engine, words["handover"])
    return words


def measured(words: dict[str, Any], requests: int, repeats: int) -> float:
    """Requests per CPU-second, in the best of several runs."""
    made = vary(Scenario(), {"model": MODEL, **words, "num_prompts": requests})
    deployment, workload = made.deployment(), made.load.workload()
    tables, overheads = batch_times(deployment), made.overheads()
    best = 0.0
    for _ in range(repeats):
        start = time.process_time()
        simulate(deployment, workload, 0, tables=tables, overheads=overheads)
        best = max(best, requests / (time.process_time() - start))
    return best


def base_of(feature: str) -> str:
    """What a feature is compared with."""
    base = next((base for pools, base in BASES.items() if feature.startswith(pools)), "plain")
    return "plain" if feature == base else base


def cell(engine: str, feature: str, requests: int, rates: dict[str, float]) -> str:
    """What stands in the table; ``rates`` of the engine's features gets one more."""
    words = words_of(engine, feature)
    try:
        measured(words, 200, 1)  # compiles
        rate = rates[feature] = measured(words, requests, 3)
    except InputError as error:
        return f"no: {str(error)[:90]}"
    return f"{rate:,.0f} ({rate / rates[base_of(feature)]:.2f})"


def rows(engines: Sequence[str], requests: int) -> Iterator[str]:
    """The table, row by row."""
    yield f"| requests/CPU-s | {' | '.join(engines)} |"
    yield f"|---|{'---:|' * len(engines)}"
    rates: dict[str, dict[str, float]] = {engine: {} for engine in engines}
    for feature in FEATURES:
        yield f"| {feature} | {' | '.join(cell(engine, feature, requests, rates[engine]) for engine in engines)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    options = parser.parse_args()
    wanted = options.engines or list(ENGINES)
    if unknown := [name for name in wanted if name not in ENGINES]:
        parser.error(f"{unknown[0]!r}: must be one of {', '.join(ENGINES)}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("WINDTUNNEL_CACHE", folder)
        for line in rows(wanted, 4_000 if options.quick else 20_000):
            print(line, flush=True)


if __name__ == "__main__":
    main()
