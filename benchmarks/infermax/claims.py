"""The claims about schedulers, each with the experiment that tests it, and a verdict by a rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import numpy as np

from benchmarks.charts import lines
from benchmarks.infermax.machine import EVICT, GRID, LOOK_AHEAD, RESERVE, SARATHI, VLLM, Case, Result, run
from windtunnel.policy.unified import FASTERTRANSFORMER

LENGTHS = (16, 64, 256, 1024)
PLACES = (4, 8, 16, 32, 64, 128, 256)
MEMORY = (4_000, 8_000, 16_000, 32_000, 64_000, 128_000)
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Finding:
    """What an experiment says of a claim."""

    verdict: str
    """holds, holds where …, or fails, by a rule on the numbers."""
    measured: str
    charts: dict[str, str] = field(default_factory=dict)


def falls(values: Sequence[float]) -> bool:
    """Whether each value is at most the one before (within 1 %)."""
    return all(later <= earlier * 1.01 for earlier, later in pairwise(values))


def grid() -> list[Case]:
    """Lengths and memory in which one request fits at least twice."""
    cells = product(LENGTHS, LENGTHS, (8_000, 32_000))
    return [Case(prompt=i, output=o, memory=m, requests=256) for i, o, m in cells if 2 * (i + o) <= m]


def preemption_pays() -> Finding:
    """IM1."""
    ratios = [
        (
            run(RESERVE, case).makespan / run(EVICT, case).makespan,
            run(LOOK_AHEAD, case).makespan / run(EVICT, case).makespan,
            case,
        )
        for case in grid()
    ]
    most, ahead, case = max(ratios, key=lambda row: row[0])
    worst = min(row[0] for row in ratios)
    chart = lines(
        "Makespan of never evicting, as a share of evicting",
        "output tokens",
        "ratio",
        {
            f"reserve, I = {prompt}": [
                (c.output, ratio) for ratio, _, c in ratios if c.prompt == prompt and c.memory == 8_000
            ]
            for prompt in LENGTHS[:3]
        },
        log_x=True,
    )
    return Finding(
        "holds where prompts are short, outputs long and memory is tight; elsewhere never evicting can be faster"
        if most > 1.1
        else f"fails: {most - 1:.0%} at most",
        f"over {len(ratios)} cells reserving takes {worst - 1:+.0%} to {most - 1:+.0%} more than evicting, "
        f"most at I = {case.prompt}, O = {case.output}, M = {case.memory:,}; look-ahead there {ahead - 1:+.0%}",
        {"infermax-preemption.svg": chart},
    )


def wrong_scheduling() -> Finding:
    """IM2."""
    case = Case(prompt=64, output=256, memory=32_000, spread=0.9)
    speeds = {name: run(policy, case).throughput for name, policy in GRID.items()}
    speeds["fastertransformer"] = run(replace(FASTERTRANSFORMER, max_num_seqs=8), case).throughput
    best, worst = max(speeds, key=lambda name: speeds[name]), min(speeds, key=lambda name: speeds[name])
    continuous = min(value for name, value in speeds.items() if name != "fastertransformer")
    ratio = speeds[best] / speeds[worst]
    return Finding(
        f"holds only with static batches among the schedulers ({speeds[best] / continuous:.1f}× without)"
        if ratio >= 4
        else f"fails: {ratio:.1f}×",
        f"`{best}` {speeds[best]:,.0f} tokens/s, `{worst}` with 8 places {speeds[worst]:,.0f}: {ratio:.1f}×; "
        f"among {len(GRID)} variants with continuous batches {speeds[best] / continuous:.2f}×",
    )


def vllm_until_outputs_are_long() -> Finding:
    """IM3."""
    cells = [case for case in grid() if case.prompt in (64, 256)]
    wins = {
        o: [
            run(VLLM, c).e2el <= min(run(SARATHI, c).e2el, run(RESERVE, c).e2el) * 1.001 for c in cells if c.output == o
        ]
        for o in LENGTHS
    }
    shares = {o: float(np.mean(rows)) for o, rows in wins.items()}
    short, long = shares[LENGTHS[0]], shares[LENGTHS[-1]]
    return Finding(
        "holds" if short > 0.5 > long else "fails" if short <= long else "holds in part",
        "share of cells in which prefill first has the lowest mean latency: "
        + ", ".join(f"O = {o}: {s:.0%}" for o, s in shares.items()),
    )


def throughput_over_batches() -> Finding:
    """IM4."""
    by_places = [run(EVICT, Case(places=places)).throughput for places in PLACES]
    by_output = [(o, run(EVICT, Case(output=o)).throughput) for o in (1, 4, 16, 64, 256, 1024)]
    speeds = [speed for _, speed in by_output]
    inner = max(speeds) > max(speeds[0], speeds[-1])
    chart = lines("Output tokens a second", "output tokens", "tokens/s", {"I = 256": by_output}, log_x=True)
    return Finding(
        "holds" if falls(by_places[::-1]) and inner else "holds in part",
        f"R_max 4 to 256: {by_places[0]:,.0f} to {by_places[-1]:,.0f} tokens/s; O = 1, 4 … 1024: "
        + ", ".join(f"{s:,.0f}" for s in speeds),
        {"infermax-throughput.svg": chart},
    )


def batches_over_prompts() -> Finding:
    """IM5."""
    sizes = [run(EVICT, Case(prompt=i)).batch for i in LENGTHS]
    return Finding(
        "holds" if falls(sizes) else "fails",
        "decode batch for I = 16, 64, 256, 1024: " + ", ".join(f"{s:.0f}" for s in sizes),
    )


def evictions_over_outputs() -> Finding:
    """IM6."""
    by_output = [run(EVICT, Case(output=o)).evictions for o in LENGTHS]
    by_places = [run(EVICT, Case(places=p)).evictions for p in PLACES]
    good = falls(by_output[::-1]) and falls(by_places[::-1])
    return Finding(
        "holds" if good else "holds in part",
        "evictions a request for O = 16 … 1024: "
        + ", ".join(f"{e:.2f}" for e in by_output)
        + "; for R_max 4 … 256: "
        + ", ".join(f"{e:.2f}" for e in by_places),
    )


def tpot_by_evictions() -> Finding:
    """IM7: standardised regression of TPOT on evictions, batch, I and O, each in logarithms."""
    rows = [(case, run(EVICT, case)) for case in grid() if case.output > 16]
    names = ("evictions", "batch", "I", "O")
    columns = np.array([[np.log1p(r.evictions), np.log(r.batch), np.log(c.prompt), np.log(c.output)] for c, r in rows])
    tpot = np.log([r.tpot for _, r in rows])
    scaled = (columns - columns.mean(0)) / columns.std(0)
    weights, *_ = np.linalg.lstsq(scaled, (tpot - tpot.mean()) / tpot.std(), rcond=None)
    largest = names[int(np.argmax(np.abs(weights)))]
    return Finding(
        "holds" if largest == "evictions" else f"fails: {largest} weighs more",
        f"{len(rows)} cells, standardised weights on log TPOT: "
        + ", ".join(f"{n} {w:+.2f}" for n, w in zip(names, weights, strict=True)),
    )


def never_evicting() -> Finding:
    """IM8."""
    cells = [case for case in grid() if run(EVICT, case).evictions > 0.05]
    speed = np.array([run(RESERVE, c).throughput / run(EVICT, c).throughput for c in cells])
    first = np.array([run(RESERVE, c).ttft / run(EVICT, c).ttft for c in cells])
    return Finding(
        f"TTFT holds; throughput rises in {np.mean(speed > 1):.0%} of cells only"
        if (first > 1).all()
        else "holds in part",
        f"{len(cells)} cells with evictions: throughput {speed.min() - 1:+.0%} to {speed.max() - 1:+.0%}, median "
        f"{np.median(speed) - 1:+.0%}; "
        f"TTFT median ×{np.median(first):.1f}",
    )


def victims(objective: Callable[[Result], float]) -> dict[str, float]:
    """Of each victim, relative to the newest, over cells with unequal lengths: geometric mean."""
    cells = [replace(c, spread=0.9) for c in grid() if c.output >= 256]
    found = {}
    for victim in ("newest", "shortest", "longest"):
        policy = GRID[f"sarathi-hybrid-{victim}-fcfs"]
        ratios = [objective(run(policy, c)) / objective(run(EVICT, c)) for c in cells]
        found[victim] = float(np.exp(np.mean(np.log(ratios))))
    return found


def who_is_evicted() -> Finding:
    """IM9."""
    e2el, makespan = victims(lambda r: r.e2el), victims(lambda r: r.makespan)
    return Finding(
        "holds for large ones; small ones gain little"
        if e2el["shortest"] < 1 < e2el["longest"] or makespan["shortest"] < 1 < makespan["longest"]
        else "fails",
        f"against the newest: evicting the shortest {e2el['shortest'] - 1:+.1%} mean latency, "
        f"{makespan['shortest'] - 1:+.1%} makespan; "
        f"the longest {e2el['longest'] - 1:+.1%}, {makespan['longest'] - 1:+.1%}",
    )


def memory_and_bandwidth() -> Finding:
    """IM10."""
    speeds = {
        factor: [(m, run(EVICT, Case(memory=m, requests=512, per_kv=factor)).throughput) for m in MEMORY]
        for factor in (1.0, 0.25)
    }
    gain = speeds[1.0][-1][1] / speeds[1.0][-2][1]
    early = speeds[1.0][1][1] / speeds[1.0][0][1]
    chart = lines(
        "Output tokens a second",
        "memory, tokens",
        "tokens/s",
        {"KV bandwidth": speeds[1.0], "four times the bandwidth": speeds[0.25]},
        log_x=True,
    )
    return Finding(
        "holds" if gain - 1 < 0.35 * (early - 1) else "fails",
        f"doubling M from 4k gains {early - 1:.0%}, from 64k {gain - 1:.0%}; there four times the bandwidth gains "
        f"{speeds[0.25][-1][1] / speeds[1.0][-1][1] - 1:.0%}",
        {"infermax-memory.svg": chart},
    )


def little_memory() -> Finding:
    """IM11."""
    ratios = [
        (m, run(EVICT, Case(memory=m, prompt=64)).e2el / run(RESERVE, Case(memory=m, prompt=64)).e2el) for m in MEMORY
    ]
    chart = lines(
        "Mean latency of evicting, as a share of reserving",
        "memory, tokens",
        "ratio",
        {"I = 64, O = 256": ratios},
        log_x=True,
    )
    small = ratios[0][1]
    return Finding(
        "holds" if small < 0.99 else "fails",
        "mean latency of evicting by that of reserving for M = 4k, 8k … 128k: "
        + ", ".join(f"{r:.2f}" for _, r in ratios),
        {"infermax-little-memory.svg": chart},
    )


def best_places(**case: int) -> int:
    """R_max with the lowest mean latency."""
    return min(PLACES, key=lambda p: run(EVICT, Case(places=p, **case)).e2el)


def places_over_lengths() -> Finding:
    """IM12."""
    by_prompt, by_output = [best_places(prompt=i) for i in LENGTHS], [best_places(output=o) for o in LENGTHS]
    good = falls([float(p) for p in by_prompt]) and falls([float(p) for p in by_output])
    return Finding(
        "holds" if good else "holds in part",
        f"best R_max for I = 16 … 1024: {by_prompt}; for O = 16 … 1024: {by_output}",
    )


def shortest_replaced_first() -> Finding:
    """IM16."""
    e2el, makespan = victims(lambda r: r.e2el), victims(lambda r: r.makespan)
    better = e2el["shortest"] < 1 and makespan["shortest"] < 1
    return Finding(
        "holds" if better else "holds for one of both" if min(e2el["shortest"], makespan["shortest"]) < 1 else "fails",
        f"shortest first against newest first: {e2el['shortest'] - 1:+.1%} mean latency, "
        f"{makespan['shortest'] - 1:+.1%} makespan",
    )
