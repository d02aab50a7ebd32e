"""Schedulers of ours: the unified policy's space searched by simulation, judged on workloads the search has not seen.

``python -m benchmarks.infermax.ours search`` prints the best settings for each class of information; without a word it
writes docs/experiments/ours.md from the presets.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.infermax.machine import Case, Result, measured
from benchmarks.page import table
from windtunnel import Workload, generate
from windtunnel.errors import InputError
from windtunnel.optimum.served import gaps
from windtunnel.policy.named import PRESETS
from windtunnel.policy.settings import Settings
from windtunnel.policy.unified import POLICIES, Policy
from windtunnel.workload import AllAtOnce, Both, Gamma, Lognormal, builtin

FOLDER = Path(__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "experiments" / "ours.md"
MACHINE = Case(memory=60_000, tokens=8192, places=256)
REQUESTS, LONGEST = 300, 12_000
TTFT, TPOT = 5.0, 0.15
"""Limits of a good request, s."""
MEAN_LOST, GOOD_LOST = 0.01, 0.02
"""What no preset should lose: shares of mean latency and of requests."""
SEARCHED = 50
"""Settings drawn at random for each class; then the best are changed in one word at a time."""
CLOSER = 0.9995
"""Factor below which other settings are better."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "group_order": ("prefill_first", "decode_first"),
    "mixed": (True, False),
    "chunked_prefill": (True, False),
    "pass_over": (True, False),
    "victim": ("newest", "shortest", "longest"),
    "max_num_seqs": (0, 32, 64, 96, 128, 192),
    "max_num_prefill_tokens": (0, 512, 1024, 2048, 4096),
    "watermark": (0.0, 0.01, 0.05, 0.1),
}
CLASSES: dict[str, dict[str, tuple[Any, ...]]] = {
    "known": {
        "admission_order": ("shortest_job", "shortest_output", "shortest_prompt", "fcfs"),
        "allocation": ("on_demand", "prompt", "look_ahead", "prompt_and_output"),
    },
    "ranked": {"admission_order": ("priority", "shortest_prompt", "fcfs"), "allocation": ("on_demand", "prompt")},
    "unknown": {"admission_order": ("shortest_prompt", "fcfs"), "allocation": ("on_demand", "prompt")},
}
"""What a scheduler may know of outputs: their lengths; which is longer; nothing."""
USES_LENGTHS = frozenset({"lightllm", "trtllm-guaranteed-no-evict"})
PUBLISHED: dict[str, Settings] = {
    "vllm": PRESETS["vllm"],
    "sglang": PRESETS["sglang-0.4.6"],
    **{
        name: POLICIES[name]
        for name in ("sarathi", "orca", "lightllm", "trtllm-max-utilization", "trtllm-guaranteed-no-evict")
    },
}

TRACES = {
    "azure-conv": (3.0, 4.5),
    "azure-code": (3.0, 4.5),
    "sharegpt": (4.0, 7.0),
    "alpaca": (15.0,),
    "arxiv-summarization": (1.5, 2.5),
    "mooncake-conversation": (1.0, 1.5),
}
"""Fits of public traces, and the rates (1/s) that they are held out at."""
SHARES = (0.7, 1.0, 1.5)
"""Of the rate at which vLLM serves a load all at once."""
OURS = {information: POLICIES[f"ours-{information}"] for information in CLASSES}
"""What the search found, by what is known of outputs."""


def ranked(workload: Workload) -> Workload:
    """The workload with the rank of each output as its priority: what one sees that can tell which is longer."""
    rank = np.argsort(np.argsort(workload.output_tokens, kind="stable"), kind="stable")
    return replace(workload, priority=rank.astype(np.int64))


def at(rate: float) -> str:
    """A rate in words."""
    return f"at {rate:g}/s" if rate else "all at once"


def synthetic(prompt: int, output: int, rate: float, seed: int) -> Workload:
    """Lognormal lengths with these means; a rate of 0: all at once."""
    lengths = Both(Lognormal(prompt, 0.8, 4000), Lognormal(output, 0.8, 1500))
    return ranked(generate(Gamma(rate, 1.0) if rate else AllAtOnce(), lengths, REQUESTS, seed=seed))


def trace(name: str, rate: float, seed: int) -> Workload:
    """A built-in workload at another rate, without the longest prompts."""
    found = builtin(name, seed=seed, num_requests=REQUESTS, request_rate=rate)
    short = found.prompt_tokens + found.output_tokens <= LONGEST
    names = ("arrival", "prompt_tokens", "output_tokens")
    return ranked(Workload.from_columns(**{column: getattr(found, column)[short] for column in names}))


def seen() -> dict[str, Workload]:
    """Workloads of the search: both phases, from below saturation to all at once."""
    return {
        f"{i}+{o} {at(rate)}": synthetic(i, o, rate, seed=1)
        for i, o, rates in (
            (200, 300, (4.0, 0.0)),
            (1000, 100, (5.0, 0.0)),
            (100, 600, (2.0, 0.0)),
            (600, 200, (4.0, 6.0)),
        )
        for rate in rates
    }


def held_out() -> dict[str, Workload]:
    """Workloads that the search has not seen: other lengths, rates and seeds, and fits of public traces."""
    found = {
        f"{i}+{o} {at(rate)}": synthetic(i, o, rate, seed=2)
        for i, o, rates in (
            (300, 300, (3.0, 5.0, 0.0)),
            (1500, 150, (3.0, 0.0)),
            (50, 400, (4.0, 0.0)),
            (800, 400, (2.0, 0.0)),
        )
        for rate in rates
    }
    for name, rates in TRACES.items():
        found |= {f"{name} {at(rate)}": trace(name, rate, seed=2) for rate in rates}
    return found


@cache
def at_capacity(share: float) -> dict[str, Workload]:
    """Workloads at this share of the rate at which vLLM serves each of them all at once: where waiting begins."""
    kinds: dict[str, Callable[..., Workload]] = {
        f"{i}+{o}": partial(synthetic, i, o, seed=3) for i, o in ((100, 60), (200, 1500), (400, 200), (2000, 300))
    }
    kinds |= {name: partial(trace, name, seed=3) for name in TRACES}
    found = {}
    for name, kind in kinds.items():
        known = kind(rate=1.0)
        together = replace(known, arrival=np.zeros(len(known)))
        rate = len(known) / measured(PUBLISHED["vllm"], MACHINE, together).makespan
        found[f"{name} at {share:g}"] = kind(rate=share * rate)
    return found


@cache
def served(policy: Settings, name: str) -> Result:
    """One of the workloads under a policy."""
    workloads = seen() | held_out()
    for share in SHARES:
        workloads |= at_capacity(share)
    return measured(policy, MACHINE, workloads[name])


def against(words: Mapping[str, Any], best: Mapping[str, float]) -> float:
    """Geometric mean of the mean latency under settings by the best published one's; infinite if they cannot run."""
    try:
        policy = made(words)
        ratios = [served(policy, name).e2el / least for name, least in best.items()]
    except InputError:
        return float("inf")
    return float(np.exp(np.mean(np.log(ratios))))


def made(words: Mapping[str, Any]) -> Policy:
    """The policy with these settings. Raises InputError for settings that contradict each other."""
    return Policy(**words, preemption="none" if words["allocation"] == "prompt_and_output" else "recompute")


def best_published(names: Mapping[str, Workload], known: bool) -> dict[str, float]:
    """The lowest mean latency of a published preset, for each workload."""
    return {name: min(served(policy, name).e2el for policy in fair(known)) for name in names}


def fair(known: bool) -> list[Settings]:
    """The published presets that need not know more; ``known``: lengths of outputs are."""
    return [policy for name, policy in PUBLISHED.items() if known or name not in USES_LENGTHS]


def most_good(name: str, known: bool) -> float:
    """The largest share of good requests of a published preset on a workload."""
    return max(good(served(policy, name)) for policy in fair(known))


def search(information: str, seed: int = 0) -> tuple[float, Policy]:
    """The settings with the lowest mean latency over the workloads seen."""
    rng = np.random.default_rng(seed)
    choices = CHOICES | CLASSES[information]
    best = best_published(seen(), information == "known")

    def draw() -> dict[str, Any]:
        return {name: values[rng.integers(len(values))] for name, values in choices.items()}

    drawn = [draw() for _ in range(SEARCHED)]
    values = [against(words, best) for words in drawn]
    value, words = min(values), drawn[int(np.argmin(values))]
    improved = True
    while improved:
        improved = False
        for name, others in choices.items():
            for other in others:
                changed = words | {name: other}
                if (now := against(changed, best)) < value * CLOSER:
                    value, words, improved = now, changed, True
        print(information, value, words, flush=True)
    return value, made(words)


def p99_ttft(result: Result) -> float:
    """Seconds."""
    requests = result.run.requests
    return float(np.percentile(requests.first_token - requests.arrival, 99))


def good(result: Result) -> float:
    """Share of requests that keep both limits."""
    requests = result.run.requests
    tpot = (requests.finish - requests.first_token) / np.maximum(requests.output_tokens - 1, 1)
    return float(((requests.first_token - requests.arrival <= TTFT) & (tpot <= TPOT)).mean())


def interval(values: NDArray[np.float64]) -> str:
    """The mean, and a 95 % bootstrap interval over workloads."""
    rng = np.random.default_rng(0)
    means = rng.choice(values, (2000, len(values))).mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return f"{values.mean():+.1%} ({low:+.1%} … {high:+.1%})"


def page() -> str:
    """What the presets are worth on workloads that the search has not seen."""
    workloads = held_out()
    wins, gains, singles = [], [], []
    for information, policy in OURS.items():
        best = best_published(workloads, information == "known")
        ours = {name: served(policy, name) for name in workloads}
        ratio = np.array([1 - ours[name].e2el / best[name] for name in workloads])
        crowded = [p99_ttft(served(PUBLISHED["vllm"], name)) > TTFT for name in workloads]
        won = np.array([ours[name].e2el < best[name] for name in workloads])
        gap = np.array([gaps(ours[name].run)["mean-e2el"]["gap"] for name in workloads])
        shares = f"{won.sum()} of {len(won)}", f"{won[crowded].sum()} of {sum(crowded)}"
        wins.append((information, *shares, f"{ratio.min():+.1%}", interval(ratio), f"{np.median(gap):.0%}"))
        for rival in ("vllm", "sglang"):
            theirs = {name: served(PUBLISHED[rival], name) for name in workloads}
            pairs = [(ours[name], theirs[name]) for name in workloads]
            row = [
                interval(np.array([1 - measure(a) / measure(b) for a, b in pairs])) for measure in (mean_e2el, p99_ttft)
            ]
            gains.append((information, rival, *row, interval(np.array([good(a) - good(b) for a, b in pairs]))))
        singles.append([1 - ours[name].e2el / best[name] for name in workloads])
    rows = [
        (name, *(f"{value:+.1%}" for value in values))
        for name, values in zip(workloads, zip(*singles, strict=True), strict=True)
    ]
    return (
        (FOLDER / "ours.md")
        .read_text(encoding="utf-8")
        .format(
            workloads=len(workloads),
            ttft=TTFT,
            tpot=1000 * TPOT,
            wins=table(
                (
                    "outputs are",
                    "workloads won",
                    "won where requests wait",
                    "worst",
                    "mean latency saved",
                    "median gap to the bound",
                ),
                wins,
            ),
            gains=table(
                ("outputs are", "against", "mean latency saved", "P99 TTFT saved", "good requests more"), gains
            ),
            near=table(
                ("outputs are", "rate", "won", "mean latency saved", "worst", "good requests more than vllm", "worst"),
                near_capacity(),
            ),
            singles=table(("workload", *OURS), rows),
            losses="; ".join(losses()) or "none",
            settings="\n".join(f"- `{information}`: `{words(policy)}`" for information, policy in OURS.items()),
        )
    )


def near_capacity() -> list[tuple[str, ...]]:
    """Rows: what is known, the share of capacity, and how often, and by how much, ours is better or worse."""
    rows: list[tuple[str, ...]] = []
    for information, policy in OURS.items():
        for share in SHARES:
            workloads = at_capacity(share)
            best, vllm = best_published(workloads, information == "known"), PUBLISHED["vllm"]
            ratio = np.array([1 - served(policy, name).e2el / best[name] for name in workloads])
            more = np.array([good(served(policy, name)) - good(served(vllm, name)) for name in workloads])
            won = f"{(ratio > 0).sum()} of {len(ratio)}"
            row = (won, f"{ratio.mean():+.1%}", f"{ratio.min():+.1%}", f"{more.mean():+.1%}", f"{more.min():+.1%}")
            rows.append((information, f"{share:g}", *row))
    return rows


def losses() -> list[str]:
    """Workloads on which a preset saves less than −MEAN_LOST of the lowest mean latency of a published preset, or has
    fewer good requests by more than GOOD_LOST than the one that has the most, with both."""
    found = []
    for information, policy in OURS.items():
        for workloads in (held_out(), *(at_capacity(share) for share in SHARES)):
            best = best_published(workloads, information == "known")
            for name in workloads:
                ours = served(policy, name)
                saved, more = 1 - ours.e2el / best[name], good(ours) - most_good(name, information == "known")
                if saved < -MEAN_LOST or more < -GOOD_LOST:
                    found.append(f"{information}, {name} ({saved:+.1%}, {more:+.1%})")
    return found


def words(policy: Policy) -> str:
    """The preset as text: what differs from the plain policy."""
    plain = Policy()
    changed = {
        f.name: getattr(policy, f.name) for f in fields(policy) if getattr(policy, f.name) != getattr(plain, f.name)
    }
    return ", ".join(f"{name}={value}" for name, value in changed.items())


def mean_e2el(result: Result) -> float:
    """Seconds."""
    return result.e2el


if __name__ == "__main__":
    if sys.argv[1:2] == ["search"]:
        for each in sys.argv[2:] or CLASSES:
            search(each)
    else:
        PAGE.write_text(page(), encoding="utf-8")
