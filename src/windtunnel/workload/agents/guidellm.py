"""guidellm's conversations, a JSON object a line: turns in numbered columns, or graphs of turns.

Source: github.com/vllm-project/guidellm at ee7a774, docs/guides/multiturn.md and
data/schemas/conversation_graph_data.py. Answers are live: the next prompt holds what the server said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.errors import InputError, unknown
from windtunnel.workload.agents.talk import Talks

PROMPT, COUNT, OUTPUT = "prompt_", "prompt_tokens_count_", ("output_tokens_count_", "output_tokens_")
HISTORIES = ("new", "last", "full")
"""What a turn has of a parent: nothing, its prompt and answer, or also all that it had before."""


def is_guidellm(row: Mapping[str, Any]) -> bool:
    """Whether a line is one of these conversations."""
    turns = row.get("turns")
    return f"{PROMPT}0" in row or (
        isinstance(turns, list) and turns[:1] != [] and isinstance(turns[0], dict) and "node_id" in turns[0]
    )


def read_guidellm(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments of Workload.from_columns: a session for each line, all at 0; ``--request-rate`` or ``--lanes`` say when
    they come. Tokens are counts where the columns have them, else estimated.

    Raises InputError for turns without an answer's tokens, unknown parents and circles.
    """
    talks, differ = Talks(), 0
    for number, row in enumerate(rows):
        try:
            if "turns" in row:
                differ += _graph(talks, number, row["turns"])
            else:
                _chain(talks, number, row)
        except InputError as error:
            raise InputError(f"row {number + 1}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            said = f"({type(error).__name__}: {error})"
            raise InputError(f"row {number + 1}: is no conversation as guidellm writes it {said}") from None
    note = f"{differ} turns have parents with different requeue_delay: the longest counts, not that of the last to end"
    return talks.arguments([note] if differ else [])


def _chain(talks: Talks, session: int, row: Mapping[str, Any]) -> None:
    """Turns in columns with numbers."""
    numbers = sorted(int(key.removeprefix(PROMPT)) for key in row if key.removeprefix(PROMPT).isdigit())
    before: int | None = None
    for number in numbers:
        output = next((row[name + str(number)] for name in OUTPUT if row.get(name + str(number)) is not None), None)
        system = str(row.get(f"prefix_{number}") or ("" if before is not None else row.get("prefix") or ""))
        own = _count(talks, row.get(f"{COUNT}{number}"), str(row[f"{PROMPT}{number}"])) + talks.tokens(system)
        after = [] if before is None else [before]
        before = talks.add(session, after, 0.0, own, _answer(output, f"turn {number}"), before, system=system)


def _graph(talks: Talks, session: int, turns: Sequence[Mapping[str, Any]]) -> int:
    """Turns that name their parents; how many have parents with different delays."""
    left = {str(turn["node_id"]): turn for turn in turns}
    if len(left) < len(turns):
        raise InputError("node_id: one stands twice")
    for turn in turns:
        for parent in turn.get("parents") or []:
            if parent["parent_node_id"] not in left:
                raise unknown("node", parent["parent_node_id"], left)
    delays = {name: float((turn.get("settings") or {}).get("requeue_delay") or 0.0) for name, turn in left.items()}
    rows: dict[str, int] = {}
    own: dict[str, int] = {}
    differ = 0
    while left:
        ready = [name for name, turn in left.items() if all(one in rows for one in _parents(turn))]
        if not ready:
            raise InputError(f"turns {', '.join(left)} wait for each other in a circle")
        for name in ready:
            turn = left.pop(name)
            waits = [delays[one] for one in _parents(turn)]
            differ += len(set(waits)) > 1
            rows[name], own[name] = _node(talks, session, turn, rows, own, max(waits, default=0.0))
    return differ


def _parents(turn: Mapping[str, Any]) -> list[str]:
    return [str(parent["parent_node_id"]) for parent in turn.get("parents") or []]


def _node(
    talks: Talks, session: int, turn: Mapping[str, Any], rows: Mapping[str, int], own: Mapping[str, int], wait: float
) -> tuple[int, int]:
    """(The number of its request, the tokens that its own prompt adds)."""
    history, more = None, 0
    for parent in turn.get("parents") or []:
        name, kind = str(parent["parent_node_id"]), parent.get("history_context", "full")
        if kind not in HISTORIES:
            raise unknown("history_context", kind, HISTORIES)
        if kind == "full" and history is None:
            history = rows[name]
        elif kind != "new":
            more += own[name] + talks.columns["output_tokens"][rows[name]]
    columns = turn.get("columns") or {}
    system = "" if history is not None else _first(columns, "prefix_column", "")
    tokens = _count(talks, _first(columns, "prompt_tokens_count_column", None), _first(columns, "text_column", ""))
    added = tokens + talks.tokens(system)
    output = _answer(_first(columns, "output_tokens_count_column", None), str(turn["node_id"]))
    after = [rows[name] for name in _parents(turn)]
    return talks.add(session, after, wait, added, output, history, more, system), added


def _first(columns: Mapping[str, Any], name: str, default: Any) -> Any:
    """A column's value; columns hold lists of one."""
    value = columns.get(name, default)
    return (value[0] if value else default) if isinstance(value, list) else value


def _count(talks: Talks, given: Any, text: str) -> int:
    return given if type(given) is int else talks.tokens(text)


def _answer(tokens: Any, where: str) -> int:
    if type(tokens) is not int or tokens < 1:
        raise InputError(f"{where}: output_tokens_count={tokens!r}: must be the answer's tokens, ≥ 1")
    return tokens
