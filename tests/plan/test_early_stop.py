"""Early stop: what is lost at the beginning is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st
from planning import chat, question, small_space

from windtunnel.deployment import SLO, parse_slo
from windtunnel.plan.outcome import measure
from windtunnel.plan.trial import beginning, is_lost, tables_of, whole_run
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
