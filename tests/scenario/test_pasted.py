"""Launch lines as words of a scenario: one server, equal ones, both sides."""

import pytest

from windtunnel.errors import InputError
from windtunnel.scenario.pasted import read_pasted, scenario_of

PREFILL = "prefill: vllm serve Qwen/Qwen3-8B --max-num-seqs 16"
DECODE = "decode: vllm serve Qwen/Qwen3-8B -tp 2 --max-num-seqs 64"


def test_one_server() -> None:
    pasted = read_pasted(["vllm serve Qwen/Qwen3-8B -tp 2 --port 1"])
    deployment = scenario_of(pasted).deployment()
    assert [(pool.role, pool.replicas, pool.engine.tensor_parallel_size) for pool in deployment.pools] == [
        ("mixed", 1, 2)
    ]
    assert any(remark.startswith("device:") for remark in pasted.remarks())


def test_equal_servers_are_replicas() -> None:
    text = "vllm serve Qwen/Qwen3-8B --port 1 &\nvllm serve Qwen/Qwen3-8B --port 2 &\nwait"
    assert scenario_of(read_pasted([text])).deployment().pools[0].replicas == 2


def test_both_sides_become_pools() -> None:
    pools = scenario_of(read_pasted([PREFILL, DECODE])).deployment().pools
    assert [(pool.role, pool.engine.max_num_seqs, pool.engine.world_size) for pool in pools] == [
        ("prefill", 16, 1),
        ("decode", 64, 2),
    ]


def test_one_side_alone_is_said() -> None:
    pasted = read_pasted([DECODE])
    assert scenario_of(pasted).deployment().pools[0].role == "mixed"
    assert [word.flag for word in pasted.not_simulated] == ["role decode"]
    with pytest.raises(InputError, match="not simulated: role decode"):
        pasted.require_all()


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["vllm serve $MODEL"], "names no model"),
        (["vllm serve A", "vllm serve B"], "servers of A, B"),
        ([PREFILL, DECODE, "vllm serve Qwen/Qwen3-8B"], "roles decode, mixed, prefill"),
    ],
)
def test_lines_that_do_not_belong_together(texts: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_pasted(texts)


def test_a_model_of_the_users_takes_the_place_of_the_lines() -> None:
    assert read_pasted(["vllm serve $MODEL"], "Qwen/Qwen3-8B").words["model"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("label", "name"), [("nvidia-h100-80gb", "h100_sxm"), ("nvidia-l4", "l4"), ("NVIDIA-H200", "h200_sxm")]
)
def test_devices_as_clouds_call_them(label: str, name: str) -> None:
    text = f"# windtunnel: device={label}\nvllm serve Qwen/Qwen3-8B"
    assert scenario_of(read_pasted([text])).deployment().pools[0].device.name == name


def test_a_store_that_is_given_answers_what_the_line_leaves_open() -> None:
    text = 'vllm serve Qwen/Qwen3-8B --kv-transfer-config \'{"kv_connector": "MooncakeStoreConnector"}\''
    pasted = read_pasted([text])
    with pytest.raises(InputError, match="kv_connector"):
        pasted.require_all()
    pasted.with_stores().require_all()
    assert "store" in [word.note for word in pasted.with_stores().used]
