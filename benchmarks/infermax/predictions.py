"""Predictions of output lengths that are wrong, and what that costs each scheduler that uses them.

``python -m benchmarks.infermax.predictions`` writes docs/experiments/predictions.md.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.infermax.machine import measured
from benchmarks.infermax.ours import FOLDER, MACHINE, held_out
from benchmarks.page import table
from windtunnel import Workload
from windtunnel.policy import predictions
from windtunnel.policy.named import PRESETS
from windtunnel.policy.settings import Settings
from windtunnel.policy.unified import OURS_KNOWN, POLICIES

Integers = NDArray[np.int64]
Predictor = Callable[[Integers, np.random.Generator], Integers]
PAGE = Path(__file__).parents[2] / "docs" / "experiments" / "predictions.md"
NAMES = ("300+300 all at once", "1500+150 all at once", "800+400 all at once", "azure-conv at 4.5/s")
"""Held-out workloads in which requests wait: elsewhere no order matters."""
SPREADS = (0.3, 0.6, 1.2)
"""Of the logarithm of predicted by real output."""
CLASS, WRONG = 4, 0.2
"""Each class of outputs is so many times as long as the one before; the share of requests put into another class."""
LONGEST = 12_000


def oracle(output: Integers, rng: np.random.Generator) -> Integers:  # noqa: ARG001
    """The real length."""
    return output


def noisy(spread: float) -> Predictor:
    """As often too long as too short, by a lognormal factor."""

    return lambda output, rng: np.minimum(predictions.noisy(output, spread, rng), LONGEST)


def classwise(wrong: float) -> Predictor:
    """The end of the class that holds the length; for some requests that of a class next to it."""

    return lambda output, rng: np.minimum(predictions.classwise(output, CLASS, wrong, rng), LONGEST)


def shuffled(output: Integers, rng: np.random.Generator) -> Integers:
    """Lengths of other requests: right as a distribution, and of no use for any one."""
    return rng.permutation(output)


PREDICTORS: dict[str, Predictor] = {
    "oracle": oracle,
    **{f"noisy, σ = {spread:g}": noisy(spread) for spread in SPREADS},
    "classes": classwise(0.0),
    f"classes, {WRONG:.0%} wrong": classwise(WRONG),
    "of others": shuffled,
}
"""What each makes of the real outputs."""
SCHEDULERS: dict[str, Settings] = {
    "ours-known": replace(OURS_KNOWN, admission_order="priority"),
    "lightllm": POLICIES["lightllm"],
    "trtllm-guaranteed-no-evict": POLICIES["trtllm-guaranteed-no-evict"],
}
"""Those that use predictions: ours as its order, the others for the memory that they admit by."""
BLIND: dict[str, Settings] = {"ours-unknown": POLICIES["ours-unknown"], "vllm": PRESETS["vllm"]}
"""Those that use none."""


@cache
def workloads() -> dict[str, Workload]:
    """Those that are served."""
    return {name: workload for name, workload in held_out().items() if name in NAMES}


def predicted(workload: Workload, predictor: str) -> Workload:
    """The workload with predictions in it: the order of jobs as priorities, and declared limits to reserve memory by,
    which no real output is above: one that outgrows its prediction is declared as long as it is."""
    lengths = PREDICTORS[predictor](workload.output_tokens, np.random.default_rng(0))
    priority = workload.prompt_tokens + lengths
    return replace(workload, priority=priority, max_tokens=np.maximum(lengths, workload.output_tokens))


def latency(policy: Settings, workload: Workload) -> float:
    """Mean E2E latency (s)."""
    return measured(policy, MACHINE, workload).e2el


def costs(policy: Settings) -> list[float]:
    """Mean latency with each predictor, as a multiple of that with the real lengths: geometric means over workloads."""
    found = []
    for predictor in PREDICTORS:
        pairs = [
            (latency(policy, predicted(one, predictor)), latency(policy, predicted(one, "oracle")))
            for one in workloads().values()
        ]
        found.append(float(np.exp(np.mean([np.log(value / best) for value, best in pairs]))))
    return found


def blind(policy: Settings) -> float:
    """Mean latency without predictions, as a multiple of ours with the real lengths."""
    ratios = [
        latency(policy, one) / latency(SCHEDULERS["ours-known"], predicted(one, "oracle"))
        for one in workloads().values()
    ]
    return float(np.exp(np.mean(np.log(ratios))))


def main() -> None:
    """Write the page."""
    rows = [(name, *(f"{value - 1:+.1%}" for value in costs(policy))) for name, policy in SCHEDULERS.items()]
    others = [(name, f"{blind(policy) - 1:+.1%}") for name, policy in BLIND.items()]
    text = (FOLDER / "predictions.md").read_text(encoding="utf-8")
    costly = table(("mean E2E latency", *PREDICTORS), rows)
    without = table(("without predictions", "above ours-known with real lengths"), others)
    words = {"class_size": CLASS, "wrong": f"{WRONG:.0%}", "workloads": ", ".join(NAMES)}
    PAGE.write_text(text.format(costs=costly, blind=without, **words), encoding="utf-8")


if __name__ == "__main__":
    main()
