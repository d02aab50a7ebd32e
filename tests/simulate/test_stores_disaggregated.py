"""Stores of KV behind prefill and decode replicas: what is written, and who finds it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core.pools_cases import equal_requests, tandem

import windtunnel as wt
from windtunnel.core.disaggregation.handover import Crossing, Handed, run
from windtunnel.core.engine import Demand, Fleet
from windtunnel.deployment import Handover
from windtunnel.errors import InputError
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.routing import ROUND_ROBIN
from windtunnel.policy.tiers import Tier, TierUse

CACHED = VllmV1(async_scheduling=False, prefix_caching=True)
PULL = Crossing(rules=Handover("pull", "decode"))
HOST = Tier("host", 1000, 4, read_s=0.125, write_s=0.0, latency=0.5, shared_by="replica")
SHARED = replace(HOST, name="shared", shared_by="deployment")


def fleet(*decode: Tier, prefill: tuple[Tier, ...] = (), blocks: int = 600) -> Fleet:
    """Prompts take a second, decode steps half of one; blocks of 4 tokens."""
    found = replace(tandem(1.0, 0.5, seats=4), policies=(CACHED, CACHED), tiers=(prefill, decode))
    return replace(found, limits=(Limits(1, 64, 64, 600, 4), Limits(4, 64, 64, blocks, 4)))


def handed(served: Fleet, demand: Demand, crossing: Crossing = PULL) -> Handed:
    return run(served, demand, (ROUND_ROBIN, ROUND_ROBIN), np.zeros((2, len(demand.arrival))), crossing)


@pytest.mark.parametrize(("generated", "written"), [(False, 8), (True, 12)])
def test_a_decode_replica_writes_the_prompt_that_it_got(generated: bool, written: int) -> None:
    """Eight tokens of prompt and six of output, the last of which is never computed: two blocks of one, three of all.
    Nobody waits for that."""
    found = handed(fleet(replace(HOST, generated=generated, write_s=9.0)), equal_requests(np.zeros(1), output=6))
    assert found.tiers == (TierUse(1, "host", 0, 0, written),)
    assert found.requests["finish"].tolist() == [4.0]


def test_an_evicted_request_finds_its_prompt_again() -> None:
    """Two requests of 8 + 10 tokens, memory for 24. The first decodes from 1 to 6 s. At 3.5 s it takes a block of the
    second one, which has two tokens by then, and at 5.5 s another: of its prompt one block is left. At 6 s the other
    one comes from the host, in 0.5 s and an eighth of a second a token, and eight tokens are left to be made; without
    the host all is computed at once, in a step that costs no more here."""
    demand = equal_requests(np.zeros(2), output=10)
    found = handed(fleet(HOST, blocks=6), demand)
    assert found.requests["finish"].tolist() == [6.0, 11.0]
    assert found.requests["preemptions"].tolist() == [0, 1]
    assert found.tiers == (TierUse(1, "host", 0, 4, 16),)
    assert handed(fleet(blocks=6), demand).requests["finish"].tolist() == [6.0, 10.0]


@pytest.mark.parametrize(("generated", "cached"), [(True, 16), (False, 8)])
def test_the_next_turn_finds_the_answer_where_decode_replicas_write_it(generated: bool, cached: int) -> None:
    """A prompt of 8 tokens, an answer of 9, and a prompt of both and 3 more. The prefill replica has the first prompt
    itself; of the answer, two blocks are computed by the decode replica, and the last token never is."""
    shared = replace(SHARED, generated=generated)
    demand = equal_requests(np.zeros(2), follow=np.array([1, -1]), think_time=np.full(2, 5.0))
    demand = replace(demand, prompt_tokens=np.array([8, 20]), output_tokens=np.array([9, 2]), max_tokens=None)
    demand = replace(demand, begins=(np.array([-1, 0]), np.array([0, 17])))
    found = handed(fleet(shared, prefill=(shared,)), demand)
    assert found.requests["cached_tokens"].tolist() == [0, cached]
    assert found.tiers[0] == TierUse(0, "shared", cached - 8, cached - 8, 20 if not generated else 12)


def test_pools_at_other_speeds_share_a_store() -> None:
    """The decode replica finds nothing new in what the prefill replica wrote: both have written the prompt once."""
    found = handed(fleet(replace(SHARED, read_s=1.0), prefill=(SHARED,)), equal_requests(np.zeros(1), output=6))
    assert [use.written for use in found.tiers] == [8, 0]


def test_a_prompt_that_stays_is_found_in_the_decode_replicas_store() -> None:
    """Prompts of 8 tokens stay. Memory for three blocks: the second one evicts the first one's, which come back."""
    rules = Handover("pull", "decode", max_local_prefill_length=8)
    demand = equal_requests(np.array([0.0, 10.0, 20.0]), output=2, hash_block_size=4)
    demand = replace(demand, hash_ids=(np.array([0, 2, 4, 6]), np.array([1, 2, 3, 4, 1, 2])))
    found = handed(fleet(HOST, blocks=3), demand, Crossing(rules=rules))
    assert found.requests["cached_tokens"].tolist() == [0, 0, 4]
    assert found.tiers == (TierUse(1, "host", 4, 4, 16),)
    assert found.requests["scheduled"].tolist() == [0.0, 10.0, 21.0]


def test_a_store_names_its_pool() -> None:
    load: dict[str, Any] = {"random_input_len": 600, "random_output_len": 40, "num_prompts": 20, "request_rate": 5}
    pools: dict[str, Any] = {"prefill": "name=p", "decode": "name=d"}

    def stores(*store: str) -> list[list[str]]:
        run = wt.simulate("Qwen/Qwen3-8B", **load, **pools, store=store)
        return [[each["tier"] for each in pool.get("stores", [])] for pool in run.manifest["pools"]]

    host, shared = "tier=host capacity=1e11", "tier=shared capacity=1e12"
    assert stores(host, f"{shared} pool=all") == [["host", "shared"], ["shared"]]
    assert stores(f"{host} pool=d generated=true") == [[], ["host"]]
    with pytest.raises(InputError, match="store: unknown pool 'decode': known: all, d, p"):
        stores(f"{host} pool=decode")
    with pytest.raises(InputError, match=r"stores: not simulated with this scheduler, but with vLLM's v1 scheduler"):
        wt.simulate("Qwen/Qwen3-8B", **load, **pools, store=f"{host} pool=d", engine="sglang-0.5")
