"""DistServe's placement of a space: each side by what it carries alone, or pairs within a node."""

import pytest

from plan.planning import chat, question, small_space
from windtunnel.deployment import Handover, Link
from windtunnel.errors import InputError
from windtunnel.plan.capacity import capacity
from windtunnel.plan.disaggregation.placed import Placed, layout_of, of_side, placed
from windtunnel.plan.disaggregation.placement import Layout
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.objective import LeastForRate
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints

SIDE = small_space(device=("h100",), max_num_seqs=(64,), max_num_batched_tokens=(1024,), max_model_len=(2048,))
SPACE = PoolSpace(SIDE, SIDE, link=lambda _: Link(bandwidth=50e9), handover=Handover(transfer="pull"), ratio=2)
ASKED = question(chat(150), tolerance=0.1)
RATE = 60.0


@pytest.fixture(scope="module", params=["high", "low"])
def found(request: pytest.FixtureRequest) -> Placed:
    return placed(SPACE, ASKED, RATE, request.param)


def test_a_placement_has_instances_for_the_rate(found: Placed) -> None:
    one = found.placement
    assert one.prefills * one.prefill_rate >= RATE
    assert one.decodes * one.decode_rate >= RATE
    assert (one.prefills - 1) * one.prefill_rate < RATE
    assert "DistServe's placement" in found.words and "requests/s each" in found.words


def test_its_space_is_the_placement_alone(found: Placed) -> None:
    (candidate,) = found.space.enumerate().candidates
    prefill, decode = candidate.deployment.pools
    assert (layout_of(prefill), layout_of(decode)) == (found.placement.prefill, found.placement.decode)
    counts = found.placement.prefills, found.placement.decodes
    assert prefill.replicas * counts[1] == decode.replicas * counts[0]
    answer = search(found.space.enumerate(), ASKED, LeastForRate(RATE, Constraints()))
    assert answer.best is not None


def test_a_pair_carries_what_it_carries_together() -> None:
    one = placed(SPACE, ASKED, RATE, "low").placement
    assert one.prefills == one.decodes
    (candidate,) = placed(SPACE, ASKED, RATE, "low").space.enumerate().candidates
    assert capacity(candidate.deployment, ASKED).rate == one.prefill_rate
    assert candidate.deployment.link.bandwidth > 50e9


def test_a_side_has_its_own_limits() -> None:
    assert of_side(ASKED, "prefill").slo.limits == {"ttft": 0.4}
    assert of_side(ASKED, "decode").slo.limits == {"tpot": 0.03}


def test_layouts_are_stages_and_shards() -> None:
    pool = small_space(pipeline_parallel_size=(2,), device=("h100",)).enumerate().candidates[0].deployment.pools[0]
    assert layout_of(pool) == Layout(2, 1)


@pytest.mark.parametrize(
    ("limits", "kind", "said"),
    [
        (("ttft:400",), "medium", "must be high or low"),
        (("e2el:4000",), "high", "both sides together"),
        (("ttft:1",), "high", "no layout keeps the limits"),
    ],
)
def test_what_cannot_be_placed_is_refused(limits: tuple[str, ...], kind: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        placed(SPACE, question(chat(60), limits), RATE, kind)
