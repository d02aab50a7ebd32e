"""run --stream: the sentence that answers, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from windtunnel.cli import main
from windtunnel.metrics.streamed import StreamSummary, Totals
from windtunnel.scenario import streamed


def served(*_: Any, **__: Any) -> StreamSummary:
    """A thousand requests, 900 of which were good."""
    totals = Totals(total=1000, finished=1000, good=900, output_tokens=5000, first=0.0, last=10.0)
    for digest in totals.latencies.values():
        digest.add(np.full(1000, 0.04))
    return StreamSummary(totals, 2, 1, 4.0, _[2])


@pytest.mark.parametrize(
    ("flags", "code", "answer"),
    [
        ((), 0, "✓ GOAL MET  90 % of requests meet ttft ≤ 500 ms and tpot ≤ 50 ms (default goal 90 %)"),
        (("--goodput", "tpot:50", "--attainment", "0.95"), 1, "✗ GOAL MISSED  90 % of requests meet tpot ≤ 50 ms"),
    ],
)
def test_the_answer_comes_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: int, answer: str
) -> None:
    monkeypatch.setattr(streamed, "stream", served)
    assert main(["run", "--stream", "--trace", "azure-conv", "--num-prompts", "1000", *flags]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Qwen/Qwen3-32B on 2 × H100 SXM, TP 2, ")
    assert lines[0].endswith(" · azure-conv, 1,000 requests, streamed")
    assert lines[1].startswith(answer)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--seeds", "2"), "--seeds"),
        (("--exclude-warmup",), "--exclude-warmup"),
        (("--save-result", "x"), "--save-result"),
    ],
)
def test_what_needs_the_whole_run_is_refused_by_its_flag(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], named: str
) -> None:
    assert main(["run", "--stream", *flags]) == 2
    assert f"--stream keeps no requests and steps, which {named} needs" in capsys.readouterr().err
