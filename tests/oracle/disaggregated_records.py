"""Prefill and decode pools on the oracle: takes what the core takes, returns its record.
``core.disaggregation.handover`` says what stands in it."""

from dataclasses import replace
from itertools import accumulate
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle import handover as reference
from oracle.elastic.disaggregated import SIDES, ElasticDisaggregated, Faultiness
from oracle.handover import Attempt
from oracle.loop import Replica
from oracle.loop import Router as Choice
from oracle.mixed_records import (
    clients_of,
    maker,
    no_collection,
    pools_in,
    record_of,
    requests_of,
    require_scheduled,
    router_of,
    table_of,
    used_tiers,
)
from oracle.stores import Shelf
from windtunnel.core.disaggregation.handover import Crossing, Handed, of_role, pools_of, require_handing
from windtunnel.core.disaggregation.link import HANDED
from windtunnel.core.engine import Demand, Fleet, Floats
from windtunnel.core.records import NONE, STALL, records
from windtunnel.policy.named import Router
from windtunnel.simulate.disaggregation import Sending

TIMES = ("asked", "admitted", "transfer_start", "transfer_end", "joined", "prefill_end")


def run_disaggregated(
    fleet: Fleet,
    demand: Demand,
    routers: tuple[Router, Router],
    uniforms: Floats,
    crossing: Crossing,
    sending: Sending | None = None,
) -> Handed:
    """Simulate pools that prefill and pools that decode; arguments as for ``core.disaggregation.handover.run``.

    The settings of the first router stand in the fleet. ``sending``: the link's work for prompts that grow, because
    their requests go on elsewhere.

    Raises:
        InputError: a scheduler that does not hand over, takes nothing, or is not in the oracle.
    """
    require_handing(fleet, crossing.rules)
    with no_collection():
        shelf = Shelf()
        make = maker(fleet, shelf)
        requests = requests_of(demand, fleet.policies)
        known = [request.tokens for request in requests] if _stores_there(fleet) else []
        between = reference.Crossing(crossing.link, crossing.rules, crossing.work.tolist(), known)
        asked = (_choices(fleet, demand, routers, uniforms), requests, between)
        if any(fleet.scaling) or fleet.failures:
            faults = _faults(fleet, sending)
            loop: reference.Disaggregated = ElasticDisaggregated(
                make, pools_in(fleet), *asked, faults, clients_of(demand)
            )
        else:
            replicas = [make(number) for number in range(sum(fleet.replicas))]
            before, after = ([replicas[j] for j in numbers_of(fleet, role)] for role in SIDES)
            loop = reference.Disaggregated(before, after, *asked, clients_of(demand))
        loop.run()
        ends = [loop.decodes.get(r) or prompt for r, prompt in enumerate(loop.prefills)]
        asking = [lane.scheduler for lanes in loop.reservation for lane in lanes if lane.asking]
        require_scheduled(loop, ends, asking)
        return replace(_handed(fleet, loop, crossing, sending), tiers=used_tiers(shelf))


def _stores_there(fleet: Fleet) -> bool:
    """Whether decode replicas write what they have to stores."""
    return any(tiers and role == "decode" for tiers, role in zip(fleet.tiers, fleet.roles, strict=False))


def _faults(fleet: Fleet, sending: Sending | None) -> Faultiness:
    """What fails; prompts that go on elsewhere grow up to what each prefill pool can compute."""
    longest = [
        min(policy.longest_prompt(limits), policy.longest_request(limits) - 1, limits.num_blocks * limits.block_size)
        for policy, limits, role in zip(fleet.policies, fleet.limits, fleet.roles, strict=True)
        if role == "prefill"
    ]

    def work(tokens: int) -> float:
        return float(sending(np.array([tokens]))[1][0]) if sending else 0.0

    return Faultiness(list(fleet.failures), fleet.on_failure, work, min(longest))


def numbers_of(fleet: Fleet, role: str) -> list[int]:
    """The replicas of the pools that have a role, by their numbers in the fleet."""
    first = [0, *accumulate(fleet.replicas)]
    return [j for pool in of_role(fleet, role).tolist() for j in range(first[pool], first[pool + 1])]


def _choices(fleet: Fleet, demand: Demand, routers: tuple[Router, Router], uniforms: Floats) -> tuple[Choice, Choice]:
    """The routers of both sides, each with what it may see of its side."""
    second = replace(fleet, route_score=routers[1].route_score, routing=routers[1].routing)
    unknown = replace(demand, hash_ids=None, begins=None)  # no prompt is computed there, and so none is looked for
    sides = ((fleet, "prefill", demand), (second, "decode", unknown))
    found = [
        router_of(pools_of(whole, of_role(whole, role)), asked, router.number, numbers.tolist())
        for (whole, role, asked), router, numbers in zip(sides, routers, uniforms, strict=True)
    ]
    return found[0], found[1]


def _handed(fleet: Fleet, loop: reference.Disaggregated, crossing: Crossing, sending: Sending | None) -> Handed:
    """What the core would have written."""
    replicas: dict[int, Replica] = {}
    for role, stage in zip(SIDES, loop.stages, strict=True):
        replicas |= zip(numbers_of(fleet, role), stage.replicas, strict=True)
    there = [replicas[number] for number in range(len(replicas))]
    record = record_of([*loop.prefills, *loop.decodes.values()], there)
    tries, lanes = [loop.attempts(r) for r in range(len(loop.whole))], _numbers(there, loop)
    table = _requests(loop, tries, lanes)
    return Handed(
        table,
        record.rows,
        _seen_by_client(table, record.stalls, tries, loop.rules.first_token),
        record.replica_of_lane,
        record.rank_of_lane,
        handovers=_handovers(fleet, [one[0] for one in tries], loop, lanes),
        kv_bytes=_moved(loop, crossing, sending),
        lost=np.array([r for r, passage in enumerate(loop.passages) if passage.lost], dtype=np.int64),
        lives=loop.account(),
    )


Lanes = dict[tuple[int, int], int]
"""The lane of each (group by identity, rank in it)."""


def _numbers(replicas: list[Replica], loop: reference.Disaggregated) -> Lanes:
    """The lanes, those of groups that are no more included."""
    ranks = [(id(group), rank) for replica in replicas for group, rank in replica.ranks]
    found = {key: lane for lane, key in enumerate(ranks)}
    for old, new in reversed(loop.former):
        found |= {(id(old), rank): found[id(new), rank] for rank in range(len(old.schedulers))}
    return found


def _decode_lane(attempt: Attempt, loop: reference.Disaggregated, lanes: Lanes) -> int:
    """The lane that decodes a request, NONE where it went to none."""
    passage = attempt.passage
    return lanes[id(loop.groups[passage.group]), passage.rank] if passage.group >= 0 else NONE


def _prefill_lane(attempt: Attempt, loop: reference.Disaggregated, lanes: Lanes) -> int:
    """The lane that computes its prompt, NONE where none did."""
    if attempt.stays:
        return _decode_lane(attempt, loop, lanes)
    return NONE if attempt.place is None else lanes[id(attempt.place[0]), attempt.place[1]]


def _handovers(fleet: Fleet, firsts: list[Attempt], loop: reference.Disaggregated, lanes: Lanes) -> NDArray[Any]:
    """[n] of HANDED, of the attempt that gave the first token; replicas are counted through the prefill pools and then
    the decode pools, as the core does."""
    n, before = len(firsts), len(numbers_of(fleet, "prefill"))
    handed = records(n, HANDED)
    for name in TIMES:
        handed[name] = [getattr(one.passage, name) for one in firsts]
    handed["goes"] = [one.goes for one in firsts]
    handed["stays"] = [one.stays for one in firsts]
    handed["source"] = [one.passage.source for one in firsts]
    asked = [one.rest if not isnan(one.passage.asked) else None for one in firsts]
    handed["destination"] = [NONE if rest is None else before + rest.replica for rest in asked]
    handed["prefill_lane"] = [_prefill_lane(one, loop, lanes) for one in firsts]
    return handed


def _requests(loop: reference.Disaggregated, tries: list[list[Attempt]], lanes: Lanes) -> NDArray[Any]:
    """The rows of both sides as one; first tokens as the first attempt's prefill replica made them."""
    table: NDArray[Any] = table_of([one[0].prompt for one in tries], {})
    ends = table_of(loop.prefills, {})
    last = [(_decode_lane(one[-1], loop, lanes), _prefill_lane(one[-1], loop, lanes)) for one in tries]
    table["lane"] = [prompt if lane == NONE else lane for lane, prompt in last]
    table["output"] = [one.output_tokens for one in loop.given]
    alone = {r: one[0].rest for r, one in enumerate(tries) if one[0].stays and one[0].rest is not None}
    rest, which = table_of(list(alone.values()), {}), np.array(list(alone), dtype=np.int64)
    for name in ("arrival", "scheduled", "first_token", "cached_tokens"):
        table[name][which] = rest[name]
    rest, which = table_of(list(loop.decodes.values()), {}), np.array(list(loop.decodes), dtype=np.int64)
    lost = np.array([passage.lost for passage in loop.passages], dtype=bool)
    for name in ("finish", "state"):
        table[name] = ends[name]
        table[name][which] = rest[name]
        table[name][lost] = np.nan if name == "finish" else 0
    seen = [[part for attempt in one for part in (attempt.prompt, attempt.rest) if part] for one in tries]
    table["preemptions"] = [
        len(one) - 1 + sum(part.preemptions for part in both) for one, both in zip(tries, seen, strict=True)
    ]
    return table


def _moved(loop: reference.Disaggregated, crossing: Crossing, sending: Sending | None) -> Floats:
    """[n] bytes of the transfers that came through."""
    found = np.zeros(len(loop.passages))
    if not loop.moved or not len(crossing.kv_bytes):
        return found
    which, prompts = np.array(loop.moved, dtype=np.int64).T
    np.add.at(found, which, sending(prompts)[0] if sending else crossing.kv_bytes[which])
    return found


def _told_first(attempt: Attempt, first_token: str) -> float:
    """When the client gets the first token of an attempt; NaN: it does not."""
    rest = attempt.rest
    if not attempt.goes:
        return rest.first_token if rest is not None else attempt.prompt.first_token
    if first_token == "prefill":
        return attempt.prompt.first_token
    if first_token == "relayed":
        return attempt.passage.joined
    return rest.stalls[0][1] if rest is not None and rest.stalls else nan


def _seen_by_client(
    table: NDArray[Any], stalls: NDArray[Any], tries: list[list[Attempt]], first_token: str
) -> NDArray[Any]:
    """The stalls of whole requests; the first tokens as clients get them."""
    gone, added = set(), []
    for r, attempts in enumerate(tries):
        table["first_token"][r] = _told_first(attempts[0], first_token)
        for k, one in enumerate(attempts):
            known = one.rest.stalls if one.rest is not None else []
            first = known[:1] if one.goes and first_token == "decode" else []
            gone |= {(*stall, r) for stall in first}
            if one is not attempts[-1]:
                added += [(*stall, r) for stall in known[len(first) :]]
            begin = _told_first(one, first_token)
            if k and not isnan(begin):
                before = attempts[k - 1].rest or attempts[k - 1].prompt
                added.append((before.last_token, begin, r))
    kept = [stall for stall in stalls.tolist() if tuple(stall) not in gone]
    return np.array(kept + added, dtype=records(0, STALL).dtype)
