"""The claims about the optimum, the cost model and the host: IM13, IM14 and IM15, and preemption at the optimum."""

from collections.abc import Iterator
from html import escape

import numpy as np

from benchmarks.charts import lines
from benchmarks.infermax.claims import Finding
from windtunnel import Deployment, Engine, Pool, Workload, device, generate, load_model, simulate
from windtunnel.optimum.certificate import certify, gap
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.heuristics import best_simulated, simulated
from windtunnel.optimum.objective import MAKESPAN, MEAN_E2EL
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Schedule, check
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.policy import Limits
from windtunnel.policy.unified import infermax_grid
from windtunnel.simulate.simulate import batch_times
from windtunnel.workload import AllAtOnce, Both, RangeRatio

COST = Cost(200.0, 4.0, 1.0)
SEEDS = range(6)
SECONDS = 20.0
CELL = 26


def small(seed: int, n: int = 5) -> Problem:
    """Requests of 4 to 12 tokens in, up to 4 out, in memory for under a half of them."""
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(4, 13, n), rng.integers(2, 5, n)
    memory = max(int(0.45 * (prompt + output - 1).sum()), int((prompt + output).max()))
    return Problem.of(prompt, output, Limits(n, 24, 24, memory, 1), COST)


def optimum_beats_heuristics() -> Finding:
    """IM15, and what evictions are worth at the optimum."""
    rows = []
    for seed in SEEDS:
        problem = small(seed)
        kept = certify(problem, MAKESPAN, seconds=SECONDS, forbid=("evictions",))
        free = certify(problem, MAKESPAN, seconds=SECONDS, known=kept.schedule)
        best = best_simulated(problem, MAKESPAN)
        assert best is not None
        heuristic = check(problem, best[1]).value(MAKESPAN)
        plain = check(problem, simulated(problem, infermax_grid()["vllm-newest-fcfs"])).value(MAKESPAN)
        rows.append(
            (gap(heuristic, free.value), gap(plain, free.value), kept.value / free.value - 1, free.proof == "optimal")
        )
    best_gap, plain_gap, price, proven = (np.array(column) for column in zip(*rows, strict=True))
    latency = certify(small(0), MEAN_E2EL, seconds=SECONDS)
    return Finding(
        "holds" if (plain_gap > 0).all() else "holds in part",
        f"{len(rows)} instances of 5 requests, {int(proven.sum())} proven optimal: the best found schedule saves "
        f"{best_gap.min():.1%} to {best_gap.max():.1%} of the makespan of the best of 144 heuristics, "
        f"{plain_gap.min():.1%} to {plain_gap.max():.1%} of that of vLLM's order; forbidding evictions "
        f"costs {price.min():.1%} to {price.max():.1%}",
        {"infermax-schedule.svg": timeline(small(0), latency.schedule)},
    )


def timeline(problem: Problem, schedule: Schedule) -> str:
    """One request a row, batches as columns: P computes a prompt (or again after an eviction), the number is the token
    that comes out, a dot a pause, × an eviction."""
    rows, columns = len(problem), len(schedule.batches)
    cells: list[str] = []
    out, held = [0] * rows, set[int]()
    for j, batch in enumerate(schedule.batches):
        held -= set(batch.evicted)
        for i in range(rows):
            word, colour = "", "#ffffff"
            if i in batch.tokens:
                decodes = i in held
                out[i] += 1
                held.add(i)
                word, colour = (
                    (str(out[i]), "#cfe0ff") if decodes else (f"P{out[i]}", "#ffd9b8" if out[i] == 1 else "#ffb0b0")
                )
            elif i in batch.evicted:
                word = "×"
            elif i in held:
                word = "·"
            if out[i] == problem.output_tokens[i]:
                held.discard(i)
            x, y = 150 + j * CELL, 30 + i * CELL
            cells.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{colour}" stroke="#c3cad4"/>')
            cells.append(f'<text x="{x + CELL / 2}" y="{y + 17}" text-anchor="middle">{escape(word)}</text>')
    names = [
        f'<text x="8" y="{47 + i * CELL}">{prompt} in, {output} out</text>'
        for i, (prompt, output) in enumerate(zip(problem.prompt_tokens, problem.output_tokens, strict=True))
    ]
    width, height = 160 + columns * CELL, 40 + rows * CELL
    style = 'font-family="system-ui, sans-serif" font-size="11"'
    head = '<text x="150" y="18">batches of the schedule with the lowest mean latency</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{head}{"".join(names)}{"".join(cells)}</svg>\n'
    )


def batches(rng: np.random.Generator) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Decodes alone and with a chunk, as a server has them."""
    for _ in range(400):
        decodes = int(rng.integers(0, 256))
        context = int(rng.integers(64, 4096))
        chunks = (
            [(int(rng.integers(16, 4096)), int(rng.integers(0, 2048)))] if rng.random() < 0.4 or not decodes else []
        )
        yield decodes, decodes * context, chunks


def terms_are_linear() -> Finding:
    """IM13: the four terms, fitted to the batch times of a model from measured kernels."""
    engine = Engine(max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192)
    deployment = Deployment((Pool(load_model("Qwen/Qwen3-8B"), device("h100"), engine),))
    times = batch_times(deployment)[0].times
    assert isinstance(times, BatchTimes)
    cases = list(batches(np.random.default_rng(0)))
    columns = np.array(
        [[1, d + sum(n for n, _ in c), kv, sum(n * (2 * at + n) for n, at in c)] for d, kv, c in cases], dtype=float
    )
    seconds = np.array([times.batch(*case) for case in cases])
    fitted, *_ = np.linalg.lstsq(columns / seconds[:, None], np.ones(len(cases)), rcond=None)
    error = columns @ fitted / seconds - 1
    r2 = 1 - ((columns @ fitted - seconds) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    lone = {}
    for name, axis in (
        ("tokens", [(n, (0, 0, [(n, 0)])) for n in range(256, 8193, 256)]),
        ("decodes", [(n, (n, n * 1000, [])) for n in range(1, 257, 8)]),
        ("KV tokens", [(64 * c, (64, 64 * c, [])) for c in range(64, 8192, 256)]),
    ):
        x, y = np.array([n for n, _ in axis], dtype=float), np.array([times.batch(*case) for _, case in axis])
        slope, base = np.polyfit(x, y, 1)
        lone[name] = 1 - ((slope * x + base - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    points = sorted(zip(seconds * 1000, columns @ fitted * 1000, strict=True))
    chart = lines(
        "Fitted batch time",
        "table, ms",
        "four terms, ms",
        {"fit": points, "equal": [(points[0][0],) * 2, (points[-1][0],) * 2]},
    )
    return Finding(
        "holds" if r2 > 0.99 and min(lone.values()) > 0.99 else "holds in part",
        f"Qwen3-8B on an H100: R² {r2:.4f} over 400 batches, error {np.abs(error).mean():.1%} on average and "
        f"{np.abs(error).max():.0%} at most; one term alone: "
        + ", ".join(f"{name} R² {value:.4f}" for name, value in lone.items())
        + f"; {1e3 * fitted[0]:.2f} ms + {1e6 * fitted[1]:.2f} µs a token + {1e9 * fitted[2]:.2f} ns a KV token "
        f"+ {1e9 * fitted[3]:.3f} ns a pair",
        {"infermax-linear.svg": chart},
    )


def host_can_overlap() -> Finding:
    """IM14."""
    lengths = Both(RangeRatio(256, 0.5), RangeRatio(128, 0.5))
    workload: Workload = generate(AllAtOnce(), lengths, 400, seed=1)
    seconds = {}
    for overlapped in (True, False):
        engine = Engine(async_scheduling=overlapped)
        found = simulate(Deployment((Pool(load_model("Qwen/Qwen3-8B"), device("h100"), engine),)), workload).requests
        seconds[overlapped] = float(found.finish.max() - found.arrival.min())
    gain = seconds[False] / seconds[True] - 1
    return Finding(
        "holds" if gain > 0 else "fails",
        f"Qwen3-8B on an H100 with vLLM's host times: without overlap {gain:+.1%} makespan",
    )
