"""Whole simulations through the public door: conservation, causality, equal bits, and what cannot run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool, engine_scheduler
from windtunnel.deployment.presets import PRESETS
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.policy import Policy, VllmV0
from windtunnel.simulate.run import FINISHED, REJECTED, UNFINISHED, Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Both, Gamma, Lognormal, Workload, generate, prefix_repetition

LENGTHS = Both(Lognormal(400, 0.8, 3000), Lognormal(100, 0.8, 900))


def deployment(replicas: int = 1, router: str = "round_robin", **engine: Any) -> Deployment:
    settings: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
    pool = Pool(load_model("Llama-3.1-8B"), device("h100"), Engine(**(settings | engine)), replicas)
    return Deployment((pool,), router)


def run(served: Deployment, workload: Workload, seed: int = 0) -> Run:
    return simulate(served, workload, seed, perf="modelled")


CASES = {
    "asynchronous": deployment(),
    "synchronous": deployment(async_scheduling=False),
    "no chunks": deployment(enable_chunked_prefill=False, max_num_batched_tokens=4096),
    "pipeline": deployment(pipeline_parallel_size=2),
    "few blocks in a pipeline": deployment(pipeline_parallel_size=2, num_gpu_blocks_override=400),
    "few blocks": deployment(num_gpu_blocks_override=400),
    "replicas": deployment(4, "least_outstanding"),
    "ranks": deployment(2, "vllm_dp", data_parallel_size=2),
}


@pytest.fixture(params=CASES)
def simulated(request: pytest.FixtureRequest) -> Run:
    return run(CASES[request.param], generate(Gamma(20.0, 0.5), LENGTHS, 1500, seed=1))


def test_events_are_in_their_order(simulated: Run) -> None:
    requests = simulated.requests
    assert (requests.status == FINISHED).all()
    assert (requests.arrival <= requests.scheduled).all()
    assert (requests.scheduled < requests.first_token).all()
    assert (requests.first_token <= requests.finish).all()
    single = requests.output_tokens == 1
    assert (requests.first_token[single] == requests.finish[single]).all()


def test_every_token_is_computed_once(simulated: Run) -> None:
    requests, rows = simulated.requests, simulated.iterations
    decoded = int((rows.decodes * rows.steps - rows.discarded).sum()) + len(simulated.stalls.request)
    assert decoded == int((requests.output_tokens - 1).sum())
    if requests.preemptions.sum() == 0:
        per_row = np.maximum(rows.steps, 1) * rows.chunk_tokens
        assert int(per_row.sum()) == int(requests.prompt_tokens.sum())


def test_blocks_hold_what_is_in_the_cache(simulated: Run) -> None:
    rows, pool = simulated.iterations, simulated.manifest["pools"][0]
    assert (rows.used_blocks <= pool["kv_blocks"]).all()
    assert (rows.used_blocks * pool["block_size"] >= rows.kv_tokens + rows.decodes).all()


def test_a_lane_steps_while_anybody_is_there(simulated: Run) -> None:
    """Work conservation: no request is in the system during a gap between two steps of its replica's lanes."""
    requests, rows = simulated.requests, simulated.iterations
    times = simulated.iteration_times()
    lanes = rows.replica[times.row] * 8 + rows.lane[times.row]
    if len(np.unique(rows.lane)) > 1:
        return
    for lane in np.unique(lanes):
        mine = lanes == lane
        start, end = times.start[mine], times.start[mine] + times.duration[mine]
        idle = start[1:] > end[:-1] + 1e-9
        served = requests.replica * 8 == lane
        for since, until in zip(end[:-1][idle], start[1:][idle], strict=True):
            inside = served & (requests.arrival < until - 1e-9) & (requests.finish > since + 1e-9)
            assert not inside.any()


def test_steps_of_a_lane_follow_each_other(simulated: Run) -> None:
    rows, times = simulated.iterations, simulated.iteration_times()
    lanes = rows.replica[times.row] * 8 + rows.lane[times.row]
    for lane in np.unique(lanes):
        start, end = times.start[lanes == lane], (times.start + times.duration)[lanes == lane]
        stages = simulated.manifest["replicas"][0]["stages"]
        waits = rows.decodes[times.row[lanes == lane]] > 0  # chunks of a prompt need no token of the step before
        assert (start[1:] >= end[:-1] - 1e-9)[waits[1:] | (stages == 1)].all()


def test_same_seed_same_bits() -> None:
    workload = generate(Gamma(20.0, 0.5), LENGTHS, 500, seed=3)
    served = deployment(4, "random")
    first, second, other = run(served, workload, 1), run(served, workload, 1), run(served, workload, 2)
    assert np.array_equal(first.requests.finish, second.requests.finish)
    assert first.manifest == second.manifest
    assert not np.array_equal(first.requests.replica, other.requests.replica)


def test_slower_arrivals_only_shift_an_idle_server() -> None:
    """Requests that never meet are served alike: first tokens and ends are shifted by the arrivals."""
    workload = Workload.from_columns(arrival=[0.0, 100.0], prompt_tokens=[500, 500], output_tokens=[50, 50])
    requests = run(deployment(), workload).requests
    assert requests.finish[1] - 100.0 == pytest.approx(requests.finish[0], rel=1e-9)


def test_a_request_that_can_never_run_is_rejected_not_awaited() -> None:
    workload = Workload.from_columns(prompt_tokens=[5000, 4095, 100], output_tokens=[10, 10, 10])
    done = run(deployment(), workload)
    assert done.requests.status.tolist() == [REJECTED, FINISHED, FINISHED]
    assert done.requests.output_tokens.tolist()[1] == 1
    assert any("1 of 3 requests can never run" in text for text in done.manifest["warnings"])
    assert any("1 requests end at max_model_len=4096" in text for text in done.manifest["warnings"])


def test_a_prompt_longer_than_all_blocks_is_rejected() -> None:
    workload = Workload.from_columns(prompt_tokens=[1000, 100], output_tokens=[10, 10])
    done = run(deployment(num_gpu_blocks_override=40), workload)
    assert done.requests.status.tolist() == [REJECTED, FINISHED]
    assert np.isnan(done.requests.finish[0])


def test_closed_loop_keeps_the_limit() -> None:
    workload = replace(generate(Gamma(1000.0), LENGTHS, 300, seed=5), max_concurrency=7)
    requests = run(deployment(2), workload).requests
    moments = np.sort(requests.arrival)
    present = [int(((requests.arrival <= t) & (requests.finish > t)).sum()) for t in moments]
    assert max(present) == 7


def test_turns_of_a_session_wait_for_each_other() -> None:
    workload = Workload.from_columns(
        arrival=[0.0, 0.0, 0.0],
        prompt_tokens=[100, 200, 300],
        output_tokens=[20, 20, 20],
        session=[4, 4, 4],
        think_time=[0.0, 2.0, 3.0],
    )
    requests = run(deployment(), workload).requests
    assert requests.arrival[1] == requests.finish[0] + 2.0
    assert requests.arrival[2] == requests.finish[1] + 3.0


def test_lockstep_ranks_share_every_step() -> None:
    pool = Pool(
        load_model("Qwen3-30B-A3B"),
        device("h100"),
        Engine(data_parallel_size=2, enable_expert_parallel=True, max_model_len=4096, max_num_seqs=64),
    )
    done = run(Deployment((pool,)), generate(Gamma(10.0), LENGTHS, 200, seed=1))
    rows = done.unfolded().iterations
    starts = [rows.start[(rows.lane == lane) & (rows.steps > 0)] for lane in (0, 1)]
    assert np.array_equal(starts[0], starts[1])


def test_a_model_that_does_not_fit_says_what_would() -> None:
    pool = Pool(load_model("Llama-3.1-70B"), device("l4"), Engine(max_model_len=4096))
    with pytest.raises(InputError, match="GB"):
        run(Deployment((pool,)), generate(Gamma(10.0), LENGTHS, 2, seed=1))


def test_a_scheduler_may_be_given_as_a_value() -> None:
    workload = generate(Gamma(20.0, 0.5), LENGTHS, 300, seed=1)
    served = deployment(async_scheduling=False, max_num_batched_tokens=4096)
    own, same, first = (
        simulate(served, workload, perf="modelled", policies=policies)
        for policies in (
            None,
            [engine_scheduler(served.pools[0].engine)],
            [Policy(group_order="prefill_first", mixed=False)],
        )
    )
    assert np.array_equal(own.requests.finish, same.requests.finish)
    alone = first.iterations.chunk_tokens > 0
    assert (first.iterations.decodes[alone] == 0).all()
    assert (own.iterations.decodes[own.iterations.chunk_tokens > 0] > 0).any()
    assert "prefill_first" in first.manifest["schedulers"][0]


def test_schedulers_see_declared_limits_and_priorities() -> None:
    """Of requests that come at once one runs at a time: by priority; one that declares too much waits for room."""
    served = deployment(max_num_batched_tokens=4096, num_gpu_blocks_override=101)
    workload = Workload.from_columns(
        arrival=np.zeros(3), prompt_tokens=np.full(3, 100), output_tokens=np.full(3, 10), max_tokens=np.full(3, 1000),
        priority=np.array([2, 0, 1]),
    )  # fmt: skip
    settings = Policy(allocation="prompt_and_output", preemption="none", admission_order="priority")
    requests = simulate(served, workload, perf="modelled", policies=[settings]).requests
    assert np.argsort(requests.scheduled).tolist() == [1, 2, 0]
    assert requests.scheduled[2] >= requests.finish[1]


def test_common_prefixes_are_computed_once() -> None:
    """Ten prefixes of 320 tokens: every request but the first of each finds 20 blocks."""
    workload = prefix_repetition(Gamma(5.0, 1.0), LENGTHS, 500, num_prefixes=10, prefix_tokens=320, seed=2)
    found = run(deployment(), workload).requests.cached_tokens
    assert (found == 320).sum() == 490
    assert (found == 0).sum() == 10
    assert run(deployment(enable_prefix_caching=False), workload).requests.cached_tokens.sum() == 0


def test_contents_that_nobody_told_are_like_no_others() -> None:
    workload = generate(Gamma(20.0, 0.5), LENGTHS, 300, seed=1)
    cached, plain = run(deployment(), workload), run(deployment(enable_prefix_caching=False), workload)
    assert np.array_equal(cached.requests.finish, plain.requests.finish)
    assert any("no hash_ids" in text for text in cached.manifest["warnings"])
    assert not any("no hash_ids" in text for text in plain.manifest["warnings"])


def test_better_priorities_wait_less() -> None:
    workload = generate(Gamma(60.0, 0.5), LENGTHS, 1500, seed=1)
    priority = np.arange(1500) % 2
    ordered = Workload.from_columns(
        arrival=workload.arrival,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        priority=priority,
    )
    requests = run(deployment(scheduling_policy="priority", max_num_seqs=16), ordered).requests
    waited = requests.scheduled - requests.arrival
    assert waited[priority == 0].mean() < waited[priority == 1].mean() / 4


def test_a_threshold_bounds_the_tokens_of_a_prompt_in_a_step() -> None:
    """Except where a request has the engine to itself."""
    rows = run(
        deployment(long_prefill_token_threshold=128), generate(Gamma(20.0, 0.5), LENGTHS, 300, seed=1)
    ).iterations
    assert rows.chunk_tokens[rows.decodes > 0].max() == 128
    assert rows.chunk_tokens.max() > 128


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("vllm-")])
def test_every_version_finishes_every_request(preset: str) -> None:
    served = deployment(preset=preset, num_gpu_blocks_override=400, max_num_batched_tokens=4096)
    simulated = run(served, generate(Gamma(20.0, 0.5), LENGTHS, 300))
    assert (simulated.requests.status == FINISHED).all()


V0 = {
    "default": VllmV0(),
    "chunked": VllmV0(chunked_prefill=True),
    "swap": VllmV0(preemption_mode="swap"),
    "caching": VllmV0(prefix_caching=True),
}


@pytest.mark.parametrize("name", V0)
def test_a_pool_runs_with_the_v0_scheduler(name: str) -> None:
    served = deployment(num_gpu_blocks_override=400, max_num_batched_tokens=4096)
    workload = generate(Gamma(20.0, 0.5), LENGTHS, 300, seed=1)
    result = simulate(served, workload, perf="roofline", policies=[V0[name]])
    requests, rows = result.requests, result.iterations
    assert (requests.status == FINISHED).all()
    assert requests.preemptions.sum() > 0
    decoded = int((rows.decodes * rows.steps - rows.discarded).sum()) + len(result.stalls.request)
    assert decoded == int((requests.output_tokens - 1).sum())
    assert rows.used_blocks.max() <= result.manifest["pools"][0]["kv_blocks"] == 400
    assert ((rows.decodes > 0) & (rows.chunk_tokens > 0)).any() == (name == "chunked")
    assert (rows.transfer > 0).any() == (name == "swap")


def test_a_v0_scheduler_must_fit_the_engine() -> None:
    with pytest.raises(InputError, match="must be ≥ max_model_len=4096 without chunked prefill"):
        simulate(deployment(), generate(Gamma(20.0, 0.5), LENGTHS, 3, seed=1), perf="roofline", policies=[VllmV0()])


def test_requests_that_preempt_each_other_for_ever_are_told_of() -> None:
    n = 2
    workload = Workload(
        arrival=np.zeros(n),
        prompt_tokens=np.full(n, 64),
        output_tokens=np.ones(n, dtype=np.int64),
        max_tokens=np.ones(n, dtype=np.int64),
        priority=np.zeros(n, dtype=np.int64),
        session=np.full(n, -1),
        think_time=np.zeros(n),
    )
    engine: dict[str, Any] = {
        "num_gpu_blocks_override": 5,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "max_model_len": 80,
    }
    engine |= {"long_prefill_token_threshold": 16, "scheduler_reserve_full_isl": False, "enable_prefix_caching": False}
    circling = run(deployment(scheduling_policy="priority", **engine), workload)
    assert (circling.requests.status == UNFINISHED).all()
    assert any("2 requests never finish: requests of equal priority" in note for note in circling.manifest["warnings"])
    assert (run(deployment(**engine), workload).requests.status == FINISHED).all()


@pytest.mark.plain_python
def test_unlike_pools_take_turns() -> None:
    served = deployment()
    other = deployment(preset="sglang-0.5", num_gpu_blocks_override=3000).pools[0]
    both = run(replace(served, pools=(*served.pools, other)), generate(Gamma(20.0, 0.5), LENGTHS, 200, seed=1))
    requests = both.requests
    assert (requests.status == FINISHED).all()
    assert requests.pool.tolist() == requests.replica.tolist() == [0, 1] * 100
    assert [replica["pool"] for replica in both.manifest["replicas"]] == [0, 1]
    assert both.manifest["schedulers"][0] != both.manifest["schedulers"][1]
    assert len(both.iteration_times().start) == both.iterations.steps.sum()


def test_a_request_must_fit_every_pool() -> None:
    served = deployment()
    small = deployment(max_model_len=300).pools[0]
    requests = run(
        replace(served, pools=(*served.pools, small)), generate(Gamma(20.0, 0.5), LENGTHS, 200, seed=1)
    ).requests
    rejected = requests.status == REJECTED
    assert (rejected == (requests.prompt_tokens > 299)).all()
    assert (requests.prompt_tokens + requests.output_tokens)[~rejected].max() == 300


def test_prefill_and_decode_apart() -> None:
    pool = deployment().pools[0]
    apart = Deployment((replace(pool, role="prefill"), replace(pool, role="decode", replicas=2)))
    workload = generate(Gamma(20.0, 0.5), LENGTHS, 300, seed=1)
    found = run(apart, workload)
    requests, rows, stalls = found.requests, found.iterations, found.stalls
    assert (requests.status == FINISHED).all()
    assert (requests.first_token <= requests.finish).all()
    assert (requests.pool == np.where(requests.output_tokens > 1, 1, 0)).all()
    assert set(requests.replica[requests.pool == 1].tolist()) == {1, 2}
    prefills = rows.replica == 0
    assert rows.decodes[prefills].sum() == 0
    assert rows.chunk_tokens[~prefills].sum() == 0
    decoded = int((rows.decodes * rows.steps - rows.discarded).sum()) + len(stalls.request)
    assert decoded == int((requests.output_tokens - 1).sum())
    joined = np.sort(stalls.request)
    assert joined.tolist() == np.nonzero(requests.output_tokens > 1)[0].tolist()
    one = np.ones_like(workload.output_tokens)
    alone = run(deployment(), replace(workload, output_tokens=one, max_tokens=one))
    assert (alone.requests.first_token == requests.first_token).all()
    assert len(found.iteration_times().start) == rows.steps.sum()
