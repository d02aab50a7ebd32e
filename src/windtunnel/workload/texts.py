"""What prompts share: each may begin with the text of another request, its prompt followed by its answer.

A prefix cache can use nothing but the longest beginning that a prompt shares with an earlier text, so one pair for each
request, (whose text, how many tokens of it), says everything that there is to say about sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.workload.graph import Edges
from windtunnel.workload.rules import HashIds, Integers, dense, first

PIECE = 1 << 14
"""Rows whose blocks are looked at together."""
Begins = tuple[Integers, Integers]
"""For each row (the row with whose text its prompt begins, the tokens of it): (-1, 0) if with no other's."""


def begins_with(
    given: Begins | Sequence[Any] | None, prompt_tokens: Integers, output_tokens: Integers
) -> Begins | None:
    """Beginnings from a list of None, a row (its whole text), or (row, tokens). None if no prompt has any.

    Raises InputError for rows that are not earlier ones, and for more tokens than a text has.
    """
    if given is None:
        return None
    n = len(prompt_tokens)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], np.ndarray):
        others, tokens = np.array(given[0], np.int64), np.array(given[1], np.int64)
    else:
        others, tokens = _from_list(given, n, prompt_tokens + output_tokens)
    row = first(others >= np.arange(n))
    if row >= 0:
        raise InputError(
            f"row {row + 1}: begins={int(others[row])}: must name an earlier request (from 0; this is number {row})"
        )
    check_begins((others, tokens), prompt_tokens, output_tokens)
    return (others, tokens) if (others >= 0).any() else None


def _from_list(given: Sequence[Any], n: int, lengths: Integers) -> Begins:
    if len(given) != n:
        raise InputError(f"begins has {len(given)} rows: must have {n}, one for each request")
    others, tokens = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    for row, pair in enumerate(given):
        if pair is None:
            continue
        numbers: Any = [pair, None] if type(pair) is int else pair
        fits = isinstance(numbers, list | tuple) and len(numbers) == 2 and type(numbers[0]) is int
        if not fits or type(numbers[1]) not in (int, type(None)) or not 0 <= numbers[0] < row:
            raise InputError(
                f"row {row + 1}: begins={pair!r}: must be the number of an earlier request, from 0, or [number, tokens]"
            )
        others[row] = numbers[0]
        tokens[row] = lengths[numbers[0]] if numbers[1] is None else numbers[1]
    return others, tokens


def check_begins(begins: Begins, prompt_tokens: Integers, output_tokens: Integers) -> None:
    """Texts must exist, be long enough, and not begin with each other in a circle."""
    others, tokens = begins
    n = len(prompt_tokens)
    if len(others) != n or len(tokens) != n:
        raise InputError(f"begins has {len(others)} rows: must have {n}, one for each request")
    row = first((others < -1) | (others >= n) | (others == np.arange(n)))
    if row >= 0:
        raise InputError(f"row {row + 1}: begins={others[row]}: must be the number of another request, from 0")
    has = others >= 0
    row = first(np.where(has, (tokens < 1) | (tokens > prompt_tokens), tokens != 0))
    if row >= 0:
        raise InputError(
            f"row {row + 1}: begins with {tokens[row]} tokens: must be ≥ 1 and ≤ its prompt_tokens={prompt_tokens[row]}"
        )
    text = (prompt_tokens + output_tokens)[others]
    row = first(has & (tokens > text))
    if row >= 0:
        raise InputError(
            f"row {row + 1}: begins with {tokens[row]} tokens of request {others[row]}, whose prompt and answer have "
            f"{text[row]}: must be ≤ that"
        )
    above, steps = others, 1
    while (above >= 0).any():
        if steps > 2 * n:
            raise InputError("begins: requests begin with each other in a circle: each must name an earlier one")
        above, steps = np.where(above >= 0, above[above], -1), steps * 2


def check_causes(begins: Begins, waits: Edges, prompt_tokens: Integers) -> None:
    """Who begins with an answer must wait for its end, through however many others."""
    others, tokens = begins
    offsets, parents = waits[0].tolist(), waits[1].tolist()
    for row in np.flatnonzero((others >= 0) & (tokens > prompt_tokens[others])).tolist():
        other = int(others[row])
        if not waits_for(row, other, lambda child: parents[offsets[child] : offsets[child + 1]]):
            raise InputError(
                f"row {row + 1}: begins with the answer of request {other} (from 0), but does not wait for it: name it "
                f"in after, or begin with at most its prompt_tokens={prompt_tokens[other]}"
            )


def waits_for(row: int, other: int, parents_of: Callable[[int], Sequence[int]]) -> bool:
    """Whether a row waits for another one, through however many; parents have lower numbers than their children."""
    seen, ahead = set[int](), [row]
    while ahead and other not in seen:
        above = [parent for parent in parents_of(ahead.pop()) if parent >= other and parent not in seen]
        ahead += above
        seen.update(above)
    return other in seen


def of_hashes(hash_ids: HashIds, size: int, prompt_tokens: Integers) -> Begins:
    """What prompts share by the ids of their blocks, of ``size`` tokens each.

    An id also stands for all before it. The longest run of ids that an earlier row had counts. The last block of either
    prompt may be filled in part only.
    """
    offsets, values = hash_ids
    prompts = prompt_tokens.tolist()
    others, tokens = np.full(len(prompts), -1, np.int64), np.zeros(len(prompts), np.int64)
    if not len(values):
        return others, tokens
    ids, count = dense(values)
    runs, writers = _known_runs(offsets, ids, count)
    rows = np.flatnonzero(runs)
    ends = ids[offsets[rows] + runs[rows] - 1]
    holder: dict[int, int] = {}
    known = zip(*(part.tolist() for part in (rows, runs[rows], ends, writers[ends])), strict=True)
    for row, run, end, writer in known:
        other = holder.get(end, writer)
        prompt = prompts[row]
        shared = min(run * size, prompt, prompts[other])
        if shared:
            others[row], tokens[row] = other, shared
        if prompt > prompts[other] and run * size > prompts[other]:
            holder[end] = row
    return others, tokens


def _known_runs(offsets: Integers, ids: Integers, count: int) -> tuple[Integers, Integers]:
    """(For each row, how many of its ids, from the first on, an earlier row has; for each id the first row that has
    it)."""
    writers = np.full(count, -1, np.int64)
    runs = np.zeros(len(offsets) - 1, np.int64)
    for low in range(0, len(runs), PIECE):
        high = min(low + PIECE, len(runs))
        piece = ids[offsets[low] : offsets[high]]
        row = np.repeat(np.arange(low, high), np.diff(offsets[low : high + 1]))
        new = np.flatnonzero(writers[piece] < 0)[::-1]
        writers[piece[new]] = row[new]  # of several rows the last one written: the first
        runs[low:high] = np.bincount(row[writers[piece] < row] - low, minlength=high - low)
    return runs, writers


def known_run(ids: Sequence[int], known: Any) -> int:
    """How many of a prompt's first ids are known: with each one all before it are."""
    low, high = 0, len(ids)
    if high and ids[-1] in known:
        return high
    while low < high:
        middle = (low + high) // 2
        if ids[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low


def tree(begins: Begins) -> Begins:
    """The same, with each row hung on the one that wrote the last token that they share: tokens grow on a way down."""
    above, tokens = begins[0].tolist(), begins[1].tolist()
    for row in range(len(above)):
        other = above[row]
        while other >= 0 and tokens[row] <= tokens[other]:
            other = above[other]
        above[row] = other
    return np.array(above, np.int64), np.array(tokens, np.int64)


def from_earlier(begins: Begins, prompt_tokens: Integers, output_tokens: Integers) -> Begins:
    """The same, each with the earliest of the rows before it that shares most with it; as it is where a prompt begins
    with the answer of a row behind it, which only that row has."""
    others, tokens = begins
    behind = others >= np.arange(len(others))
    if not behind.any() or (behind & (tokens > prompt_tokens[others])).any():
        return begins
    above, counts, prompts = others.tolist(), tokens.tolist(), prompt_tokens.tolist()
    full = (prompt_tokens + output_tokens).tolist()
    covered: dict[int, tuple[int, int]] = {}  # text → (tokens of it, row): most of it that one of the rows before has
    found, shared = np.full(len(above), -1, np.int64), np.zeros(len(above), np.int64)
    for row, prompt in enumerate(prompts):
        owner, upto, has, best = row, prompt, full[row], (0, -1)
        while owner >= 0:
            most, holder = covered.get(owner, (0, -1))
            if min(most, upto) > best[0]:
                best = min(most, upto), holder
            if has > most:
                covered[owner] = has, row
            if most >= min(upto, counts[owner]) > 0:
                break  # who has that also has all above it
            owner, upto = above[owner], min(upto, counts[owner])
            has = upto
        shared[row], found[row] = best
    return found, shared


def without_answers(begins: Begins, prompt_tokens: Integers) -> Begins:
    """Beginnings as far as the other's prompt: what the server answers never comes back."""
    others, tokens = begins
    cut = np.where(others >= 0, np.minimum(tokens, prompt_tokens[others]), 0)
    return others, cut


def taken(begins: Begins | None, rows: Integers) -> Begins | None:
    """The beginnings of these rows, in this order and numbered by it.

    In place of a text that is left out stands the one of these rows that shares most of it.
    """
    if begins is None:
        return None
    number = np.full(len(begins[0]), -1, np.int64)
    number[rows] = np.arange(len(rows))
    if len(rows) == len(number):
        kept = begins[0][rows]
        return np.where(kept >= 0, number[kept], -1), begins[1][rows]
    others, tokens = (part.tolist() for part in begins)
    numbers = number.tolist()
    heirs: dict[int, tuple[int, int]] = {}  # text left out → (tokens, row) of the one that shares most of it
    found, counts = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
    for place, row in enumerate(rows.tolist()):
        other, count = others[row], tokens[row]
        best, left = (0, -1), []
        while other >= 0 and numbers[other] < 0:
            shared, heir = heirs.get(other, (0, -1))
            best = max(best, (min(count, shared), heir))
            left.append((other, count))
            other, count = others[other], min(count, tokens[other])
        if other >= 0:
            best = max(best, (count, numbers[other]))
        for text, most in left:
            if most > heirs.get(text, (0, -1))[0]:
                heirs[text] = most, place
        if best[0]:
            found[place], counts[place] = best[1], best[0]
    return (found, counts) if (found >= 0).any() else None


def earlier_first(begins: Begins | None, waits: Edges) -> Integers:
    """An order of the rows in which all name earlier ones: one that the clock releases may have to come behind an
    answer that its prompt begins with."""
    order = np.arange(len(waits[0]) - 1)
    if begins is None or not (begins[0] >= order).any():
        return order
    others, offsets, parents = begins[0].tolist(), waits[0].tolist(), waits[1].tolist()
    done, found = [False] * len(order), list[int]()
    for row in range(len(order)):
        pending = [row]
        while pending:
            top = pending[-1]
            needed = [*parents[offsets[top] : offsets[top + 1]], others[top]]
            missing = [other for other in needed if other >= 0 and not done[other]]
            if missing and not done[top]:
                pending += missing
                continue
            pending.pop()
            if not done[top]:
                done[top] = True
                found.append(top)
    return np.array(found)
