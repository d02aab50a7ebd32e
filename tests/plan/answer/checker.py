"""An independent reader of certificates: arithmetic on the document and on the load's rows, and nothing of ours."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

Document = Mapping[str, Any]


def wrong(document: Document, arrivals: Sequence[float] = (), outputs: Sequence[int] = ()) -> list[str]:
    """What a certificate does not prove; empty where it proves that nothing is better than its best.

    With the rows of the load, what it says of it is counted again.
    """
    best, rows = document["best"], document["candidates"]
    found = [f"{document['undecided']} undecided"] if document["undecided"] else []
    if len({row["candidate"] for row in rows}) != len(rows):
        found.append("a candidate stands twice")
    if len(rows) + sum(document["cannot_run"].values()) != document["points"]:
        found.append("not every point is named")
    pools = _pools(document) if "pools" in document else []
    if best is None:
        return found + [f"{row['candidate']}: could score" for row in rows if row["at_most"] is not None] + pools
    (own,) = (row for row in rows if row["candidate"] == best["candidate"])
    if own["at_most"] != best["score"] or own["rule"] != "simulated":
        found.append("the best is not what its candidate was simulated to do")
    if len(arrivals):
        load = document["loads"][0]
        if load["output_tokens"] != sum(outputs) or load["seconds"] != max(arrivals) - min(arrivals):
            found.append("the load is another")
    for row in rows:
        place = (best["score"], -best["candidate"])
        if row["at_most"] is not None and (row["at_most"], -row["candidate"]) > place:
            found.append(f"{row['candidate']}: may be better")
        if "replicas" in row:
            found += [f"{row['candidate']}: {text}" for text in _replicas(document, row, best["score"])]
    return found + pools


def _pools(document: Document) -> list[str]:
    """What is wrong with pools: each pair of servers in each of its numbers must be closed, by what the load asks for
    or by tokens that are too few for their weight; what has the same as another must have what that has."""
    pools, found = document["pools"], []
    least = pools["score"] * (1 + 1e-12)
    offered = min(load["output_tokens"] / load["seconds"] for load in document["loads"])
    if abs(pools["offered"] - offered) > 1e-9 * offered:
        found.append(f"the load asks for {offered}, not {pools['offered']}")
    weights = {role: [one["weight"] for one in servers] for role, servers in pools["servers"].items()}
    closed: dict[tuple[int, int, int, int], float] = {}
    own = False
    for rule, prefills, decodes, layouts, tokens in pools["closed"]:
        for p, d, (a, b) in product(prefills, decodes, layouts):
            weight = a * weights["prefill"][p] + b * weights["decode"][d]
            key = (p, d, a, b)
            closed[key] = min(closed.get(key, tokens), tokens)
            best = [p, d, [a, b]] == pools["best"]
            own = own or (best and rule == "simulated" and abs(tokens / weight - pools["score"]) <= 1e-9 * least)
    if pools["best"] is not None and not own:
        found.append("the best of the pools was not simulated to do that")
    for prefills, decodes, layouts in pools["families"]:
        for p, d, (a, b) in product(prefills, decodes, layouts):
            weight = a * weights["prefill"][p] + b * weights["decode"][d]
            if min(offered, closed.get((p, d, a, b), offered)) / weight > least:
                found.append(f"{p} beside {d} as {a} : {b}: may be better")
    return found


def _replicas(document: Document, row: Mapping[str, Any], best: float) -> list[str]:
    """What is wrong with the numbers of replicas of one candidate: each must be closed, those beyond by the load, and
    those below one that misses the least share of good requests by that."""
    offered = min(load["output_tokens"] / load["seconds"] for load in document["loads"])
    found, due, closed_by_load = [], row["fewest"], False
    for count, rule, score in row["replicas"]:
        if count != due and score is not None and not closed_by_load:
            found.append(f"{due} replicas are left out")
        due, closed_by_load = count + 1, closed_by_load or rule == "offered"
        asked = offered / (count * row["weight"])
        if rule == "offered" and abs(score - asked) > 1e-9 * asked:
            found.append(f"{count} replicas: the load asks for {asked}, not {score}")
        if score is not None and score > min(asked, best) * (1 + 1e-12):
            found.append(f"{count} replicas score more than the load asks for, or than the best")
    if due <= row["most"] and not closed_by_load and offered / (due * row["weight"]) > best * (1 + 1e-12):
        found.append(f"{due} replicas and more are left out")
    return found
