"""Splitwise's clusters of one power or one cost, with its own table of step times (checklist 325)."""

import csv
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.charts import bars
from benchmarks.page import Findings, table
from windtunnel import Deployment, Engine, Pool, Workload, device, generate, load_model, simulate
from windtunnel.metrics.requests import request_metrics
from windtunnel.perf.batch_times import CONTEXT_STEP, BatchTimes
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.workload import Both, Gamma, Lognormal

TABLE = Path(__file__).parents[3] / "shared" / "splitwise" / "perf_model.csv"
MODEL, TP = "llama2-70b", "8"
SERVED = "meta-llama/Llama-2-70b-hf"
"""Decides nothing but whether the cache fits."""
AGREES = 0.02
"""Of rows that are read: prompt and tokens add up to the whole, so that the batch ran in one piece."""
PROMPT_TOKENS, RUNNING, LONGEST = 2048, 64, 4096
"""Limits of a step: its queues take 2,048 tokens of prompts; the table ends with 64 requests."""


class Machine(NamedTuple):
    """Eight GPUs, by Splitwise's table 5: cost and power of a machine with eight A100 are 1."""

    hardware: str
    gpu: str
    cost: float
    power: float


A100 = Machine("a100-80gb", "a100", 1.0, 1.0)
H100 = Machine("h100-80gb", "h100", 2.5, 1.75)
CAPPED = Machine("h100-80gb", "h100", 2.5, 1.23)
"""Half the power for decodes, which lose nothing by it."""
DESIGNS = {
    "A100 together": (A100, A100),
    "H100 together": (H100, H100),
    "AA": (A100, A100),
    "HH": (H100, H100),
    "HA": (H100, A100),
    "HH capped": (H100, CAPPED),
}
"""(prompt machine, token machine)."""
SLOWDOWNS = {"ttft": {50: 2.0, 90: 3.0, 99: 6.0}, "tpot": {50: 1.25, 90: 1.5, 99: 5.0}}
"""Of a lone request on A100, by percentile: Splitwise's limits (its table 6)."""
POWER, COST = 17.5, 25.0
"""Of ten machines with H100."""
SECONDS = 120.0
"""Of arrivals."""


Curve = tuple[tuple[float, float], ...]


@cache
def curves(hardware: str) -> tuple[Curve, Curve]:
    """((tokens of the prompts, seconds), …) and ((requests, seconds of a step of decodes), …), medians."""
    prompts: dict[float, list[float]] = defaultdict(list)
    steps: dict[float, list[float]] = defaultdict(list)
    for row in csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()):
        if (row["model"], row["hardware"], row["tensor_parallel"]) != (MODEL, hardware, TP):
            continue
        prompt, token, tokens = float(row["prompt_time"]), float(row["token_time"]), int(row["token_size"])
        if abs((prompt + (tokens - 1) * token) / float(row["e2e_time"]) - 1) > AGREES:
            continue
        if row["batch_size"] == "1":
            prompts[float(row["prompt_size"])].append(prompt * 1e-3)
        if row["prompt_size"] == "512":
            steps[float(row["batch_size"])].append(token * 1e-3)
    return _medians(prompts), _medians(steps)


def _medians(found: Mapping[float, list[float]]) -> Curve:
    return tuple((at, median(found[at])) for at in sorted(found))


@cache
def tables(hardware: str) -> Tabulated:
    """The table as batch times: prompts by their tokens, decodes by their number, and both one after the other."""
    (sizes, prompts), (numbers, steps) = (zip(*curve, strict=True) for curve in curves(hardware))
    tokens, batch = np.arange(PROMPT_TOKENS + 1), np.arange(RUNNING + 1)
    contexts = np.array([0, -(-(LONGEST + 1) // CONTEXT_STEP) * CONTEXT_STEP])
    none = np.zeros(RUNNING + 1)
    decode = np.interp(tokens, numbers, steps)
    times = BatchTimes(
        decode_tokens=decode,
        mixed_tokens=np.interp(tokens, sizes, prompts),
        sequences=none,
        host_overlapped=none,
        host_serial=none,
        context_knots=contexts,
        decode_attention=np.zeros((RUNNING + 1, 2)),
        mixed_attention=np.repeat((np.interp(batch, numbers, steps) * (batch > 0))[:, None], 2, axis=1),
        chunk_knots=np.array([0, PROMPT_TOKENS]),
        prefill_attention=np.zeros((2, 2)),
        prefill_base=0.0,
        expert_tokens=np.zeros(1),
        padded=tokens,
        graph_tokens=0,
    )
    return Tabulated(times, {"modelled": times}, {}, ())


def pool(machine: Machine, count: int, role: str) -> Pool:
    """So many machines."""
    engine = Engine(
        tensor_parallel_size=int(TP),
        max_model_len=LONGEST,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=PROMPT_TOKENS,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    return Pool(load_model(SERVED), device(machine.gpu), engine, count, role)


def chat(rate: float) -> Workload:
    """Conversations with the medians of Azure's trace that Splitwise used: 1,020 and 129 tokens."""
    lengths = Both(Lognormal(1155, 0.5, 3000), Lognormal(211, 0.9, 1000))
    return generate(Gamma(rate), lengths, max(200, int(rate * SECONDS)), seed=1)


def holds(pools: tuple[tuple[Machine, int, str], ...], rate: float) -> bool:
    """Whether the slow-downs over a lone request on A100 stay within the limits."""
    workload = chat(rate)
    deployment = Deployment(tuple(pool(*each) for each in pools), router="least_outstanding")
    run = simulate(deployment, workload, tables=[tables(machine.hardware) for machine, *_ in pools])
    found, alone = request_metrics(run.requests), tables(A100.hardware).times
    prompt = alone.mixed_tokens[np.minimum(workload.prompt_tokens, PROMPT_TOKENS)]
    slower = {"ttft": found.ttft / prompt, "tpot": found.tpot[np.isfinite(found.tpot)] / alone.decode_tokens[1]}
    return all(
        float(np.percentile(slower[name], percent)) <= most
        for name, limits in SLOWDOWNS.items()
        for percent, most in limits.items()
    )


def capacity(pools: tuple[tuple[Machine, int, str], ...]) -> float:
    """Most requests/s within the limits, to 4 %."""
    low, high = 0.0, 2.0 * sum(count for _, count, _ in pools)
    while holds(pools, high):
        low, high = high, 2 * high
    while high - low > 0.04 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(pools, middle) else (low, middle)
    return low


@cache
def best(design: str, budget: float, of: str) -> tuple[float, int, int]:
    """(requests/s, prompt machines, token machines) of the best division of a budget of ``cost`` or ``power``."""
    first, second = DESIGNS[design]
    price, other = getattr(first, of), getattr(second, of)
    if "together" in design:
        count = int(budget / price)
        return capacity(((first, count, "mixed"),)), count, 0
    found = []
    for prompts in range(1, int(budget / price)):
        tokens = int((budget - prompts * price) / other + 1e-9)
        if tokens and 1 / 3 <= prompts / tokens <= 6:
            found.append((capacity(((first, prompts, "prefill"), (second, tokens, "decode"))), prompts, tokens))
    return max(found)


def findings() -> Findings:
    """Every design within one power, and within one cost."""
    rows, groups, speeds = [], {}, {}
    for of, budget in (("power", POWER), ("cost", COST)):
        found = {name: best(name, budget, of) for name in DESIGNS}
        groups[f"one {of}"] = {name: speed for name, (speed, *_) in found.items()}
        speeds[of] = groups[f"one {of}"]
        for name, (speed, prompts, tokens) in found.items():
            counts = f"{prompts}" if not tokens else f"{prompts} + {tokens}"
            rows.append((f"one {of}, {name}", counts, speed, speed / speeds[of]["A100 together"]))
    separate = [name for name in DESIGNS if "together" not in name]
    most = {of: max(separate, key=speeds[of].__getitem__) for of in speeds}
    facts = {
        "table": table(("", "machines", "requests/s", "of A100 together"), rows),
        **{f"{of}_best": most[of] for of in most},
        **{of: speeds[of][most[of]] / speeds[of]["H100 together"] for of in most},
        **{f"{of}_old": speeds[of][most[of]] / speeds[of]["A100 together"] for of in most},
        "capped": speeds["power"]["HH capped"] / speeds["power"]["HH"],
    }
    return Findings(facts, {"splitwise.svg": bars("Clusters of one power and of one cost", "requests/s", groups)})
