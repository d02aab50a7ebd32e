"""Sizes of models left out: what the others choose, and with what error."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.accuracy import left_out_sizes
from benchmarks.accuracy.left_out_sizes import SHARES, left_out, of_size
from windtunnel.perf import predictor
from windtunnel.validation.measured_points import MeasuredPoint, _batch


def point(model: str) -> MeasuredPoint:
    return _batch(
        {
            **{"model": model, "device": "mi300x", "framework": "vllm", "framework_version": "0.6.1"},
            **{"batch": 1, "input_tokens": 128, "output_tokens": 16, "tensor_parallel_size": 1, "latency_s": 0.2},
        },
        "here",
    )


def test_a_size_is_predicted_with_the_share_that_the_others_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    best = {"mistralai/Mistral-7B-v0.1": 0.065, "mistralai/Mixtral-8x7B-v0.1": 0.1}

    def replayed(point: MeasuredPoint, _: object) -> Any:
        return SimpleNamespace(error=lambda _: predictor.AMD_2024 - best[point.model])

    monkeypatch.setattr(left_out_sizes, "replay", replayed)
    before = predictor.AMD_2024
    found = left_out([point(model) for model in best])
    assert {size: share for size, (share, _) in found.items()} == {"7 and 8B": 0.1, "47B (experts)": 0.065}
    assert [error for _, error in found.values()] == pytest.approx([0.035, 0.035])
    assert before == predictor.AMD_2024 and before in SHARES
    assert of_size(point("mistralai/Mixtral-8x7B-v0.1")) == "47B (experts)"
