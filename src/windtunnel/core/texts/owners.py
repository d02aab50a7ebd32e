"""Whose tokens a text has: each prompt begins with another request's text, its prompt and then its answer.

A token is named after the request that wrote it first, and its place. Texts stand in a tree: each hangs on the one that
wrote the last token that they share, so on the way down the shared tokens grow (``workload.texts.tree``). Contents of a
prompt may be given by names of its blocks instead, where nobody knows who wrote them first: in a server.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Fields, attributes, records

PRIVATE = 1 << 62
"""Tokens named from here on are their request's own."""

TEXT: Fields = [
    (name, np.int64)
    for name in (
        "other",  # with whose text the prompt begins, NONE if with no other's
        "begins",  # tokens of it
        "below",  # who hangs on this one on the way down to the text that is read
        "named",  # tokens at its beginning whose contents have names
        "names",  # first entry of these
    )
]


class Texts(NamedTuple):
    """The texts of all requests."""

    rows: Array
    names: Array
    """Of blocks of ``size`` tokens; equal names are equal tokens with equal tokens before them."""
    size: int


def texts_of(demand: Any) -> Texts:
    """The texts of the requests."""
    rows = records(len(demand.arrival), TEXT)
    rows["other"] = NONE
    names = np.zeros(1, dtype=np.int64)
    if demand.begins is not None:
        rows["other"], rows["begins"] = demand.begins
    if demand.hash_ids is not None:
        offsets, values = demand.hash_ids
        rows["names"] = offsets[:-1]
        rows["named"] = np.minimum(np.diff(offsets) * demand.hash_block_size, demand.prompt_tokens)
        if len(values):
            names = np.unique(values, return_inverse=True)[1].astype(np.int64)
    return Texts(attributes(rows), names, max(demand.hash_block_size, 1))


def shared_tokens(demand: Any) -> NDArray[np.int64]:
    """[requests] tokens at the beginning of each text that another one may also have."""
    found = np.zeros(len(demand.arrival), dtype=np.int64)
    if demand.begins is not None:
        others, tokens = demand.begins
        has = others != NONE
        np.maximum(found, tokens, out=found)
        np.maximum.at(found, others[has], tokens[has])
    if demand.hash_ids is not None and len(demand.hash_ids[1]):
        offsets, values = demand.hash_ids
        ids = np.unique(values, return_inverse=True)[1]
        common = _leading(np.bincount(ids)[ids] > 1, offsets) * demand.hash_block_size
        np.maximum(found, np.minimum(common, demand.prompt_tokens), out=found)
    return found


def _leading(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n] how many flags of each row are set before the first that is not."""
    unset = np.append(np.nonzero(~flags)[0], len(flags))
    first = unset[np.searchsorted(unset, offsets[:-1])]
    return np.minimum(first, offsets[1:]) - offsets[:-1]


def begins(texts: Texts, other: int, row: int, tokens: int) -> None:
    """The text of a row begins with this number of tokens of another row's."""
    rows: Any = texts.rows
    rows["other"][row], rows["begins"][row], rows["named"][row] = other, tokens, 0


@part
def owner_of(texts: Texts, r: int, place: int) -> int:
    """Who wrote the token at a place of a text first."""
    rows = texts.rows
    while place < rows[r].begins:
        r = rows[r].other
    return r


@part
def top_of(texts: Texts, r: int) -> int:
    """Who wrote the first token of a text; ``below`` leads down from there."""
    rows = texts.rows
    while rows[r].other != NONE:
        rows[rows[r].other].below = r
        r = rows[r].other
    return r


@part
def down_to(texts: Texts, r: int, owner: int, place: int) -> int:
    """Who wrote the token at a place of text ``r``, given the owner of an earlier one after ``top_of``."""
    rows = texts.rows
    while owner != r and place >= rows[rows[owner].below].begins:
        owner = rows[owner].below
    return owner


@compiled
def common(texts: Texts, a: int, b: int, start: int, end: int) -> int:
    """How many tokens two requests with equal beginnings share from ``start`` on, at most to ``end``."""
    rows, names, size = texts.rows, texts.names, texts.size
    while a != b and end > start and (rows[a].begins > start or rows[b].begins > start):
        if rows[a].begins >= rows[b].begins:  # shared tokens grow on the way down: b is not above a
            end, a = min(end, rows[a].begins), rows[a].other
        else:
            end, b = min(end, rows[b].begins), rows[b].other
    if a == b:
        return max(end - start, 0)
    end = min(end, rows[a].named, rows[b].named)
    at = start
    while at < end and names[rows[a].names + at // size] == names[rows[b].names + at // size]:
        at = min((at // size + 1) * size, end)
    return max(at - start, 0)


@part
def token_of(texts: Texts, owner: int, place: int) -> int:
    """A number of a token, given its owner: equal for equal tokens with equal beginnings."""
    if place < texts.rows[owner].named:
        return texts.names[texts.rows[owner].names + place // texts.size] * texts.size + place % texts.size
    return PRIVATE | (int(owner) << 31) | int(place)
