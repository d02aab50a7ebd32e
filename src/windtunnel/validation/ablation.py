"""Ablation: what each modelled cause is worth, by the errors without it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.perf.corrections import Corrections
from windtunnel.simulate.overheads import ClientPath, Floats
from windtunnel.validation.comparison import PLAIN, Options, compare, relative_error, summarise
from windtunnel.validation.markdown import per_cent
from windtunnel.validation.measured_run import MeasuredRun
from windtunnel.validation.served_points import Served
from windtunnel.validation.served_replay import METRICS, replay_all, simulated
from windtunnel.workload.columns import Workload

NOTHING = "nothing"


@dataclass(frozen=True)
class AtOnce(ClientPath):
    """A client's path with a closed loop whose next request reaches the engine as the previous one ends."""

    def turnaround(self, workload: Workload, delays: Floats) -> Floats:  # noqa: ARG002
        """Zero for every request."""
        return np.zeros(len(workload))


CLIENT_PATHS: dict[str, Callable[[ClientPath], ClientPath | None]] = {
    "client_path": lambda _: None,
    "client_turnaround": lambda path: AtOnce(**asdict(path)),
    "client_per_sequence": lambda path: replace(path, per_sequence=0.0),
}
"""Corrections outside the batch times, in what a client sees: all of them off, then one at a time."""


@dataclass(frozen=True)
class Ablation:
    """Errors without one cause."""

    without: str
    points: int
    served: dict[str, dict[str, float]]
    """ttft and tpot → median_ape, mape and bias over the served points; empty without any."""
    runs: dict[str, dict[str, float]]
    """Measured run → relative errors of the mean ttft, tpot and e2el."""


def variants(options: Options = PLAIN) -> Iterator[tuple[str, Options]]:
    """Everything on, then each cause off."""
    yield NOTHING, options
    for name, without in CLIENT_PATHS.items():
        path = without(options.overheads.client or ClientPath())
        yield name, replace(options, client_path=path is not None, overheads=replace(options.overheads, client=path))
    for cause in fields(Corrections):
        yield cause.name, replace(options, corrections=options.corrections.without(cause.name))


def ablate(points: Sequence[Served], runs: Sequence[MeasuredRun], options: Options = PLAIN) -> Iterator[Ablation]:
    """Compare again, each time without one cause."""
    for name, without in variants(options):
        known = simulated(replay_all(points, without))
        served = {
            metric: dict(summarise(np.array([result.error(metric) for result in known]))) for metric in METRICS if known
        }
        yield Ablation(name, len(known), served, {one.name: _errors(one, without) for one in runs})


def _errors(run: MeasuredRun, options: Options) -> dict[str, float]:
    found = compare(run.measurement, run.pool(), options)
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
