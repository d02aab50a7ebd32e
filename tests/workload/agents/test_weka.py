"""Agents' sessions: times, who waits for whom, what prompts share; the public traces against an independent replay."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.workload import Workload, load_trace

TRACES = Path(__file__).parents[4] / "shared" / "traces" / "agent_sessions"


def call(t: float, prompt: int, output: int, ids: list[int], api_time: float = 2.0) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": prompt, "out": output, "hash_ids": ids, "api_time": api_time}


def agent(t: float, seconds: float, requests: list[dict[str, Any]], name: str = "agent_1") -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": name, "duration_ms": seconds * 1000, "requests": requests}


def session(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": "x", "block_size": 4, "hash_id_scope": "local", "requests": list(requests)}


TWO_TURNS = (call(0.0, 10, 6, [1, 2]), call(7.0, 20, 5, [1, 2, 3, 4]))
WITH_AGENT = session(
    *TWO_TURNS,
    agent(30.0, 20.0, [call(0.0, 9, 3, [7, 8]), call(5.0, 20, 2, [7, 8, 9, 10])]),
    call(40.0, 40, 3, [1, 2, 3, 4, 5, 6, 11]),
)


def written(tmp_path: Path, document: Any, name: str = "one.json.gz") -> Path:
    data = json.dumps(document).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return tmp_path / name


def shape(workload: Workload) -> list[tuple[list[int], float, int, int]]:
    assert workload.begins is not None
    offsets, parents = workload.waits
    waits = [parents[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    return list(zip(waits, workload.think_time.tolist(), *(part.tolist() for part in workload.begins), strict=True))


@pytest.mark.parametrize("name", ["one.json", "one.json.gz"])
def test_a_subagent_ends_at_its_time(tmp_path: Path, name: str) -> None:
    workload = load_trace(written(tmp_path, WITH_AGENT, name))
    assert shape(workload) == [
        ([], 0.0, -1, 0),
        ([0], 5.0, 0, 16),  # the answer, too
        ([1], 1.0, -1, 0),  # 30 − 20 s is a second after the turn before it
        ([2], 3.0, 2, 12),
        ([1, 3], 23.0, 1, 25),
    ]


def test_recorded_answers_are_never_found(tmp_path: Path) -> None:
    workload = load_trace(written(tmp_path, WITH_AGENT), answers="recorded")
    assert [row[2:] for row in shape(workload)] == [(-1, 0), (0, 8), (-1, 0), (2, 8), (1, 16)]


def test_a_time_that_cannot_be_an_end_is_a_start(tmp_path: Path) -> None:
    document = session(*TWO_TURNS, agent(12.0, 20.0, [call(0.0, 9, 3, [7, 8])]), call(60.0, 40, 3, [1, 2, 3, 4]))
    found = shape(load_trace(written(tmp_path, document)))
    assert [row[:2] for row in found] == [([], 0.0), ([0], 5.0), ([1], 3.0), ([1, 2], 46.0)]


def test_one_that_starts_before_the_turn_before_has_ended_waits_for_an_earlier_one(tmp_path: Path) -> None:
    document = session(call(0.0, 10, 6, [1]), call(4.0, 20, 5, [1, 2], api_time=30.0), call(20.0, 20, 5, [1, 2]))
    assert [row[:2] for row in shape(load_trace(written(tmp_path, document)))] == [([], 0.0), ([0], 2.0), ([0], 18.0)]


def test_a_folder_has_a_session_a_file(tmp_path: Path) -> None:
    for name in ("b.json", "a.json.gz"):
        written(tmp_path, session(*TWO_TURNS), name)
    (tmp_path / "LICENSE").write_text("Apache-2.0")
    workload = load_trace(tmp_path)
    assert workload.session.tolist() == [0, 1, 0, 1]
    assert shape(workload) == [([], 0.0, -1, 0), ([], 0.0, -1, 0), ([0], 5.0, 0, 16), ([1], 5.0, 1, 16)]


def test_bad_sessions_are_named(tmp_path: Path) -> None:
    written(tmp_path, session(), "a.json")
    with pytest.raises(InputError, match=r"a\.json: has no requests"):
        load_trace(tmp_path)
    written(tmp_path, session({"type": "n", "t": 1}), "a.json")
    with pytest.raises(InputError, match=r"a\.json: is no session of an agent \(KeyError: 'in'\)"):
        load_trace(tmp_path)
    written(tmp_path, {"requests": []}, "a.json")
    with pytest.raises(InputError, match=r"a\.json: is no session of an agent, an object with block_size"):
        load_trace(tmp_path)
    with pytest.raises(InputError, match="answers 'liv'"):
        load_trace(tmp_path, answers="liv")


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")
def test_all_subagents_of_the_public_traces_run_between_two_turns() -> None:
    workload = load_trace(TRACES)
    assert (len(workload), int(workload.prompt_tokens.sum())) == (24351, 2970102477)
    assert int((~np.isnan(workload.arrival)).sum()) == len(np.unique(workload.session)) == 355
    assert workload.begins is not None
    answers = workload.begins[1] > workload.prompt_tokens[workload.begins[0]]
    assert int((answers & (workload.begins[0] >= 0)).sum()) == 20528


def message(talk: str, turn: int, role: str, **more: Any) -> dict[str, Any]:
    return {"conversation_id": talk, "turn": turn, "role": role, **more}


MESSAGES = [
    message("a", 1, "user", content="x" * 40, system="s" * 80),
    message("b", 1, "user", content="y" * 20, system="s" * 80),
    message("a", 2, "assistant", content=None, tool_calls=["z" * 36]),
    message("a", 3, "tool", tool_results=["r" * 76], delay_seconds=1.5),
    message("a", 4, "assistant", content="w" * 12),
    message("b", 2, "assistant", content="v" * 4),
    message("a", 5, "user", content="never answered"),
]


def test_messages_are_turns_that_begin_with_all_before_them(tmp_path: Path) -> None:
    """Four characters a token; brackets and quotes of a list count."""
    file = tmp_path / "agentic.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in MESSAGES))
    load = load_trace(file)
    assert load.session.tolist() == [0, 1, 0]
    assert load.prompt_tokens.tolist() == [30, 25, 60]
    assert load.output_tokens.tolist() == [10, 1, 3]
    assert load.think_time.tolist() == [0.0, 0.0, 1.5]
    assert load.begins is not None
    assert [part.tolist() for part in load.begins] == [[-1, 0, 0], [0, 20, 40]]
    assert any("1 conversations end with" in note for note in load.notes)
    recorded = load_trace(file, answers="recorded")
    assert recorded.begins is not None and recorded.begins[1].tolist() == [0, 20, 30]


def test_messages_must_stand_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "agentic.jsonl"
    file.write_text(json.dumps(MESSAGES[0]) + "\n" + json.dumps(MESSAGES[3]) + "\n")
    with pytest.raises(InputError, match="row 2: turn=3: must follow turn 1"):
        load_trace(file)
    file.write_text(json.dumps(MESSAGES[0]) + "\n")
    with pytest.raises(InputError, match="no messages of the role assistant"):
        load_trace(file)
