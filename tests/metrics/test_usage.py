"""Usage in closed form on runs written by hand: every expected number is worked out next to the run."""

from dataclasses import replace
from typing import Any

import handmade
import numpy as np
import pytest

from windtunnel.core.rebuild import IterationTimes
from windtunnel.deployment.footprint import Footprint
from windtunnel.metrics import group_share, summary, time_share, unroll
from windtunnel.metrics.steps import Floats, Steps, in_flight
from windtunnel.metrics.summary import Summary
from windtunnel.metrics.usage import step_sums, usage
from windtunnel.metrics.window import Window
from windtunnel.simulate.run import Run


def close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def test_usage_of_two_requests() -> None:
    used = summary(handmade.two_requests()).usage
    table = used.replicas
    assert (used.busy, used.gpus) == (close(1.0), 2)
    assert used.kv == close((2 + 3 + 4 + 5) / 4 / 100)
    assert table.kv_peak.tolist() == close([0.05])
    assert table.batch_size.tolist() == close([(1 + 1 + 2 + 2) / 4])
    assert table.tokens_per_iteration.tolist() == close([(32 + 1 + 17 + 2) / 4])
    assert (table.prefill_tokens.tolist(), table.decode_tokens.tolist()) == ([48.0], [4.0])
    assert table.running.tolist() == close([(0.4 + 0.2) / 0.4])
    assert table.waiting.tolist() == close([0.05 / 0.4])
    assert used.energy_wh == close(2 * 700 * 0.4 / 3600)
    assert used.cost_usd == close(2 * 3.0 * 0.4 / 3600)


def test_flops_and_bytes_of_two_requests() -> None:
    used = summary(handmade.two_requests()).usage
    pairs = 32 * 33 / 2 + (32 + 1) + (33 + 1) + 16 * 17 / 2 + (50 + 2)
    flops = 1e6 * 52 + 1e5 * 6 + 100 * pairs
    assert used.mfu == close(flops / (0.4 * 2 * 1e12))
    cached = (33 + 34 + 52) + 52
    assert used.mbu == close((4 * 1e6 + 10 * cached) / (0.4 * 1e9))


def test_a_run_of_steps_counts_as_its_single_steps() -> None:
    def run(*rows: dict[str, float]) -> Summary:
        requests = handmade.requests(
            arrival=[0.0, 0.0], output_tokens=[9, 9], scheduled=[0, 0], first_token=[0.1, 0.1], finish=[0.9, 0.9]
        )
        return summary(handmade.run(requests, handmade.iterations(*rows), times=handmade.flat_times(per_token=1e-3)))

    joined = run({"start": 0.0, "steps": 8, "decodes": 2, "kv_tokens": 40})
    single = run(*({"start": 0.102 * i, "decodes": 2, "kv_tokens": 40 + 2 * i} for i in range(8)))
    assert joined.latencies["itl"].count == single.latencies["itl"].count == 16
    assert joined.usage.mfu == close(single.usage.mfu)
    assert joined.usage.mbu == close(single.usage.mbu)
    assert joined.usage.replicas.batch_size.tolist() == [2.0]


def test_further_chunks_belong_to_their_step() -> None:
    requests = handmade.requests(arrival=[0, 0], scheduled=[0, 0], first_token=[0.1, 0.1], finish=[0.2, 0.2])
    log = handmade.iterations(
        {"start": 0.0, "chunk_tokens": 10},
        {"start": 0.0, "steps": 0, "chunk_tokens": 20, "chunk_context": 5},
        {"start": 0.1, "decodes": 2, "kv_tokens": 30},
    )
    found = summary(handmade.run(requests, log)).usage
    assert found.replicas.batch_size.tolist() == [2.0]
    assert found.replicas.prefill_tokens.tolist() == [30.0]
    pairs = 10 * 11 / 2 + 20 * 5 + 20 * 21 / 2 + 32
    assert found.mfu == close((32 * 1e6 + 4 * 1e5 + 100 * pairs) / (0.2 * 2e12))


def test_shares_of_sources_and_groups() -> None:
    parts = {"measured": handmade.flat_times(0.06), "interpolated": handmade.flat_times(0.03)}
    groups = {"gemm": handmade.flat_times(0.04), "attention": handmade.flat_times(0.04)}
    base = handmade.two_requests()
    steps = unroll(handmade.run(base.requests, base.iterations, sources=(parts,), groups=(groups,)))
    assert time_share(steps) == close({"measured": 0.6, "interpolated": 0.3, "modelled": 0.1})
    assert group_share(steps) == close({"gemm": 0.4, "attention": 0.4, "host": 0.2})
    assert np.isnan(list(time_share(unroll(base)).values())).all()


def test_host_work_beside_a_slower_gpu_has_no_share() -> None:
    host = np.full(65, 0.05)
    parts = {"measured": handmade.flat_times(0.1), "modelled": handmade.with_host(handmade.flat_times(0.0), host)}
    base = handmade.two_requests()
    run = handmade.run(
        base.requests, base.iterations, times=handmade.with_host(handmade.flat_times(0.1), host), sources=(parts,)
    )
    assert time_share(unroll(run))["measured"] == close(1.0)


def two_pools() -> Summary:
    """Replica 0 has two GPUs and works for all of 0.4 s; replica 1 has six of another kind and works for 0.1 s."""
    base = handmade.two_requests()
    requests = handmade.requests(
        arrival=[0.0, 0.15, 0.0],
        replica=[0, 0, 1],
        scheduled=[0.0, 0.2, 0.0],
        first_token=[0.1, 0.3, 0.1],
        finish=[0.4, 0.4, 0.1],
    )
    log = handmade.iterations(
        *({"start": start, "decodes": 2, "kv_tokens": 50} for start in (0.0, 0.1, 0.2, 0.3)),
        {"start": 0.0, "chunk_tokens": 16, "replica": 1},
    )
    (pool,) = base.manifest["pools"]
    print_ = {**pool["footprint"], "idle_power_w": 50.0, "power_w": 250.0, "price_per_hour": 1.5}
    pools = [pool, {**pool, "gpus_per_replica": 6, "footprint": print_}]
    manifest = {"pools": pools, "replicas": [{"pool": 0, "lanes": 1}, {"pool": 1, "lanes": 1}]}
    run = handmade.run(requests, log, manifest=manifest)
    return summary(replace(run, times=(handmade.flat_times(), handmade.flat_times())))


def test_replicas_count_by_their_gpus() -> None:
    used = two_pools().usage
    assert used.gpus == 8
    assert used.replicas.busy_seconds.tolist() == close([0.4, 0.1])
    assert used.replicas.idle_seconds.tolist() == close([0.0, 0.3])
    assert used.busy == close((2 * 1.0 + 6 * 0.25) / 8)
    assert used.idle_seconds == close(6 * 0.3 / 8)
    assert used.batch_size == close((4 * 2 + 1) / 5)
    assert used.phases == close({"prefill": 0.2, "decode": 0.8, "mixed": 0.0})
    assert used.gpu_hours == close(8 * 0.4 / 3600)
    assert used.energy_wh == close((2 * 700 + 6 * (50 + 200 * 0.25)) * 0.4 / 3600)
    assert used.cost_usd == close((2 * 3.0 + 6 * 1.5) * 0.4 / 3600)
    assert used.replicas.running.tolist() == close([2.0, 0.25])
    assert used.replicas.waiting.tolist() == close([0.0, 0.0])


def test_ranks_of_a_replica_are_averaged() -> None:
    """Rank 0 computes two steps of 0.1 s and rank 1 one, each rank with 100 blocks of its own."""
    requests = handmade.requests(arrival=[0.0], scheduled=[0.0], first_token=[0.1], finish=[0.2])
    log = handmade.iterations(
        {"start": 0.0, "decodes": 1, "kv_tokens": 9, "used_blocks": 10},
        {"start": 0.0, "lane": 1, "decodes": 3, "kv_tokens": 27, "used_blocks": 30},
        {"start": 0.1, "decodes": 1, "kv_tokens": 10, "used_blocks": 50},
    )
    found = summary(handmade.run(requests, log, lanes=2)).usage
    table = found.replicas
    assert (table.busy_seconds[0], table.idle_seconds[0]) == close((0.15, 0.05))
    assert table.kv[0] == close((10 + 30 + 50) * 0.1 / (2 * 100 * 0.2))
    assert table.kv_peak[0] == close(0.5)
    assert (table.iterations[0], table.batch_size[0]) == close((3, 5 / 3))
    flops = 1e6 * 5 + 1e5 * 5 + 100 * (10 + 3 * 10 + 11)
    assert found.mfu == close(flops / (2 * 0.2 * 2 * 1e12))
    assert found.mbu == close((3 * 1e6 + 10 * ((10 + 1) + (30 + 3) + (11 + 1))) / (2 * 0.2 * 1e9))


def staged(lanes: tuple[int, ...], starts: tuple[float, ...]) -> Steps:
    """Steps of 0.2 s through two stages of 0.1 s each."""
    rows = [
        {"start": start, "lane": lane, "decodes": 1, "kv_tokens": 9, "used_blocks": 10 * (lane + 1)}
        for lane, start in zip(lanes, starts, strict=True)
    ]
    requests = handmade.requests(arrival=[0.0], scheduled=[0.0], first_token=[0.1], finish=[0.3])
    manifest = {"replicas": [{"pool": 0, "lanes": 1, "stages": 2}]}
    run = handmade.run(requests, handmade.iterations(*rows), manifest=manifest)
    number = len(rows)
    ones, seconds = np.ones(number, dtype=np.int32), np.full(number, 0.1)
    steps = Steps(run)
    vars(steps)["every"] = IterationTimes(np.cumsum(ones) - ones, np.array(starts), 2 * seconds, ones, seconds)
    return steps


def test_stages_idle_until_the_pipeline_is_full() -> None:
    """Two steps overlap from 0.1 to 0.2: the stages compute for 0.2 s of the 0.3 s in which a step is in flight."""
    steps = staged((0, 1), (0.0, 0.1))
    spans = in_flight(steps, np.array([10.0, 20.0]))
    assert np.diff([spans.begin, spans.end], axis=0)[0].tolist() == close([0.1, 0.1, 0.1])
    assert spans.blocks.tolist() == close([10.0, 15.0, 20.0])
    used = usage(steps, Window(0.0, 0.3, False))
    assert used.bubbles == close(1 - 0.2 / 0.3)
    assert used.busy == close(0.2 / 0.3)
    assert used.kv == close((10 + 15 + 20) * 0.1 / (100 * 0.3))
    assert steps.busy_seconds == close(2 * 2 * 0.1)


def test_ranks_of_a_pipeline_do_not_overlap_each_other() -> None:
    """Lanes 0 and 1 are micro-batches of one rank, lane 2 is another rank's."""
    spans = in_flight(staged((0, 2), (0.0, 0.1)), np.array([10.0, 30.0]))
    assert spans.blocks.tolist() == [10.0, 30.0]
    assert (spans.begin.tolist(), spans.end.tolist()) == (close([0.0, 0.1]), close([0.2, 0.3]))


def work_of(run: Run, footprint: Footprint) -> tuple[Floats, Floats]:
    """FLOPs and bytes of all of its steps."""
    sums = step_sums(unroll(run), Window(0.0, 1.0, trimmed=False), [footprint])
    return sums["flops"], sums["moved"]


def test_windows_and_experts_bound_the_work() -> None:
    """Three decodes at 30 tokens see 8 of them; 3 tokens visit 1 − (3/4)³ of experts of which each takes a quarter; a
    chunk of 4 behind 6 sees 7, 8, 8 and 8."""
    print_ = replace(handmade.FOOTPRINT, attention=((8, 100.0, 10.0),), expert_bytes=6.4e6, expert_share=0.25, ranks=1)
    requests = handmade.requests(arrival=[0.0], scheduled=[0.0], first_token=[0.1], finish=[0.1])
    decodes = handmade.iterations({"start": 0.0, "decodes": 3, "kv_tokens": 90})
    flops, moved = work_of(handmade.run(requests, decodes), print_)
    assert flops.tolist() == close([3e6 + 3e5 + 100 * 3 * 8])
    assert moved.tolist() == close([1e6 + 6.4e6 * 37 / 64 + 10 * (3 * 8 + 3)])
    chunk = handmade.iterations({"start": 0.0, "chunk_tokens": 4, "chunk_context": 6})
    flops, moved = work_of(handmade.run(requests, chunk), print_)
    assert flops.tolist() == close([4e6 + 1e5 + 100 * (7 + 8 + 8 + 8)])
    assert moved.tolist() == close([1e6 + 6.4e6 * 175 / 256 + 10 * (6 + 4)])
    two = replace(print_, ranks=2)  # six tokens visit the experts that two ranks share
    assert work_of(handmade.run(requests, decodes), two)[1].tolist() == close(
        [1e6 + 6.4e6 * (1 - 0.75**6) + 10 * (3 * 8 + 3)]
    )


def test_work_outside_the_window_does_not_count() -> None:
    """Arrivals from 0 to 10 are measured from 1 on; a prompt is computed before, a decode inside, one after the end."""
    requests = handmade.requests(
        arrival=[0.0, 10.0], scheduled=[0.0, 10.0], first_token=[0.1, 10.0], finish=[10.3, 10.4]
    )
    rows = ({"start": 0.0, "chunk_tokens": 50}, {"start": 5.0, "decodes": 1, "kv_tokens": 9, "used_blocks": 30})
    late = {"start": 10.2, "decodes": 1, "kv_tokens": 9}
    used = summary(handmade.run(requests, handmade.iterations(*rows, late)), exclude_warmup=True).usage
    assert used.mfu == close((1e6 + 1e5 + 100 * 10) / (9 * 2 * 1e12))
    assert used.mbu == close((1e6 + 10 * 11) / (9 * 1e9))
    assert (used.replicas.iterations[0], used.replicas.prefill_tokens[0]) == close((1, 0))
    assert (used.busy, used.kv) == close((0.1 / 9, 30 * 0.1 / (100 * 9)))
    assert used.phases == close({"prefill": 0.0, "decode": 1.0, "mixed": 0.0})


def test_a_rank_that_runs_along_idle_is_no_batch() -> None:
    """Rank 0 decodes two requests for 0.1 s and one for 0.3 s; rank 1 has nothing to do in the first step."""
    requests = handmade.requests(arrival=[0.0], scheduled=[0.0], first_token=[0.1], finish=[0.4])
    log = handmade.iterations(
        {"start": 0.0, "decodes": 2, "kv_tokens": 9},
        {"start": 0.0, "lane": 1},
        {"start": 0.1, "steps": 3, "decodes": 1, "kv_tokens": 9},
    )
    table = summary(handmade.run(requests, log, lanes=2)).usage.replicas
    assert table.iterations[0] == close(4)
    assert table.batch_size[0] == close((2 + 3 * 1) / 4)
    assert table.batch_size_time[0] == close((2 * 0.1 + 1 * 0.3) / 0.4)
    assert table.busy_seconds[0] == close((0.4 + 0.1) / 2)


def test_a_pipeline_that_stands_still_has_no_step_in_flight() -> None:
    """A step from 0 to 0.2 s, the next from 0.5 to 0.7."""
    spans = in_flight(staged((0, 0), (0.0, 0.5)), np.array([10.0, 20.0]))
    assert (spans.begin.tolist(), spans.end.tolist()) == (close([0.0, 0.5]), close([0.2, 0.7]))
    assert spans.blocks.tolist() == [10.0, 20.0]
    assert spans.inside(Window(0.1, 0.6, True)).tolist() == close([0.1, 0.1])
    assert spans.inside(Window(0.3, 0.4, True)).tolist() == [0.0, 0.0]
