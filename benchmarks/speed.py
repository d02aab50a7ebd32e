"""How fast the core and the whole command are: ``python -m benchmarks.speed [--quick] [--trace AZURE.csv]``.

Prints Markdown tables. Times are CPU seconds of one core, medians of several runs. A fixed NumPy sort is
timed in the same process: compare ratios, machines differ.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np

from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.metrics import summary
from windtunnel.model import load_model
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.policy import Decision, Limits, Policy, RequestView, Settings, Sglang, UserScheduler, VllmV0, VllmV1
from windtunnel.policy.drafts import Drafts, rates_of
from windtunnel.policy.unified import POLICIES
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload import Both, Fixed, Poisson, Workload, builtin, generate
from windtunnel.workload.traces import load_trace

LEAST_OUTSTANDING = 2
MODEL_LEN = 24576
COMMAND = "import sys; from windtunnel.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Load:
    """Poisson arrivals and lognormal lengths (σ 0.8), as in the prototypes' benchmark."""

    name: str
    rate: float
    blocks: int
    prompt: int = 512
    output: int = 200
    sigma: float = 0.8


LOADS = (Load("light", 6.4, 20_000), Load("medium", 31, 20_000), Load("heavy", 60, 9_000))
LONG = Load("long outputs", 1.0, 60_000, output=8192, sigma=0.3)


def demand(load: Load, requests: int, replicas: int = 1, seed: int = 0) -> Demand:
    """The load's requests, at a rate for so many replicas."""
    rng = np.random.default_rng(seed)

    def lengths(mean: float, sigma: float, longest: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        drawn = rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, requests)
        return np.clip(drawn, 1, longest).astype(np.int64)

    return Demand(
        arrival=np.cumsum(rng.exponential(1 / (load.rate * replicas), requests)),
        prompt_tokens=lengths(load.prompt, 0.8, 4096),
        output_tokens=lengths(load.output, load.sigma, 16384),
        overruns=np.zeros(requests, dtype=bool),
        refused=np.zeros(requests, dtype=bool),
        follow=np.full(requests, -1),
        think_time=np.zeros(requests),
        max_concurrency=0,
    )


def tables(max_num_seqs: int = 256, tokens: int = 2048) -> BatchTimes:
    """6 ms + 20 µs a token + 40 ns a cached token + 1 ns a pair, as tables."""
    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": max_num_seqs, "max_model_len": MODEL_LEN}
    return linear(6e-3, 20e-6, 40e-9, 1e-9, **limits)


def fleet(load: Load, replicas: int, asynchronous: bool, max_num_seqs: int = 256) -> Fleet:
    """Replicas of one engine with tables."""
    limits = Limits(max_num_seqs, 2048, MODEL_LEN, load.blocks, 16)
    policy = VllmV1(async_scheduling=asynchronous)
    return Fleet((limits,), (policy,), (tables(max_num_seqs),), (replicas,), (1,), (False,))


def cpu(function: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return median(times)


def core_seconds(load: Load, requests: int, replicas: int, asynchronous: bool, repeats: int) -> float:
    """CPU seconds of the core alone."""
    asked, served = demand(load, requests, replicas), fleet(load, replicas, asynchronous)
    router = LEAST_OUTSTANDING if replicas > 1 else 0
    uniforms = np.zeros(requests)
    return cpu(lambda: run(served, asked, router, uniforms), repeats)


def sort_seconds() -> float:
    """The yardstick of the machine: sorting ten million random numbers."""
    numbers = np.random.default_rng(0).random(10_000_000)
    return cpu(lambda: np.sort(numbers), 3)


def show_core(repeats: int) -> None:
    """Requests per second by load, replicas and kind of scheduling."""
    print("\n| load | replicas | scheduling | million requests/s | ns per request |\n|---|---:|---|---:|---:|")
    for asynchronous in (False, True):
        for replicas in (1, 64):
            for load in LOADS:
                seconds = core_seconds(load, 100_000, replicas, asynchronous, repeats)
                kind = "asynchronous" if asynchronous else "synchronous"
                print(f"| {load.name} | {replicas} | {kind} | {0.1 / seconds:.2f} | {seconds * 1e4:.0f} |")


def presets() -> dict[str, tuple[Settings, int]]:
    """The schedulers that are not vLLM v1, and some of their settings; with the tokens of a step.

    Where prompts are not cut, a step has room for the longest.
    """
    whole: dict[str, Settings] = {
        **POLICIES,
        "trtllm-max-utilization:preemption=swap": Policy(
            preemption="swap", host_blocks=20_000, swap_time_per_block=1e-4
        ),
        "vllm-0.8-v0": VllmV0(),
        "vllm-0.8-v0:preemption_mode=swap": VllmV0(
            preemption_mode="swap", num_cpu_blocks=20_000, swap_seconds_per_block=1e-4
        ),
        "vllm-0.8-v0:prefix_caching=true": VllmV0(prefix_caching=True),
    }
    pieces: dict[str, Settings] = {
        "vllm-0.8-v0-chunked": VllmV0(chunked_prefill=True),
        "sglang-0.5": Sglang(),
        "sglang-0.5:schedule_policy=lpm": Sglang(schedule_policy="lpm"),
        "sglang-0.5:radix_cache=false": Sglang(radix_cache=False),
    }
    return {name: (policy, MODEL_LEN) for name, policy in whole.items()} | {
        name: (policy, 8192 if "sglang" in name else 2048) for name, policy in pieces.items()
    }


def show_presets(repeats: int) -> None:
    """Requests per second of every preset."""
    print("\n| scheduler | million requests/s, medium | heavy | preemptions per request, heavy |\n|---|---:|---:|---:|")
    for name, (policy, tokens) in presets().items():
        cells = []
        for load in LOADS[1:]:
            # SGLang's pages hold one token.
            size = 1 if isinstance(policy, Sglang) else 16
            limits = Limits(256, tokens, MODEL_LEN, load.blocks * 16 // size, size)
            asked = demand(load, 100_000)
            served = Fleet((limits,), (policy,), (tables(tokens=tokens),), (1,), (1,), (False,))
            record = run(served, asked, 0, np.zeros(100_000))
            cells.append(f"{0.1 / cpu(partial(run, served, asked, 0, np.zeros(100_000)), repeats):.2f}")
        print(f"| {name} | {' | '.join(cells)} | {record.requests['preemptions'].mean():.2f} |")


def rules() -> dict[str, VllmV1]:
    """vLLM's v1 scheduler with settings for which it does not suffice to count blocks and requests."""
    return {
        "prefix caching, nothing shared": VllmV1(prefix_caching=True),
        "priorities": VllmV1(admission_order="priority", victim="lowest_priority"),
        "threshold of 256 tokens": VllmV1(long_prefill_token_threshold=256),
    }


def show_rules(repeats: int) -> None:
    """The rules of vLLM's v1 scheduler beyond first come, first served: requests per second, preemptions."""
    names = " | ".join(load.name for load in LOADS)
    print(f"\n| vLLM v1, asynchronous, one replica | {names} | preemptions per request, heavy |")
    print("|---|---:|---:|---:|---:|")
    for name, policy in rules().items():
        cells = []
        for load in LOADS:
            priority = np.random.default_rng(0).integers(0, 3, 100_000)
            asked, served = replace(demand(load, 100_000), priority=priority), fleet(load, 1, True)
            served = replace(served, policies=(policy,))
            record = run(served, asked, 0, np.zeros(100_000))
            cells.append(f"{0.1 / cpu(partial(run, served, asked, 0, np.zeros(100_000)), repeats):.2f}")
        print(f"| {name} | {' | '.join(cells)} | {record.requests['preemptions'].mean():.2f} |")


def show_drafts(requests: int, repeats: int) -> None:
    """Three drafts beside none: how many times as fast the core is, and the whole simulation with its summary."""
    drafts = Drafts(3, rates=rates_of(2.5, 3))
    print(f"\n| {requests:,} requests, 3 drafts, 2.5 tokens a step | steps | ns per step | times the speed without |")
    print("|---|---:|---:|---:|")
    for load in LOADS:
        plain = fleet(load, 1, True)
        drafted = replace(plain, policies=(VllmV1(async_scheduling=True, drafts=drafts),))
        asked, uniforms = demand(load, requests), np.zeros(requests)
        runs = [partial(run, served, asked, 0, uniforms, folds=True) for served in (plain, drafted)]
        steps = int(runs[1]().rows["steps"].sum())
        pairs = [(cpu(runs[0], 1), cpu(runs[1], 1)) for _ in range(repeats)]
        ratio, seconds = median(one / other for one, other in pairs), median(other for _, other in pairs)
        print(f"| core, {load.name} | {steps:,} | {seconds / steps * 1e9:.0f} | {ratio:.2f} |")
    loads = {
        "20 a second": generate(Poisson(20), Both(Fixed(1000), Fixed(200)), requests),
        "azure-conv": builtin("azure-conv"),
    }
    engines = Engine(), Engine(num_speculative_tokens=3, acceptance_length=2.5)
    pools = [Pool(load_model("Qwen/Qwen3-8B"), device("h100"), engine) for engine in engines]
    served_by = [Deployment((pool,)) for pool in pools]
    tables_of = [batch_times(one) for one in served_by]
    for name, workload in loads.items():
        wholes = [
            partial(summarised, one, workload, at_hand) for one, at_hand in zip(served_by, tables_of, strict=True)
        ]
        steps = [whole() for whole in wholes][1]
        pairs = [(cpu(wholes[0], 1), cpu(wholes[1], 1)) for _ in range(repeats)]
        ratio = median(one / other for one, other in pairs)
        print(f"| `simulate` and `summary`, {name} | {steps:,} | | {ratio:.2f} |")


def summarised(deployment: Deployment, asked: Workload, at_hand: list[Tabulated]) -> int:
    """A whole simulation with its tables at hand, and its summary: the steps that it made."""
    made = simulate(deployment, asked, tables=at_hand)
    summary(made)
    return int(made.iterations.steps.sum())


class ShortestFirst:
    """The scheduler of docs/write-a-scheduler.md."""

    def __init__(self, hold: bool) -> None:
        self.hold = hold

    def schedule(
        self,
        now: float,  # noqa: ARG002
        waiting: Sequence[RequestView],
        running: Sequence[RequestView],
        limits: Limits,
    ) -> Decision:
        """Decode, and admit whole prompts, the shortest first, for which all memory is there."""
        tokens = dict.fromkeys(running, 1)
        free = limits.num_blocks - sum(most_blocks(request, limits) for request in running)
        budget = limits.max_num_batched_tokens - len(running)
        for request in sorted(waiting, key=lambda request: request.prompt_tokens):
            free -= most_blocks(request, limits)
            budget -= request.prompt_tokens
            if free < 0 or budget < 0 or len(tokens) == limits.max_num_seqs:
                break
            tokens[request] = request.prompt_tokens
        return Decision(tokens, hold=self.hold)


@numba.njit
def shortest_first(now: float, waiting: Any, running: Any, limits: Any) -> bool:  # noqa: ARG001
    """The same with columns, in machine code."""
    free, budget, seats = limits.num_blocks, limits.max_num_batched_tokens, limits.max_num_seqs - len(running)
    for k in range(len(running)):
        running[k].tokens = 1
        budget -= 1
        free -= -(-(running[k].prompt_tokens + running[k].max_tokens) // limits.block_size)
    for k in np.argsort(waiting.prompt_tokens, kind="mergesort"):
        free -= -(-(waiting[k].prompt_tokens + waiting[k].max_tokens) // limits.block_size)
        budget -= waiting[k].prompt_tokens
        if free < 0 or budget < 0 or seats == 0:
            break
        seats -= 1
        waiting[k].tokens, waiting[k].turn = waiting[k].prompt_tokens, waiting[k].prompt_tokens
    return True


@numba.njit
def shortest_first_in_every_step(now: float, waiting: Any, running: Any, limits: Any) -> bool:
    """The same, asked in every step."""
    shortest_first(now, waiting, running, limits)
    return False


class Columns:
    """A scheduler in machine code."""

    def __init__(self, hold: bool) -> None:
        self.schedule_columns = shortest_first if hold else shortest_first_in_every_step


def most_blocks(request: RequestView, limits: Limits) -> int:
    """The memory that a request may ever need."""
    return limits.blocks(request.prompt_tokens + request.max_tokens)


def show_own(requests: int, repeats: int) -> None:
    """Requests per second with a scheduler written in Python."""
    print(f"\n| {requests:,} requests, a scheduler in Python | {' | '.join(load.name for load in LOADS)} |")
    print(f"|---|{'---:|' * len(LOADS)}")
    for name, kind, hold in (
        ("asked in every step", ShortestFirst, False),
        ("`hold=True`", ShortestFirst, True),
        ("compiled columns, asked in every step", Columns, False),
        ("compiled columns, `hold`", Columns, True),
    ):
        cells = []
        for load in LOADS:
            asked, limits = demand(load, requests), Limits(256, 8192, MODEL_LEN, load.blocks, 16)
            policy = UserScheduler(partial(kind, hold), VllmV1())
            served = Fleet((limits,), (policy,), (tables(tokens=8192),), (1,), (1,), (False,))
            own = partial(run, served, asked, 0, np.zeros(requests))
            cells.append(f"{requests / cpu(own, repeats):,.0f}")
        print(f"| {name} | {' | '.join(cells)} |")


def show_example(requests: int, repeats: int) -> None:
    """The example of docs/write-a-scheduler.md with more requests: the whole simulation, with its tables at hand."""
    deployment = Deployment((Pool(load_model("Qwen/Qwen3-8B"), device("h100")),))
    asked = generate(Poisson(20), Both(Fixed(1000), Fixed(60)), requests)
    at_hand = batch_times(deployment)
    own = partial(simulate, deployment, asked, tables=at_hand, scheduler=partial(ShortestFirst, True))
    served = requests / cpu(own, repeats)
    print(f"\nThe example of docs/write-a-scheduler.md, {requests:,} requests: {served:,.0f} a second")


def show_prefixes(trace: Path, repeats: int) -> None:
    """A Mooncake trace on eight replicas of 30,000 blocks of 16 tokens, under schedulers that share prefixes."""
    workload = load_trace(trace)
    n, longest = len(workload), 131_072
    times = linear(6e-3, 5e-6, 4e-9, 1e-11, max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=longest)
    asked = Demand(
        arrival=workload.arrival,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        overruns=np.zeros(n, dtype=bool),
        refused=workload.prompt_tokens + workload.output_tokens > longest,
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
        hash_ids=workload.hash_ids,
        hash_block_size=workload.hash_block_size,
    )
    cases: dict[str, tuple[Settings, int]] = {
        "vllm-0.32": (VllmV1(prefix_caching=True), 16),
        "vllm-0.32, no prefix caching": (VllmV1(), 16),
        "vllm-0.8-v0-chunked:prefix_caching=true": (VllmV0(chunked_prefill=True, prefix_caching=True), 16),
        "sglang-0.5:schedule_policy=lpm": (Sglang(schedule_policy="lpm"), 1),
    }
    print(f"\n| {trace.stem}, {workload.prompt_tokens.mean() / 16:.0f} blocks a prompt | requests/s | tokens found |")
    print("|---|---:|---:|")
    for name, (policy, size) in cases.items():
        limits = Limits(256, 8192, longest, 30_000 * 16 // size, size)
        served = Fleet((limits,), (policy,), (times,), (8,), (1,), (False,))
        found = run(served, asked, 0, np.zeros(n)).requests["cached_tokens"].sum() / workload.prompt_tokens.sum()
        seconds = cpu(partial(run, served, asked, 0, np.zeros(n)), repeats)
        print(f"| {name} | {n / seconds:,.0f} | {found:.1%} |")


def show_growth(sizes: tuple[int, ...], repeats: int) -> None:
    """Nanoseconds per request as the number of requests grows."""
    print(f"\n| ns per request | {' | '.join(f'{size:,}' for size in sizes)} |\n|---|{'---:|' * len(sizes)}")
    for replicas in (1, 64):
        for load in LOADS:
            cells = [core_seconds(load, size, replicas, True, repeats) / size * 1e9 for size in sizes]
            print(f"| {load.name}, {replicas} replicas | {' | '.join(f'{cell:.0f}' for cell in cells)} |")


def show_batch(repeats: int) -> None:
    """Nanoseconds per decode step and per request, for batches of very different size."""
    print("\n| decodes in the batch | steps | ns per step |\n|---:|---:|---:|")
    for size in (1, 16, 256, 1024):
        asked = demand(LONG, 4 * size)
        limits = Limits(size, max(2048, size), MODEL_LEN, size * 2000, 16)
        served = Fleet((limits,), (VllmV1(),), (tables(size),), (1,), (1,), (False,))
        record = run(served, asked, 0, np.zeros(4 * size))
        seconds = cpu(partial(run, served, asked, 0, np.zeros(4 * size)), repeats)
        steps = int(record.rows["steps"].sum())
        print(f"| {size:,} | {steps:,} | {seconds / steps * 1e9:.1f} |")


def show_memory(requests: int) -> None:
    """Peak memory of a process that simulates so many requests; its own, without what it had of us when it began."""
    code = f"""
import numpy as np
from benchmarks.speed import LOADS, demand, fleet
from windtunnel.core.engine import run
run(fleet(LOADS[1], 1, True), demand(LOADS[1], {requests}), 0, np.zeros({requests}))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"\nPeak memory, {requests:,} requests at medium load, whole process: {int(done.stdout) / 1024:.0f} MB")


def command_seconds(arguments: list[str], repeats: int) -> float:
    """Median user + system seconds of a whole process."""
    times = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(times)


def show_command(trace: str, repeats: int) -> None:
    """The complete command, caches warm."""
    model = ["run", "Qwen/Qwen3-32B", "--device", "h100", "-tp", "2", "--json", "--trace", trace]
    command_seconds(model, 1)
    print("\n| whole command, caches warm | CPU s |\n|---|---:|")
    print(f"| `windtunnel --help` | {command_seconds(['--help'], repeats):.2f} |")
    name = Path(trace).name
    print(f"| `windtunnel run Qwen/Qwen3-32B -tp 2 --trace {name} --json` | {command_seconds(model, repeats):.2f} |")
    ten = command_seconds([*model, "--repeat", "10"], repeats)
    print(f"| the same with `--repeat 10` | {ten:.2f} |")


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller sizes")
    parser.add_argument("--trace", default="azure-conv", help="trace of the whole command: a name or a file")
    parser.add_argument("--own", action="store_true", help="only schedulers in Python")
    parser.add_argument("--prefixes", type=Path, help="a Mooncake trace: the speed of the prefix cache")
    options = parser.parse_args()
    repeats = 3 if options.quick else 7
    sizes = (1_000, 10_000, 100_000) if options.quick else (1_000, 10_000, 100_000, 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("WINDTUNNEL_CACHE", folder)
        if options.own:
            show_own(2_000 if options.quick else 10_000, repeats)
            show_example(4_000, repeats)
            return
        run(fleet(LOADS[0], 1, True), demand(LOADS[0], 100), 0, np.zeros(100))
        print(f"np.sort of 10 million numbers: {sort_seconds():.2f} s")
        show_core(repeats)
        show_presets(3)
        show_rules(repeats)
        show_drafts(20_000, repeats)
        show_own(2_000 if options.quick else 10_000, 3)
        show_example(4_000, 3)
        if options.prefixes:
            show_prefixes(options.prefixes, repeats)
        show_growth(sizes, 3 if options.quick else 5)
        show_batch(3)
        show_memory(sizes[-1])
        show_command(options.trace, repeats)


if __name__ == "__main__":
    main()
