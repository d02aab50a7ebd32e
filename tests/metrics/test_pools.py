"""Pools by hand: what each did, and the parts of the time to first token."""

import json

import handmade
import numpy as np
import pytest

from windtunnel.metrics import summary, summary_json, unroll, usage
from windtunnel.metrics.handed import TTFT_PARTS, parts_in_order
from windtunnel.metrics.window import Window


def test_each_pool_by_hand() -> None:
    found = summary(handmade.disaggregated())
    prefill, decode = found.pools
    assert (prefill.name, prefill.role, prefill.device, prefill.replicas, prefill.gpus) == (
        "prefill", "prefill", "h100_sxm", 1, 2,
    )  # fmt: skip
    seconds = 1.7
    assert prefill.busy == pytest.approx(0.2 / seconds)
    assert decode.busy == pytest.approx(0.2 / seconds)
    assert (prefill.prefill_tokens, prefill.decode_tokens) == (48, 0)
    assert (decode.prefill_tokens, decode.decode_tokens) == (0, 2)
    assert (prefill.kv_peak, decode.kv_peak) == (0.02, 0.03)
    assert prefill.cost_usd == pytest.approx(2 * 3.0 * seconds / 3600)
    assert decode.cost_usd == pytest.approx(prefill.cost_usd / 2)
    assert found.usage.cost_usd == pytest.approx(prefill.cost_usd + decode.cost_usd)
    assert found.usage.energy_wh == pytest.approx(prefill.energy_wh + decode.energy_wh)


def test_requests_wait_at_the_prefill_replica_until_the_prompt_is_computed() -> None:
    """Replica 0 has request 1 waiting for 0.5 s; replica 1 has them from the end of their prompts to their tokens."""
    used = usage(unroll(handmade.disaggregated()), Window(0.0, 1.7, trimmed=False))
    assert used.replicas.waiting * 1.7 == pytest.approx([0.5, 0.4 + 0.5])


def test_the_parts_add_up_one_after_the_other() -> None:
    run = handmade.disaggregated()
    parts = parts_in_order(run)
    assert tuple(parts) == TTFT_PARTS == ("queue", "prefill", "held", "admission", "transfer", "join")
    np.testing.assert_allclose(parts["admission"], [(0.125, 1.1), (0.25, 1.1)])
    np.testing.assert_array_equal(parts["join"][1], run.requests.first_token)
    assert parts_in_order(handmade.two_requests()) == {}


def test_memory_that_is_asked_for_before_the_prompt_comes_first() -> None:
    parts = parts_in_order(handmade.disaggregated(gate="before_prefill"))
    assert next(iter(parts)) == "admission"
    np.testing.assert_allclose(parts["prefill"], [(0.125, 1.0), (0.225, 1.1)])
    np.testing.assert_allclose(parts["join"][1], [0.5, 1.6])


def test_the_document_has_pools_and_parts_only_where_there_are_some() -> None:
    document = summary_json(summary(handmade.disaggregated()))
    assert [pool["name"] for pool in document["pools"]] == ["prefill", "decode"]
    assert document["kv_bytes"] == 6144
    assert document["ttft_parts"]["transfer"]["mean"] == pytest.approx(0.3125)
    assert sum(part["mean"] for part in document["ttft_parts"].values()) == pytest.approx(document["ttft"]["mean"])
    json.dumps(document, allow_nan=False)
    assert not {"pools", "ttft_parts", "kv_bytes"} & set(summary_json(summary(handmade.two_requests())))
