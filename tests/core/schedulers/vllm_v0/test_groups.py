"""The sequences of one request in vLLM's v0 scheduler, by hand: shared blocks, copies, and who is swapped."""

from dataclasses import replace

import numpy as np
import pytest

from core.conftest import IN_PLAIN_PYTHON
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.records import GONE, IGNORED
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV0

FORKS = VllmV0(forks=True, num_cpu_blocks=40, watermark=0.0)


def serve(requests: list[tuple[int, list[int]]], policy: VllmV0 = FORKS, *, blocks: int, seqs: int = 8) -> Record:
    """(Prompt, output of each sequence), all there at once, in steps of 1 s, with blocks of 4 tokens."""
    rows = [(prompt, output, len(outputs)) for prompt, outputs in requests for output in outputs]
    first = np.cumsum([0, *(len(outputs) for _, outputs in requests)])
    n = len(rows)
    demand = Demand(
        arrival=np.zeros(n),
        prompt_tokens=np.array([row[0] for row in rows]),
        output_tokens=np.array([row[1] for row in rows]),
        overruns=np.zeros(n, dtype=bool),
        refused=np.zeros(n, dtype=bool),
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
        sample_of=np.repeat(first[:-1], np.diff(first)),
    )
    times = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=seqs, max_model_len=64)
    return run(
        Fleet((Limits(seqs, 64, 64, blocks, 4),), (policy,), (times,), (1,), (1,), (False,)), demand, 0, np.zeros(n)
    )


def used(record: Record) -> list[int]:
    """Blocks in use after each decision that is logged."""
    rows = record.rows[record.rows["steps"] > 0]
    return [int(row["used_blocks"]) for row in rows]


@IN_PLAIN_PYTHON
def test_a_prompt_is_computed_once_and_its_last_block_is_copied_for_all_but_one() -> None:
    record = serve([(6, [3, 3, 3])], blocks=20)
    rows = record.rows[record.rows["steps"] > 0]
    assert rows["chunk_tokens"].tolist() == [6, 0, 0]
    assert rows["decodes"].tolist() == [0, 3, 3]
    assert used(record) == [2, 4, 4]  # one full block, then three times the second
    assert record.requests["first_token"].tolist() == [1.0] * 3
    assert record.requests["finish"].tolist() == [3.0] * 3


@IN_PLAIN_PYTHON
def test_a_full_last_block_is_not_copied() -> None:
    assert used(serve([(8, [3, 3])], blocks=20)) == [2, 4, 4]


@IN_PLAIN_PYTHON
def test_shared_blocks_stay_until_the_last_sequence_ends() -> None:
    record = serve([(8, [2, 4])], blocks=20)
    assert used(record) == [2, 4, 3, 3]
    assert record.requests["finish"].tolist() == [2.0, 4.0]


@IN_PLAIN_PYTHON
def test_groups_are_swapped_and_single_sequences_are_computed_again() -> None:
    # 8 blocks: two and two for prompts, one more for each sequence, and then none that is free
    record = serve([(8, [6, 6]), (8, [6, 6])], blocks=8)
    assert record.requests["swaps"].tolist() == [0, 0, 1, 1]
    assert record.rows["transfer"].max() == 0.0  # copies take no time here
    assert set(record.requests["state"].tolist()) == {GONE}
    single = serve([(8, [6]), (8, [6])], blocks=5)
    assert (single.requests["swaps"].tolist(), single.requests["preemptions"].tolist()) == ([0, 0], [0, 1])


@IN_PLAIN_PYTHON
def test_what_comes_back_shares_nothing() -> None:
    policy = replace(FORKS, swap_seconds_per_block=0.5)
    record = serve([(8, [6, 6]), (8, [6, 6])], policy, blocks=8)
    out, back = record.rows["transfer"][record.rows["transfer"] > 0]
    assert (out, back) == (3.0, 3.0)  # three blocks of each sequence, though they shared two


@IN_PLAIN_PYTHON
def test_places_and_blocks_are_asked_for_all_sequences() -> None:
    record = serve([(4, [2, 2, 2]), (4, [2, 2])], blocks=40, seqs=4)
    assert record.requests["first_token"].tolist() == [1.0, 1.0, 1.0, 3.0, 3.0]
    hopeless = serve([(4, [2]), (60, [2, 2])], replace(FORKS, watermark=0.5), blocks=20)
    assert hopeless.requests["state"].tolist() == [GONE, IGNORED, IGNORED]


@IN_PLAIN_PYTHON
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (replace(FORKS, preemption_mode="recompute"), "one of several sequences, and vLLM 0.6.3 does not survive"),
        (replace(FORKS, num_cpu_blocks=3), "num_cpu_blocks=3: no room to swap"),
    ],
)
def test_what_ends_the_engine(policy: VllmV0, words: str) -> None:
    with pytest.raises(InputError, match=words):
        serve([(8, [6, 6]), (8, [6, 6])], policy, blocks=8)


def test_where_groups_are_not_simulated() -> None:
    for policy, words in (
        (replace(FORKS, chunked_prefill=True), "chunked prefill"),
        (replace(FORKS, prefix_caching=True), "prefix caching"),
        (replace(FORKS, admission_order="priority"), "admission_order=priority"),
    ):
        with pytest.raises(InputError, match=f"n=2: groups of sequences are not simulated with {words}"):
            serve([(8, [2, 2])], policy, blocks=20)
    with pytest.raises(InputError, match="n=3: more sequences than max_num_seqs=2"):
        serve([(8, [2, 2, 2])], blocks=20, seqs=2)
