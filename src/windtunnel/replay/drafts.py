"""Which drafts of a recording are right, and how many there are."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from windtunnel.policy.drafts import Drafts
from windtunnel.replay.loop import Record
from windtunnel.replay.recording import known

SPECULATION: Record = {"k": 0, "method": "ngram", "accept": 0.0, "propose": 1.0}
"""Drafts of a step, who makes them, how likely each is right, and how likely n-grams propose any."""


def drafts_of(spec: Mapping[str, Any] | None) -> Drafts | None:
    """What a recording says of drafts; None: there are none. Raises InputError for an unknown setting."""
    given = known(spec or {}, SPECULATION, "setting of spec")
    return Drafts(given["k"], given["method"]) if given["k"] else None


def drawn(spec: Mapping[str, Any], names: Sequence[str], output: Sequence[int]) -> tuple[Any, Any, Any]:
    """Which drafts are right, and how many are proposed, as the recorder draws them: see ``Demand.drafts``."""
    given = known(spec, SPECULATION, "setting of spec")
    most, hits, proposals = given["k"], [], []
    for name, tokens in zip(names, output, strict=True):
        for place in range(tokens + 1):
            stream, right = Random(f"{name}:{place}"), 0
            while right < most and stream.random() < given["accept"]:
                right += 1
            hits.append(right)
            stream = Random(f"p:{name}:{place}")
            proposes = given["method"] != "ngram" or stream.random() < given["propose"]
            proposals.append((most if given["method"] != "ngram" else stream.randint(1, most)) if proposes else 0)
    first = np.cumsum([0, *(tokens + 1 for tokens in output)])
    return first, np.array(hits, dtype=np.int8), np.array(proposals, dtype=np.int8)
