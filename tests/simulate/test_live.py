"""Live prefill and decode pools give what a simulation of the same arrivals gives, to the bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python

from simulate.test_disaggregation import LENGTHS, pools
from windtunnel.core.live.tokens import FAILED, STAYS
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.deployment.store import Store
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.policy.scaling import Autoscale, Faults, Foresight, Planner, Rule, Variant
from windtunnel.simulate.live import Arrival, LiveDeployment, live
from windtunnel.simulate.run import ABORTED
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Gamma, Workload, generate


def tokens_of(served: LiveDeployment, workload: Workload) -> list[list[float]]:
    """When each request's client gets its tokens; negative: it learns then that it has failed."""
    found: list[list[float]] = [[] for _ in range(len(workload))]
    slots: dict[int, int] = {}

    def note(rows: Any) -> None:
        for time, slot, tokens, gone in rows.tolist():
            had = found[slots[slot]]
            had += [time] * (tokens - len(had)) + [-time] * (gone == FAILED)
            if gone != STAYS:
                served.engine.forget(slot)

    for i, time in enumerate(workload.arrival.tolist()):
        note(served.engine.advance(time))
        prompt, output = int(workload.prompt_tokens[i]), int(workload.output_tokens[i])
        slot, came, rows = served.engine.arrive(Arrival(prompt, output, int(workload.max_tokens[i])), time)
        assert came == time
        note(rows[rows["slot"] != slot])
        slots[slot] = i
        note(rows[rows["slot"] == slot])
    note(served.engine.advance(np.inf))
    return found


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("preset", ["vllm-0.33", "sglang-0.5", "trtllm-1.0", "vllm-0.33 in the other order"])
def test_each_engine(preset: str) -> None:
    deployment = pools(preset.partition(" ")[0])
    served = replace(deployment, pools=deployment.pools[::-1]) if " " in preset else deployment
    workload = generate(Gamma(40.0, 0.5), LENGTHS, 40, seed=3)
    run = simulate(deployment, workload, perf="modelled").requests
    found = tokens_of(live(served, perf="modelled"), workload)
    assert [len(times) for times in found] == run.output_tokens.tolist()
    assert [times[0] for times in found] == run.first_token.tolist()
    assert [times[-1] for times in found] == run.finish.tolist()


@IN_PLAIN_PYTHON
def test_a_request_that_waits_too_long_for_memory_fails() -> None:
    deployment = pools("sglang-0.5", num_gpu_blocks_override=300)
    rules = replace(deployment.handover, timeout=0.3, on_expiry="fail")
    deployment = replace(deployment, handover=rules)
    workload = generate(Gamma(60.0, 0.5), LENGTHS, 60, seed=2)
    run = simulate(deployment, workload, perf="modelled").requests
    served = live(deployment, perf="modelled")
    lost = [i for i, times in enumerate(tokens_of(served, workload)) if times[-1] < 0]
    assert lost == np.flatnonzero(run.status == ABORTED).tolist() != []
    assert {served.engine.why_failed(i) for i in lost} == {"a lease or a timeout of the hand-over ran out"}


@IN_PLAIN_PYTHON
def test_clients_that_leave_and_caches_that_are_forgotten() -> None:
    served = live(pools("vllm-0.33"), perf="modelled")
    engine, length, most = served.engine, 500, 400
    slots = [engine.arrive(Arrival(length, most, most), 0.01 * k)[0] for k in range(30)]
    tokens = {slot: engine.end_early(slot) for slot in slots}
    assert min(tokens.values()) >= 1
    assert max(tokens.values()) < most
    rows = engine.advance(60.0)
    assert {slot: int(rows["tokens"][rows["slot"] == slot].max()) for slot in slots} == tokens
    assert engine.at_rest
    assert (engine.state.lanes["outstanding"] == 0).all()
    engine.forget_caches(60.0)
    again = live(pools("vllm-0.33"), perf="modelled").engine
    times = [
        one.arrive(Arrival(length, 3, 3), 70.0)[1] or one.advance(80.0)["time"].tolist() for one in (engine, again)
    ]
    assert times[0] == times[1]


def kept_tokens(served: LiveDeployment, workload: Workload, until: float) -> list[list[float]]:
    """When each request's client gets its tokens, of which none is withdrawn, where requests go on elsewhere."""
    told: list[tuple[float, int, int]] = []
    slots: dict[int, int] = {}

    def note(rows: Any) -> None:
        for slot, time in served.engine.withdrawn:
            told[:] = [one for one in told if one[1] != slots[slot] or one[0] <= time]
        served.engine.withdrawn.clear()
        told.extend((row[0], slots[row[1]], row[2]) for row in rows.tolist())

    for i, time in enumerate(workload.arrival.tolist()):
        note(served.engine.advance(time))
        prompt, output = int(workload.prompt_tokens[i]), int(workload.output_tokens[i])
        slot, _, rows = served.engine.arrive(Arrival(prompt, output, int(workload.max_tokens[i])), time)
        slots[slot] = i
        note(rows)
    note(served.engine.advance(until))
    found: list[list[float]] = [[] for _ in range(len(workload))]
    for time, i, tokens in sorted(told):
        found[i] += [time] * (tokens - len(found[i]))
    return found


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("preset", ["vllm-0.33", "sglang-0.5"])
def test_pools_that_fail_and_scale(preset: str) -> None:
    deployment = pools(preset)
    named = tuple(replace(pool, name=pool.role, replicas=2) for pool in deployment.pools)
    faults = [
        Faults(pool=name, at=at, down=0.5, on_failure="migrate") for name, at in (("decode", 0.4), ("prefill", 0.7))
    ]
    scaled = Autoscale(Planner("latency"), 1, 2, 0.25, 0.1, "decode")
    deployment = replace(deployment, pools=named, faults=tuple(faults), scaling=scaled)
    workload = generate(Gamma(40.0, 0.5), LENGTHS, 40, seed=3)
    run = simulate(deployment, workload, perf="modelled")
    assert run.requests.preemptions.sum() > 0
    found = kept_tokens(live(deployment, perf="modelled"), workload, 30.0)
    assert [len(times) for times in found] == run.requests.output_tokens.tolist()
    assert [times[0] for times in found] == run.requests.first_token.tolist()
    assert [times[-1] for times in found] == run.requests.finish.tolist()


@pytest.mark.parametrize("rule", [Foresight(rps=1.0), Variant()])
def test_rules_that_go_by_a_whole_run_are_not_served(rule: Rule) -> None:
    pool = Pool(load_model("Qwen/Qwen3-8B"), device("l40s"), Engine(), 4)
    with pytest.raises(InputError, match=r"autoscale: policy=.*: use planner"):
        live(Deployment((pool,), scaling=Autoscale(rule, most=4)))


def test_what_is_refused() -> None:
    served = pools("vllm-0.33")
    tiers = tuple(replace(pool, stores=(Store("host", 2e11),)) for pool in served.pools)
    with pytest.raises(InputError, match="mixed pools"):
        live(replace(served, pools=tiers), perf="modelled")


@WITH_THE_COMPILER
def test_all_of_it_without_the_compiler() -> None:
    in_plain_python(1, __file__)
