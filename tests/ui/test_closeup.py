"""A stretch of a run's time: every step and request in it, and nothing else."""

import numpy as np
import pytest

from ui.words import SMALL
from windtunnel.errors import InputError
from windtunnel.metrics import Steps
from windtunnel.ui import closeup as module
from windtunnel.ui.bench import Bench
from windtunnel.ui.closeup import closeup


@pytest.fixture(scope="module")
def steps() -> Steps:
    return Bench({}).flight(SMALL).steps


def test_the_whole_run(steps: Steps) -> None:
    found = closeup(steps, None, None)
    assert found["batch_count"] == len(steps.start)
    assert found["batches"]["start"] == steps.start.tolist()
    assert found["request_count"] == 60
    assert found["requests"]["status"] == ["finished"] * 60
    emitted = sum(found["batches"]["decodes"])
    assert emitted == 60 * 19  # the first token of each comes with its prompt
    assert sum(found["batches"]["chunk_tokens"]) == 60 * 200


def test_a_stretch_holds_what_overlaps_it(steps: Steps) -> None:
    begin, until = np.quantile(steps.start, (0.4, 0.6)).tolist()
    found = closeup(steps, begin, until)
    assert found["batch_count"] == int(((steps.end >= begin) & (steps.start <= until)).sum())
    assert 0 < found["batch_count"] < len(steps.start)
    requests = steps.run.requests
    here = (requests.arrival <= until) & (requests.finish >= begin)
    assert found["requests"]["id"] == np.flatnonzero(here).tolist()
    lines = found["lines"]
    assert (lines["start"], lines["end"]) == (begin, until)
    inside = (steps.start < until) & (steps.end > begin)
    seconds = np.minimum(steps.end, until)[inside] - np.maximum(steps.start, begin)[inside]
    batch = steps.batch[steps.head_of_row[steps.row]][inside]
    mean = float((seconds * batch).sum()) / (until - begin)
    assert np.mean(lines["running"]) == pytest.approx(mean, rel=1e-3)


def test_too_many_are_counted_and_the_slowest_shown(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BATCHES", 10)
    monkeypatch.setattr(module, "MOST_REQUESTS", 5)
    found = closeup(steps, None, None)
    assert found["batches"] is None
    assert (found["batch_count"], found["request_count"]) == (len(steps.start), 60)
    waited = steps.run.requests.first_token - steps.run.requests.arrival
    assert sorted(found["requests"]["id"]) == sorted(np.argsort(-waited, kind="stable")[:5].tolist())


@pytest.mark.parametrize("times", [(2.0, 1.0), (1.0, 1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_times_that_are_none(steps: Steps, times: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="two times"):
        closeup(steps, *times)
