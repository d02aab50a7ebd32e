"""A lane of the compiled core that serves a recording's requests, one step at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.engine import Demand
from windtunnel.core.records import NONE
from windtunnel.policy import Limits, Settings
from windtunnel.policy.tiers import Tier
from windtunnel.replay.recording import RecordedRequest
from windtunnel.replay.stepper import ONLY, Stepper
from windtunnel.workload.texts import tree


class Lane:
    """What every scheduler's replay reads of the core; what it decides, its own file reads from the seats.

    Requests are numbered in the order in which they are given.
    """

    def __init__(
        self,
        rows: Sequence[RecordedRequest],
        limits: Limits,
        policy: Settings,
        arrival: Sequence[float],
        output: Sequence[int] | None = None,
        declared: Sequence[int] | None = None,
        drafts: tuple[Any, Any, Any] | None = None,
        tiers: tuple[Tier, ...] = (),
        ranks: int = 1,
    ) -> None:
        """Arrivals in any unit; ``output`` and ``declared`` tokens are those of the recording where they are None;
        ``drafts``: as of ``Demand``, ``tiers``: as of ``Fleet``; ``ranks``: in lockstep."""
        asked = [row.output_tokens for row in rows]
        self.rows = rows
        found = demand(
            rows,
            arrival,
            asked if output is None else output,
            limits.block_size,
            asked if declared is None else declared,
        )
        self.stepper = Stepper(limits, policy, replace(found, drafts=drafts), ranks, tiers)

    @property
    def columns(self) -> Any:
        """The requests in the core."""
        return self.stepper.state.requests

    @property
    def lane(self) -> Any:
        """The lane in the core."""
        return self.stepper.state.lanes[ONLY]

    @property
    def pool(self) -> Any:
        """Its pool in the core."""
        return self.stepper.state.pools[ONLY]

    @property
    def seats(self) -> Any:
        """Its seats."""
        return self.stepper.state.seats[ONLY]

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return int(self.lane["free"])

    @property
    def preemptions(self) -> list[int]:
        """How often each request was preempted."""
        found: list[int] = self.columns["preemptions"].tolist()
        return found

    def linked(self, first: str, lane: int = ONLY) -> list[int]:
        """The requests of a list whose first one stands in this field of a lane."""
        found: list[int] = []
        r = int(self.stepper.state.lanes[lane][first])
        while r != NONE:
            found.append(r)
            r = int(self.columns[r]["next"])
        return found

    def launch(self, decision: Any, end: Any) -> None:
        """What was decided is on its way and ends at ``end``; nothing to do where ``update`` concludes it."""


def demand(
    rows: Sequence[RecordedRequest],
    arrival: Sequence[float],
    output: Sequence[int],
    block_size: int,
    max_tokens: Sequence[int],
) -> Demand:
    """The columns of these requests, in this order: arrivals in any unit, tokens really generated and declared."""
    n = len(rows)
    answers = any(row.answer for row in rows)
    keys = ["", *sorted({row.routing_key for row in rows} - {""})]
    return Demand(
        arrival=np.array(arrival, dtype=np.float64),
        prompt_tokens=np.array([row.prompt_tokens for row in rows], dtype=np.int64),
        output_tokens=np.array(output, dtype=np.int64),
        overruns=np.zeros(n, dtype=np.bool_),
        refused=np.zeros(n, dtype=np.bool_),
        follow=np.full(n, NONE, dtype=np.int64),
        think_time=np.zeros(n),
        max_concurrency=0,
        max_tokens=np.array(max_tokens, dtype=np.int64),
        priority=np.array([row.priority for row in rows], dtype=np.int64),
        adapter=np.array([row.adapter for row in rows], dtype=np.int64),
        images=images_of(rows),
        sessions=np.array([keys.index(row.routing_key) - 1 for row in rows], dtype=np.int64),
        hash_ids=None if answers else hash_ids([row.tokens for row in rows], block_size),
        hash_block_size=block_size,
        begins=tree(begins_of(rows)) if answers else None,
    )


def images_of(rows: Sequence[RecordedRequest]) -> tuple[NDArray[np.int64], ...] | None:
    """Inputs of an encoder, as of ``Demand``."""
    numbers: dict[str, int] = {}
    given = [
        (offset, size, numbers.setdefault(name, len(numbers))) for row in rows for offset, size, name in row.images
    ]
    first = np.cumsum([0, *(len(row.images) for row in rows)])
    return (first, *np.array(given, dtype=np.int64).T) if given else None


def begins_of(rows: Sequence[RecordedRequest]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(The row with whose text, prompt and answer, each prompt begins, how many tokens of it): the longest beginning of
    an earlier one of the file; -1 and 0 if there is none."""
    others, counts = np.full(len(rows), NONE, dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    nodes: dict[tuple[int, int], int] = {}
    writers: list[int] = []
    for r in sorted(range(len(rows)), key=lambda r: rows[r].rank):
        node = NONE
        for place, token in enumerate(rows[r].tokens + rows[r].answer):
            following = nodes.get((node, token))
            if following is None:
                following = nodes[node, token] = len(nodes)
                writers.append(r)
            elif place < rows[r].prompt_tokens:
                others[r], counts[r] = writers[following], place + 1
            node = following
    return others, counts


def hash_ids(prompts: Sequence[tuple[int, ...]], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(offsets, values) of the prompts' full blocks: equal values are equal blocks with equal blocks before them."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    values: list[int] = []
    offsets = [0]
    for tokens in prompts:
        before = -1
        for end in range(block_size, len(tokens) + 1, block_size):
            before = numbers.setdefault((before, tokens[end - block_size : end]), len(numbers))
            values.append(before)
        offsets.append(len(values))
    return np.array(offsets, dtype=np.int64), np.array(values, dtype=np.int64)
