"""Runs whose replicas start, stop or fail: what they report."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from windtunnel import Deployment, Engine, Pool, device, load_model, simulate, summary, summary_json
from windtunnel.errors import InputError
from windtunnel.policy.scaling import Autoscale, Faults, Forecast, Foresight, Variant
from windtunnel.workload import Workload


def run(replicas: int, router: str = "least_outstanding", **more: Any) -> Any:
    """Sixty requests in two minutes, twenty of them at once in the middle."""
    arrival = np.sort(np.concatenate([np.arange(40.0) * 3, np.full(20, 60.0)]))
    asked = Workload.from_columns(arrival=arrival, prompt_tokens=[500] * 60, output_tokens=[50] * 60)
    pool = Pool(load_model("Qwen/Qwen3-8B"), device("l40s"), Engine(), replicas)
    return simulate(Deployment((pool,), router, **more), asked)


def test_only_what_is_there_is_paid() -> None:
    """Foresight of one request/s a replica: two for the interval with the burst, one otherwise."""
    scaling = Autoscale(Foresight(rps=1.0), least=1, most=4, interval=15.0, startup=10.0)
    found, full = summary(run(4, scaling=scaling)), summary(run(4))
    assert found.finished == full.finished == 60
    paid = found.lives["replicas_paid"]
    assert 1.0 < paid < 2.0
    assert found.lives["starts"] == 1
    assert found.usage.cost_usd / found.window.seconds == pytest.approx(
        full.usage.cost_usd / full.window.seconds * paid / 4
    )
    assert summary_json(found)["lives"]["replicas_paid"] == paid


def test_a_forecast_counts_the_turns_that_others_release() -> None:
    """Eight sessions of ten turns: only their first ones come by the clock."""
    n = 80
    sessions = Workload.from_columns(
        session=np.arange(n) % 8, prompt_tokens=[200] * n, output_tokens=[20] * n, think_time=[1.0] * n
    )
    pool = Pool(load_model("Qwen/Qwen3-8B"), device("l40s"), Engine(), 4)

    def starts(rule: Forecast | Foresight) -> int:
        scaling = Autoscale(rule, least=1, most=4, interval=4.0, startup=1.0)
        lives = summary(simulate(Deployment((pool,), "least_outstanding", scaling=scaling), sessions)).lives
        return int(lives["starts"])

    assert starts(Forecast(rps=2.0)) > starts(Forecast(rps=20.0)) == 0
    with pytest.raises(InputError, match="policy=foresight knows when requests come, and these wait: use forecast"):
        starts(Foresight(rps=2.0))


def test_lost_requests_are_aborted() -> None:
    lost = run(2, faults=(Faults(replica=1, at=61.0, down=30.0, on_failure="lost"),))
    found = summary(lost)
    assert found.aborted == found.lives["lost"] == 10
    assert found.finished == 50
    again = summary(run(2, faults=(Faults(replica=1, at=61.0, down=30.0),)))
    assert (again.finished, again.lives["retries"]) == (60, 10)
    assert again.latencies["e2el"].mean > found.latencies["e2el"].mean


def test_what_cannot_come_and_go_is_refused() -> None:
    with pytest.raises(InputError, match="conductor: what it promises for replicas that start, stop or fail"):
        run(2, "conductor", faults=(Faults(at=5.0),))
    with pytest.raises(InputError, match="replicas=2: must be autoscale's most=4"):
        run(2, scaling=Autoscale(Foresight(rps=1.0), most=4))
    with pytest.raises(InputError, match="fail: replica=2: there are 2, counted from 0"):
        run(2, faults=(Faults(replica=2, at=5.0),))


def test_llmds_autoscaler_learns_in_each_run_anew_what_a_replica_serves() -> None:
    """The rate rises sixteenfold: one replica at first, several at the end, in each of two runs."""
    gaps = 1.0 / np.linspace(0.25, 8.0, 1200)
    asked = Workload.from_columns(arrival=np.cumsum(gaps), prompt_tokens=[500] * 1200, output_tokens=[100] * 1200)
    pool = Pool(load_model("Qwen/Qwen3-8B"), device("l40s"), Engine(), 8)
    scaling = Autoscale(Variant(ttft=0.4, tpot=0.035), most=8, interval=20.0, startup=10.0)
    elastic = Deployment((pool,), "least_outstanding", scaling=scaling)
    first, again = (summary(simulate(elastic, asked)).lives for _ in range(2))
    assert first == again
    assert first["starts"] > 0
    assert 1.0 < first["replicas_paid"] < 8.0
    halves = (replace(pool, replicas=1, role="prefill", name="p"), replace(pool, role="decode", name="d"))
    with pytest.raises(InputError, match="policy=variant sizes servers that do both prefill and decode: use planner"):
        simulate(Deployment(halves, scaling=replace(scaling, pool="d")), asked)
