"""The public names: all there, typed, lazily imported, and not shadowed by the modules they live in."""

import ast
import inspect
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import windtunnel as wt

SOURCE = Path(wt.__file__).read_text(encoding="utf-8")


def test_every_public_name_exists() -> None:
    for name in wt.__all__:
        assert getattr(wt, name) is not None
    assert set(wt.__all__) <= set(dir(wt))


def test_type_checkers_and_python_see_the_same_names() -> None:
    branch = next(node for node in ast.parse(SOURCE).body if isinstance(node, ast.If))
    typed = {alias.name for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == set(wt.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="simulat"):
        wt.simulat  # noqa: B018


@pytest.mark.parametrize("first", ["windtunnel.simulate", "windtunnel.cli.run", "windtunnel"])
def test_simulate_is_the_function_whatever_was_imported_first(first: str) -> None:
    code = f"import {first}\nimport windtunnel.simulate\nassert type(windtunnel.simulate).__name__ == 'function'"
    subprocess.run((sys.executable, "-c", code), check=True)


WORDS: dict[str, Any] = {
    "device": "h100", "random_input_len": 200, "random_output_len": 20, "num_prompts": 40, "request_rate": 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def run() -> wt.Run:
    return wt.simulate("Qwen/Qwen3-8B", **WORDS)


def test_one_line_is_a_run_of_the_same_words(run: wt.Run) -> None:
    scenario = wt.Scenario()
    again = wt.simulate(scenario, model="Qwen/Qwen3-8B", **WORDS)
    assert np.array_equal(again.requests.finish, run.requests.finish)
    pool = wt.Pool(wt.load_model("Qwen/Qwen3-8B"), wt.device("h100"))
    load = wt.Load(random_input_len=200, random_output_len=20, num_prompts=40, request_rate=10)
    by_objects = wt.simulate(wt.Deployment((pool,)), load.workload())
    assert np.array_equal(by_objects.requests.finish, run.requests.finish)
    other = wt.simulate("Qwen/Qwen3-8B", seed=1, **WORDS)
    assert not np.array_equal(other.requests.arrival, run.requests.arrival)


def test_the_name_of_a_trace_will_do_for_a_workload() -> None:
    pool = wt.Pool(wt.load_model("Qwen/Qwen3-8B"), wt.device("h100"))
    by_object = wt.simulate(wt.Deployment((pool,)), wt.builtin("alpaca"))
    for run in (
        wt.simulate(wt.Deployment((pool,)), "alpaca"),
        wt.simulate("Qwen/Qwen3-8B", "alpaca", device="h100"),
    ):
        assert np.array_equal(run.requests.finish, by_object.requests.finish)
    with pytest.raises(wt.InputError, match="did you mean 'azure-conv'"):
        wt.simulate(wt.Deployment((pool,)), "azure-con")


def test_a_wrong_word_is_named() -> None:
    with pytest.raises(wt.InputError, match="did you mean 'device'"):
        wt.simulate("Qwen/Qwen3-8B", devise="h100")
    with pytest.raises(wt.InputError, match="request_rate: is of a load, and workload is one already"):
        wt.simulate("Qwen/Qwen3-8B", wt.builtin("azure-conv"), request_rate=8)
    with pytest.raises(wt.InputError, match="workload is missing"):
        wt.simulate(wt.Scenario().deployment())  # type: ignore[call-overload]


class Tags(HTMLParser):
    """Whether every element is closed where it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002 - the signature of every parser's
        """It is open now."""
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """It must be the last one that was opened."""
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")


def unclosed(text: str) -> list[str]:
    """The elements that are not closed, or in the wrong place."""
    tags = Tags()
    tags.feed(text)
    tags.close()
    return tags.wrong + tags.open


def test_what_is_printed_in_a_notebook_is_short(run: wt.Run) -> None:
    assert repr(run) == "Run(Qwen/Qwen3-8B on 1 × H100 SXM, vllm-0.32; random: 40 requests, 40 finished)"
    assert repr(run.requests).startswith("Requests(40 rows: id, arrival, prompt_tokens,")
    result = wt.summary(run, wt.SLO(ttft=9.0))
    assert "40 of 40 finished" in repr(result)
    assert "attainment 100.0 %" in repr(result)
    assert result._repr_html_().count("<tr>") == 8
    assert repr(result.latencies["ttft"]).startswith("Distribution(40 values: mean")
    for thing in (result, *vars(result).values(), run, *vars(run).values()):
        if hasattr(thing, "_repr_html_"):
            assert unclosed(thing._repr_html_()) == []
    things = (run, run.requests, run.iterations, run.stalls, result, wt.builtin("azure-conv", num_requests=9))
    assert max(len(repr(thing)) for thing in things) < 300


def test_tables_are_data_frames_where_pandas_is(run: wt.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = SimpleNamespace(DataFrame=dict)  # what pandas would be given
    monkeypatch.setitem(sys.modules, "pandas", frames)
    requests = run.requests.to_pandas()
    assert requests["status"].tolist() == ["finished"] * 40
    assert np.array_equal(requests["finish"], run.requests.finish)
    assert set(run.iterations.to_pandas()) >= {"start", "steps", "decodes"}
    rows = list(run.requests)  # as pandas.DataFrame(run.requests) reads them
    assert len(rows) == len(run.requests) == 40
    assert rows[7] == {name: column[7].item() for name, column in requests.items() if column is not None}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(wt.InputError, match="pandas is not installed"):
        run.requests.to_pandas()


def test_names_do_where_a_name_will_do() -> None:
    named = wt.Deployment(wt.Pool("Qwen/Qwen3-8B", "h100"))  # type: ignore[arg-type]
    assert named.pools == (wt.Pool(wt.load_model("Qwen/Qwen3-8B"), wt.device("h100")),)
    with pytest.raises(wt.InputError, match="unknown device 'h1000'"):
        wt.Pool("Qwen/Qwen3-8B", "h1000")  # type: ignore[arg-type]


def test_tab_completes_the_words_of_a_run() -> None:
    """Notebooks ask the signature."""
    words = inspect.signature(wt.simulate).parameters
    assert list(words)[:3] == ["what", "workload", "seed"] and "model" not in words
    assert words["tensor_parallel_size"].annotation is int
    assert (
        words.keys() >= {"request_rate", "goodput", "random_input_len"} <= inspect.signature(wt.grid).parameters.keys()
    )


def test_a_grid_is_a_row_for_each_combination() -> None:
    pytest.importorskip("pandas")
    found = wt.grid(
        "Qwen/Qwen3-0.6B",
        max_num_seqs=[4, 8],
        request_rate=[2, 20],
        random_input_len=50,
        num_prompts=20,
        perf="roofline",
    )
    assert len(found) == 4 and found.columns[:2].tolist() == ["max_num_seqs", "request_rate"]
    rows = found.to_dict("records")
    assert [(row["max_num_seqs"], row["request_rate"]) for row in rows] == [(4, 2), (4, 20), (8, 2), (8, 20)]
    assert all(row["requests.finished"] == 20 and row["ttft.p99"] > 0 for row in rows)
    with pytest.raises(wt.InputError, match="no axis"):
        wt.grid("Qwen/Qwen3-0.6B", num_prompts=20)


def test_limits_may_be_a_mapping() -> None:
    run = wt.simulate("Qwen/Qwen3-0.6B", random_input_len=50, num_prompts=5, perf="roofline")
    assert wt.summary(run, {"ttft": 1.0}).attainment == wt.summary(run, wt.SLO(ttft=1.0)).attainment
