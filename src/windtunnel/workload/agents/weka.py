"""Coding agents' sessions as recorded: the "Weka" form of kv-cache-tester, which AgentX replays.

A file has one session: `requests` with `t` (s from its start), `in`, `out` (tokens), `hash_ids` of full blocks and
`api_time` (s); a request of the type `subagent` has requests of its own, whose `t` count from where it started. Source:
github.com/callanjfox/kv-cache-tester at 94f6046, docs/TRACE_FORMAT.md of agentic-coding-analysis at 15e88f7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from itertools import repeat
from typing import Any, Literal, get_args

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.workload.texts import known_run, waits_for

Answers = Literal["live", "recorded"]
"""What the next prompt of a session holds: the answer that the server gave, or the one that was recorded, which it
never has in its cache."""
ROUNDED = 1.0
"""Seconds to which the traces round ``t``."""
KEYS = ("block_size", "hash_id_scope", "requests")
"""What tells a session of this form from other JSON."""


@dataclass
class Call:
    """One request of an agent, in seconds from the session's start."""

    start: float
    end: float
    prompt: int
    output: int
    ids: list[int] = field(repr=False)
    agent: str
    """Of a subagent; empty: the main one."""
    system: int
    """Tokens of its tools and system prompt."""


def is_session(document: Any) -> bool:
    """Whether a JSON document has this form."""
    return isinstance(document, dict) and all(key in document for key in KEYS)


def read_sessions(documents: Iterable[tuple[str, Any]], answers: str = "live") -> dict[str, Any]:
    """Arguments of Workload.from_columns from sessions by name, which all start at 0.

    Raises InputError naming the session and what it lacks.
    """
    if answers not in get_args(Answers):
        raise unknown("answers", answers, get_args(Answers))
    names = ("session", "arrival", "after", "think_time", "prompt_tokens", "output_tokens", "begins", "system_tokens")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    models, empty = set[str](), 0
    for number, (name, document) in enumerate(documents):
        try:
            calls = _calls(document)
            _append(columns, number, calls, _begins(calls, document["block_size"], answers == "live"))
            models.update(str(row.get("model")) for row in _plain(document["requests"]) if row.get("model"))
            empty += sum(min(int(row["in"]), int(row["out"])) < 1 for row in _plain(document["requests"]))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{name}: is no session of an agent ({type(error).__name__}: {error})") from None
    notes = [f"answers={answers}: later prompts hold {HOLD[answers]}"]
    if len(models) > 1:
        notes.append(f"recorded with {len(models)} models: all requests are served by one here")
    if empty:
        notes.append(f"{empty} requests with 0 prompt or output tokens count as 1")
    return {**columns, "notes": notes}


HOLD = {
    "live": "what the server answers, so that it finds its own answers in the cache",
    "recorded": "recorded answers, so that the server never finds its own in the cache",
}


def _plain(requests: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """All requests, those of subagents included."""
    for row in requests:
        if row["type"] == "subagent":
            yield from row["requests"]
        else:
            yield row


def _calls(document: Mapping[str, Any]) -> list[Call]:
    """The requests in order of their start.

    A subagent's ``t`` is where it ends, if its duration before that leads to the end of the turn before; inner times
    count from its start. (In the public traces all of them do: as a start, most parents would go on meanwhile.)
    """
    found, ended, system = list[Call](), 0.0, _system(document)
    for row in document["requests"]:
        if row["type"] != "subagent":
            found.append(_call(row, 0.0, "", system))
            ended = max(ended, found[-1].end)
            continue
        start = row["t"] - row["duration_ms"] / 1000
        if start < ended - ROUNDED:
            start = float(row["t"])
        found += [_call(inner, start, str(row["agent_id"]), _system(row)) for inner in row["requests"]]
    if not found:
        raise InputError("has no requests")
    return sorted(found, key=lambda call: call.start)


def _system(agent: Mapping[str, Any]) -> int:
    """Tokens with which all prompts of an agent begin."""
    return int(agent.get("tool_tokens") or 0) + int(agent.get("system_tokens") or 0)


def _call(row: Mapping[str, Any], origin: float, agent: str, system: int) -> Call:
    start, tokens = origin + row["t"], max(int(row["in"]), 1)
    end = start + row.get("api_time", 0.0)
    return Call(start, end, tokens, max(int(row["out"]), 1), row["hash_ids"], agent, min(system, tokens))


def _begins(calls: list[Call], block: int, live: bool) -> list[tuple[int, int] | None]:
    """(Whose text, how many tokens) for each call.

    By the longest run of ids that an earlier call had. If they are live: where all ids of an earlier call stand at the
    beginning and it had ended, the prompt goes on with its answer if it is long enough for it (the deepest such call,
    the latest of equals), an assumption, because a trace holds no contents of answers.
    """
    known: dict[int, int] = {}
    whole: dict[int, int] = {}  # last id of a prompt → the latest call that ends so
    found: list[tuple[int, int] | None] = []
    for number, call in enumerate(calls):
        run = known_run(call.ids, known)
        best = (known[call.ids[run - 1]], min(run * block, call.prompt)) if run else None
        earlier = (
            next((whole[call.ids[d]] for d in range(run - 1, -1, -1) if call.ids[d] in whole), None) if live else None
        )
        if earlier is not None and best is not None:
            other = calls[earlier]
            text = other.prompt + other.output
            if call.prompt >= text > best[1] and other.end <= call.start + ROUNDED:
                best = earlier, text
        found.append(best)
        known.update(zip(call.ids[run:], repeat(number)))
        if call.ids:
            whole[call.ids[-1]] = number
    return found


def _append(
    columns: dict[str, list[Any]], session: int, calls: list[Call], begins: list[tuple[int, int] | None]
) -> None:
    """One more session behind those that the columns have."""
    first = len(columns["session"])
    after = _after(calls, begins)
    for call, parents, shared in zip(calls, after, begins, strict=True):
        ended = max((calls[parent].end for parent in parents), default=None)
        columns["session"].append(session)
        columns["arrival"].append(call.start - calls[0].start)
        columns["after"].append([first + parent for parent in parents])
        columns["think_time"].append(0.0 if ended is None else round(max(call.start - ended, 0.0), 3))
        columns["prompt_tokens"].append(call.prompt)
        columns["output_tokens"].append(call.output)
        columns["begins"].append(None if shared is None else (first + shared[0], shared[1]))
        columns["system_tokens"].append(call.system)


def _after(calls: list[Call], begins: list[tuple[int, int] | None]) -> list[list[int]]:
    """Whom each call waits for: its agent's call before; a subagent's first one for the main turn that ended last; a
    main turn also for the subagents that ended since the turn before. A call that started before all these had ended
    hangs on the latest one that had. Whose answer it begins with it waits for in any case."""
    latest: dict[str, int] = {}
    joined = set[int]()
    found: list[list[int]] = []
    for number, call in enumerate(calls):
        before = latest.get(call.agent)
        if before is None and call.agent:
            main = [j for j in range(number) if not calls[j].agent and calls[j].end <= call.start + ROUNDED]
            before = max(main, key=lambda j: calls[j].end, default=None)
        parents = [] if before is None else [before]
        if before is not None and not call.agent:
            for agent, j in latest.items():
                ends = calls[j].end
                if agent and j not in joined and calls[before].start < ends <= call.start + ROUNDED:
                    parents.append(j)
                    joined.add(j)
        if parents and calls[parents[0]].end > call.start + ROUNDED:
            ended = [j for j in range(number) if calls[j].end <= call.start + ROUNDED]
            parents = [max(ended, key=lambda j: calls[j].end)] if ended else []
        other, tokens = begins[number] or (number, 0)
        answered = tokens > calls[other].prompt
        found.append(parents)
        if answered and not waits_for(number, other, found.__getitem__):
            parents.append(other)
        latest[call.agent] = number
    return found
