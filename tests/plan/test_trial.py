"""Early stop: what is lost at the beginning is lost."""

import handmade
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.planning import chat, question, small_space
from windtunnel.deployment import SLO, parse_slo
from windtunnel.plan.outcome import measure
from windtunnel.plan.trial import beginning, is_lost, missed, tables_of, whole_run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import head, with_concurrency

SETTINGS = {"device": "h100", "max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 512}


@given(st.floats(0.5, 400.0), st.integers(0, 3), st.sampled_from([0.5, 0.9, 0.99]))
@settings(max_examples=40, deadline=None)
def test_what_is_lost_at_the_beginning_is_lost(rate: float, seed: int, share: float) -> None:
    deployment = small_space().deployment(SETTINGS | {"max_num_seqs": 8})
    slo = SLO(ttft=0.2, tpot=0.02, percentiles=parse_slo(["queue_p90=0.1", "e2el_p99=5"]))
    asked = question(chat(400, seed), slo=slo, attainment=share)
    workload = asked.at(rate)
    for count in (50, 200, 399):
        begun = simulate(deployment, head(workload, count), tables=tables_of(deployment, "modelled"))
        if is_lost(begun.requests, workload, asked):
            assert measure(whole_run(asked, deployment, rate), asked, rate).stretch > 1


def test_a_flood_is_lost_early() -> None:
    deployment = small_space().deployment(SETTINGS | {"max_num_seqs": 8})
    asked = question(chat(2000))
    workload = asked.at(200.0)
    count = beginning(workload, asked)
    assert count is not None
    begun = simulate(deployment, head(workload, count), tables=tables_of(deployment, "modelled"))
    assert is_lost(begun.requests, workload, asked)
    assert beginning(with_concurrency(workload, 4), asked) is None
    assert beginning(workload, question(workload, goodput=())) is None


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        (2010, 0.99, 229),  # 228.1: a tenth, and 1.5 × 1 % of the rest
        (2010, 0.9, 473),
        (1600, 0.99, None),  # 182 requests: too few to save anything
        (2000, 0.6, None),  # 1280: more than half
    ],
)
def test_the_beginning_holds_half_as_many_again_as_may_miss(count: int, share: float, expected: int | None) -> None:
    assert beginning(chat(count), question(attainment=share)) == expected
    limits = SLO(percentiles=parse_slo([f"ttft_p{100 * share:g}=1"]))
    assert beginning(chat(count), question(slo=limits)) == expected
    assert beginning(chat(count), question(slo=SLO(percentiles=parse_slo(["itl_p99=1"])))) is None


def test_what_is_missed_for_certain_by_hand() -> None:
    """At 10 s, limit 4 s: a late first token, one exactly in time, one still due, one due for too long, one refused."""
    requests = handmade.requests(
        arrival=[0.0, 0.0, 7.0, 5.0, 0.0],
        status=[0, 0, 0, 0, 1],
        scheduled=[1.0, 1.0, 8.0, np.nan, np.nan],
        first_token=[4.5, 4.0, 12.0, np.nan, np.nan],
        finish=[5.5, 11.0, 13.0, np.nan, 0.0],
    )
    assert missed(requests, "ttft", 4.0, 10.0).tolist() == [True, False, False, True, False]
    assert missed(requests, "queue", 0.5, 10.0).tolist() == [True, True, True, True, False]
    assert missed(requests, "e2el", 5.5, 10.0)[:3].tolist() == [False, True, False]
    assert missed(requests, "tpot", 0.9, 10.0).tolist() == [True, False, False, False, False]
