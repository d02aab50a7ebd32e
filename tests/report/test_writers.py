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


def test_a_run_draws_itself_in_a_notebook(small: wt.Run, tmp_path: Path) -> None:
    assert small.plot("breakdown").to_json() == wt.plots(small)["breakdown"].to_json()
    with pytest.raises(wt.InputError, match="unknown plot 'breakdwn': did you mean 'breakdown'"):
        small.plot("breakdwn")
    assert (
        small.report(tmp_path / "page.html", LIMITS).read_text()
        == wt.report(small, tmp_path / "2.html", LIMITS).read_text()
    )
    shown = small._repr_html_()
    assert shown.count('<div class="card">') == 11
    assert "First token, median" in shown and "Cost / M output tokens" in shown


def test_objects_say_what_they_are_in_a_line(small: wt.Run) -> None:
    pool = wt.Pool(wt.load_model("Qwen/Qwen3-8B"), wt.device("h100"), replicas=2)
    assert repr(pool) == "Pool(Qwen/Qwen3-8B on 2 replicas of 1 × H100 SXM, vllm-0.32)"
    assert (
        repr(wt.Deployment((pool,)))
        == "Deployment(Qwen/Qwen3-8B on 2 replicas of 1 × H100 SXM, vllm-0.32; round_robin)"
    )
    assert repr(pool.model) == "Model(Qwen/Qwen3-8B: Qwen3ForCausalLM, 36 layers, bfloat16)"
    assert repr(wt.bands(small)).startswith("Bands(means on a real server: ttft ")


def test_a_summary_is_a_document_and_a_table(small: wt.Run) -> None:
    found = wt.summary(small, {"ttft": 0.3})
    assert found.to_dict() == wt.summary_json(found)
    frame = found.to_pandas()
    assert frame.loc["ttft", "p99"] == found.latencies["ttft"].percentile(99)


def test_what_cannot_be_simulated_says_what_can() -> None:
    pool, load = wt.Pool(wt.load_model("Qwen/Qwen3-8B"), wt.device("h100")), wt.builtin("azure-conv")
    with pytest.raises(wt.InputError, match="must be a model's name, a Scenario or a Deployment"):
        wt.simulate(pool.model)  # type: ignore[call-overload]
    with pytest.raises(wt.InputError, match="unknown argument 'schedular': did you mean 'scheduler'"):
        wt.simulate(wt.Deployment((pool,)), load, schedular=1)  # type: ignore[call-overload]
