"""Conversations as messages, a JSON object a line: MLPerf's agentic inference.

Source: github.com/mlcommons/endpoints at 7bc1908, scripts/agentic_inference_dataset_schema.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from windtunnel.errors import InputError
from windtunnel.workload.agents.talk import tokens_of

MESSAGE = ("conversation_id", "turn", "role")
"""Keys of every message."""
FIRST_BYTES = 4096


def has_messages(data: bytes) -> bool:
    """Whether lines look like messages of conversations."""
    return all(f'"{key}"'.encode() in data[:FIRST_BYTES] for key in MESSAGE)


def read_messages(rows: list[dict[str, Any]], answers: str = "live") -> dict[str, Any]:
    """Arguments of Workload.from_columns from messages: each of the assistant is a request, whose prompt is the system
    prompt, the tools and all messages before it. Tokens are estimated, four characters each.

    ``delay_seconds`` of the client's messages are the think time. Conversations that start with the same system prompt
    and tools share them. Raises InputError for a message without its keys or out of turn.
    """
    talks: dict[str, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows, start=1):
        missing = next((key for key in MESSAGE if key not in row), None)
        if missing is not None:
            raise InputError(f"row {number}: {missing} is missing: a message has {', '.join(MESSAGE)}")
        if type(row["turn"]) is not int:
            raise InputError(f"row {number}: turn={row['turn']!r}: must be a whole number")
        talk = talks.setdefault(str(row["conversation_id"]), [])
        if talk and row["turn"] != talk[-1]["turn"] + 1:
            before = talk[-1]["turn"]
            raise InputError(f"row {number}: turn={row['turn']}: must follow turn {before} of its conversation")
        talk.append(row)
    names = ("session", "think_time", "prompt_tokens", "output_tokens", "begins")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    heads: dict[str, int] = {}
    for session, talk in enumerate(talks.values()):
        _append_talk(columns, session, talk, heads)
    if not columns["session"]:
        raise InputError("has no messages of the role assistant: they are the answers")
    notes = ["token counts are estimated: 4 characters a token"]
    if answers == "live":
        notes.append("without --answers recorded, as MLPerf replays them, later prompts hold what the server answers")
    if unanswered := sum(talk[-1]["role"] != "assistant" for talk in talks.values()):
        notes.append(f"{unanswered} conversations end with a message of the client, which is left out")
    return {**columns, "arrival": 0.0, "notes": notes}


def _append_talk(
    columns: dict[str, list[Any]], session: int, talk: list[dict[str, Any]], heads: dict[str, int]
) -> None:
    """One more conversation. ``heads``: the first row that begins with a system prompt and tools."""
    head = "".join(_said(row, "system") + _said(row, "tools") for row in talk[:1])
    shared = tokens_of(head) if head else 0
    prompt, think, before = shared, 0.0, None
    for row in talk:
        own = tokens_of("".join(_said(row, key) for key in ("content", "tool_calls", "tool_results")))
        if row["role"] != "assistant":
            delay = row.get("delay_seconds") or 0.0
            if isinstance(delay, bool) or not isinstance(delay, int | float):
                raise InputError(f"delay_seconds={delay!r}: must be a number of seconds")
            prompt, think = prompt + own, think + delay
            continue
        at = len(columns["session"])
        begins = (heads[head], shared) if head in heads and shared else None
        columns["begins"].append(begins if before is None else before)
        for name, value in zip(columns, (session, think, max(prompt, 1), own), strict=False):
            columns[name].append(value)
        heads.setdefault(head, at)
        prompt, think, before = max(prompt, 1) + own, 0.0, at


def _said(row: Mapping[str, Any], key: str) -> str:
    found = row.get(key) or ""
    return found if isinstance(found, str) else json.dumps(found)
