"""InferMax's figures: memory, running size and latencies by scheduler, evictions over R_max and O, small requests."""

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.charts import bars, lines
from benchmarks.infermax.claims import LENGTHS, PLACES, Finding, falls
from benchmarks.infermax.machine import EVICT, GRID, LOOK_AHEAD, RESERVE, SARATHI, VLLM, Case, Result, run
from windtunnel.metrics import unroll
from windtunnel.metrics.timeline import mean_level, timeline
from windtunnel.perf.batch_times import Floats
from windtunnel.policy.unified import Policy

SCHEDULERS: dict[str, Policy] = {
    "prefill first (vLLM)": VLLM,
    "decode first, chunks (Sarathi)": SARATHI,
    "decode first": EVICT,
    "look ahead": LOOK_AHEAD,
    "never evicting": RESERVE,
}
CROWDED = Case(prompt=256, output=512, memory=16_000)
"""256 requests of which 62 fit with their prompts, and 20 with their whole outputs."""
BINS = 60


@dataclass(frozen=True)
class OverTime:
    """A run in BINS equal parts of its time."""

    seconds: Floats
    memory: Floats
    """Tokens of KV that are taken."""
    holding: Floats
    """Running size: requests that hold KV, in the batch or not."""


def over_time(policy: Policy, case: Case) -> OverTime:
    """Memory and running size; all who have arrived and not ended, but for those in the waiting queue, hold KV."""
    steps = unroll(run(policy, case).run)
    found, log, requests = timeline(steps, BINS), steps.run.iterations, steps.run.requests
    queued = mean_level(
        found.edges, log.start[steps.heads], steps.row_end[steps.heads], log.waiting[steps.heads].astype(np.float64)
    )
    here = mean_level(found.edges, requests.arrival, requests.finish)
    return OverTime(found.centres, found.kv * case.memory, np.maximum(here - queued, 0.0))


def memory_by_scheduler() -> Finding:
    """IM17: 201, and 199's first half."""
    parts = {name: over_time(policy, CROWDED) for name, policy in SCHEDULERS.items()}
    middle = slice(BINS // 6, BINS // 2)  # when all places are taken and none is left empty for want of requests
    memory = {name: float(part.memory[middle].mean()) / CROWDED.memory for name, part in parts.items()}
    size = {name: float(part.holding[middle].mean()) for name, part in parts.items()}
    highest = max(float(part.holding.max()) for part in parts.values())
    bound = CROWDED.memory / CROWDED.prompt
    good = memory["never evicting"] > 0.9 and highest <= bound
    charts = {
        f"infermax-{key}.svg": lines(
            title,
            "seconds",
            label,
            {name: list(zip(part.seconds, getattr(part, what), strict=True)) for name, part in parts.items()},
        )
        for key, title, label, what in (
            ("memory-over-time", "KV that is taken, by scheduler", "tokens", "memory"),
            ("running-size", "Running size: requests that hold KV", "requests", "holding"),
        )
    }
    return Finding(
        "holds, and evicting fills it as well, with more requests" if good else "holds in part",
        f"at I = {CROWDED.prompt}, O = {CROWDED.output}, M = {CROWDED.memory:,} memory is full to "
        + ", ".join(f"{share:.0%} with {size[name]:.0f} requests ({name})" for name, share in memory.items())
        + f"; at most {highest:.0f} hold KV at once, of the {bound:.0f} that M / I allows",
        charts,
    )


def prompts_now_outputs_later() -> Finding:
    """IM18: 200, and 199's second half."""
    peaks, most = {}, 0
    for output in LENGTHS[1:]:
        case = replace(CROWDED, output=output, requests=48, memory=120_000)
        steps = unroll(run(EVICT, case).run)
        first = float(steps.run.requests.first_token.max())
        log = steps.run.iterations
        after = steps.start[steps.start >= first]
        last = float(steps.run.requests.finish.min())
        peaks[output] = int(np.count_nonzero(after < last))
        step = np.cumsum(log.steps > 0)  # further chunks of a step follow as rows of 0 steps
        most = max(most, int(np.bincount(step, weights=log.chunk_tokens).max()))
    shares = [count / output for output, count in peaks.items()]
    return Finding(
        "holds" if all(0.8 < share <= 1.0 for share in shares) else "holds in part",
        f"48 prompts take 12,288 tokens in two batches (at most {most:,} of C = 8,192 in one); the peak, I + O of all, "
        "comes " + ", ".join(f"{count} batches later for O = {output}" for output, count in peaks.items()),
    )


def evictions_over_places_and_outputs() -> Finding:
    """IM19: 203 as a figure."""
    places = PLACES[1:]
    grown = {
        output: [(float(p), run(EVICT, replace(CROWDED, output=output, places=p)).evictions) for p in places]
        for output in LENGTHS
    }
    rises = all(falls([value for _, value in points][::-1]) for points in grown.values())
    last = [points[-1][1] for points in grown.values()]
    chart = lines(
        "Evictions a request",
        "R_max",
        "evictions",
        {f"O = {output}": points for output, points in grown.items()},
        log_x=True,
    )
    return Finding(
        "holds" if rises and falls(last[::-1]) else "holds in part",
        f"from R_max = {places[0]} to {places[-1]}: "
        + "; ".join(f"O = {o}: {points[0][1]:.2f} to {points[-1][1]:.2f}" for o, points in grown.items()),
        {"infermax-evictions.svg": chart},
    )


def latencies_by_scheduler() -> Finding:
    """IM20: TTFT and TPOT by scheduler."""
    found: dict[str, Result] = {name: run(policy, CROWDED) for name, policy in SCHEDULERS.items()}
    ttft, tpot = ({n: getattr(r, what) for n, r in found.items()} for what in ("ttft", "tpot"))
    groups = {"TTFT, s": ttft, "100 × TPOT, s": {name: 100 * value for name, value in tpot.items()}}
    good = min(tpot, key=tpot.__getitem__) == "never evicting" and max(ttft, key=ttft.__getitem__) == "never evicting"
    return Finding(
        "holds" if good else "holds in part",
        "mean TTFT and TPOT: "
        + ", ".join(f"{name} {r.ttft:.1f} s and {1000 * r.tpot:.0f} ms" for name, r in found.items()),
        {"infermax-latencies.svg": bars("TTFT and TPOT by scheduler", "seconds", groups)},
    )


def small_first() -> Finding:
    """IM21: 210."""
    gains, latency, done = {}, {}, {}
    for memory in (8_000, 16_000, 32_000):
        case = replace(CROWDED, memory=memory, spread=0.9)
        plain, small = (run(GRID[f"sarathi-hybrid-newest-{order}"], case) for order in ("fcfs", "shortest_job"))
        gains[memory] = small.throughput / plain.throughput - 1
        latency[memory] = small.e2el / plain.e2el - 1
        if memory == CROWDED.memory:
            done = {name: np.sort(r.run.requests.finish) for name, r in (("first come", plain), ("small first", small))}
    good = min(gains.values()) > 0.05
    return Finding(
        "holds" if good else "holds for latency, not for throughput" if max(latency.values()) < -0.1 else "fails",
        "shortest job first against first come: "
        + "; ".join(f"M = {m:,}: {gain:+.1%} tokens/s, {latency[m]:+.0%} mean latency" for m, gain in gains.items())
        + f"; half of the requests are done after {np.median(done['small first']):.0f} s instead of "
        f"{np.median(done['first come']):.0f} s",
        {
            "infermax-small-first.svg": lines(
                f"Requests that are done, M = {CROWDED.memory:,}",
                "seconds",
                "requests",
                {name: [(float(t), float(n)) for n, t in enumerate(ends, 1)][::8] for name, ends in done.items()},
            )
        },
    )
