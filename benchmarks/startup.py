"""What the whole command costs, beside another checkout: ``python -m benchmarks.startup --against PATH [--repeats 5]``.

Prints a Markdown table: the Azure conversation trace with caches warm, ten times the trace with its peak memory, and
the first run on a machine, whose caches are empty. The two checkouts take turns, because machines swing; compare
ratios. CPU seconds are user + system, of one core; the least of several runs, and the ratio of the medians.

With ``--day ragpulse.jsonl.gz`` days instead: 512 users of RAGPulse's fifth day on DeepSeek-V3, of SGLang's prefill and
decode pools and of vLLM, simulated and summed up. The load is read before the clock starts.

With ``--first-runs`` the first run of each scheduler, one after the other, from an empty cache: each compiles what only
it needs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from windtunnel.workload import copies, load_trace, save

COMMAND = """
import json, resource, sys
from windtunnel.cli import main
code = main()
used = resource.getrusage(resource.RUSAGE_SELF)
sys.stderr.write(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""
RUN = ["run", "Qwen/Qwen3-32B", "--device", "h100", "-tp", "2", "--json", "--trace"]


DAY = """
import json, resource, sys
from windtunnel.metrics import bands, summary, summary_json, unroll
from windtunnel.scenario import Scenario
from windtunnel.scenario.scenario import vary
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload import load_trace

def used():
    each = resource.getrusage(resource.RUSAGE_SELF)
    return each.ru_utime + each.ru_stime

deployment, load = vary(Scenario(), json.loads(sys.argv[2])).deployment(), load_trace(sys.argv[1])
tables, clock = batch_times(deployment), [used()]
run = simulate(deployment, load, tables=tables)
clock.append(used())
steps = unroll(run)
bands(run, summary_json(summary(run, {"ttft": 1.0, "tpot": 0.05}, steps=steps)), steps=steps)
clock.append(used())
print(json.dumps([*clock, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, len(run.iterations.steps)]))
"""
SECONDS = 86_400.0
FIFTH = 4 * SECONDS - 82.0
"""Where the fifth day begins, counted from the first request, which comes 82 s into the first."""
LARGE = {"model": "deepseek-ai/DeepSeek-V3", "device": "h200", "kv_cache_dtype": "fp8", "max_model_len": 8192}
PREFILL = "replicas=3 tensor_parallel_size=8 max_num_batched_tokens=32768 max_num_seqs=256"
DECODE = "replicas=2 tensor_parallel_size=1 data_parallel_size=8 max_num_batched_tokens=16384 max_num_seqs=512"
DAYS: dict[str, dict[str, Any]] = {
    "SGLang, 3 × TP 8 and 2 × DP 8": LARGE | {"engine": "sglang-0.5", "prefill": PREFILL, "decode": DECODE},
    "vLLM, 5 × TP 8": LARGE | {"replicas": 5, "tensor_parallel_size": 8, "max_num_batched_tokens": 8192},
}


def show_days(trace: Path) -> None:
    """CPU seconds and MB of whole days, after a first run that compiles."""
    week = load_trace(trace)
    rows = np.flatnonzero((week.arrival >= FIFTH) & (week.arrival < FIFTH + SECONDS))
    day = week.take(rows)
    load = copies(replace(day, arrival=day.arrival - day.arrival[0]), 512, 30.0)
    print(f"| {len(load):,} requests | simulation, CPU s | figures, CPU s | MB | rows of the log |")
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        short, whole = Path(folder) / "short.parquet", Path(folder) / "day.parquet"
        save(load.take(np.arange(50)), short)
        save(load, whole)
        for name, words in DAYS.items():
            for path in (short, whole):
                command = [sys.executable, "-c", DAY, str(path), json.dumps(words)]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            before, simulated, after, peak, rows_of_log = json.loads(done.stdout)
            cells = f"{simulated - before:.2f} | {after - simulated:.2f} | {peak:.0f} | {rows_of_log:,}"
            print(f"| {name} | {cells} |", flush=True)


FEW = ["run", "Qwen/Qwen3-0.6B", "--random-input-len", "100", "--random-output-len", "4", "--num-prompts", "20"]
SEPARATE = ["--prefill", "replicas=1", "--decode", "replicas=1"]
FIRST: dict[str, list[str]] = {
    "vLLM": [],
    "TensorRT-LLM": ["--engine", "trtllm-1.0"],
    "vLLM v0": ["--engine", "vllm-0.6"],
    "SGLang": ["--engine", "sglang-0.5"],
    "vLLM, separate pools": SEPARATE,
    "SGLang, separate pools": ["--engine", "sglang-0.5", *SEPARATE],
}


def show_first_runs() -> None:
    """CPU seconds and MB of each scheduler's first run, after those above it, and of its second."""
    here = Path(__file__).parents[1]
    print("| 20 requests | first run, CPU s | MB | second run, CPU s |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, words in FIRST.items():
            (first, peak), (second, _) = (once(here, Path(folder), [*FEW, *words, "--json"]) for _ in range(2))
            print(f"| {name} | {first:.1f} | {peak:.0f} | {second:.2f} |", flush=True)


def once(checkout: Path, cache: Path, arguments: list[str]) -> tuple[float, float]:
    """CPU seconds and peak MB of one process that runs the command of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "WINDTUNNEL_CACHE": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled to bytecode
    environment["PYTHONPYCACHEPREFIX"] = str(cache / "bytecode")
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    code, seconds, peak = json.loads(done.stderr.splitlines()[-1])
    if code != 0:
        raise SystemExit(f"{checkout}: windtunnel ended with {code}: {done.stderr}")
    return seconds, peak


def measure(
    checkouts: list[Path], caches: list[Path], arguments: list[str], repeats: int
) -> tuple[list[list[float]], list[float]]:
    """For each checkout the CPU seconds of every repeat, and the largest peak in MB; the checkouts take turns."""
    seconds: list[list[float]] = [[] for _ in checkouts]
    peaks = [0.0 for _ in checkouts]
    for _ in range(repeats):
        for i, (checkout, cache) in enumerate(zip(checkouts, caches, strict=True)):
            used, peak = once(checkout, cache, arguments)
            seconds[i].append(used)
            peaks[i] = max(peaks[i], peak)
    return seconds, peaks


def show(name: str, seconds: list[list[float]], peaks: list[float]) -> None:
    """One row: CPU seconds and MB of each checkout, and the ratio to the other."""
    cells = [f"{min(each):.2f} | {peak:.0f}" for each, peak in zip(seconds, peaks, strict=True)]
    ratio = f"{median(seconds[0]) / median(seconds[1]):.2f}" if len(seconds) > 1 else "-"
    print(f"| {name} | {' | '.join(cells)} | {ratio} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, whose figures follow and divide")
    parser.add_argument("--trace", default="azure-conv", help="a name or a file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--day", type=Path, help="RAGPulse's trace, with its pieces beside it: whole days instead")
    parser.add_argument("--first-runs", action="store_true", help="of each scheduler, from an empty cache")
    options = parser.parse_args()
    if options.first_runs:
        show_first_runs()
        return
    if options.day is not None:
        show_days(options.day)
        return
    here = Path(__file__).parents[1]
    checkouts = [here] if options.against is None else [here, options.against.absolute()]
    once_each, more = [*RUN, options.trace], [*RUN, options.trace, "--repeat", "10"]
    header = " | CPU s, other | MB, other" if options.against else ""
    print(f"| `windtunnel run` | CPU s | MB{header} | ratio |\n|---|{'---:|' * (2 * len(checkouts) + 1)}")
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder) / str(i) for i in range(len(checkouts))]
        show("first run on a machine", *measure(checkouts, caches, once_each, 1))
        show("caches warm", *measure(checkouts, caches, once_each, options.repeats))
        show("ten times the trace, warm", *measure(checkouts, caches, more, max(1, options.repeats // 2)))


if __name__ == "__main__":
    main()
