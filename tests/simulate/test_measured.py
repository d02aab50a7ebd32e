"""A run of which a window counts: requests that came, those that are cancelled, and what is said of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pytest

import windtunnel
from windtunnel.errors import InputError
from windtunnel.metrics import summary, window_of
from windtunnel.scenario import Load, Scenario, Server
from windtunnel.simulate.measured import within
from windtunnel.simulate.run import ABORTED, FINISHED, REJECTED, UNFINISHED, Requests, Stalls
from windtunnel.simulate.simulate import simulate
from windtunnel.workload.agents.measured import Measured

NAN = float("nan")


def requests(**columns: list[Any]) -> Requests:
    n = len(columns["status"])
    filled: dict[str, Any] = {name: np.zeros(n) for name in ("arrival", "scheduled", "first_token", "finish")}
    whole = (
        "id",
        "prompt_tokens",
        "output_tokens",
        "max_tokens",
        "pool",
        "replica",
        "lane",
        "preemptions",
        "cached_tokens",
    )
    filled |= {name: np.arange(n) if name == "id" else np.zeros(n, np.int64) for name in whole}
    return Requests(**filled | {name: np.array(values) for name, values in columns.items()})


def test_those_that_came_are_kept_and_numbered_anew() -> None:
    run = requests(
        status=[FINISHED, UNFINISHED, FINISHED, REJECTED, REJECTED, FINISHED],
        replica=[0, -1, 0, -1, -1, 0],
        arrival=[0.0, NAN, 3.0, 4.0, 0.0, 5.0],
        finish=[2.0, NAN, 6.0, NAN, NAN, 14.5],
    )
    stalls = Stalls(np.array([2, 5]), np.zeros(2), np.ones(2))
    measured = Measured(np.array([0]), np.array([2]), seconds=10.0, grace=2.0)
    found = within(replace(handmade.two_requests(), requests=run, stalls=stalls), measured)
    kept, waited = found.requests, found.stalls
    assert found.manifest["window"] == [2.0, 12.0]
    assert kept.arrival.tolist() == [0.0, 3.0, 4.0, 5.0]
    assert kept.status.tolist() == [FINISHED, FINISHED, REJECTED, ABORTED]  # the last one ends after 12 + 2 s
    assert np.isnan(kept.finish[3])
    assert (kept.id.tolist(), waited.request.tolist()) == ([0, 1, 2, 3], [1, 3])


def corpus(folder: Path) -> str:
    for k in range(3):
        calls = [
            {"t": 20.0 * j, "type": "n", "in": 64 * (j + 4), "out": 10, "hash_ids": list(range(j + 4)), "api_time": 2.0}
            for j in range(8)
        ]
        session = {
            "block_size": 64,
            "hash_id_scope": "local",
            "system_tokens": 128,
            "tool_tokens": 64,
            "requests": calls,
        }
        (folder / f"{k}.json").write_text(json.dumps(session))
    return str(folder)


def test_the_window_of_a_replay_is_measured(tmp_path: Path) -> None:
    load = Load(trace=corpus(tmp_path), replay="agentx", lanes=2, benchmark_duration=60.0)
    workload = load.workload()
    run = simulate(Scenario(Server("Qwen/Qwen3-8B", device="h100")).deployment(), workload)
    start, end = run.manifest["window"]
    assert end - start == 60.0
    found = summary(run)
    assert window_of(run, run.iterations.start) == found.window
    arrival = run.requests.arrival
    assert found.total == int(((arrival >= start) & (arrival <= end)).sum()) < len(arrival)
    assert arrival.max() <= end
    assert workload.measured is not None
    before = len(workload.measured.warm_up)
    assert (arrival < start).sum() == before == run.manifest["workload"]["measured"]["warm_up"]
    assert found.prefix_cache_hit_rate > 0.5


@pytest.mark.plain_python
@pytest.mark.parametrize(
    "words",
    [
        {"prefill": "replicas=1", "decode": "replicas=1"},
        {"replicas": 2, "autoscale": "policy=hpa least=1 most=2 interval=5 startup=2"},
        {"replicas": 2, "fail": "replica=0 at=20 down=10"},
        {"prefill": "replicas=1", "decode": "replicas=2", "fail": "pool=decode at=20 down=10 on_failure=lost"},
    ],
)
def test_a_replay_runs_on_every_fleet(tmp_path: Path, words: dict[str, Any]) -> None:
    words |= {"trace": corpus(tmp_path), "replay": "agentx", "lanes": 2, "benchmark_duration": 60.0}
    run = windtunnel.simulate("Qwen/Qwen3-8B", device="h100", perf="roofline", **words)
    start, end = run.manifest["window"]
    assert end - start == 60.0
    came = run.requests.arrival
    assert 10 < ((came >= start) & (came <= end)).sum() < len(came)
    assert came.max() <= end
    assert (run.handovers is None) or len(run.handovers.kv_bytes) == len(came)
    lost = run.manifest.get("lives", {}).get("lost", [])
    assert np.flatnonzero(run.requests.status == ABORTED).tolist() == lost
    summary(run)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"replay": "agentx", "lanes": 2}, "replay=agentx: replays recorded sessions: add trace"),
        ({"replay": "agentx", "trace": "azure-conv"}, "recorded sessions: trace=azure-conv has none: give a folder"),
        ({"replay": "agenty", "trace": "x.json"}, "did you mean 'agentx'"),
        ({"replay": "agentx", "trace": "x.json", "request_rate": 1.0}, "request_rate: replay=agentx has its own order"),
        ({"benchmark_duration": 10.0}, "benchmark_duration=10: is of AgentX: add replay=agentx"),
    ],
)
def test_a_replay_needs_sessions_and_has_its_own_times(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Load(**words)


def test_a_replay_needs_lanes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="replay=agentx: keeps a number of sessions in play: add lanes"):
        Load(trace=corpus(tmp_path), replay="agentx").workload()


def test_answers_are_recorded_ones_unless_said(tmp_path: Path) -> None:
    load = Load(trace=corpus(tmp_path), replay="agentx", lanes=2)
    assert (load.answers_told, Load(trace="x.json").answers_told) == ("recorded", "live")
    assert load.corpus.workload().begins is not None
