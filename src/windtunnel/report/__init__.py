"""Report: a run as a page, a trace, and the files of other tools. Each writer leaves a whole file or none."""

from collections.abc import Callable
from pathlib import Path

from windtunnel.deployment import SLO
from windtunnel.metrics import summary, unroll
from windtunnel.report.comparison import comparison_page, write_comparison
from windtunnel.report.html import html_report
from windtunnel.report.perfetto import perfetto, write_perfetto
from windtunnel.report.prometheus import prometheus, write_prometheus
from windtunnel.report.vllm_bench import vllm_bench, write_vllm_bench
from windtunnel.report.write import write_whole
from windtunnel.simulate.run import Run

__all__ = [
    "WRITERS",
    "comparison_page",
    "html_report",
    "perfetto",
    "prometheus",
    "vllm_bench",
    "write_comparison",
    "write_perfetto",
    "write_prometheus",
    "write_vllm_bench",
]


def _report(run: Run, path: Path, slo: SLO | None = None) -> None:
    steps = unroll(run)
    write_whole(path, [html_report(steps, summary(run, slo, steps=steps), slo)])


def _perfetto(run: Run, path: Path, slo: SLO | None = None) -> None:  # noqa: ARG001 - a trace has no limits
    write_perfetto(path, perfetto(unroll(run)))


def _save_result(run: Run, path: Path, slo: SLO | None = None) -> None:
    steps = unroll(run)
    write_vllm_bench(path, vllm_bench(steps, summary(run, slo, steps=steps)))


def _prometheus(run: Run, path: Path, slo: SLO | None = None) -> None:  # noqa: ARG001 - counters have no limits
    write_prometheus(path, unroll(run))


WRITERS: dict[str, Callable[[Run, Path, SLO | None], None]] = {
    "report": _report,
    "perfetto": _perfetto,
    "save_result": _save_result,
    "prometheus": _prometheus,
}
"""Command-line option → function that writes the file of a run."""
