"""Prefill and decode pools on the reference engine, for what the core's loop over both lacks: takes what that takes and
returns its record. ``core.apart.handover`` says what stands in it."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.apart.handover import Crossing, Handed, of_role, pools_of, require_handing
from windtunnel.core.apart.link import HANDED
from windtunnel.core.engine import Demand, Fleet, Floats, Integers
from windtunnel.core.pipeline import unsupported
from windtunnel.core.records import NONE, STALL, records
from windtunnel.deployment.handover import Handover
from windtunnel.policy import routing
from windtunnel.policy.named import Router
from windtunnel.reference import handover as reference
from windtunnel.reference.loop import Replica
from windtunnel.reference.loop import Router as Choice
from windtunnel.reference.stores import Shelf
from windtunnel.simulate.on_reference import (
    beyond_the_core,
    clients_of,
    no_collection,
    record_of,
    replica_of,
    requests_of,
    router_of,
    table_of,
    used_tiers,
)

TIMES = ("asked", "admitted", "transfer_start", "transfer_end", "joined", "prefill_end")


def beyond_the_tandem(fleet: Fleet, routers: tuple[Router, Router], rules: Handover) -> list[str]:
    """What keeps prefill and decode pools from the core's loop over both; nothing for most."""
    names = {*beyond_the_core(fleet), *(name for policy in fleet.policies for name in unsupported(policy))}
    if any(router.number in (routing.SCORED, routing.SESSION_AFFINITY) for router in routers):
        names.add("routers that remember")
    if routers[1].number == routing.ROUTE_SCORE and routers[1] is not routers[0]:
        names.add("decode_router of your own")
    if rules.on_expiry != "wait":
        names.add(f"on_expiry={rules.on_expiry}")
    return sorted(names)


def run_apart(
    fleet: Fleet, demand: Demand, routers: tuple[Router, Router], uniforms: Floats, crossing: Crossing
) -> Handed:
    """Simulate pools that prefill and pools that decode; arguments as for ``core.apart.handover.run``.

    The settings of the first router stand in the fleet.

    Raises:
        InputError: a scheduler that does not hand over, takes nothing, or is not in the reference engine.
    """
    require_handing(fleet, crossing.rules)
    with no_collection():
        shelf = Shelf()
        replicas: list[Replica] = []
        for pool, count in enumerate(fleet.replicas):
            replicas += [replica_of(fleet, pool, shelf, len(replicas) + i) for i in range(count)]
        before, after = (numbers_of(fleet, name) for name in ("prefill", "decode"))
        loop = reference.Apart(
            [replicas[j] for j in before],
            [replicas[j] for j in after],
            _choices(fleet, demand, routers, uniforms),
            requests_of(demand),
            reference.Crossing(crossing.link, crossing.rules, crossing.work.tolist()),
            clients_of(demand),
        )
        loop.run()
        return _handed(fleet, replicas, loop, crossing)


def numbers_of(fleet: Fleet, role: str) -> list[int]:
    """The replicas of the pools that have a role, by their numbers in the fleet."""
    first = [0, *accumulate(fleet.replicas)]
    return [j for pool in of_role(fleet, role).tolist() for j in range(first[pool], first[pool + 1])]


def _choices(fleet: Fleet, demand: Demand, routers: tuple[Router, Router], uniforms: Floats) -> tuple[Choice, Choice]:
    """The routers of both sides, each with what it may see of its own."""
    second = replace(fleet, route_score=routers[1].route_score, routing=routers[1].routing)
    unknown = replace(demand, hash_ids=None)  # no prompt is computed there, and so none is looked for
    sides = ((fleet, "prefill", demand), (second, "decode", unknown))
    found = [
        router_of(pools_of(whole, of_role(whole, role)), asked, router.number, numbers.tolist())
        for (whole, role, asked), router, numbers in zip(sides, routers, uniforms, strict=True)
    ]
    return found[0], found[1]


def _handed(fleet: Fleet, replicas: list[Replica], loop: reference.Apart, crossing: Crossing) -> Handed:
    """What the core would have written."""
    record = record_of([*loop.prefills, *loop.decodes.values()], replicas)
    handed = _handovers(fleet, replicas, loop)
    moved = np.array([passage.transfer_end >= 0 and not passage.expired for passage in loop.passages])
    sizes = crossing.kv_bytes if len(crossing.kv_bytes) else np.zeros(len(moved))
    table = _requests(loop, handed["prefill_lane"], _lanes(replicas, loop))
    return Handed(
        table,
        record.rows,
        _seen_by_client(table, record.stalls, loop),
        record.replica_of_lane,
        record.rank_of_lane,
        tiers=used_tiers(fleet, replicas),
        handovers=handed,
        kv_bytes=np.where(moved, sizes, 0.0),
        lost=np.array([r for r, passage in enumerate(loop.passages) if passage.lost], dtype=np.int64),
    )


def _numbers(replicas: list[Replica]) -> dict[tuple[int, int], int]:
    """The lane of each (group by identity, rank in it)."""
    ranks = [(id(group), rank) for replica in replicas for group, rank in replica.ranks]
    return {key: lane for lane, key in enumerate(ranks)}


def _lanes(replicas: list[Replica], loop: reference.Apart) -> Integers:
    """[n] the lane that decodes each request, NONE where it went to none."""
    numbers = _numbers(replicas)
    found = [
        numbers[id(loop.groups[passage.group]), passage.rank] if passage.group >= 0 else NONE
        for passage in loop.passages
    ]
    return np.array(found, dtype=np.int64)


def _handovers(fleet: Fleet, replicas: list[Replica], loop: reference.Apart) -> NDArray[Any]:
    """[n] of HANDED; replicas are counted through the prefill pools and then the decode pools, as the core does."""
    n, numbers, before = len(loop.whole), _numbers(replicas), len(numbers_of(fleet, "prefill"))
    handed = records(n, HANDED)
    for name in TIMES:
        handed[name] = [getattr(passage, name) for passage in loop.passages]
    handed["goes"] = [loop.goes(r) for r in range(n)]
    handed["stays"] = [loop.stays(r) for r in range(n)]
    handed["source"] = [passage.source for passage in loop.passages]
    asked = ~np.isnan(handed["asked"])
    handed["destination"] = [
        before + loop.decodes[r].replica if there else NONE for r, there in enumerate(asked.tolist())
    ]
    prompts = [loop.prompts.get(r) for r in range(n)]
    handed["prefill_lane"] = [NONE if at is None else numbers[id(at[0]), at[1]] for at in prompts]
    stays = handed["stays"] > 0
    handed["prefill_lane"][stays] = _lanes(replicas, loop)[stays]
    return handed


def _requests(loop: reference.Apart, prefill_lanes: Integers, lanes: Integers) -> NDArray[Any]:
    """The rows of both sides as one; first tokens as the prefill replica made them."""
    table: NDArray[Any] = table_of(loop.prefills, {})
    table["output"] = [one.output_tokens for one in loop.whole]
    table["lane"] = np.where(lanes == NONE, prefill_lanes, lanes)
    decodes = list(loop.decodes.values())
    rest, which = table_of(decodes, {}), np.array([one.id for one in decodes], dtype=np.int64)
    alone = np.array([loop.stays(r) for r in which.tolist()], dtype=bool)
    for name in ("arrival", "scheduled", "first_token", "cached_tokens"):
        table[name][which[alone]] = rest[name][alone]
    lost = np.array([passage.lost for passage in loop.passages])[which]
    for name in ("finish", "state"):
        table[name][which] = np.where(lost, np.nan if name == "finish" else 0, rest[name])
    table["preemptions"][which] += rest["preemptions"]
    return table


def _seen_by_client(table: NDArray[Any], stalls: NDArray[Any], loop: reference.Apart) -> NDArray[Any]:
    """The stalls of whole requests; the first tokens as clients get them."""
    first_token = loop.rules.first_token
    if first_token == "prefill":
        return stalls
    seen = set()
    for r, passage in enumerate(loop.passages):
        if not loop.goes(r):
            continue
        table["first_token"][r] = passage.joined
        if first_token == "decode":
            later = loop.decodes[r].stalls[:1] if r in loop.decodes else []
            table["first_token"][r] = later[0][1] if later else np.nan
            seen |= {(*stall, r) for stall in later}
    kept = [stall for stall in stalls.tolist() if tuple(stall) not in seen]
    return np.array(kept, dtype=records(0, STALL).dtype)
