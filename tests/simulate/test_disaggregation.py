"""Prefill and decode pools through the public door, by the rules of each engine."""

from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from oracle.disaggregated_records import run_disaggregated

from windtunnel.deployment import Deployment, Engine, Pool, Store, find_handover, find_link, usual_handover
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.metrics import summary
from windtunnel.metrics.handed import TTFT_PARTS
from windtunnel.model import load_model
from windtunnel.policy import Sglang, UserScheduler
from windtunnel.simulate.disaggregation import routers_of
from windtunnel.simulate.overheads import INFERENCEX, Overheads
from windtunnel.simulate.run import ABORTED, FINISHED, REJECTED, Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Both, Gamma, Lognormal, Workload, generate

LENGTHS = Both(Lognormal(400, 0.8, 3000), Lognormal(60, 0.8, 400))
ENGINES = ("vllm-0.32", "sglang-0.5", "trtllm-1.0")

pytestmark = pytest.mark.plain_python


def pools(preset: str, prefill: dict[str, Any] | None = None, **decode: Any) -> Deployment:
    """One prefill replica and two for decoding, with the link that Mooncake measured."""
    settings: dict[str, Any] = {
        "preset": preset,
        "max_model_len": 4096,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
    }
    model, h100 = load_model("Llama-3.1-8B"), device("h100")
    computing = Pool(model, h100, Engine(**(settings | (prefill or {}))), 1, "prefill")
    decoding = Pool(model, h100, Engine(**(settings | decode)), 2, "decode")
    rules = find_handover(usual_handover(preset.partition("-")[0]))
    return Deployment((computing, decoding), link=find_link("vllm-mooncake-8x400g"), handover=rules)


def served(deployment: Deployment, workload: Workload, **more: Any) -> Run:
    return simulate(deployment, workload, perf="modelled", **more)


def parts(run: Run) -> np.ndarray[Any, Any]:
    """[parts, n] of the time to first token."""
    return np.array([getattr(run.handovers, f"ttft_{name}") for name in TTFT_PARTS])


@pytest.mark.parametrize("preset", ENGINES)
def test_parts_of_the_time_to_first_token_add_up_to_the_bit(preset: str) -> None:
    workload = generate(Gamma(30.0, 0.5), LENGTHS, 300, seed=1)
    for load, overheads in (
        (workload, Overheads()),
        (replace(workload, max_concurrency=24), Overheads(client=INFERENCEX)),
    ):
        run = served(pools(preset), load, overheads=overheads)
        assert (run.requests.status == FINISHED).all()
        found, ttft = parts(run), run.requests.first_token - run.requests.arrival
        for order in (slice(None), slice(None, None, -1)):
            total = np.zeros(len(ttft))
            for part in found[order]:
                total = total + part
            assert (total == ttft).all()
        assert (found >= 0).all()
        assert (run.handovers.ttft_transfer[run.requests.output_tokens > 1] > 0).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("preset", ENGINES)
def test_sessions_pass_from_one_side_to_the_other(preset: str) -> None:
    load = generate(Gamma(30.0, 0.5), LENGTHS, 20, seed=1)
    with_sessions = replace(load, session=np.arange(20), think_time=np.zeros(20))
    assert (served(pools(preset), with_sessions).requests.status == FINISHED).all()


def test_a_decode_replica_that_is_full_makes_the_others_wait() -> None:
    """SGLang keeps 512 tokens for each request: 4,800 tokens of memory are soon too few."""
    burst = replace(generate(Gamma(30.0, 0.5), LENGTHS, 40, seed=2), max_concurrency=20)
    tight = served(pools("sglang-0.5", num_gpu_blocks_override=300), burst)
    wide = served(pools("sglang-0.5"), burst)
    waited = [float(np.nanmean(run.handovers.ttft_admission)) for run in (tight, wide)]  # type: ignore[union-attr]
    assert waited[0] > 10 * waited[1]


def test_bytes_are_those_of_whole_blocks() -> None:
    """Llama-3.1-8B: 32 layers, 8 heads of 128, keys and values of two bytes each."""
    run = served(pools("vllm-0.32"), generate(Gamma(30.0, 0.5), LENGTHS, 50, seed=3))
    blocks = -(-run.requests.prompt_tokens // 16)
    assert (run.handovers.kv_bytes == blocks * 16 * 32 * 8 * 128 * 2 * 2).all()  # type: ignore[union-attr]


@pytest.mark.long  # its kernel serves nothing else
def test_tensorrt_llms_scheduler_takes_what_others_have_computed() -> None:
    """With little memory requests wait, whatever the capacity scheduler's policy; all end."""
    workload = generate(Gamma(30.0, 0.5), LENGTHS, 60, seed=1)
    waited = []
    for policy in ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"):
        text = f"trtllm-1.0:capacity_scheduler_policy={policy}"
        for more in ({}, {"num_gpu_blocks_override": 150}):
            run = served(pools("trtllm-1.0", prefill={"scheduler": text}, scheduler=text, **more), workload)
            assert (run.requests.status == FINISHED).all()
            waited.append(float(np.nanmean(run.handovers.ttft_admission)))  # type: ignore[union-attr]
    assert waited[1] > waited[0]
    assert waited[3] > waited[2]


def test_the_columns_survive_on_disk(tmp_path: Any) -> None:
    run = served(pools("trtllm-1.0"), generate(Gamma(30.0, 0.5), LENGTHS, 20, seed=4))
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run").handovers
    for field in fields(again):  # type: ignore[arg-type]
        assert np.array_equal(getattr(again, field.name), getattr(run.handovers, field.name), equal_nan=True)


def test_requests_that_no_decode_replica_ever_takes_are_rejected() -> None:
    few = pools("sglang-0.5", num_gpu_blocks_override=300)
    few = replace(few, handover=replace(few.handover, reserved_decode_tokens=3000))
    run = served(few, generate(Gamma(30.0, 0.5), LENGTHS, 100, seed=5))
    tokens = run.manifest["pools"][1]["kv_blocks"] * run.manifest["pools"][1]["block_size"]
    assert tokens < 5000
    assert ((run.requests.status == REJECTED) == (run.requests.prompt_tokens + 3000 > tokens)).all()


@pytest.mark.parametrize("preset", ["vllm-0.32", "trtllm-1.0"])
def test_both_engines_report_the_same_run(preset: str) -> None:
    workload = replace(generate(Gamma(30.0, 0.5), LENGTHS, 100, seed=6), max_concurrency=12)
    core = served(pools(preset), workload)
    routers = routers_of(pools(preset))

    def readable(fleet: Any, demand: Any, _: Any, uniforms: Any, crossing: Any, **__: Any) -> Any:
        return run_disaggregated(fleet, demand, routers, uniforms, crossing)

    with patch("windtunnel.core.disaggregation.handover.run", readable):
        reference = served(pools(preset), workload)
    for name in ("requests", "handovers"):
        one, other = getattr(core, name), getattr(reference, name)
        for field in fields(one):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name), equal_nan=True), field.name
    one, other = (run.iteration_times() for run in (core, reference))
    assert np.array_equal(np.sort(one.start), np.sort(other.start))
    assert one.duration.sum() == pytest.approx(other.duration.sum(), rel=1e-12)


def shared_prefixes(n: int = 120) -> Workload:
    """Prompts of 976 tokens, all but the last 16 of them one of twelve beginnings."""
    rng = np.random.default_rng(7)
    beginnings = [[int(b) * 100 + k for k in range(60)] for b in rng.integers(0, 12, n)]
    return Workload.from_columns(
        arrival=np.cumsum(rng.exponential(0.05, n)),
        prompt_tokens=[976] * n,
        output_tokens=[20] * n,
        hash_ids=[[*known, 10**6 + i] for i, known in enumerate(beginnings)],
        hash_block_size=16,
    )


@pytest.mark.long  # a minute and a half of compilation
def test_a_router_of_prefixes_finds_more_on_prefill_replicas() -> None:
    """Two of them with memory for three beginnings each, beside the prompt."""
    deployment = pools("vllm-0.32", prefill={"num_gpu_blocks_override": 300})
    first = replace(deployment.pools[0], replicas=2)
    deployment = replace(deployment, pools=(first, deployment.pools[1]))
    found = {}
    for router in ("round_robin", "prefix_aware:queue=0"):
        run = served(replace(deployment, router=router, decode_router="least_outstanding"), shared_prefixes())
        assert (run.requests.status == FINISHED).all()
        assert set(run.handovers.prefill_replica.tolist()) == {0, 1}  # type: ignore[union-attr]
        found[router] = run.requests.cached_tokens.sum()
    assert found["prefix_aware:queue=0"] > 1.2 * found["round_robin"]


def test_stores_behind_prefill_replicas_are_found() -> None:
    """The memory of one replica holds three beginnings of twelve, the host's all of them."""
    deployment = pools("vllm-0.32", prefill={"num_gpu_blocks_override": 300})
    stored = replace(deployment.pools[0], stores=(Store(capacity=50e9),))
    without = served(deployment, shared_prefixes())
    run = served(replace(deployment, pools=(stored, deployment.pools[1])), shared_prefixes())
    assert (run.requests.status == FINISHED).all()
    assert summary(run).stores["host"] > 0.3
    assert run.requests.cached_tokens.sum() > 2 * without.requests.cached_tokens.sum()
    assert np.mean(run.handovers.ttft_prefill) < np.mean(without.handovers.ttft_prefill)  # type: ignore[union-attr]
    assert (parts(run).sum(axis=0) == run.requests.first_token - run.requests.arrival).all()


def test_waits_that_end_leave_errors_and_a_note() -> None:
    deployment = pools("vllm-0.32", max_num_seqs=1)
    workload = generate(Gamma(30.0, 0.5), LENGTHS, 60, seed=8)
    waited = served(deployment, workload)
    rules = replace(deployment.handover, lease=0.5, on_expiry="fail")
    failed = served(replace(deployment, handover=rules), workload)
    lost = failed.requests.status == ABORTED
    assert (waited.requests.status == FINISHED).all()
    assert 0 < lost.sum() < 60
    assert np.isnan(failed.requests.finish[lost]).all()
    assert (failed.handovers.kv_bytes[lost] == 0).all()  # type: ignore[union-attr]
    assert f"{lost.sum()} requests ended with an error" in " ".join(failed.manifest["warnings"])
    again = served(replace(deployment, handover=replace(rules, on_expiry="recompute")), workload)
    assert (again.requests.status == FINISHED).all()
    assert (again.requests.preemptions.sum() > 0) & (again.handovers.kv_bytes == 0).any()  # type: ignore[union-attr]
    assert (parts(again).sum(axis=0) == again.requests.first_token - again.requests.arrival).all()


def test_what_stays_refused_names_a_way_out() -> None:
    two = generate(Gamma(1.0), LENGTHS, 2, seed=1)
    with pytest.raises(InputError, match=r"conductor': .* another decode_router, e.g. least_outstanding"):
        served(replace(pools("vllm-0.32"), router="conductor"), two)
    own, stores = replace(pools("vllm-0.32"), router="round_robin"), (Store("host", 1e9),)
    behind = replace(own, pools=(replace(own.pools[0], stores=stores), own.pools[1]))
    with pytest.raises(InputError, match="stores: not simulated with this scheduler"):
        served(behind, two, scheduler=object)
    with pytest.raises(InputError, match=r"object: has no schedule\(now, waiting, running, limits\)"):
        served(pools("sglang-0.5"), two, policies=[UserScheduler(object, Sglang()), Sglang()])
