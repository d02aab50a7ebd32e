"""Pools in the words of a run: flags, files and Python say the same; contradictions are named in one line."""

from dataclasses import replace
from pathlib import Path

import pytest

from windtunnel.deployment import HANDOVERS, LINKS, Deployment, Engine, Handover, Link
from windtunnel.errors import InputError
from windtunnel.scenario import Pools, Scenario, Server, load_scenario, vary

SERVER = Server("Qwen/Qwen3-8B", engine=Engine(max_num_seqs=64))


def sizes(deployment: Deployment) -> list[tuple[object, ...]]:
    return [
        (pool.name, pool.role, pool.device.name, pool.replicas, pool.engine.tensor_parallel_size)
        for pool in deployment.pools
    ]


def test_without_words_there_is_one_mixed_pool() -> None:
    (pool,) = Scenario(SERVER, replicas=3).deployment().pools
    assert (pool.role, pool.replicas) == ("mixed", 3)


def test_what_a_pool_does_not_say_is_as_for_the_run() -> None:
    pools = Pools(
        prefill=("tensor_parallel_size=2 device=a100",), decode=("replicas=1 max-num-seqs=32 --enforce-eager",)
    )
    deployment = Scenario(SERVER, replicas=2, pools=pools).deployment()
    assert sizes(deployment) == [("prefill", "prefill", "a100_sxm", 2, 2), ("decode", "decode", "h100_sxm", 1, 1)]
    first, second = (pool.engine for pool in deployment.pools)
    assert (first.max_num_seqs, first.enforce_eager) == (64, False)
    assert (second.max_num_seqs, second.enforce_eager) == (32, True)


def test_a_role_may_have_several_pools() -> None:
    pools = Pools(prefill=("device=h100", "device=a100 name=old"), decode=("",))
    names = [(name, device) for name, _, device, *_ in sizes(Scenario(SERVER, pools=pools).deployment())]
    assert names == [("prefill 1", "h100_sxm"), ("old", "a100_sxm"), ("decode", "h100_sxm")]


def test_unlike_servers_behind_one_router() -> None:
    deployment = Scenario(
        SERVER, pools=Pools(mixed=("device=h100 price_per_hour=2", "device=a100 price_per_hour=1"))
    ).deployment()
    assert [pool.role for pool in deployment.pools] == ["mixed", "mixed"]
    assert deployment.price_per_hour == 3.0


def test_mappings_texts_and_files_say_the_same(tmp_path: Path) -> None:
    text = """
    prefill: {replicas: 2, tensor-parallel-size: 4}
    decode:
      - {device: a100, cudagraph_capture_sizes: [1, 2, 4]}
      - replicas=3
    """
    (tmp_path / "pools.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "whole.yaml").write_text(f"{text}\n    model: Qwen/Qwen3-8B\n    max_num_seqs: 64", encoding="utf-8")
    words = {
        "prefill": "replicas=2 tensor_parallel_size=4",
        "decode": ({"device": "a100", "cudagraph_capture_sizes": (1, 2, 4)}, "--replicas 3"),
    }
    expected = vary(Scenario(SERVER), words).deployment()
    assert len(expected.pools) == 3
    assert expected.pools[1].engine.cudagraph_capture_sizes == (1, 2, 4)
    from_file = Scenario(SERVER, pools=Pools(pools_file=tmp_path / "pools.yaml"))
    assert from_file.deployment().spec() == expected.spec()
    assert load_scenario(tmp_path / "whole.yaml").deployment().spec() == expected.spec()
    fewer = vary(from_file, {"decode": "device=a100"}).deployment()
    assert sizes(fewer) == [("prefill", "prefill", "h100_sxm", 2, 4), ("decode", "decode", "a100_sxm", 1, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"prefill": "replicaz=2", "decode": ""}, "prefill: unknown key 'replicaz': did you mean 'replicas'"),
        ({"prefill": "replicas=two", "decode": ""}, "prefill: replicas='two'"),
        ({"prefill": "replicas=0", "decode": ""}, "prefill: replicas=0: must be an integer ≥ 1"),
        ({"prefill": "two", "decode": ""}, "prefill 'two': 'two': must be word=value"),
        ({"prefill": "model=gpt2", "decode": ""}, "model: is that of the run"),
        ({"prefill": "device=h10", "decode": ""}, "prefill: unknown device 'h10': did you mean"),
        ({"prefill": "price_per_hour=-1", "decode": ""}, "prefill: device h100_sxm: price_per_hour=-1"),
        ({"prefill": ""}, "prefill without decode: add decode"),
        ({"decode": ""}, "decode without prefill: add prefill"),
        ({"prefill": "", "decode": "", "mixed": ""}, "mixed pools with prefill and decode pools"),
        ({"prefill": "", "decode": None}, "decode=None: has no devices"),
        ({"prefill": "", "decode": 3}, "decode=3: has no devices"),
        ({"link": "node"}, "link: is for prefill and decode pools"),
        ({"mixed": "", "decode_router": "random"}, "decode_router: is for prefill and decode pools"),
        ({"prefill": "", "decode": "", "link": "nod"}, "unknown link 'nod': did you mean 'node'"),
        (
            {"prefill": "", "decode": "", "link": "bandwith=1e9"},
            "link: unknown key 'bandwith': did you mean 'bandwidth'",
        ),
        ({"prefill": "", "decode": "", "link": "bandwidth=0"}, "link: bandwidth=0.0: must be > 0"),
        ({"prefill": "", "decode": "", "link": "sharing=turns"}, "link: unknown sharing 'turns'"),
        (
            {"prefill": "", "decode": "", "handover": "vllm-0.32-nixl"},
            "unknown handover 'vllm-0.32-nixl': did you mean 'vllm",
        ),
        (
            {"prefill": "", "decode": "", "handover": "ideal gate=before_prefill"},
            "handover: gate='before_prefill' without",
        ),
        ({"prefill": "block_size=32", "decode": ""}, "block_size=32 and 16: KV is transferred only"),
    ],
)
def test_mistakes_are_named_in_one_line(words: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        vary(Scenario(SERVER), words).deployment()
    assert "\n" not in str(caught.value)


def test_a_file_with_other_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").write_text("prefil: {replicas: 2}", encoding="utf-8")
    with pytest.raises(InputError, match=r"pools '.*pools.yaml': unknown key 'prefil': did you mean 'prefill'"):
        Scenario(SERVER, pools=Pools(pools_file=tmp_path / "pools.yaml")).deployment()


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (None, Link(bandwidth=25e9)),
        ("", Link(bandwidth=25e9)),
        ("latency=0.001 sharing=fifo", Link(bandwidth=25e9, latency=0.001, sharing="fifo")),
        ("node", Link(bandwidth=300e9)),
        ("free", Link()),
        ({"preset": "vllm-mooncake-8x400g", "per_request": 0.002}, Link(146.1e9, 0.38e-3, 0.002)),
        ("bandwidth=10e9", Link(bandwidth=10e9)),
    ],
)
def test_a_link_is_that_of_the_devices_unless_words_say_otherwise(link: object, expected: Link) -> None:
    words = {"prefill": "device=h100 tensor_parallel_size=2", "decode": "device=a100"}
    scenario = vary(Scenario(SERVER), words | ({} if link is None else {"link": link}))
    a100 = scenario.deployment().pools[1].device
    assert (a100.network_bandwidth, a100.link_bandwidth) == (25e9, 300e9), "of one GPU, the slower side"
    assert scenario.deployment().link == expected


def test_the_rules_of_a_handover_are_those_of_the_decode_engine() -> None:
    apart = vary(Scenario(SERVER), {"prefill": "", "decode": ""})
    assert apart.deployment().handover == HANDOVERS["vllm-0.32-nixl-pull"]
    assert vary(apart, {"engine": "sglang-0.5"}).deployment().handover == HANDOVERS["sglang-0.5-bootstrap"]
    longer = vary(apart, {"handover": "vllm-0.32-nixl-push lease=9 first_token=prefill"}).deployment().handover
    assert longer == replace(HANDOVERS["vllm-0.32-nixl-push"], lease=9.0, first_token="prefill")
    assert vary(apart, {"handover": "ideal"}).deployment().link == LINKS["free"]
    assert vary(apart, {"handover": {"transfer": "push"}}).deployment().handover.transfer == "push"
    assert isinstance(apart.deployment().handover, Handover)
