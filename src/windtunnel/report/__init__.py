"""Report: a run as a page, a trace, and the files of other tools."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from windtunnel.deployment import SLO
from windtunnel.metrics import summary, unroll
from windtunnel.report.html import html_report
from windtunnel.report.launch_files import write_launch_files
from windtunnel.report.perfetto import perfetto, trace_text
from windtunnel.report.planner_profile import write_planner_profile
from windtunnel.report.prometheus import prometheus
from windtunnel.report.vllm_bench import vllm_bench
from windtunnel.simulate.run import Run

__all__ = ["FOLDERS", "TEXTS", "html_report", "perfetto", "prometheus", "vllm_bench"]


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


def _launch(folder: Path, run: Run) -> None:
    per_node = [pool["gpus_per_node"] for pool in run.manifest["pools"]]
    write_launch_files(folder, run.manifest["deployment"], per_node)


FOLDERS: dict[str, Callable[[Path, Run], None]] = {"launch": _launch, "planner_profile": write_planner_profile}
"""Command-line option → what writes its folder of a run."""
