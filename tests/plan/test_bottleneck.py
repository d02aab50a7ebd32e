"""Bottlenecks: each is found where it was made."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import handmade
import numpy as np
import pytest

from plan.planning import chat, question, small_space
from windtunnel.deployment import Deployment
from windtunnel.plan.bottleneck import Finding, bottlenecks
from windtunnel.plan.question import Question
from windtunnel.plan.trial import whole_run
from windtunnel.simulate.run import Requests
from windtunnel.workload import Both, Fixed, Gamma, generate

SETTINGS: dict[str, Any] = {"device": "h100", "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 1024}


def deployment(**settings: Any) -> Deployment:
    return small_space().deployment(SETTINGS | settings)


def found(asked: Question, rate: float, **settings: Any) -> list[str]:
    return [finding.name for finding in bottlenecks(whole_run(asked, deployment(**settings), rate))]


def test_each_bottleneck_is_found_where_it_was_made() -> None:
    load = question(chat(400), goodput=())
    assert "batch cap" in found(load, 60.0, max_num_seqs=4)
    assert "KV memory" in found(load, 80.0, num_gpu_blocks_override=300)
    long = question(generate(Gamma(1.0), Both(Fixed(1500), Fixed(4)), 300), goodput=())
    assert "token budget" in found(long, 60.0, max_num_batched_tokens=256)
    assert "spare time" in found(load, 0.2)
    assert "spare time" not in found(load, 60.0)
    mixed = question(generate(Gamma(1.0), Both(Fixed(1500), Fixed(100)), 300), goodput=())
    assert "prefill interference" in found(mixed, 8.0, device="l40s")
    growing = question(generate(Gamma(1.0), Both(Fixed(100), Fixed(1500)), 100), goodput=())
    assert "preemptions" in found(growing, 50.0, num_gpu_blocks_override=400)
    assert "communication" in found(load, 30.0, device="l40s", tensor_parallel_size=4)
    finding = bottlenecks(whole_run(load, deployment(max_num_seqs=4), 60.0))[0]
    assert "max_num_seqs=4" in finding.evidence


def test_a_run_of_nothing_has_no_bottleneck() -> None:
    asked = question(generate(Gamma(1.0), Both(Fixed(4000), Fixed(4)), 50), goodput=())
    assert bottlenecks(whole_run(asked, deployment(), 1.0)) == ()


def by_hand(*rows: Mapping[str, float], requests: Requests | None = None, **more: Any) -> dict[str, Finding]:
    """Steps of 0.1 s each, 100 blocks, at most 4 requests and 100 tokens in a step."""
    base = handmade.two_requests()
    (pool,) = base.manifest["pools"]
    pool = {**pool, "max_num_seqs": 4, "max_num_batched_tokens": 100}
    log = handmade.iterations(*({"start": 0.1 * place, **row} for place, row in enumerate(rows)))
    run = handmade.run(requests or base.requests, log, manifest={"pools": [pool]}, **more)
    return {finding.name: finding for finding in bottlenecks(run)}


def test_shares_of_what_is_full_by_hand() -> None:
    """Of ten steps one waits for blocks (95 of 100), two for places, three for the token budget; others do not wait."""
    waiting = {"waiting": 1, "kv_tokens": 9}
    found = by_hand(
        {**waiting, "decodes": 3, "used_blocks": 95},
        {**waiting, "decodes": 4, "used_blocks": 99},
        {**waiting, "decodes": 4, "used_blocks": 1},
        *({**waiting, "decodes": 1, "chunk_tokens": 94} for _ in range(3)),
        {**waiting, "decodes": 1, "chunk_tokens": 93},
        {**waiting, "decodes": 3, "used_blocks": 94},
        {"decodes": 4, "kv_tokens": 9, "used_blocks": 99},
        {"decodes": 1, "kv_tokens": 9, "chunk_tokens": 99},
    )
    shares = {name: found[name].share for name in ("KV memory", "batch cap", "token budget")}
    assert shares == pytest.approx({"KV memory": 0.1, "batch cap": 0.2, "token budget": 0.3})
    assert found["batch cap"].evidence == "in 20 % of the step time requests wait while max_num_seqs=4 run"
    assert "max_num_batched_tokens=100 tokens" in found["token budget"].evidence


def test_prompts_are_in_the_way_where_steps_last_half_as_long_again() -> None:
    """Two of five tokens come from steps with a prompt, of 0.1 + 0.001 s a token."""
    rows = ({"decodes": 3, "kv_tokens": 9}, {"decodes": 2, "kv_tokens": 9, "chunk_tokens": 58})
    found = by_hand(*rows, times=handmade.flat_times(0.1, per_token=1e-3))["prefill interference"]
    assert found.share == pytest.approx(0.4)
    assert "40 % of the tokens" in found.evidence
    assert "last 160 ms instead of 103 ms" in found.evidence
    few = by_hand(rows[0], {**rows[1], "chunk_tokens": 50}, times=handmade.flat_times(0.1, per_token=1e-3))
    assert "prefill interference" not in few  # 152 ms, not half as long again


def test_busy_gpus_are_compared_with_their_peaks() -> None:
    """One step of 0.1 s reads 1 MB and 10 tokens of 10 bytes at 1 GB/s; four gaps of as long are spare time."""
    found = by_hand({"decodes": 1, "kv_tokens": 9})
    assert found["memory bandwidth"].share == pytest.approx((1e6 + 10 * 11) / (0.1 * 1e9), rel=1e-3)
    assert "compute" not in found


def test_limits_that_are_touched_too_little_are_not_named() -> None:
    """A twentieth of the time is the least for queues: one step of 19 is enough, of 21 too little."""
    busy, idle = {"waiting": 1, "decodes": 4, "kv_tokens": 9}, {"decodes": 1, "kv_tokens": 9}
    assert by_hand(busy, *[idle] * 18)["batch cap"].share == pytest.approx(1 / 19)
    assert "batch cap" not in by_hand(busy, *[idle] * 20)


def test_the_most_telling_comes_first_and_steps_of_nothing_count_nowhere() -> None:
    """Nine tenths of the time wait for places; a step that computes nothing is no step."""
    rows = [{"waiting": 1, "decodes": 4, "kv_tokens": 9}] * 9 + [{"decodes": 1, "kv_tokens": 9}] + [{"waiting": 9}] * 5
    found = by_hand(*rows)
    assert found["batch cap"].share == pytest.approx(0.9)
    shares = [finding.share for finding in found.values()]
    assert shares == sorted(shares, reverse=True)


def test_preemptions_and_spare_time_by_hand() -> None:
    """One of two requests lost its cache 1,500 times; GPUs compute for 0.1 s of 0.9."""
    steps = [{"start": place / 10, "decodes": 1, "kv_tokens": 9} for place in range(4)]
    lost = replace(handmade.two_requests().requests, preemptions=np.array([1500, 0]))
    found = by_hand(*steps, requests=lost)
    assert found["preemptions"].share == 0.5
    assert found["preemptions"].evidence == "50.0 % of the requests lost their KV cache, 1,500 times in all"
    assert "spare time" not in found, "steps one after the other"
    second = handmade.requests(arrival=[0.0, 1.0], scheduled=[0.0, 1.0], first_token=[0.1, 1.1], finish=[0.2, 1.2])
    spare = by_hand({"start": 0.2, "decodes": 1, "kv_tokens": 9}, requests=second)["spare time"]
    assert spare.share == pytest.approx(8 / 9)
    assert spare.evidence == "GPUs are busy 11 % of the time"
    assert set(by_hand(*steps)).isdisjoint({"preemptions", "pipeline bubbles", "host"})


def test_groups_of_operators_that_wait() -> None:
    """Of a step a quarter is communication, and 12 % are work of the host."""
    parts = {
        "communication": handmade.flat_times(0.025), "host": handmade.flat_times(0.012),
        "gemm": handmade.flat_times(0.063),
    }  # fmt: skip
    step = {"decodes": 1, "kv_tokens": 9}
    found = by_hand(step, groups=(parts,))
    assert found["communication"].share == pytest.approx(0.25)
    assert found["communication"].evidence == "25 % of the step time is communication between GPUs"
    assert found["host"].evidence == "12 % of the step time is host work during which the GPU waits"
    less = {"communication": handmade.flat_times(0.014), "host": handmade.flat_times(0.009)}
    rest = {"gemm": handmade.flat_times(0.077)}
    assert set(by_hand(step, groups=(less | rest,))).isdisjoint({"communication", "host"})


@pytest.mark.parametrize(("flops", "name"), [(1e9, "memory bandwidth"), (1e12, "compute")])
def test_what_busy_gpus_are_limited_by(flops: float, name: str) -> None:
    """Of 0.1 s a step reads 1 MB of 100 possible, and computes ten tokens of 1 or 1,000 MFLOPs of 200 GFLOPs."""
    footprint = replace(handmade.FOOTPRINT, linear_flops_per_token=flops / 1e3, head_flops=0.0, attention=())
    base = handmade.two_requests()
    (pool,) = base.manifest["pools"]
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 100, "footprint": asdict(footprint)}
    log = handmade.iterations({"start": 0.1, "chunk_tokens": 10})
    run = handmade.run(base.requests, log, manifest={"pools": [pool | limits]})
    found = {finding.name: finding for finding in bottlenecks(run)}
    assert (name in found) and ({"compute", "memory bandwidth"} - {name}).isdisjoint(found)
    evidence = {"compute": "5 % of their FLOP/s and 1 %", "memory bandwidth": "0 % of their FLOP/s and 1 %"}[name]
    assert f"busy GPUs reach {evidence} of their memory bandwidth" in found[name].evidence
    assert found[name].share == pytest.approx({"compute": 0.05, "memory bandwidth": 0.01}[name])


def test_places_of_a_pipeline_that_idle_by_hand() -> None:
    """Two lanes of a pipeline, of which one computes 0.1 s of 0.4 in which requests are there: an eighth is busy."""
    base = handmade.two_requests()
    (pool,) = base.manifest["pools"]
    engine = pool["engine"] | {"pipeline_parallel_size": 2}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 100, "engine": engine}
    log = handmade.iterations({"start": 0.1, "decodes": 1, "kv_tokens": 9}, {"start": 0.1, "lane": 1, "waiting": 1})
    run = handmade.run(base.requests, log, manifest={"pools": [pool | limits]})
    found = {finding.name: finding for finding in bottlenecks(run)}["pipeline bubbles"]
    assert found.share == pytest.approx(1 - 0.125)
    assert "12 % of the time in each of 2 places" in found.evidence


def test_steps_that_take_no_time_have_no_shares() -> None:
    found = by_hand({"waiting": 1, "decodes": 4, "kv_tokens": 9}, times=handmade.flat_times(0.0))
    assert "batch cap" not in found


def test_a_share_counts_from_its_least_on() -> None:
    """Of 20 steps one each waits for blocks, for a place and for the token budget: 5 %, which counts; of 21 it is less.
    Of requests one in a hundred counts, of idle time three tenths: six of nine steps do, seven do not."""
    one_each = (
        {"waiting": 1, "decodes": 1, "used_blocks": 95},
        {"waiting": 1, "decodes": 4},
        {"waiting": 1, "decodes": 1, "chunk_tokens": 94},
    )
    names = ["KV memory", "batch cap", "token budget"]
    for others, counted in ((17, names), (18, [])):
        found = by_hand(*one_each, *({"decodes": 1} for _ in range(others)), times=handmade.flat_times(0.125))
        assert [name for name in found if name in names] == counted
    for number, counts in ((100, True), (101, False)):
        once = handmade.requests(arrival=[0.0] * number, preemptions=[1] + [0] * (number - 1))
        assert ("preemptions" in by_hand({"decodes": 1}, requests=once)) is counts
    two = handmade.requests(arrival=[0.0, 1.0], scheduled=[0.0, 1.0], first_token=[0.1, 1.1], finish=[0.2, 1.2])
    for busy, spare in ((6, 1 / 3), (7, None)):
        found = by_hand(*({"start": 0.2 + 0.1 * place, "decodes": 1} for place in range(busy)), requests=two)
        assert (found["spare time"].share if "spare time" in found else None) == (spare and pytest.approx(spare))


def test_what_tells_most_comes_first() -> None:
    found = by_hand({"waiting": 1, "decodes": 4}, *({"waiting": 1, "decodes": 1, "used_blocks": 95} for _ in range(3)))
    names = [name for name in found if name in ("KV memory", "batch cap")]
    assert names == ["KV memory", "batch cap"]
    assert found["KV memory"].share == pytest.approx(0.75)


def test_a_log_of_idle_lanes_or_of_nothing_has_no_bottleneck() -> None:
    assert by_hand({"waiting": 1}) == {}
    assert bottlenecks(handmade.run(handmade.requests(arrival=[0.0]), handmade.iterations())) == ()
    assert "communication" not in by_hand({"decodes": 1}), "no group of operators is known"


def test_prompts_are_in_the_way_from_a_tenth_of_the_tokens_and_half_as_long_again_on() -> None:
    """Nine tokens come from steps of 127 + 1 units, one from a step with a prompt of 65 tokens more: 193 units. A step
    that computes nothing but a prompt keeps no token waiting."""

    def found(steps: int, prompt: int) -> Finding | None:
        times = handmade.flat_times(127 / 1024, per_token=1 / 1024)
        rows = ({"decodes": 1, "steps": steps}, {"decodes": 1, "chunk_tokens": prompt}, {"chunk_tokens": 100})
        return by_hand(*rows, times=times).get("prefill interference")

    least = found(9, 65)
    assert least is not None and least.share == pytest.approx(0.1)
    assert "10 % of the tokens come from" in least.evidence
    assert "which last 188 ms instead of 125 ms" in least.evidence
    assert found(10, 65) is None, "one of eleven"
    assert found(9, 63) is None, "191 units"
    assert "prefill interference" not in by_hand({"decodes": 1, "chunk_tokens": 99}), "beside steps without a prompt"


def test_each_pool_has_its_own_limits() -> None:
    """Of four steps one of each pool fills its batch of 4 or 8, one of the larger pool its budget of 200."""
    base = handmade.two_requests()
    (pool,) = base.manifest["pools"]
    pools = [pool | {"max_num_seqs": seqs, "max_num_batched_tokens": 25 * seqs} for seqs in (4, 8)]
    log = handmade.iterations(
        {"waiting": 1, "decodes": 4},
        {"replica": 1, "waiting": 1, "decodes": 8},
        {"replica": 1, "waiting": 1, "decodes": 4},
        {"replica": 1, "waiting": 1, "decodes": 1, "chunk_tokens": 189},
    )
    manifest = {"pools": pools, "replicas": [{"pool": place, "lanes": 1} for place in range(2)]}
    run = handmade.run(base.requests, log, manifest=manifest)
    found = {finding.name: finding for finding in bottlenecks(replace(run, times=2 * run.times))}
    assert (found["batch cap"].share, found["token budget"].share) == pytest.approx((0.5, 0.25))
    assert found["batch cap"].evidence == "in 50 % of the step time requests wait while max_num_seqs=8 run"
    assert "max_num_batched_tokens=200 tokens" in found["token budget"].evidence


def test_places_of_all_pipelines_are_idle_while_requests_are_there() -> None:
    """Requests are there for 2 of 4 s; four places, of two replicas of a pipeline of two stages, compute 0.1 s each, a
    fortieth."""
    base = handmade.two_requests()
    (pool,) = base.manifest["pools"]
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 100, "engine": pool["engine"]}
    staged = pool | limits | {"engine": pool["engine"] | {"pipeline_parallel_size": 2}}
    requests = handmade.requests(
        arrival=[0.0, 3.0, 3.0], scheduled=[0.0, 3.0, np.nan], first_token=[0.1, 3.1, np.nan], finish=[1.0, 4.0, np.nan]
    )
    rows: list[dict[str, float]] = [
        {"replica": replica, "lane": lane, "decodes": 1} for replica in (0, 1) for lane in (0, 1)
    ]
    manifest = {"pools": [staged, pool | limits], "replicas": [{"pool": 0, "lanes": 2}, {"pool": 0, "lanes": 2}]}
    run = handmade.run(requests, handmade.iterations(*rows), manifest=manifest)
    found = {finding.name: finding for finding in bottlenecks(replace(run, times=2 * run.times))}["pipeline bubbles"]
    assert found.share == pytest.approx(0.5 - 0.025)
    assert "under way 2 % of the time in each of 2 places" in found.evidence
