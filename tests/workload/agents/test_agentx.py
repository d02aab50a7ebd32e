"""AgentX: plays, the point where first ones start, primers, warm-up and gaps, by hand."""

import itertools
from typing import Any

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.workload import Workload
from windtunnel.workload.agents.agentx import VERSIONS, Rules, agentx, rules_of

RULES = Rules(100.0, start=(0.5, 0.5), warm_up=1, tree_idle=300.0, system_idle=10.0)


def chain(**more: Any) -> Workload:
    """Six turns, each of which begins with the one before and its answer."""
    columns: dict[str, Any] = {
        "session": 0,
        "prompt_tokens": [100, 200, 300, 400, 500, 600],
        "output_tokens": 10,
        "think_time": [0.0, 1.0, 2.0, 3.0, 4.0, 500.0],
        "begins": [None, 0, 1, 2, 3, 4],
        "system_tokens": 64,
    }
    return Workload.from_columns(**columns | more)


def rows(workload: Workload) -> list[tuple[Any, ...]]:
    """(Session, whom it waits for, think time, prompt, output, whose text it begins with, how much) of each row."""
    offsets, parents = workload.waits
    waits = [parents[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert workload.begins is not None
    columns = (workload.think_time, workload.prompt_tokens, workload.output_tokens, *workload.begins)
    return list(zip(workload.session.tolist(), waits, *(column.tolist() for column in columns), strict=True))


def test_a_lane_starts_inside_its_session_and_plays_it_again_from_the_beginning() -> None:
    found = agentx(chain(), RULES, lanes=1)
    play = [row for row in rows(found) if row[0] == 0]
    first, second, *_ = np.flatnonzero(np.isnan(found.arrival)).tolist()
    assert play == [
        (0, [], 0.0, 300, 1, -1, 0),  # the primer
        (0, [0], 0.0, 400, 1, 0, 300),  # of the warm-up; the primer's answer is another one
        (0, [first], 4.0, 500, 10, first, 400),
        (0, [second], 500.0, 600, 10, second, 510),
    ]
    assert found.measured is not None
    assert (found.measured.warm_up.tolist(), found.measured.opening.tolist()) == ([0, first], [second])
    assert (found.measured.tree_gap, found.measured.idle_gap) == (300.0, 10.0)
    again = [row for row in rows(found) if row[0] == 1]
    assert [row[2:5] for row in again] == [
        (t, p, 10) for t, p in zip([0, 1, 2, 3, 4, 500], range(100, 700, 100), strict=True)
    ]
    assert again[0][5:] == (0, 64)  # tools and system prompt
    assert again[1][6] == 110


def test_there_are_plays_for_the_whole_window() -> None:
    found = agentx(chain(), RULES, lanes=2)
    least = 1 + 2 + 3 + 4 + 10 + 6 * 0.01  # gaps of 10 s at most, and 1 ms a token
    assert found.session.max() + 1 == 2 + 2 * np.ceil(100 / least)
    assert found.lanes == 2


def test_each_live_conversation_is_primed() -> None:
    """A subagent (rows 2 and 3) that the main agent, rows 0, 1 and 4, waits for."""
    corpus = Workload.from_columns(
        session=0,
        prompt_tokens=[100, 200, 50, 60, 300],
        output_tokens=10,
        think_time=1.0,
        after=[[], [0], [1], [2], [1, 3]],
        begins=[None, 0, None, 2, 1],
    )
    rules = Rules(1.0, start=(0.6, 0.6))
    play = [row for row in rows(agentx(corpus, rules, lanes=1)) if row[0] == 0]
    assert [row[3:5] for row in play] == [(200, 1), (50, 1), (60, 10), (300, 10)]
    assert [row[5:] for row in play] == [(-1, 0), (-1, 0), (1, 50), (0, 200)]
    waits = [len(row[1]) for row in play]
    assert waits == [0, 0, 1, 2]


def test_sessions_are_all_played_before_any_is_again_and_the_seed_orders_them() -> None:
    corpus = Workload.from_columns(
        session=np.repeat(range(8), 2), prompt_tokens=np.repeat(range(1, 9), 2), output_tokens=5
    )
    orders = set()
    for seed in range(4):
        found = agentx(corpus, Rules(0.06), lanes=3, seed=seed)
        heads = [int(found.prompt_tokens[found.session == play][0]) for play in range(8)]
        assert sorted(heads) == list(range(1, 9))
        orders.add(tuple(heads))
    assert len(orders) > 1


def test_what_sessions_share_is_shared_by_plays() -> None:
    corpus = Workload.from_columns(
        session=[0, 0, 1, 1],
        prompt_tokens=[100, 200, 100, 200],
        output_tokens=10,
        begins=[None, 0, [0, 40], 2],
    )
    found = rows(agentx(corpus, Rules(0.05), lanes=2))
    heads = {play: next(row for row in found if row[0] == play) for play in {row[0] for row in found}}
    assert [head[6] for head in heads.values()] == [0, *[40] * (len(heads) - 1)]


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        (Workload.from_columns(prompt_tokens=[1, 2], output_tokens=1), "none has two requests"),
        (Workload.from_columns(prompt_tokens=[1, 2], output_tokens=1, session=[0, 1]), "none has two requests"),
    ],
)
def test_a_corpus_needs_sessions(corpus: Workload, message: str) -> None:
    with pytest.raises(InputError, match=message):
        agentx(corpus, RULES, lanes=1)


def test_versions() -> None:
    assert rules_of("agentx", 900.0).seconds == 900.0
    assert {name: rules.seconds for name, rules in VERSIONS.items()} == {
        "agentx": 3600.0,
        "agentx-mvp": 1800.0,
        "agentx-aiperf": 1800.0,
        "agentx-aisimulate": 3600.0,
    }
    with pytest.raises(InputError, match="did you mean 'agentx-mvp'"):
        rules_of("agentx-mvpp")
    with pytest.raises(InputError, match="benchmark_duration=0: must be finite seconds > 0"):
        agentx(chain(), rules_of("agentx", 0.0), lanes=1)
