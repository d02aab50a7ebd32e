"""Early stop: what is lost at the beginning is lost; what is simulated, and what trials are known by."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.planning import chat, question, small_space
from windtunnel.deployment import SLO, parse_slo
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import PARTS
from windtunnel.plan import trial as trials
from windtunnel.plan.doubt import slowed
from windtunnel.plan.outcome import measure
from windtunnel.plan.trial import (
    beginning,
    candidate_key,
    deployment_key,
    is_lost,
    missed,
    tables_of,
    tables_to_bound,
    trial,
    trial_key,
    whole_run,
)
from windtunnel.simulate.overheads import Overheads
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload, head, with_concurrency

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


def test_a_beginning_is_that_of_the_strictest_limit_and_of_200_requests_at_least() -> None:
    """A tenth and 1.5 × 10 % of the rest are 23.5 %: of 850 requests 200, of 846 199."""
    for count, expected in ((850, 200), (846, None)):
        assert beginning(chat(count), question(attainment=0.9)) == expected
    slo = SLO(percentiles=parse_slo(["ttft_p50=1", "e2el_p99=5"]))
    assert beginning(chat(2010), question(slo=slo)) == 229
    session = np.array([0, 0, *range(2, 2010)])
    two = Workload.from_columns(
        arrival=np.arange(2010.0), prompt_tokens=[9] * 2010, output_tokens=2, session=session, think_time=1.0
    )
    assert beginning(two, question(attainment=0.99)) is None, "the second waits for the first"
    alone = Workload.from_columns(arrival=np.arange(2010.0), prompt_tokens=[9] * 2010, output_tokens=2)
    assert beginning(alone, question(attainment=0.99)) == 229


def test_what_is_missed_at_the_very_moment_is_not_missed_yet() -> None:
    """At 10 s: one waits for 4 s, the limit; one is refused; one has just ended, at 2 s for each of 3 tokens."""
    requests = handmade.requests(
        arrival=[6.0, 0.0, 3.0], output_tokens=[2, 2, 4], status=[0, 1, 0], scheduled=[np.nan, np.nan, 3.5],
        first_token=[np.nan, np.nan, 4.0], finish=[np.nan, 0.0, 10.0],
    )  # fmt: skip
    assert missed(requests, "ttft", 4.0, 10.0).tolist() == [False, False, False]
    assert missed(requests, "ttft", 3.9, 10.0).tolist() == [True, False, False]
    assert missed(requests, "tpot", 1.9, 10.0).tolist() == [False, False, True]
    assert missed(requests, "tpot", 2.0, 10.0).tolist() == [False, False, False]


@pytest.mark.parametrize(
    ("late", "refused", "share", "percentile"),
    [([0, 1, 5], [], False, False), ([5, 6], [], True, False), ([5], [6], True, False), ([5, 6, 7], [], True, True)],
)
def test_a_run_is_lost_by_hand(late: list[int], refused: list[int], share: bool, percentile: bool) -> None:
    """Of 21 arrivals a second apart 19 are measured, from the third on. Nine in ten are 18 of them, so two late ones
    are too many; the 90th percentile lies above the 17th, so three are. Of the first ten some took 5 s, not 1."""
    workload = Workload.from_columns(arrival=np.arange(21.0), prompt_tokens=[9] * 21, output_tokens=2)
    arrival = np.arange(10.0)
    ttft = np.where(np.isin(np.arange(10), late), 5.0, 1.0)
    status = np.isin(np.arange(10), refused).astype(np.int64)
    begun = handmade.requests(
        arrival=arrival, scheduled=arrival, first_token=arrival + ttft, finish=arrival + ttft + 0.1, status=status
    )
    asked = question(workload, slo=SLO(ttft=2.0), attainment=0.9)
    assert is_lost(begun, workload, asked) is share
    asked = question(workload, slo=SLO(percentiles=parse_slo(["ttft_p90=2", "itl_p50=0.001"])))
    assert is_lost(begun, workload, asked) is percentile
    assert not is_lost(begun, workload, question(workload, slo=SLO()))


def test_a_lost_run_is_simulated_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, Any, Any]] = []

    def simulated(_: object, workload: Workload, seed: int, *, tables: Any, overheads: Any) -> Any:
        told.append((len(workload), seed, tables, overheads))
        late = workload.arrival + (9.0 if asked.seed else 0.1)
        return handmade.run(
            handmade.requests(arrival=workload.arrival, scheduled=late, first_token=late, finish=late + 1),
            handmade.iterations(),
        )

    monkeypatch.setattr(trials, "simulate", simulated)
    deployment = small_space().deployment(SETTINGS)
    tables: Any = [object()]
    own = Overheads()
    asked = question(chat(1000), goodput=("ttft:400",), seed=5, overheads=own)
    found = trial(asked, deployment, 20.0, tables)
    assert (found.rate, found.met, found.stopped) == (20.0, False, True)
    assert told == [(235, 5, tables, own)], "a tenth and 1.5 × 10 % of the rest"
    told.clear()
    asked = replace(asked, seed=0)
    found = trial(asked, deployment, 20.0, tables)
    assert (found.met, found.stopped) == (True, False)
    assert told == [(235, 0, tables, own), (1000, 0, tables, own)]


def test_the_tables_of_the_last_four_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(trials, "_kept", {})

    def tabulated(pool: Any, perf: str, *_: object, **__: object) -> Any:
        made.append(perf)
        return pool, perf

    monkeypatch.setattr(trials, "tabulate", tabulated)
    deployment = small_space().deployment(SETTINGS)
    for name in "abcdabcdea":
        found: list[Any] = list(tables_of(deployment, "modelled", name))
        assert found == [(deployment.pools[0], "modelled")]
    assert len(made) == 6, "the fifth takes the place of the first, which is made once more"
    tables_of(deployment, "roofline", "e")
    assert made[6:] == ["roofline"]


def test_keys_are_names_of_128_bits_that_tell_trials_apart() -> None:
    one = small_space().deployment(SETTINGS)
    other = small_space().deployment(SETTINGS | {"replicas": 2})
    asked = question()
    keys = [
        deployment_key(one, "roofline"), candidate_key(asked, one), candidate_key(asked, other),
        trial_key(asked, "pools", one, 2.0), trial_key(asked, "pools", other, 2.0), trial_key(asked, "pools", one, 3.0),
        trial_key(asked, "others", one, 2.0), trial_key(question(seed=1), "pools", one, 2.0),
        trial_key(asked, "pools", replace(one, router="random"), 2.0),
    ]  # fmt: skip
    assert {len(key) for key in keys} == {32}
    assert len(set(keys)) == len(keys)
    assert deployment_key(other, "roofline") == keys[0], "whatever the number of replicas"


def test_code_is_known_by_all_that_results_depend_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sources and tables of any depth, but not what reports, or is for reading."""
    package = tmp_path / "package"
    for name in ("plan/trial.py", "report/page.py", "perf/far/down/times.toml", "notes.md"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("one")
    monkeypatch.setattr(trials, "__file__", str(package / "plan" / "trial.py"))
    before = trials.code_digest.__wrapped__()
    for name, changes in (
        ("report/page.py", False), ("notes.md", False), ("plan/trial.py", True), ("perf/far/down/times.toml", True),
    ):  # fmt: skip
        (package / name).write_text("two")
        assert (trials.code_digest.__wrapped__() != before) is changes, name
        (package / name).write_text("one")
    assert trials.code_digest.__wrapped__() == before


def test_tables_to_bound_are_those_of_trials_and_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that differ in limits, layout or cache ask one predictor, and get what each would get from its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = question(confidence=0.9)
    more = (
        {"max_num_seqs": 16},
        {"kv_cache_dtype": "fp8"},
        {"tensor_parallel_size": 2},
        {"max_num_batched_tokens": 256},
    )
    for changed in ({}, *more, {}):
        deployment = small_space().deployment(SETTINGS | changed)
        (bounding,) = tables_to_bound(asked, deployment)
        assert not list(tmp_path.rglob("*.npz"))
        trials._kept.clear()
        (own,) = slowed(deployment, [tabulate(pool, "modelled") for pool in deployment.pools], asked)
        for part in (*PARTS, "host_overlapped", "host_serial"):
            assert np.array_equal(getattr(bounding.times, part), getattr(own.times, part)), part
