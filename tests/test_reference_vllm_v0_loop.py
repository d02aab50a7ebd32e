"""vLLM's v0 scheduler in the event loop: what clients and logs see of swapping, ignored requests and circles."""

import pytest
from windtunnel.reference.vllm_v0_loop import Scheduler

from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV0
from windtunnel.reference.loop import Loop, Replica, round_robin
from windtunnel.reference.replica import Group, table_time
from windtunnel.reference.request import Request


def serve(
    requests: list[Request], policy: VllmV0, follow: dict[int, int] | None = None, *, blocks: int, tokens: int = 64
) -> Group:
    """Everything on one engine whose steps take 1 s, with blocks of 4 tokens."""
    limits = Limits(4, tokens, 64, blocks, 4)
    times = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=tokens, max_num_seqs=4, max_model_len=64)
    group = Group([Scheduler(limits, policy)], table_time(times))
    Loop([Replica([group])], round_robin, requests, follow, [0.5] * len(requests)).run()
    return group


def test_prefills_run_alone_and_decodes_wait() -> None:
    one, two = Request(0, 0.0, 4, 3, 3), Request(1, 1.5, 4, 2, 2)
    group = serve([one, two], VllmV0(), blocks=20)
    assert [(step.start, len(step.batch.decodes), step.batch.chunks) for step in group.journal] == [
        (0.0, 0, [(4, 0)]),
        (1.0, 1, []),
        (2.0, 0, [(4, 0)]),
        (3.0, 2, []),
    ]
    assert (one.finish, two.first_token, one.stalls) == (4.0, 3.0, [])


def test_blocks_on_their_way_take_time_and_a_swapped_request_stalls() -> None:
    policy = VllmV0(preemption_mode="swap", num_cpu_blocks=9, swap_latency=1.0, swap_seconds_per_block=0.25)
    one, two = Request(0, 0.0, 8, 4, 4), Request(1, 0.0, 8, 4, 4)
    group = serve([one, two], policy, blocks=5)
    assert [step.batch.transfer_time for step in group.journal] == [0.0, 1.5, 0.0, 0.0, 1.5, 0.0, 0.0]
    assert two.preemptions == 1
    assert two.stalls == [(1.0, group.journal[4].end)]
    assert group.journal[1].waiting == 1


def test_an_ignored_request_ends_for_its_client() -> None:
    one, two = Request(0, 1.0, 40, 4, 4), Request(1, 0.0, 4, 1, 1)
    serve([one, two], VllmV0(), {0: 1}, blocks=5)
    assert (one.refused, two.refused) == (True, False)
    assert two.arrival == pytest.approx(1.5)
    assert two.finish == pytest.approx(2.5)


def test_a_prompt_that_evicts_itself_for_ever_is_an_error() -> None:
    policy = VllmV0(chunked_prefill=True, watermark=0.0)
    with pytest.raises(InputError, match="max_num_batched_tokens=8: prompts that take several steps evict each other"):
        serve([Request(0, 0.0, 18, 2, 2)], policy, blocks=5, tokens=8)
