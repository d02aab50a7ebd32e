"""Every writer writes every kind of run, and a notebook has its plots and its page."""

from pathlib import Path

import handmade
import pytest

import windtunnel as wt
from windtunnel.deployment import SLO
from windtunnel.files import write_whole
from windtunnel.metrics import summary, unroll
from windtunnel.report import TEXTS
from windtunnel.report.figures import figures


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ["usual", "rejected", "empty"])
def test_every_writer_writes_every_run(name: str, kind: str, tmp_path: Path) -> None:
    runs = {
        "usual": handmade.preempted(),
        "rejected": handmade.run(
            handmade.requests(arrival=[0.0], status=[1], replica=[-1]), handmade.iterations(), footprint=None
        ),
        "empty": handmade.run(handmade.requests(arrival=[]), handmade.iterations()),
    }
    write_whole(tmp_path / "deep" / "file", TEXTS[name](runs[kind], SLO(ttft=1.0)))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]


LIMITS = SLO(ttft=0.3, tpot=0.05)


@pytest.fixture(scope="module")
def small() -> wt.Run:
    return wt.simulate("Qwen/Qwen3-8B", random_input_len=200, random_output_len=20, num_prompts=40, request_rate=10)


def test_plots_are_those_of_the_page(small: wt.Run) -> None:
    steps = unroll(small)
    drawn = wt.plots(small, LIMITS)
    assert list(drawn) == list(figures(steps, summary(small, LIMITS, steps=steps), LIMITS))
    assert [shape.x0 for shape in drawn["requests-cdf"].layout.shapes] == [0.3]
    assert len(drawn["timeline"].data) == 6


def test_the_page_is_written_whole_or_not_at_all(small: wt.Run, tmp_path: Path) -> None:
    path = wt.report(small, tmp_path / "run.html", LIMITS)
    assert "</html>" in path.read_text(encoding="utf-8")
    with pytest.raises(wt.InputError, match="report"):
        wt.report(small, tmp_path)
