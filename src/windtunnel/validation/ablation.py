"""Ablation: what each modelled cause is worth: switched off, everything is compared again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from windtunnel.overheads import ClientPath, Floats
from windtunnel.perf.corrections import Corrections
from windtunnel.validation.agreement import relative_error, summarise
from windtunnel.validation.comparison import compare
from windtunnel.validation.markdown import per_cent
from windtunnel.validation.recording import Recording
from windtunnel.validation.served import METRICS, replay, simulated
from windtunnel.validation.served_points import Point
from windtunnel.validation.terms import PLAIN, Terms
from windtunnel.workload.columns import Workload

NOTHING = "nothing"


@dataclass(frozen=True)
class AtOnce(ClientPath):
    """The path with a closed loop whose next request is at the engine when the one before it ends."""

    def turnaround(self, workload: Workload, delays: Floats) -> Floats:  # noqa: ARG002
        """None."""
        return np.zeros(len(workload))


CLIENT_PATHS: dict[str, Callable[[ClientPath], ClientPath | None]] = {
    "client_path": lambda _: None,
    "client_turnaround": lambda path: AtOnce(**asdict(path)),
    "client_per_sequence": lambda path: replace(path, per_sequence=0.0),
}
"""The causes that are no part of a batch's time but of what a client sees beside the engine: all of them, then one."""


@dataclass(frozen=True)
class Ablation:
    """Errors without one cause."""

    without: str
    points: int
    served: dict[str, dict[str, float]]
    """ttft and tpot → median_ape, mape and bias over the served points; empty without any."""
    runs: dict[str, dict[str, float]]
    """Recording → relative errors of the mean ttft, tpot and e2el."""


def variants(terms: Terms = PLAIN) -> Iterator[tuple[str, Terms]]:
    """Everything on, then each cause off."""
    yield NOTHING, terms
    for name, without in CLIENT_PATHS.items():
        path = without(terms.overheads.client or ClientPath())
        yield name, replace(terms, client_path=path is not None, overheads=replace(terms.overheads, client=path))
    for cause in fields(Corrections):
        yield cause.name, replace(terms, corrections=terms.corrections.without(cause.name))


def ablate(points: Sequence[Point], recordings: Sequence[Recording], terms: Terms = PLAIN) -> Iterator[Ablation]:
    """Compare again without each cause."""
    for name, without in variants(terms):
        known = simulated([replay(point, without) for point in points])
        served = {
            metric: dict(summarise(np.array([result.error(metric) for result in known]))) for metric in METRICS if known
        }
        yield Ablation(name, len(known), served, {one.name: _errors(one, without) for one in recordings})


def _errors(recording: Recording, terms: Terms) -> dict[str, float]:
    found = compare(recording.measurement, recording.pool(), terms)
    sides = found.measurement.side.latencies, found.simulated.latencies
    return {name: relative_error(sides[0][name]["mean"], sides[1][name]["mean"]) for name in sides[0]}


def ablation_table(found: Sequence[Ablation]) -> str:
    """As Markdown: a line for each cause that was switched off."""
    runs = list(found[0].runs)
    head = ["without"]
    if found[0].points:
        head += [f"{metric} {name}" for metric in METRICS for name in ("median APE", "bias")]
    head += [f"{run}: {name}" for run in runs for name in found[0].runs[run]]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for one in found:
        cells = [one.without.replace("_", " ")]
        for metric in METRICS if one.served else ():
            cells += [per_cent(one.served[metric]["median_ape"]), per_cent(one.served[metric]["bias"], True)]
        cells += [per_cent(error, True) for run in runs for error in one.runs[run].values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
