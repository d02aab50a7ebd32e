"""RAGPulse: prompts made of pieces, which are shared where they stand behind the same pieces.

JSON lines with `timestamp` (s), `input_length`, `output_length`, `session_id` and `hash_ids` by part of the prompt, in
the order PARTS; an id names a piece, not what stands before it. The pieces' tokens are in a second file,
``NAME_parts.json`` (or .gz) beside ``NAME.jsonl``: {id: tokens}. Source: github.com/flashserve/RAGPulse at 3672232.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.workload.csv_traces import Columns, check_arrivals, from_start
from windtunnel.workload.rules import integers

PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
KEYS = {"timestamp", "input_length", "output_length", "hash_ids", "session_id"}


def is_ragpulse(row: Mapping[str, Any]) -> bool:
    """Whether a line has this form."""
    return row.keys() <= KEYS and isinstance(row.get("hash_ids"), dict)


def read_ragpulse(rows: list[dict[str, Any]], pieces: Mapping[str, Any]) -> Columns:
    """Arguments of Workload.from_columns; ``pieces``: tokens of each id.

    Its sessions are only named: each request has its own time. Raises InputError for what is missing.
    """
    notes: list[str] = []
    try:
        ordered = sorted(rows, key=lambda row: float(row["timestamp"]))
        if ordered != rows:
            rows, notes = ordered, ["requests are put into the order of their times"]
        arrival = np.array([float(row["timestamp"]) for row in rows])
        prompt = integers("input_length", [int(row["input_length"]) for row in rows], len(rows))
        output = integers("output_length", [int(row["output_length"]) for row in rows], len(rows))
        begins = _begins(rows, prompt.tolist(), {str(name): int(tokens) for name, tokens in pieces.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"is not as RAGPulse writes it ({type(error).__name__}: {error})") from None
    check_arrivals(arrival)
    return {
        **from_start(arrival, notes),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "begins": begins,
        "notes": notes,
    }


def _begins(rows: list[dict[str, Any]], prompts: list[int], pieces: Mapping[str, int]) -> list[tuple[int, int] | None]:
    """By the longest sequence of pieces from the start that an earlier prompt had."""
    nodes: dict[tuple[int, str], int] = {}
    writers: list[int] = []
    found: list[tuple[int, int] | None] = []
    for number, row in enumerate(rows):
        node, tokens, best = -1, 0, None
        for part in PARTS:
            for piece in map(str, row["hash_ids"].get(part) or ()):
                tokens += pieces[piece]
                following = nodes.get((node, piece))
                if following is None:
                    following = nodes[node, piece] = len(nodes)
                    writers.append(number)
                else:
                    other = writers[following]
                    best = other, min(tokens, prompts[number], prompts[other])
                node = following
        found.append(best if best and best[1] else None)
    return found
