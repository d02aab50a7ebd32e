"""What KV stores have: chunks of tokens, found by their keys, those that go first at the front of a queue.

A chunk is there once it has been written; until then it takes room, but nobody finds it. Each rank has a *port* to each
store behind it, which reads one thing after the other, and writes likewise. Keys are those of blocks (``core.blocks``)
with the store's own size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.block_index import close_gap, home, slot_of
from windtunnel.core.blocks import Cache, link, own_key, unlink
from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Fields, Lane, Request, attributes, records
from windtunnel.core.texts.owners import down_to, owner_of, shared_tokens, top_of
from windtunnel.errors import InputError
from windtunnel.policy.settings import Settings
from windtunnel.policy.tiers import TierUse

STORE: Fields = [
    (name, np.int64)
    for name in (
        "block_size",  # tokens of a chunk
        "chunks",  # that fit
        "held",  # that it has
        "lru",  # a chunk that is used goes to the end of the queue
        "write_after",  # how often a chunk has to have been looked for before it is written
        "front",  # of the queue
        "back",
        "unused",  # the first item that is not used
        "first",  # of its items
        "items",  # that it has room for
        "slots",  # first entry of its index
        "mask",  # its size − 1
        "counts",  # first entry of how often each chunk has been looked for
        "counts_mask",
        "of_replica",  # it is gone with its replica
    )
]

PORT: Fields = [
    *((name, np.float64) for name in ("read_s", "write_s", "latency", "reads_until", "writes_until")),
    *(
        (name, np.int64)
        for name in (
            "store",
            "generated",  # what is generated is written
            "part",  # tokens that the search under way has found here
            "found",  # tokens that requests got from here when they were first admitted
            "read",
            "written",
        )
    ),
]

CHUNK: Fields = [
    ("key", np.int64),
    ("written_at", np.float64),
    ("next", np.int32),  # in the queue, or among the unused items
    ("previous", np.int32),
]

COUNT: Fields = [("key", np.int64), ("count", np.int64)]  # a count of 0: the entry is free

SAVE: Fields = [("time", np.float64), ("request", np.int64), ("tokens", np.int64)]
"""The first ``tokens`` of a request are computed at ``time``."""

MOST = 1 << 22
"""Chunks of a store whose requests are not known before they come."""

OF_REQUEST: Fields = [
    ("until", np.float64),  # when the KV that it waits for is here
    *(
        (name, np.int32)
        for name in (
            "looked",  # how often it had been preempted when its chunks were last looked for; NONE: never
            "saved",  # tokens that the stores have been offered
            "kept",  # blocks that it holds while it does not run
            "shared",  # tokens at its beginning that another request may also have
            "again",  # tokens of its prompt that the lane, which got the others with their KV, computes as an answer
            "came",  # it came with its KV, and has not been in a step yet
            "wrote",  # a store may have tokens that are its own alone
        )
    ),
]
"""What stores know of a request."""

STORES_OF_LANE: Fields = [
    ("decided", np.float64),  # when the step that is being scheduled is decided
    ("wakes", np.float64),  # when its group last meant to decide again because KV comes
    *(
        (name, np.int64)
        for name in (
            "number",  # its own among all lanes
            "first_port",
            "ports",
            "open",  # lanes of other groups see what this one writes
            "generated",  # some of its stores want what is generated
            "loads",  # requests whose KV is on its way; they count as waiting
            "loading",  # the first of them to get it, linked by next
            "last_loading",
            "holders",  # requests in the queue that hold blocks
            "kv_reserved",  # blocks that these, and those whose KV is on its way, still need
            "newcomers",  # requests that came with their KV from another lane, and have not been in a step yet
            "saves",  # entries of its computed tokens that have not been written yet
        )
    ),
]


class Stores(NamedTuple):
    """The stores of all lanes; None in its place where there are none."""

    stores: Array
    ports: Array
    """Those of each lane one after the other, the fastest store first."""
    items: Array
    slots: Array
    """Open-addressed indexes from keys to items, one part for each store."""
    counts: Array
    rows: Array
    """[n] of OF_REQUEST."""
    saves: Array
    """[lanes, entries] of SAVE, in order of time."""
    keys: Array
    """Those of the chunks that are being written."""
    cache: Cache
    """Of the lanes' own blocks."""


def require_taking(stores: Sequence[Any], policies: Sequence[Settings]) -> None:
    """Raise InputError for a pool with stores whose scheduler has none, or loses tokens that it would write;
    ``stores``: of each pool, () of all: none."""
    for some, policy in zip(stores, policies, strict=len(stores) > 0):
        if some and not policy.takes_stores:
            raise InputError(
                "stores: not simulated with this scheduler, but with vLLM's v1 scheduler in one stage, first come "
                "first served, and its prefix cache, and with SGLang's of 0.5 in one stage, its radix cache and "
                "radix_eviction_policy='lru' (TensorRT-LLM's host memory goes by other rules): leave the stores out"
            )
        if some:
            _require_fitting(some, policy)
        if some and policy.async_scheduling and not getattr(policy, "return_victim_tokens", True):
            raise InputError(
                "stores: not simulated with return_victim_tokens=False and async_scheduling, where vLLM ≤ 0.10 counts "
                "tokens of preempted requests as computed whose blocks are gone, and would write them: use "
                "async_scheduling=False, as vLLM 0.10 runs by default, or leave the stores out"
            )


def _require_fitting(some: Sequence[Any], policy: Settings) -> None:
    """Raise InputError for what a scheduler's own host memory does not do, or only that does."""
    if type(policy).__name__ != "Sglang":  # only named, so that an edit of its settings compiles nothing anew
        if any(each.on_eviction for each in some):
            raise InputError("stores: on_eviction=true: simulated with SGLang's scheduler: leave it out")
        return
    names = [getattr(each, "tier", None) or getattr(each, "name", None) for each in some]
    if names != ["host"]:
        raise InputError(
            f"stores: {', '.join(map(str, names))}: SGLang's HiCache is simulated with one store: tier=host"
        )
    (one,) = some
    if one.eviction != "lru" or one.shared_by not in (None, "replica") or one.latency:
        raise InputError("stores: eviction, shared_by, latency: SGLang's HiCache is LRU and of a rank: leave them out")


def stores_of(fleet: Any, demand: Any, lanes: NDArray[Any], cache: Any) -> Stores | None:
    """The stores of a fleet, which have nothing yet, None if it has none; sets the lanes' fields. ``cache``: of their
    own blocks."""
    lanes["loading"] = lanes["last_loading"] = NONE
    lanes["number"] = np.arange(len(lanes))
    if not any(tiers and policy.takes_stores for tiers, policy in zip(fleet.tiers, fleet.policies, strict=False)):
        return None
    tiers, ports = _layout(fleet, lanes)
    tokens = demand.prompt_tokens + demand.output_tokens
    longest = int(tokens.max(initial=0))
    if demand.unknown:
        _require_bounded(tiers)
        longest = max(limits.max_model_len for limits in fleet.limits)
    stores = records(len(tiers), STORE)
    items = slots = counts = 0
    for store, tier in zip(stores, tiers, strict=True):
        possible = MOST if demand.unknown else int((tokens // tier.chunk_tokens).sum())
        held = min(tier.chunks, possible) + 1
        store["block_size"], store["chunks"], store["lru"] = tier.chunk_tokens, tier.chunks, tier.eviction == "lru"
        store["write_after"] = tier.write_after
        store["first"], store["items"], store["of_replica"] = items, held, tier.shared_by == "replica"
        store["slots"], store["mask"] = slots, (1 << int(2 * held).bit_length()) - 1
        store["counts"] = counts
        store["counts_mask"] = (1 << int(2 * possible).bit_length()) - 1 if tier.write_after else 0
        items, slots, counts = items + held, slots + store["mask"] + 1, counts + store["counts_mask"] + 1
    rows = records(len(tokens), OF_REQUEST)
    rows["looked"], rows["shared"] = NONE, shared_tokens(demand)
    smallest = min(tier.chunk_tokens for tier in tiers)
    most = max(policy.most_running(limits) for policy, limits in zip(fleet.policies, fleet.limits, strict=True))
    found = Stores(
        stores=attributes(stores),
        ports=attributes(ports),
        items=attributes(records(items, CHUNK)),
        slots=np.zeros(slots, dtype=np.int32),
        counts=attributes(records(counts, COUNT)),
        rows=attributes(rows),
        saves=attributes(np.zeros((len(lanes), 4 * most + 4), dtype=records(0, SAVE).dtype)),
        keys=np.zeros(longest // smallest + 1, dtype=np.int64),
        cache=cache,
    )
    for number in range(len(tiers)):
        empty(found, number)
    return found


def _require_bounded(tiers: Sequence[Any]) -> None:
    """Raise InputError for stores that may grow for ever, or are larger than one of unknown requests may be."""
    for tier in tiers:
        if tier.chunks > MOST:
            raise InputError(f"store: {tier.chunks} chunks: a live one keeps {MOST} at most: give less capacity")
        if tier.write_after:
            raise InputError(f"store: write_after={tier.write_after}: live, everything is written: leave it out")


def with_cache_of(extra: Any) -> Any:
    """What a scheduler keeps, its stores with the cache that it has by now."""
    if getattr(extra, "stores", None) is None or extra.stores.cache is extra.cache:
        return extra
    return extra._replace(stores=extra.stores._replace(cache=extra.cache))


def renew(stores: Stores, r: int, shared: int) -> None:
    """Another request stands in row ``r``, whose text others may share up to ``shared`` tokens."""
    stores.rows[r] = np.zeros((), dtype=stores.rows.dtype)
    stores.rows["looked"][r], stores.rows["shared"][r] = NONE, shared


def to_be_written(stores: Stores, lanes: Any) -> NDArray[np.int64]:
    """Requests whose tokens are still to be written."""
    waiting = [stores.saves["request"][lane["number"]][: lane["saves"]] for lane in lanes]
    return np.concatenate(waiting)


def held_keys(stores: Stores) -> NDArray[np.int64]:
    """Keys of all chunks that stores have."""
    found: NDArray[np.int64] = np.asarray(stores.items["key"])[stores.slots[stores.slots != NONE]]
    return found


def empty(stores: Stores, number: int) -> None:
    """A store has nothing, and nothing has been looked for there."""
    store: Any = stores.stores[number : number + 1]
    first, count, slots, counts = (int(store[name][0]) for name in ("first", "items", "slots", "counts"))
    store["held"], store["unused"] = 0, first
    store["front"] = store["back"] = NONE
    stores.items["next"][first : first + count] = np.arange(first + 1, first + count + 1)
    stores.slots[slots : slots + int(store["mask"][0]) + 1] = NONE
    stores.counts["count"][counts : counts + int(store["counts_mask"][0]) + 1] = 0


def clear(stores: Stores, lane: Any) -> None:
    """A lane, whose fields are again as before the run, has computed nothing; what its replica had for itself is
    lost."""
    for p in range(int(lane["first_port"]), int(lane["first_port"] + lane["ports"])):
        port: Any = stores.ports[p : p + 1]
        port["reads_until"] = port["writes_until"] = 0.0
        number = int(port["store"][0])
        if stores.stores["of_replica"][number]:
            empty(stores, number)


def forget(stores: Stores, requests: NDArray[np.int64]) -> None:
    """Requests have computed nothing, and have not looked for anything."""
    rows: Any = stores.rows
    rows["looked"][requests] = NONE
    for name in ("saved", "kept", "came"):
        rows[name][requests] = 0


def note_again(stores: Stores, requests: Any, tokens: Any) -> None:
    """So many tokens of the prompts of these requests are computed by a lane that gets the others with their KV."""
    stores.rows["again"][requests] = tokens


def stand_in(stores: Stores, lane: Any, r: int, row: int) -> None:
    """Another row has what the stores know of request ``r`` in this lane."""
    stores.rows[row] = stores.rows[r]
    for name in ("loading", "last_loading"):
        if lane[name] == r:
            lane[name] = row
    saves: Any = stores.saves[lane["number"]][: lane["saves"]]
    saves["request"][saves["request"] == r] = row


def _layout(fleet: Any, lanes: NDArray[Any]) -> tuple[list[Any], NDArray[Any]]:
    """(The stores, as those see them who come first; the ports of all lanes.)

    Pools that see the same store at other speeds share it.
    """
    numbers: dict[Any, int] = {}
    made: list[Any] = []
    rows: list[tuple[int, Any]] = []
    groups: dict[int, set[int]] = {}
    i = replica = 0
    for pool, tiers in enumerate(fleet.tiers):
        kinds = [(tier.name, tier.chunks, tier.chunk_tokens, tier.shared_by) for tier in tiers]
        for _ in range(fleet.replicas[pool]):
            for _ in range(fleet.lanes[pool] * fleet.num_engines[pool]):
                lanes["first_port"][i], lanes["ports"][i] = len(rows), len(tiers)
                lanes["generated"][i] = any(tier.generated for tier in tiers)
                for k, tier in enumerate(tiers):
                    place = {"replica": (pool, replica), "pool": (pool,), "deployment": ()}[tier.shared_by]
                    key = (kinds[k], kinds[:k].count(kinds[k]), *place)
                    if key not in numbers:
                        numbers[key] = len(made)
                        made.append(tier)
                    rows.append((numbers[key], tier))
                    groups.setdefault(numbers[key], set()).add(int(lanes["group"][i]))
                i += 1
            replica += 1
    ports = records(len(rows), PORT)
    for port, (store, tier) in zip(ports, rows, strict=True):
        port["store"], port["generated"] = store, tier.generated
        port["read_s"], port["write_s"], port["latency"] = tier.read_s, tier.write_s, tier.latency
    for lane in lanes:
        mine = ports["store"][lane["first_port"] : lane["first_port"] + lane["ports"]].tolist()
        lane["open"] = any(len(groups[store]) > 1 for store in mine)
    return made, ports


def stores_in(extra: Any) -> Stores | None:
    """The stores among what schedulers keep."""
    found = (getattr(each, "stores", None) for each in (extra if type(extra) is tuple else (extra,)))
    return next((each for each in found if each is not None), None)


def are_shared(stores: Stores | None, lanes: Any) -> bool:
    """Whether groups see what others write."""
    return stores is not None and bool(lanes["open"].any())


def use_of(stores: Stores | None, fleet: Any, lanes: Any) -> tuple[TierUse, ...]:
    """What went through the stores, added up by pool and store."""
    if stores is None:
        return _of_lanes(fleet, lanes) if any(fleet.tiers) else ()
    found, port = [], 0
    for pool, tiers in enumerate(fleet.tiers):
        ranks = int(fleet.num_lanes[pool])
        mine: Any = stores.ports[port : port + ranks * len(tiers)]
        port += ranks * len(tiers)
        for k, tier in enumerate(tiers):
            sums = (int(mine[name][k :: len(tiers)].sum()) for name in ("found", "read", "written"))
            found.append(TierUse(pool, tier.name, *sums))
    return tuple(found)


def _of_lanes(fleet: Any, lanes: Any) -> tuple[TierUse, ...]:
    """The same where each lane has its own."""
    found, first = [], 0
    for pool, (tiers, count) in enumerate(zip(fleet.tiers, fleet.num_lanes, strict=True)):
        mine = lanes[first : first + int(count)]
        first += int(count)
        sums = [int(mine[name].sum()) for name in ("found", "read", "written")]
        found += [TierUse(pool, tier.name, *sums) for tier in tiers]
    return tuple(found)


# The queue and the index.


@part
def chunk_of(stores: Stores, store: Any, key: int) -> int:
    """The item of a key, NONE if the store does not have it."""
    return stores.slots[store.slots + slot_of(stores.items, stores.slots, store, key)]


@part
def use(stores: Stores, store: Any, x: int) -> None:
    """A chunk is used, and stays longer where that counts."""
    if store.lru and store.back != x:
        unlink(stores.items, store, x)
        link(stores.items, store, x, store.back, NONE)


@part
def count_of(stores: Stores, store: Any, key: int) -> Any:
    """How often a key has been looked for, as an entry."""
    at = home(key, store.counts_mask)
    while True:
        entry = stores.counts[store.counts + at]
        if entry.count == 0 or entry.key == key:
            return entry
        at = (at + 1) & store.counts_mask


@part
def look_for(stores: Stores, store: Any, key: int) -> None:
    """A chunk has been looked for: it is used now, or nearer to being written."""
    if store.write_after > 0:
        entry = count_of(stores, store, key)
        entry.key = key
        entry.count += 1
    if store.lru:
        x = chunk_of(stores, store, key)
        if x != NONE:
            use(stores, store, x)


@part
def wants(stores: Stores, store: Any, key: int) -> bool:
    """Whether a chunk that has been computed is to be written."""
    x = chunk_of(stores, store, key)
    if x != NONE:
        use(stores, store, x)
        return False
    if store.write_after == 0:
        return True
    return bool(count_of(stores, store, key).count >= store.write_after)


@compiled
def write(stores: Stores, store: Any, key: int, end: float) -> None:
    """A chunk will be there at ``end``; the first one makes room where it has to."""
    items, slots = stores.items, stores.slots
    if store.held >= store.chunks:
        x = store.front
        unlink(items, store, x)
        close_gap(items, slots, store, slot_of(items, slots, store, items[x].key))
        items[x].next = store.unused
        store.unused = x
        store.held -= 1
    x = store.unused
    store.unused = items[x].next
    items[x].key, items[x].written_at = key, end
    link(items, store, x, store.back, NONE)
    slots[store.slots + slot_of(items, slots, store, key)] = x
    store.held += 1


# What a lane asks of the stores behind it.


@compiled
def look(stores: Stores, lane: Lane, request: Request, r: int) -> None:
    """The chunks of a request have been looked for, once; those at the beginning are to stay longest."""
    row = stores.rows[r]
    if row.looked == request.preemptions:
        return
    row.looked = request.preemptions
    for p in range(lane.first_port, lane.first_port + lane.ports):
        store = stores.stores[stores.ports[p].store]
        last = (request.prompt + request.generated - 1) // store.block_size
        if store.write_after == 0 and row.wrote == 0:
            last = min(last, row.shared // store.block_size)
        owner = r
        for k in range(last - 1, -1, -1):
            owner = owner_of(stores.cache.texts, owner, (k + 1) * store.block_size - 1)
            look_for(stores, store, own_key(store, stores.cache.texts, owner, k))


@compiled
def find(stores: Stores, lane: Lane, r: int, local: int, last: int, now: float) -> int:
    """Tokens from ``local`` to before ``last`` that stores have, up to the first that none has; ``part`` of each port
    is how many come from there."""
    ports, texts, row = stores.ports, stores.cache.texts, stores.rows[r]
    for p in range(lane.first_port, lane.first_port + lane.ports):
        ports[p].part = 0
    if row.wrote == 0 and local >= row.shared:
        return 0
    at, owner = local, top_of(texts, r)
    while at < last:
        end = at
        owner = down_to(texts, r, owner, at)
        for p in range(lane.first_port, lane.first_port + lane.ports):
            store = stores.stores[ports[p].store]
            k = at // store.block_size
            place = (k + 1) * store.block_size - 1
            if row.wrote == 0 and place >= row.shared:
                continue
            x = chunk_of(stores, store, own_key(store, texts, down_to(texts, r, owner, place), k))
            if x != NONE and stores.items[x].written_at <= now:
                end = min(place + 1, last)
                ports[p].part += end - at
                break
        if end == at:
            break
        at = end
    return at - local


@part
def load(port: Any, now: float) -> float:
    """When the tokens are here that the search has found at a port, asked for now."""
    port.reads_until = max(port.reads_until, now) + (port.latency + float(port.part) * port.read_s)
    port.read += port.part
    return port.reads_until


@compiled
def save(stores: Stores, port: Any, r: int, first: int, last: int, time: float) -> None:
    """Chunks ``first`` to before ``last`` of a request are computed."""
    store, texts, count = stores.stores[port.store], stores.cache.texts, 0
    owner = top_of(texts, r)
    for k in range(first, last):
        owner = down_to(texts, r, owner, (k + 1) * store.block_size - 1)
        key = own_key(store, texts, owner, k)
        if wants(stores, store, key):
            stores.keys[count] = key
            count += 1
    if count == 0:
        return
    port.writes_until = max(port.writes_until, time) + port.latency
    for j in range(count):
        port.writes_until += float(store.block_size) * port.write_s
        write(stores, store, stores.keys[j], port.writes_until)
    port.written += count * store.block_size
