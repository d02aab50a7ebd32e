"""A file that crosses words of run: its cases, and what it must not hold."""

from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.scenario.matrix import Matrix, read_matrix

FILE = """
model: Qwen/Qwen3-8B
num_prompts: 20
seeds: 2
matrix:
  load:
    chat: {trace: azure-conv}
    small: "--isl 100 --osl 20"
  device: [h100, a100]
  layout:
    one: {}
    two: {tensor_parallel_size: 2}
exclude:
  - {device: a100, layout: [two]}
"""


def read(tmp_path: Path, text: str, name: str = "bench.yaml") -> Matrix:
    path = tmp_path / name
    path.write_text(text)
    return read_matrix(path)


def test_the_product_without_what_is_excluded(tmp_path: Path) -> None:
    found = read(tmp_path, FILE)
    assert found.axes == ("load", "device", "layout")
    assert [case.names for case in found.cases] == [
        (load, device, layout)
        for load in ("chat", "small")
        for device in ("h100", "a100")
        for layout in ("one", "two")
        if (device, layout) != ("a100", "two")
    ]
    assert found.load_axes == (0,)
    assert found.load_names(found.cases[1]) == ("chat",)
    assert (found.seeds, found.exclude_warmup, found.endpoint) == (2, False, None)


def test_a_case_is_the_scenario_of_its_words(tmp_path: Path) -> None:
    found = read(tmp_path, FILE)
    scenario = found.cases[-1].scenario
    assert scenario is not None
    assert scenario.server.model == "Qwen/Qwen3-8B"
    assert (scenario.server.device, scenario.load.random_input_len, scenario.load.num_prompts) == ("a100", 100, 20)
    two = next(case for case in found.cases if case.names[2] == "two").scenario
    assert two is not None
    assert two.server.engine.tensor_parallel_size == 2


def test_without_a_model_it_is_the_main_job(tmp_path: Path) -> None:
    scenario = read(tmp_path, "matrix: {device: [h100, h200]}").cases[0].scenario
    assert scenario is not None
    assert (scenario.server.model, scenario.server.engine.tensor_parallel_size) == ("Qwen/Qwen3-32B", 2)


def test_toml_says_the_same(tmp_path: Path) -> None:
    toml = """
    model = "Qwen/Qwen3-8B"
    num_prompts = 20
    seeds = 2
    exclude = [{device = "a100", layout = ["two"]}]
    [matrix]
    load = {chat = {trace = "azure-conv"}, small = "--isl 100 --osl 20"}
    device = ["h100", "a100"]
    layout = {one = {}, two = {tensor_parallel_size = 2}}
    """
    assert read(tmp_path, toml, "bench.toml") == read(tmp_path, FILE)


def test_words_that_contradict_each_other_are_a_case_that_cannot_run(tmp_path: Path) -> None:
    found = read(tmp_path, "random_input_len: 100\nmatrix: {load: {random: {}, traced: {trace: azure-conv}}}")
    assert found.cases[0].scenario is not None
    assert found.cases[1].scenario is None
    assert "trace" in found.cases[1].refusal


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: Qwen/Qwen3-8B", "matrix: must say what is varied"),
        ("matrix: []", "matrix: must say what is varied"),
        ("matrix: {device: h100}", "must be a list of values"),
        ("matrix: {device: []}", "must be a list of values"),
        ("matrix: {devise: [h100]}", "did you mean 'device'?"),
        ("matrix: {device: [h100, h100]}", "given twice"),
        ("matrix: {replicas: [many]}", "replicas='many'"),
        ("matrix: {load: {a: 3}}", "must be words and values"),
        ("matrix: {load: {a: {tracee: x}}}", "did you mean 'trace'?"),
        ("matrix: {device: [h100], other: {a: {device: a100}}}", "both 'device' and 'other' set device"),
        ("matrx: {device: [h100]}", "did you mean 'matrix'?"),
        ("seeds: 0\nmatrix: {device: [h100]}", "seeds=0"),
        ("seeds: few\nmatrix: {device: [h100]}", "seeds='few'"),
        ("endpoint_model: x\nmatrix: {device: [h100]}", "of which server?"),
        ("matrix: {device: [h100]}\nexclude: {device: h100}", "must be a list of axes"),
        ("matrix: {device: [h100]}\nexclude: [{devise: h100}]", "unknown axis 'devise'"),
        ("matrix: {device: [h100]}\nexclude: [{device: h10}]", "did you mean 'h100'?"),
        ("matrix: {device: [h100]}\nexclude: [{device: h100}]", "leaves no case"),
        ("matrix: {device: [h100, a100], replicas: [1, 2]}\nexclude: [{device: h100}, {device: h100}, {}]", "must be"),
        ("matrix: {engine: [vllm-0.3x]}", "unknown engine preset"),
        ("- a", "must be lines of"),
        ("a: [", "not YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_toml(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not TOML"):
        read(tmp_path, "a = ", "bench.toml")


def test_no_millions_of_cases(tmp_path: Path) -> None:
    numbers = list(range(1, 201))
    with pytest.raises(InputError, match="40,000 cases"):
        read(tmp_path, f"matrix: {{replicas: {numbers}, max_num_seqs: {numbers}}}")
