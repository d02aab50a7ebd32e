"""What a notebook draws and writes of a run."""

from pathlib import Path

import pytest

import windtunnel as wt
from windtunnel.metrics import summary, unroll
from windtunnel.report.figures import figures

LIMITS = wt.SLO(ttft=0.3, tpot=0.05)


@pytest.fixture(scope="module")
def run() -> wt.Run:
    return wt.simulate("Qwen/Qwen3-8B", random_input_len=200, random_output_len=20, num_prompts=40, request_rate=10)


def test_plots_are_those_of_the_page(run: wt.Run) -> None:
    steps = unroll(run)
    drawn = wt.plots(run, LIMITS)
    assert list(drawn) == list(figures(steps, summary(run, LIMITS, steps=steps), LIMITS))
    assert [shape.x0 for shape in drawn["requests-cdf"].layout.shapes] == [0.3]
    assert len(drawn["timeline"].data) == 6


def test_the_page_is_written_whole_or_not_at_all(run: wt.Run, tmp_path: Path) -> None:
    path = wt.report(run, tmp_path / "run.html", LIMITS)
    assert "</html>" in path.read_text(encoding="utf-8")
    with pytest.raises(wt.InputError, match="report"):
        wt.report(run, tmp_path)
