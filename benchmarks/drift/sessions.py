"""Random sessions: requests that wait for others and go on with their texts."""

import random
from typing import Any

LONGEST = 3000
"""Tokens of a text that a later prompt may begin with."""

Json = dict[str, Any]


def make_sessions(draw: random.Random, rows: list[Json]) -> None:
    """Most requests wait for one to three earlier ones, forks and joins among them, and go on with the text of one of
    these, its answer included, or cut somewhere; few begin with a text that they do not wait for, as far as it can be
    known then: up to the first answer in it."""
    thinks = draw.choice([0.0, 0.02, 0.5])
    known = {rows[0]["id"]: rows[0]["prompt_len"]}
    """Of each text the tokens before the first answer."""
    for number, row in enumerate(rows[1:], start=1):
        earlier = rows[max(0, number - draw.choice([2, 6, 30])) : number]
        other = draw.choice(earlier)
        most = known[other["id"]]
        if draw.random() < 0.8:
            del row["arrival"]
            parents = {other["id"], *(draw.choice(earlier)["id"] for _ in range(draw.choice([0, 0, 0, 1, 2])))}
            row |= {"after": sorted(parents), "think_time": round(draw.random() * thinks, 6)}
            most = other["prompt_len"] + other["output_len"]
        begun = 0
        if draw.random() < 0.8 and most <= LONGEST:
            begun = most if draw.random() < 0.6 else draw.randint(1, most)
            row["begins"] = [other["id"], begun]
            row["prompt_len"] = begun + draw.choice([0, 1, draw.randint(1, 60)])
        known[row["id"]] = row["prompt_len"] if begun <= known[other["id"]] else known[other["id"]]
