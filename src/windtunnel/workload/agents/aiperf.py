"""AIPerf's conversations, a JSON object a line: chains of turns, and graphs whose turns fork and spawn others.

Source: github.com/ai-dynamo/aiperf, dataset/loader/models.py at db4f639 and docs/benchmark-modes/dag.md at 05440a0.
A fork begins with the history of its parent and the live answer, a spawned conversation with its own messages only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.workload.agents.talk import Talks, said, seconds_of

CONVERSATION = (
    *("session_id", "turns", "pre_session_spawns", "orchestrator", "spawns", "rounds", "context_mode"),
    *("think_time_ms", "think_time_sigma", "think_time_min_ms", "think_time_max_ms"),
)
TURN = (
    *("messages", "text", "texts", "role", "model", "max_tokens", "output_length", "tools", "extra", "forks", "spawns"),
    *("delay", "timestamp"),
)
ALONE = "message_array_with_responses"
"""The context in which each turn is all of its prompt."""


def is_aiperf(row: Mapping[str, Any]) -> bool:
    """Whether a line is one of these conversations."""
    return "session_id" in row and (isinstance(row.get("turns"), list) or "orchestrator" in row)


def read_aiperf(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments of Workload.from_columns: a session for each conversation that no other one starts, all at 0 or at the
    ``timestamp`` of their first turns. Tokens are estimated.

    Raises InputError for unknown keys and conversations, circles, and turns without ``max_tokens``.
    """
    known: dict[str, Mapping[str, Any]] = {}
    try:
        for number, row in enumerate(rows, start=1):
            _check(row, number)
            if str(row["session_id"]) in known:
                raise InputError(f"row {number}: session_id={row['session_id']!r}: stands twice")
            known[str(row["session_id"])] = _with_system(row)
        return _played(known)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"holds no conversations as AIPerf writes them ({type(error).__name__}: {error})") from None


def _played(known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    started = {child for row in known.values() for child in _children(row)}
    for child in started:
        if child not in known:
            raise unknown("conversation", child, known)
    roots = [name for name in known if name not in started]
    if not roots:
        raise InputError("every conversation is started by another one: they go in a circle")
    trees = _Trees(known)
    for session, name in enumerate(roots):
        trees.session = session
        trees.play(name, [], 0.0, None)
    sigma = any(row.get("think_time_sigma") for row in known.values())
    return trees.talks.arguments(["think_time_sigma: think times are the medians"] if sigma else [])


def _check(row: Mapping[str, Any], number: int) -> None:
    for key in row:
        if key not in CONVERSATION:
            raise unknown(f"row {number}: key of a conversation", key, CONVERSATION)
    if "session_id" not in row or not (row.get("turns") or row.get("orchestrator")):
        raise InputError(f"row {number}: a conversation has a session_id and turns")
    turns = row.get("turns") or []
    for place, turn in enumerate(turns):
        for key in turn:
            if key not in TURN:
                raise unknown(f"row {number}: key of a turn", key, TURN)
        _check_branches(turn, f"row {number}, turn {place}", place, len(turns))


def _with_system(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The conversation, whose first turn is its system prompt where that is all it says (aiperf 0.13,
    dataset/loader/multi_turn.py: ``_try_hoist_system_message``): with the second turn's message, and sent with it."""
    first, *others = row.get("turns") or [{}]
    if first.get("role") != "system" or not first.keys() <= {"role", "text", "texts"} or not others:
        return row
    if others[0].get("role") == "system":
        return row
    messages = [
        {"role": turn.get("role"), "content": turn.get("texts") or turn.get("text")} for turn in (first, others[0])
    ]
    return {**row, "turns": [{**others[0], "messages": messages}, *others[1:]]}


def _check_branches(turn: Mapping[str, Any], where: str, place: int, turns: int) -> None:
    for spawn in turn.get("spawns") or []:
        join = place + 1 if isinstance(spawn, str) else spawn.get("join_at", place + 1)
        if not isinstance(spawn, str) and "join_at" in spawn and not place < join < turns:
            raise InputError(f"{where}: join_at={join!r}: must be a later turn of {turns}, counted from 0")
    if ended := [child for child, background in _forks(turn) if not background and place + 1 < turns]:
        raise InputError(
            f"{where}: forks {ended[0]!r}: ends a conversation that goes on: fork at its last turn, or with background"
        )


def _children(row: Mapping[str, Any]) -> list[str]:
    """All conversations that one starts."""
    found = [*(row.get("pre_session_spawns") or []), *_spawned(row.get("spawns"))]
    for stage in row["rounds"] if isinstance(row.get("rounds"), list) else []:
        found += _spawned(stage.get("spawns"))
    for turn in row.get("turns") or []:
        found += [*_spawned(turn.get("spawns")), *(child for child, _ in _forks(turn))]
    return [str(child) for child in found]


def _forks(turn: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """(Conversation, whether it runs in the background) of each fork."""
    forks = turn.get("forks") or []
    return [(one, False) if isinstance(one, str) else (one["child"], bool(one.get("background"))) for one in forks]


def _spawned(spawns: Any) -> list[str]:
    return [child for one in spawns or [] for child in ([one] if isinstance(one, str) else one["children"])]


@dataclass
class _Trees:
    """Conversations as they are played, with all that they start."""

    known: Mapping[str, Mapping[str, Any]]
    talks: Talks = field(default_factory=Talks)
    session: int = 0
    playing: list[str] = field(default_factory=list)

    def play(self, name: str, after: list[int], wait: float, history: int | None) -> list[int]:
        """One conversation; the requests with which it ends. ``history``: the request that it goes on from."""
        if name in self.playing:
            raise InputError(f"conversations go in a circle: {' → '.join([*self.playing, name])}")
        self.playing.append(name)
        row = self.known[name]
        for child in row.get("pre_session_spawns") or []:
            self.play(str(child), after, wait, None)
        ends = self._rounds(row, after, wait) if row.get("orchestrator") else self._turns(row, after, wait, history)
        self.playing.pop()
        return ends

    def _rounds(self, row: Mapping[str, Any], after: list[int], wait: float) -> list[int]:
        """What sends no requests itself: each round waits for all of the one before."""
        rounds = row.get("rounds") or 1
        stages = rounds if isinstance(rounds, list) else [{}] * int(rounds)
        for stage in stages:
            pause = wait + _think_time({**row, **stage})
            ends = [
                end
                for child in _spawned(stage.get("spawns") or row.get("spawns"))
                for end in self.play(child, after, pause, None)
            ]
            after, wait = ends, 0.0
        return after

    def _turns(self, row: Mapping[str, Any], after: list[int], wait: float, history: int | None) -> list[int]:
        """One request for each turn."""
        alone = row.get("context_mode") == ALONE
        joins: dict[int, list[int]] = {}
        for number, turn in enumerate(row["turns"]):
            if turn.get("timestamp") is not None:
                if number or after:
                    raise InputError(
                        f"{row['session_id']}, turn {number}: only first turns have a timestamp: give delay"
                    )
                wait += seconds_of(turn["timestamp"], "timestamp")
            wait += seconds_of(turn.get("delay"), "delay")
            waits = [*after, *joins.pop(number, [])]
            at = self._request(row, number, waits, wait, None if alone else history)
            for spawn in turn.get("spawns") or []:
                to = number + 1 if isinstance(spawn, str) else spawn.get("join_at", number + 1)
                for child in _spawned([spawn]):
                    joins.setdefault(to, []).extend(self.play(child, [at], 0.0, None))
            forks = [(self.play(child, [at], 0.0, at), background) for child, background in _forks(turn)]
            after, wait, history = [at], 0.0, at
        ends = [end for last, background in forks if not background for end in last] or [at]
        return [*ends, *(end for rest in joins.values() for end in rest)]

    def _request(self, row: Mapping[str, Any], number: int, after: list[int], wait: float, history: int | None) -> int:
        turn = row["turns"][number]
        output = turn.get("max_tokens", turn.get("output_length"))
        if type(output) is not int or output < 1:
            raise InputError(
                f"{row['session_id']}, turn {number}: max_tokens={output!r}: must be the answer's tokens, ≥ 1"
            )
        messages = turn.get("messages") or [said(turn.get("texts") or turn.get("text"))]
        system = "".join(said(one) for one in messages if isinstance(one, dict) and one.get("role") == "system")
        own = sum(self.talks.tokens(said(one)) for one in messages) + self.talks.tokens(_tools(turn))
        return self.talks.add(self.session, after, wait, own, output, history, system=_tools(turn) + system)


def _think_time(of: Mapping[str, Any]) -> float:
    """Seconds before a round, within its limits."""
    least, most = (seconds_of(of.get(name), name) for name in ("think_time_min_ms", "think_time_max_ms"))
    found = max(seconds_of(of.get("think_time_ms"), "think_time_ms"), least)
    return found if of.get("think_time_max_ms") is None else min(found, most)


def _tools(turn: Mapping[str, Any]) -> str:
    return str(turn["tools"]) if turn.get("tools") else ""
