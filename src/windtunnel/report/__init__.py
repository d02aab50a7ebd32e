"""Report: a run as a page, a trace, and the files of other tools."""

import json
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from windtunnel.deployment import SLO
from windtunnel.files import require_writable, write_whole
from windtunnel.hardware import load_devices
from windtunnel.metrics import summary, unroll
from windtunnel.report.html import html_report, key_figures
from windtunnel.report.manifests.formats import write_manifests
from windtunnel.report.manifests.servers import Node
from windtunnel.report.perfetto import perfetto, trace_text
from windtunnel.report.planner_profile import write_planner_profile
from windtunnel.report.prometheus import prometheus
from windtunnel.report.vllm_bench import vllm_bench
from windtunnel.simulate.run import Run

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "FOLDERS",
    "TEXTS",
    "cards",
    "html_report",
    "perfetto",
    "plots",
    "prometheus",
    "report",
    "vllm_bench",
    "write_launch",
]


def plots(run: Run, slo: SLO | None = None) -> "dict[str, Figure]":
    """The plots of a run's page as plotly figures, for notebooks: ``plots(run)["timeline"]``.

    Distributions of latencies with the limits of ``slo`` (requests-cdf, tokens-cdf), queues and throughput over time
    (timeline), where the time goes (breakdown), prompts, outputs and arrivals; first-token where prefill and decode are
    disaggregated.
    """
    from plotly.graph_objects import Figure

    from windtunnel.report.figures import figures

    steps = unroll(run)
    found = figures(steps, summary(run, slo, steps=steps), slo)
    for layout in (each["layout"] for each in found.values()):
        for marks in ("shapes", "annotations"):  # whose places among the page's colours plotly does not know
            layout[marks] = [{key: mark[key] for key in mark if key != "meta"} for mark in layout.get(marks, ())]
    return {name: Figure(each) for name, each in found.items()}


CARDS = """
.windtunnel .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 10px; }
.windtunnel .card { border: 1px solid #8886; border-radius: 10px; padding: 10px 14px; }
.windtunnel .name, .windtunnel .more { font-size: 12px; opacity: 0.75; }
.windtunnel .value { font-size: 22px; font-weight: 600; }
"""
"""How cards look outside of a page of ours."""


def cards(run: Run) -> str:
    """The key figures of a run as a fragment of HTML, for notebooks."""
    steps = unroll(run)
    return f"<div class='windtunnel'><style>{CARDS}</style>{key_figures(summary(run, steps=steps), None, {})}</div>"


def report(run: Run, path: str | PathLike[str], slo: SLO | None = None) -> Path:
    """Write a run's page, one HTML file with tables and plots that needs no network; its path.

    Raises:
        InputError: the file cannot be written.
    """
    require_writable("report", Path(path), ours=True)
    write_whole(Path(path), _report(run, slo))
    return Path(path)


def _report(run: Run, slo: SLO | None) -> Iterable[str]:
    steps = unroll(run)
    return [html_report(steps, summary(run, slo, steps=steps), slo)]


def _save_result(run: Run, slo: SLO | None) -> Iterable[str]:
    steps = unroll(run)
    return [json.dumps(vllm_bench(steps, summary(run, slo, steps=steps)), allow_nan=False)]


TEXTS: dict[str, Callable[[Run, SLO | None], Iterable[str]]] = {
    "report": _report,
    "perfetto": lambda run, _: trace_text(perfetto(unroll(run))),
    "save_result": _save_result,
    "prometheus": lambda run, _: prometheus(unroll(run)),
}
"""Command-line option → the text of its file of a run, in parts."""


def write_launch(folder: Path, run: Run, kind: str = "scripts") -> None:
    """Write what starts a run's deployment, in one of the formats. Raises InputError where that cannot be."""
    deployment, sizes = run.manifest["deployment"], [pool["gpus_per_node"] for pool in run.manifest["pools"]]
    names = [str(pool["device"]) for pool in deployment["pools"]]
    known = {name: device.vendor for name, device in load_devices().items()}
    nodes = [Node(name, known.get(name, ""), size) for name, size in zip(names, sizes, strict=True)]
    write_manifests(folder, deployment, nodes, kind)


FOLDERS: dict[str, Callable[[Path, Run], None]] = {"planner_profile": write_planner_profile}
"""Command-line option → what writes its folder of a run."""
