"""Autoscalers on pools: none is above what is said to be out of reach."""

import numpy as np
import pytest

from benchmarks.planning import scaled
from plan.goodput.test_pools import LIMITS, asked, space
from windtunnel.plan.goodput.objective import Goodput, offered_rate
from windtunnel.plan.goodput.pools import light, search_pools

RULES = ("policy=planner interval=0.2 startup=0 most=4", "policy=hpa interval=0.5 startup=0.1 most=3 / policy=planner")


def test_no_autoscaler_is_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, whole = light(asked()), space()
    closed = search_pools(whole, mine, Goodput(LIMITS)).closed
    assert closed is not None
    bound = scaled.no_more(whole, closed, mine)
    found = [
        scaled.scored(scaled.elastic(whole, prefill, decode, words), mine)[0]
        for words in RULES
        for prefill in closed.prefills[::3]
        for decode in closed.decodes[::2]
    ]
    assert 0.1 * bound < max(found) <= bound <= offered_rate(mine) / 2
    assert f"no autoscaler above {bound:.3f}" in scaled.scaled(whole, closed, mine, RULES[:1])

    load = mine.workload
    width = load.duration / 1.001
    monkeypatch.setattr(scaled, "WINDOWS", (width, width))
    tokens = load.output_tokens.astype(float)
    monkeypatch.setattr(scaled, "_work", lambda *_: (tokens / 2500, np.zeros(len(tokens))))
    inside = load.arrival + 0.06 < width
    # one window: its prompts take more GPUs than one, and one decodes
    by_hand = tokens.sum() / (tokens[inside].sum() / 2500 + load.duration - width + load.duration)
    assert by_hand < offered_rate(mine) / 2
    assert scaled.no_more(whole, closed, mine) == pytest.approx(by_hand)
