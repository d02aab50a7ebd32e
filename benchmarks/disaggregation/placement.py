"""Which layouts carry most per GPU, and when it pays to separate the stages (checklist 369, 375, 376, 380, 425)."""

from collections.abc import Callable
from functools import cache

from benchmarks.charts import lines
from benchmarks.disaggregation.machine import Side, apart, goodput, together
from benchmarks.page import Findings, table
from windtunnel import Workload, generate
from windtunnel.workload import Both, Gamma, Lengths, Lognormal

GPUS = 4
README = (0.2, 0.1)
"""Limits of TTFT and TPOT (s) in simdistserve's example, met by 90 % of the requests."""
TIGHTEST = 0.024
"""Of TPOT: a lone decode takes 22 ms on one GPU."""
SCALES = (1.0, 1.25, 1.5, 2.0, 3.0, 8.0)
"""Of both limits."""
REQUESTS = 600
KINDS: dict[str, tuple[Lengths, float]] = {
    "chat": (Both(Lognormal(755.5, 0.6, 1500), Lognormal(200.3, 1.1, 500)), 0.2),
    "code": (Both(Lognormal(171.3, 0.5, 1000), Lognormal(98.2, 0.8, 500)), 0.1),
    "summaries": (Both(Lognormal(1738.3, 0.1, 1900), Lognormal(90.7, 0.5, 140)), 0.5),
}
"""Means of ShareGPT, HumanEval and LongBench in DistServe's table 2, and the tightest limit of TTFT (s); the spreads
are assumed."""


def load(kind: str) -> Callable[[float], Workload]:
    """Requests of a kind at any rate."""
    lengths, _ = KINDS[kind]
    return lambda rate: generate(Gamma(rate), lengths, REQUESTS, seed=1)


def layouts(most: int) -> dict[str, tuple[Side, ...]]:
    """Every prefill and decode side with at most so many GPUs."""
    sides = [(tp, count) for tp in (1, 2, 4) for count in range(1, most // tp + 1)]
    return {
        f"prefill {p} × TP {a}, decode {d} × TP {b}": apart((a, p), (b, d))
        for a, p in sides
        for b, d in sides
        if a * p + b * d <= most
    }


@cache
def best(kind: str, ttft: float, tpot: float, separate: bool) -> tuple[float, str]:
    """(requests/s per GPU, layout) of the best one on at most GPUS."""
    mixed = {f"TP {tp}": together(tp) for tp in (1, 2, 4)}
    return max(
        (goodput(sides, ttft, tpot, load=load(kind)), name)
        for name, sides in (layouts(GPUS) if separate else mixed).items()
    )


def findings() -> Findings:
    """The search of simdistserve's example, and the gain of separate stages over the limit of TPOT."""
    single = {name: sides for name, sides in layouts(GPUS).items() if all(side.replicas == 1 for side in sides)}
    searched = {name: goodput(sides, *README, load=load("chat")) for name, sides in single.items()}
    rows = sorted(((name, value) for name, value in searched.items()), key=lambda row: -row[1])
    series, gains = {}, {}
    for kind, (_, ttft) in KINDS.items():
        points = []
        for scale in SCALES:
            mixed, separate = (best(kind, scale * ttft, scale * TIGHTEST, each)[0] for each in (False, True))
            if mixed and separate:
                points.append((scale, separate / mixed))
        series[kind], gains[kind] = points, max(gain for _, gain in points)
    four = [goodput(sides, *README, load=load("chat")) for sides in (together(1), together(2), together(4))]
    facts = {
        "table": table(("layout", "requests/s per GPU"), rows[:6]),
        "winner": rows[0][0].replace("1 × ", ""),
        "goodput": rows[0][1],
        "chat": gains["chat"],
        "code": gains["code"],
        "summaries": gains["summaries"],
        **{f"{kind}_loose": points[-1][1] for kind, points in series.items()},
        "spread": max(four) / min(four),
        "tightest": 1e3 * TIGHTEST,
        "widest": SCALES[-1],
    }
    chart = lines("Goodput per GPU: separate / together", "scale of both limits", "ratio", series, log_x=True)
    return Findings(facts, {"placement.svg": chart})
