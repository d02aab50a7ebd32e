"""guidellm's conversations: numbered columns, and graphs of turns."""

from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from workload.agents.test_aiperf import read, rows


def node(name: str, tokens: int, answer: int, *parents: tuple[str, str], delay: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "node_id": name,
        "parents": [{"parent_node_id": one, "history_context": kind} for one, kind in parents],
        "columns": {"prompt_tokens_count_column": [tokens], "output_tokens_count_column": [answer]},
    }
    return found | ({"settings": {"requeue_delay": delay}} if delay is not None else {})


def test_numbered_columns_are_turns_and_prefixes_are_shared(tmp_path: Path) -> None:
    row = {
        "prefix": "p" * 40,
        "prompt_0": "u" * 8,
        "output_tokens_count_0": 4,
        "prompt_1": "v" * 4,
        "output_tokens_1": 6,
    }
    found = read(
        tmp_path, row, {"prefix": "p" * 40, "prompt_0": "w" * 8, "prompt_tokens_count_0": 3, "output_tokens_0": 1}
    )
    assert rows(found) == [
        (0, [], 0.0, 12, 4, -1, 0),
        (1, [], 0.0, 13, 1, 0, 10),
        (0, [0], 0.0, 17, 6, 0, 16),
    ]


def test_a_graph_of_a_subagent_that_is_merged(tmp_path: Path) -> None:
    turns = [
        node("main", 10, 5),
        node("join", 3, 2, ("main", "full"), ("sub", "last")),
        node("sub", 20, 7, ("main", "new")),
    ]
    assert rows(read(tmp_path, {"graph_id": "g", "turns": turns})) == [
        (0, [], 0.0, 10, 5, -1, 0),
        (0, [0], 0.0, 20, 7, -1, 0),
        (0, [0, 1], 0.0, 15 + 27 + 3, 2, 0, 15),  # its own history, then the pair of the subagent
    ]


def test_delays_are_those_of_parents(tmp_path: Path) -> None:
    turns = [node("a", 1, 1, delay=2.0), node("b", 1, 1, delay=1.0), node("c", 1, 1, ("a", "new"), ("b", "full"))]
    found = read(tmp_path, {"turns": turns})
    assert rows(found)[2][1:3] == ([0, 1], 2.0)
    assert any("1 turns have parents with different requeue_delay" in note for note in found.notes)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": [node("a", 1, 1, ("b", "full")), node("b", 1, 1, ("a", "full"))]}, "a, b wait for each other"),
        ({"turns": [node("a", 1, 1, ("bb", "full")), node("b", 1, 1)]}, "node 'bb'.*did you mean 'b'"),
        ({"turns": [node("a", 1, 1), node("b", 1, 1, ("a", "ful"))]}, "did you mean 'full'"),
        ({"turns": [node("a", 1, 1), node("a", 1, 1)]}, "node_id: one stands twice"),
        (
            {"turns": [node("a", 1, 1), {"columns": 3, "parents": [], "node_id": "b"}]},
            "row 1: is no conversation as guidell",
        ),
        ({"turns": [node("a", 1, 1) | {"settings": 3}]}, "row 1: is no conversation as guidellm writes it"),
        ({"prompt_0": "hello"}, "row 1: turn 0: output_tokens_count=None: must be the answer's tokens"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, row)
