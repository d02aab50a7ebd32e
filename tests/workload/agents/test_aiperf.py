"""AIPerf's conversations: turns, forks, spawned ones, joins and rounds. Four characters are a token."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.workload import Workload, load_trace


def read(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> Workload:
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_trace(path, **options)


def turn(tokens: int, answer: int, system: int = 0, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "s" * 4 * system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": "u" * 4 * tokens}], "max_tokens": answer, **more}


def talk(name: str, *turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"session_id": name, "turns": list(turns), **more}


def rows(found: Workload) -> list[tuple[Any, ...]]:
    """(Session, whom it waits for, seconds, prompt, answer, whose text it begins with, how much) of each request."""
    offsets, parents = found.waits
    waits = [parents[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    others = found.begins or ([-1] * len(found), [0] * len(found))
    columns = (found.think_time, found.prompt_tokens, found.output_tokens)
    return list(zip(found.session.tolist(), waits, *(one.tolist() for one in columns), *map(list, others), strict=True))


def test_turns_go_on_after_their_delay_with_the_live_answer(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {"session_id": "a", "turns": [{"text": "u" * 40, "max_tokens": 5, "timestamp": 2000}, turn(3, 7, delay=500)]},
        {"session_id": "b", "turns": [{"texts": ["u" * 8, "v" * 4], "output_length": 2}]},
        sort=True,
    )
    assert sorted(found.arrival[:2].tolist()) == [0.0, 2.0]
    (a,) = [row for row in rows(found) if row[3] == 10]
    assert a == (0, [], 0.0, 10, 5, -1, 0)
    assert rows(found)[2] == (0, [rows(found).index(a)], 0.5, 10 + 5 + 3, 7, rows(found).index(a), 15)
    assert "token counts are estimated: 4 characters a token" in found.notes


def test_recorded_answers_are_never_found(tmp_path: Path) -> None:
    found = read(tmp_path, talk("a", turn(10, 5), turn(3, 7)), answers="recorded")
    assert rows(found)[1][5:] == (0, 10)


def test_a_leading_system_turn_is_said_with_the_next_one(tmp_path: Path) -> None:
    """As aiperf 0.13 sends it; two of them, or one that says more, are turns like others."""
    system, named = {"role": "system", "text": "s" * 40}, [{"name": "a", "contents": ["u" * 8, "v" * 12]}]
    talks = [
        {"session_id": str(k), "turns": [system, {"texts": named, "output_length": 2}, turn(3, 7)]} for k in (0, 1)
    ]
    assert rows(read(tmp_path, *talks)) == [
        (0, [], 0.0, 15, 2, -1, 0),
        (1, [], 0.0, 15, 2, 0, 10),
        (0, [0], 0.0, 20, 7, 0, 17),
        (1, [1], 0.0, 20, 7, 1, 17),
    ]
    timed = system | {"output_length": 4}
    assert [row[3] for row in rows(read(tmp_path, talk("a", timed, turn(1, 1))))] == [10, 15]
    with pytest.raises(InputError, match="a, turn 0: max_tokens=None"):
        read(tmp_path, talk("a", system, system, turn(1, 1)))


def test_forks_begin_with_the_history_and_spawned_ones_with_their_own_system_prompt(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        talk("root", turn(10, 5, system=20, spawns=["helper"]), turn(4, 6, forks=["left", "right"])),
        talk("helper", turn(2, 3, system=20)),
        talk("left", turn(1, 2), turn(1, 2)),
        talk("right", turn(1, 8)),
    )
    assert rows(found) == [
        (0, [], 0.0, 30, 5, -1, 0),
        (0, [0], 0.0, 22, 3, 0, 20),  # it begins with the same system prompt
        (0, [0, 1], 0.0, 39, 6, 0, 35),  # its next turn waits for what it spawned
        (0, [2], 0.0, 46, 2, 2, 45),
        (0, [3], 0.0, 49, 2, 3, 48),
        (0, [2], 0.0, 46, 8, 2, 45),
    ]


def test_a_join_at_a_later_turn_and_background_forks(tmp_path: Path) -> None:
    spawns = [{"children": ["x", "y"], "join_at": 2}]
    found = read(
        tmp_path,
        talk("root", turn(1, 1, spawns=spawns, forks=[{"child": "z", "background": True}]), turn(1, 1), turn(1, 1)),
        talk("x", turn(5, 1), turn(5, 1)),
        talk("y", turn(6, 1)),
        talk("z", turn(7, 1)),
    )
    waits = [row[1] for row in rows(found)]
    assert waits == [[], [0], [1], [0], [0], [0], [2, 3, 5]]
    assert [row[3] for row in rows(found)] == [1, 5, 11, 6, 9, 3, 5]


def test_an_orchestrator_sends_nothing_and_its_rounds_wait_for_each_other(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {"session_id": "o", "orchestrator": True, "rounds": 2, "think_time_ms": 1500, "spawns": ["a", "b"]},
        talk("a", turn(1, 1), turn(1, 1)),
        talk("b", turn(2, 1)),
        talk("alone", turn(9, 1), context_mode="message_array_with_responses"),
        sort=True,
    )
    assert sorted(found.arrival[:3].tolist()) == [0.0, 1.5, 1.5]
    chains = {tuple(row[1]): row[2] for row in rows(found) if row[1]}
    assert [wait for wait in chains.values() if wait] == [1.5]
    assert max(map(len, chains)) == 2


@pytest.mark.parametrize(
    ("limits", "seconds"), [({"min": 2000}, 2.0), ({"max": 500}, 0.5), ({"min": 1, "max": 9000}, 1.5)]
)
def test_think_times_keep_their_limits(limits: dict[str, int], seconds: float, tmp_path: Path) -> None:
    words = {f"think_time_{name}_ms": value for name, value in limits.items()}
    found = read(
        tmp_path,
        {"session_id": "o", "orchestrator": True, "think_time_ms": 1500, "spawns": ["a"], **words},
        talk("a", turn(1, 1)),
    )
    assert found.arrival.tolist() == [seconds]


def test_what_each_turn_says_whole_begins_with_nothing(tmp_path: Path) -> None:
    found = read(tmp_path, talk("a", turn(9, 1), turn(12, 1), context_mode="message_array_with_responses"))
    assert [row[3:] for row in rows(found)] == [(9, 1, -1, 0), (12, 1, -1, 0)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([talk("a", turn(1, 1, fork=["b"]))], "key of a turn 'fork'.*did you mean 'forks'"),
        ([talk("a", turn(1, 1), thinktime=2)], "key of a conversation 'thinktime'"),
        ([talk("a", turn(1, 1, forks=["brnch"])), talk("branch", turn(1, 1))], "did you mean 'branch'"),
        ([talk("a", turn(1, 1, forks=["b"])), talk("b", turn(1, 1, forks=["a"]))], "started by another one"),
        (
            [
                talk("r", turn(1, 1, spawns=["a"])),
                talk("a", turn(1, 1, spawns=["b"])),
                talk("b", turn(1, 1, spawns=["a"])),
            ],
            "in a circle: r → a → b → a",
        ),
        ([talk("a", turn(1, 1)), talk("a", turn(1, 1))], "session_id='a': stands twice"),
        ([{"session_id": "a", "turns": [5]}], "holds no conversations as AIPerf writes them"),
        ([{"session_id": "a", "turns": [{"role": "system", "text": "s"}, 5]}], "holds no conversations as AIPerf"),
        ([talk("a", {"text": "hello"})], "a, turn 0: max_tokens=None: must be the answer's tokens"),
        ([talk("a", turn(1, 1), turn(1, 1, timestamp=5))], "turn 1: only first turns have a timestamp: give delay"),
        ([talk("a", turn(1, 1, delay=-1))], "delay=-1: must be milliseconds ≥ 0"),
        (
            [talk("a", turn(1, 1, spawns=[{"children": ["b"], "join_at": 2}]), turn(1, 1)), talk("b", turn(1, 1))],
            "row 1, turn 0: join_at=2: must be a later turn of 2, counted from 0",
        ),
        (
            [talk("a", turn(1, 1, forks=["b"]), turn(1, 1)), talk("b", turn(1, 1))],
            "row 1, turn 0: forks 'b': ends a conversation that goes on: fork at its last turn, or with background",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, lines: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, *lines)
