"""Which slots may be used again, and more of them."""

from typing import Any

import numpy as np

from windtunnel.core.dispatch import several
from windtunnel.core.engine import Demand, Fleet, Integers
from windtunnel.core.records import NONE, State
from windtunnel.core.routing import ACCEPTED, between_caches, note_departures, note_first_tokens
from windtunnel.core.seats import WHO
from windtunnel.core.stores import chunks


def named(state: State, fleet: Fleet, time: float) -> Integers:
    """Requests, ended or not, that a scheduler or the router still names at a time that the loop has reached."""
    found = [_of_scheduler(extra) for extra in (state.extra if several(state.extra) else (state.extra,))]
    if state.stores is not None:
        found += [owners(chunks.held_keys(state.stores)), chunks.to_be_written(state.stores, state.lanes)]
    if any(policy.recalls_the_ended for policy in fleet.policies):
        found.append(state.seats[:, WHO].ravel())
    if state.routing is not None:
        found.append(_of_router(state, time))
    return np.concatenate([np.asarray(one, dtype=np.int64) for one in found])


def _of_scheduler(extra: Any) -> Any:
    """Whose text its caches hold, without a name for it."""
    if getattr(extra, "tree", None) is not None:
        return _owners_in_tree(extra.tree)
    cache = getattr(extra, "cache", None)
    if cache is None:
        return ()
    held = cache.items if hasattr(cache, "items") else cache.blocks
    found = owners(held["key"])
    if getattr(cache, "followers", None) is not None:
        writers = cache.followers.rows["owner"]
        found = np.append(found, np.unique(writers[writers != NONE]))
    return found


def owners(keys: Any) -> Any:
    """See ``blocks.own_key``: keys below 0 are numbered by their owners."""
    own = keys[(keys < 0) & (keys > -(1 << 61))]
    return np.unique((-1 - own) >> 24)


def _owners_in_tree(tree: Any) -> Any:
    """Whose tokens the nodes of SGLang's trees hold: all that the index of children leads to."""
    from windtunnel.core.schedulers.sglang.tree.radix import standing

    return np.unique(tree.nodes["request"][standing(tree)[1]])


def _of_router(state: State, time: float) -> Any:
    """Those that may be decoding at other replicas; all that have left are no longer in its lists."""
    known = _seen(state.routing)
    seen = state._replace(**{name: getattr(state, name).view(np.recarray) for name in ("groups", "lanes", "requests")})
    for g in range(len(state.groups)):
        if seen.groups[g].now <= time:
            _plain(note_departures)(seen, known, g)
    for j in range(len(state.replicas) - 1):
        _plain(note_first_tokens)(seen, known, j, time)
    return known.accepted[: known.settings[ACCEPTED]]


def _seen(known: Any) -> Any:
    """With the fields of its records as attributes."""
    return known._replace(replicas=known.replicas.view(np.recarray), requests=known.requests.view(np.recarray))


def _plain(part: Any) -> Any:
    """What was written: a compiled part has nothing that Python could call."""
    return getattr(part, "py_func", part)


def grown(old: Any, small: Any, large: Any) -> Any:
    """Arrays that depend on the number of requests, as their sizes in ``small`` and ``large`` show, become as large as
    in the latter; all others stay as they are."""
    if isinstance(old, tuple):
        parts = [grown(*part) for part in zip(old, small, large, strict=True)]
        return type(old)(*parts) if hasattr(old, "_fields") else tuple(parts)
    if (
        not isinstance(old, np.ndarray)
        or small.shape == large.shape
        or np.all(np.greater_equal(old.shape, large.shape))
    ):
        return old
    large[tuple(map(slice, old.shape))] = old
    return large


def linked(state: State) -> State:
    """The state, after some of its arrays have been replaced by others: what stands in two places is one."""
    extras = state.extra if several(state.extra) else (state.extra,)
    whole = tuple(chunks.with_cache_of(extra) for extra in extras)
    extra = whole if several(state.extra) else whole[0]
    return state._replace(extra=extra, stores=chunks.stores_in(extra), routing=between_caches(state.routing, extra))


def nobody(slots: int, size: int) -> Demand:
    """So many slots without requests; ``size``: tokens that a name of their contents stands for, 0 without any."""
    none, ones = np.zeros(slots), np.ones(slots, dtype=np.int64)
    return Demand(
        arrival=np.full(slots, np.nan),
        prompt_tokens=np.full(slots, max(size, 1)),
        output_tokens=ones,
        overruns=none.astype(bool),
        refused=none.astype(bool),
        follow=np.full(slots, -1),
        think_time=none,
        max_concurrency=0,
        priority=none.astype(np.int64),
        hash_ids=(np.arange(slots + 1), np.zeros(slots, dtype=np.int64)) if size else None,
        hash_block_size=size,
    )
