"""Stores: what their words may be, and what they are worth to a pool."""

import re
from typing import Any

import pytest

from windtunnel import Deployment, Device, Engine, Pool, device, load_model, simulate, summary
from windtunnel.core.stores.chunks import require_taking
from windtunnel.deployment import Store
from windtunnel.errors import InputError
from windtunnel.policy import Sglang, VllmV1
from windtunnel.workload import Workload

TOKEN = 2 * 36 * 8 * 128 * 2
"""Bytes of KV of a token of Qwen3-8B."""


def pool(*stores: Store, **engine: Any) -> Pool:
    return Pool(load_model("Qwen/Qwen3-8B"), device("h100"), Engine(**engine), stores=stores)


def parts() -> tuple[Engine, Device]:
    one = pool()
    return one.engine, one.device


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "store host: capacity=0.0: must be bytes > 0, e.g. 200e9"),
        ({"tier": "hots"}, "unknown tier of a store 'hots': did you mean 'host'"),
        ({"tier": "disk", "capacity": 1e12}, "store disk: read and write are not known: give bytes/s"),
        ({"capacity": 1e12, "read": -1.0}, "store host: read=-1.0: must be a number ≥ 0"),
        ({"capacity": 1e12, "eviction": "arc"}, "unknown eviction of a store 'arc'"),
        ({"capacity": 1e12, "shared_by": "rack"}, "unknown shared_by of a store 'rack'"),
        ({"capacity": 1e12, "write_after": -1}, "store host: write_after=-1: must be ≥ 0"),
    ],
)
def test_wrong_words_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Store(**words)


def test_a_store_may_be_one_text() -> None:
    assert Store.of("tier=disk capacity=1e12 read=7e9 write=5e9") == Store("disk", 1e12, 7e9, 5e9)
    for text, message in {"capacity=much": "capacity='much': ", "capacty=1": "did you mean 'capacity'"}.items():
        with pytest.raises(InputError, match=message):
            Store.of(text)


def test_a_store_smaller_than_a_chunk_is_refused() -> None:
    small = Store(capacity=255.0 * TOKEN, chunk_tokens=256)
    with pytest.raises(InputError, match=r"is smaller than a chunk of 256 tokens, 37,748,736 bytes"):
        small.tier_for(*parts(), TOKEN)
    assert Store(capacity=256.0 * TOKEN, chunk_tokens=256).tier_for(*parts(), TOKEN).chunks == 1


def test_a_chunk_is_whole_blocks() -> None:
    with pytest.raises(InputError, match="chunk_tokens=24: must be a multiple of block_size=16"):
        Store(capacity=1e12, chunk_tokens=24).tier_for(*parts(), TOKEN)


def test_bandwidths_are_those_of_the_device_unless_given() -> None:
    one, four = pool(), pool(tensor_parallel_size=4)
    host, shared = Store(capacity=1e12), Store(tier="shared", capacity=1e12)
    assert host.tier_for(one.engine, one.device, TOKEN).read_s == TOKEN / one.device.pcie_bandwidth
    assert host.tier_for(four.engine, four.device, TOKEN).read_s == TOKEN / (4 * one.device.pcie_bandwidth)
    assert shared.tier_for(one.engine, one.device, TOKEN).read_s == TOKEN / one.device.network_bandwidth
    assert Store(capacity=1e12, read=2e9).tier_for(one.engine, one.device, TOKEN).read_s == TOKEN / 2e9
    assert (
        host.tier_for(one.engine, one.device, TOKEN).shared_by,
        shared.tier_for(one.engine, one.device, TOKEN).shared_by,
    ) == ("replica", "deployment")


def test_stores_need_a_scheduler_that_has_them() -> None:
    asked = Workload.from_columns(prompt_tokens=[64], output_tokens=[2])
    for engine in ({"preset": "trtllm-1.0"}, {"enable_prefix_caching": False}, {"scheduling_policy": "priority"}):
        with pytest.raises(InputError, match="stores: not simulated with this scheduler"):
            simulate(Deployment((pool(Store(capacity=1e12), **engine),)), asked)


def test_what_the_host_memory_of_sglang_is_not() -> None:
    """One tier of a rank; decode pools have none, and nothing is asked of them."""
    host = Store(ratio=2)
    require_taking(((host,), ()), (Sglang(), Sglang(radix_cache=False)))
    for stores in ((host, host), (Store(tier="shared", capacity=1e12),), (Store(ratio=2, eviction="fifo"),)):
        with pytest.raises(InputError, match="SGLang's HiCache is"):
            require_taking((stores,), (Sglang(),))
    with pytest.raises(InputError, match="on_eviction=true: simulated with SGLang's scheduler"):
        require_taking(((Store(ratio=2, on_eviction=True),),), (VllmV1(prefix_caching=True),))
    with pytest.raises(InputError, match="without capacity"):
        Store(ratio=2, capacity=1e9)


def test_hits_are_reported_by_store() -> None:
    """Two replicas in turn: the second finds the first one's prompt in the store that both share, not in their own."""
    asked = Workload.from_columns(
        arrival=[0.0, 10.0], prompt_tokens=[64, 64], output_tokens=[2, 2], hash_ids=[[1, 2], [1, 2]], hash_block_size=32
    )
    stores = Store(capacity=1e12), Store(tier="shared", capacity=1e12)
    both = Pool(load_model("Qwen/Qwen3-8B"), device("h100"), replicas=2, stores=stores)
    found = summary(simulate(Deployment((both,)), asked))
    assert found.prefix_cache_hit_rate == 48 / 128
    assert dict(found.stores) == {"host": 0.0, "shared": 48 / 128}
