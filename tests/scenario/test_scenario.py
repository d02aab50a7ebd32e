"""Scenarios: a file says the same as flags, and every word leads to one field."""

from pathlib import Path

import pytest

from windtunnel.deployment import Engine
from windtunnel.errors import InputError
from windtunnel.scenario import MAIN_JOB, Goals, Scenario, Server, load_scenario, read_scenario, vary, words_of
from windtunnel.scenario.load_flags import Load
from windtunnel.scenario.scenario import places


def write(folder: Path, text: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_words_are_unique_and_vllms() -> None:
    assert {"tensor_parallel_size", "max_num_seqs", "engine", "trace", "goodput", "replicas"} <= set(places())
    assert len(set(places().values())) == len(places())


def test_a_file_is_a_scenario(tmp_path: Path) -> None:
    text = """
    model: Qwen/Qwen3-8B
    tensor-parallel-size: 2
    engine: vllm-0.32
    replicas: 3
    router: random
    request_rate: 4
    random_input_len: 100
    goodput: ttft:300 tpot:50
    slo: [ttft_p99=0.3]
    """
    assert load_scenario(write(tmp_path, text)) == Scenario(
        Server("Qwen/Qwen3-8B", engine=Engine(tensor_parallel_size=2)),
        replicas=3,
        router="random",
        load=Load(request_rate=4.0, random_input_len=100),
        goals=Goals(goodput=("ttft:300", "tpot:50"), slo=("ttft_p99=0.3",)),
    )


def test_a_file_without_a_model_is_the_main_job(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 3")
    assert read_scenario(path) == {"seed": 3}
    assert load_scenario(path) == Scenario(Server(engine=Engine(tensor_parallel_size=2)), load=Load(seed=3))
    assert load_scenario(path).server.model == MAIN_JOB["model"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor_paralel_size: 2", "did you mean 'tensor_parallel_size'"),
        ("tensor_parallel_size: 1.5", "tensor_parallel_size=1.5"),
        ("perf: mesured", "perf='mesured'"),
        ("enforce_eager: 3", "enforce_eager=3"),
        ("model: [", "not YAML"),
        ("model", "must be lines"),
        ("", "must be lines"),
        ("model: !!python/object:os.system x", "not YAML"),
        ("max_num_seqs: 0", "max_num_seqs=0: must be an integer ≥ 1"),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_scenario(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_scenario(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("goals", "message"),
    [
        ({"goodput": ("ttft",)}, "ttft:300"),
        ({"slo": ("ttft=1",)}, "ttft_p99"),
        ({"attainment": 0.9}, "add goodput"),
        ({"attainment": 1.1, "goodput": ("ttft:1",)}, "must be a share"),
    ],
)
def test_goals_that_mean_nothing_are_refused(goals: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Goals(**goals)  # type: ignore[arg-type]


def test_limits_are_seconds() -> None:
    limits = Goals(goodput=("ttft:300",), slo=("tpot_p90=0.05",)).limits()
    assert limits.ttft == 0.3
    assert limits.percentiles[0].seconds == 0.05


def test_a_deployment_has_its_replicas() -> None:
    deployment = Scenario(Server("Qwen/Qwen3-8B"), replicas=3, router="random").deployment()
    assert (deployment.replicas, deployment.gpus, deployment.router) == (3, 3, "random")


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[h100_sxm]\nmemory_gib = 40\nusable_memory_gib = 40\n", encoding="utf-8")
    pool = Server("Qwen/Qwen3-8B", devices_file=tmp_path / "own.toml").pool()
    assert pool.device.memory_bytes == 40 * 2**30


def test_a_varied_scenario_has_other_values_for_those_words_only() -> None:
    base = Scenario(Server("Qwen/Qwen3-8B"), load=Load(seed=4, request_rate=2.0))
    varied = vary(base, {"max-num-seqs": "64", "request_rate": "inf", "slo": "ttft_p99=0.3", "async_scheduling": "no"})
    changed = {word: value for word, value in words_of(varied).items() if value != words_of(base)[word]}
    assert changed == {
        "max_num_seqs": 64, "request_rate": float("inf"), "slo": ("ttft_p99=0.3",), "async_scheduling": False,
    }  # fmt: skip
    assert vary(base, {}) == base


def test_lists_may_be_one_line() -> None:
    varied = vary(Scenario(), {"cudagraph_capture_sizes": "1 2 4", "goodput": "ttft:300 tpot:50"})
    assert varied.server.engine.cudagraph_capture_sizes == (1, 2, 4)
    assert varied.goals.goodput == ("ttft:300", "tpot:50")


def test_every_word_can_be_varied_to_itself() -> None:
    base = Scenario(Server("Qwen/Qwen3-8B"))
    for word, value in words_of(base).items():
        assert vary(base, {word: value}) == base


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"max_num_seq": 4}, "here: unknown key 'max_num_seq': did you mean 'max_num_seqs'"),
        ({"max_num_seqs": "many"}, "here: max_num_seqs='many'"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be an integer ≥ 1"),
    ],
)
def test_wrong_words_are_refused_with_their_origin(words: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        vary(Scenario(), words, "here: ")


def test_nodes_of_another_size() -> None:
    """8 GPUs in nodes of 4: sums go over the network; a rack stays one domain of links."""
    gpu = Server(device="h100", gpus_per_node=4).gpu()
    assert (gpu.gpus_per_node, gpu.gpus_per_domain) == (4, 4)
    assert Server(device="h100").gpu().gpus_per_node == 8
    rack = Server(device="gb200", gpus_per_node=2).gpu()
    assert (rack.gpus_per_node, rack.gpus_per_domain) == (2, 72)
    with pytest.raises(InputError, match="gpus_per_node=0: must be ≥ 1"):
        Server(gpus_per_node=0).gpu()
