"""Usage in closed form on runs written by hand: every expected number is worked out next to the run."""

from typing import Any

import handmade
import numpy as np
import pytest

from windtunnel.metrics import group_share, summary, time_share, unroll
from windtunnel.metrics.summary import Summary


def close(value: float | list[float] | dict[str, float]) -> Any:
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
