"""The records of SGLang's scheduler in the compiled core: settings, lanes, requests, nodes of the radix tree."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.records import NONE, attributes
from windtunnel.policy.sglang import Sglang

FCFS, LPM, DFS_WEIGHT, LOF = range(4)
ORDERS = {"fcfs": FCFS, "lpm": LPM, "dfs-weight": DFS_WEIGHT, "lof": LOF}

SETTINGS = np.dtype(
    [
        ("init_ratio", np.float64),
        ("min_ratio", np.float64),
        ("decay", np.float64),
        ("total_tokens", np.int64),
        ("block_size", np.int64),  # in which memory is reported
        ("chunk_tokens", np.int64),  # of a round, NONE: prompts are never cut
        ("max_prefill_tokens", np.int64),
        ("order", np.int64),
        ("radix", np.int64),
        ("mixed", np.int64),
        ("exact_release", np.int64),
    ],
    align=True,
)

RANK = np.dtype(
    [
        ("ratio", np.float64),
        ("last_decode", np.float64),  # end of the last decode round
        ("available", np.int64),
        ("evictable", np.int64),
        ("seats", np.int64),  # first entry of this lane in the arrays of requests
        ("running", np.int64),  # entries of ``running``, those that ended since the last decode round included
        ("ended", np.int64),  # how many of them have ended
        ("batch", np.int64),  # entries of ``batch``, the last prefill round
        ("full", np.int64),  # batch_is_full
        ("chunked", np.int64),
        ("mixed", np.int64),  # the last prefill round held the running requests too
        ("decodes", np.int64),  # decodes in the round that is being scheduled
        ("row", np.int64),  # its first row in the log
        # the round in flight, with the overlap schedule
        ("flying", np.int64),  # whether there is one
        ("flying_prompts", np.int64),  # entries of ``flying_prompts``
        ("flying_decodes", np.int64),
        ("flying_ends", np.int64),  # entries of ``flying_ends``
        ("flying_row", np.int64),  # its first row in the log
        ("idle", np.int64),  # the latest decision found nothing, and nothing was in flight
        ("late", np.int64),  # decodes in it of requests that had ended before
        # the round that is being filled
        ("reserved", np.float64),
        ("computed", np.int64),
        ("input_left", np.int64),
        ("chunk_left", np.int64),
        ("ends", np.int64),  # entries in the list of ends, NONE before it is made
        # the tree
        ("nodes", np.int64),  # first node: the root; all other indices of nodes count from it
        ("slots", np.int64),  # first entry in the table of children
        ("leaves", np.int64),  # first entry in the heap of leaves
        ("num_leaves", np.int64),
        ("free_node", np.int64),
        ("free_nodes", np.int64),
        ("time", np.int64),
    ],
    align=True,
)

ENTRY = np.dtype(
    [
        ("declared", np.int32),
        ("prefix", np.int32),
        ("filled", np.int32),
        ("node", np.int32),
    ],
    align=True,
)

NODE = np.dtype(
    [
        ("used", np.int64),  # NONE: the record is free
        ("parent", np.int32),
        ("child", np.int32),  # first and last child, in order of insertion; ``child`` links the free records
        ("last_child", np.int32),
        ("next", np.int32),  # siblings
        ("previous", np.int32),
        ("request", np.int32),  # whose tokens these are
        ("start", np.int32),
        ("length", np.int32),
        ("locks", np.int32),
        ("weight", np.int32),
    ],
    align=True,
)


class Tree(NamedTuple):
    """The radix trees of all lanes."""

    nodes: Any
    slots: Any
    """Hash table (parent, first token) → node, NONE where empty; per lane a power of two."""
    leaves: Any
    """Heap of time << 28 | node of leaves that may be evicted, with outdated entries."""
    hashed: Any
    """[requests] tokens of each prompt whose content is named."""
    hash_offsets: Any
    hash_ids: Any
    sizes: Any
    """[2] nodes per lane; tokens that a hash id stands for."""


class Arrays(NamedTuple):
    """What only SGLang's scheduler reads and writes."""

    settings: Any
    """[pools]"""
    ranks: Any
    """[lanes]"""
    entries: Any
    """[requests]"""
    running: Any
    """Per lane ``max_num_seqs`` requests that decode, in order."""
    batch: Any
    """Per lane ``max_num_seqs`` requests of the last prefill round, in order."""
    flying_prompts: Any
    """Per lane ``max_num_seqs`` requests whose prompt the round in flight completes, in order."""
    flying_ends: Any
    """Per lane ``max_num_seqs`` requests whose last decode is in the round in flight, in order."""
    scratch: Any
    """[4, longest list] room for sorting."""
    tree: Any
    fault: Any
    """[3] what made the engine die, and two numbers for the message."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Arrays:
    """The arrays at the start of a run, the trees without any room yet."""
    settings = np.zeros(len(pools), dtype=SETTINGS)
    for entry, limits, policy in zip(settings, fleet.limits, fleet.policies, strict=True):
        policy.check(limits)
        _set(entry, limits, policy)
    pools["async_scheduling"] = [policy.async_scheduling for policy in fleet.policies]
    pool_of_lane = np.repeat(np.arange(len(pools)), np.multiply(fleet.replicas, fleet.lanes))
    seats = pools["max_num_seqs"][pool_of_lane]
    ranks = np.zeros(len(lanes), dtype=RANK)
    ranks["seats"] = np.cumsum(seats) - seats
    ranks["chunked"] = NONE
    ranks["idle"] = 1
    ranks["ratio"] = settings["init_ratio"][pool_of_lane]
    ranks["available"] = settings["total_tokens"][pool_of_lane]
    n = len(demand.arrival)
    offsets, ids = demand.hash_ids if demand.hash_ids is not None else (np.zeros(n + 1, dtype=np.int64), np.zeros(1))
    entries = np.zeros(n, dtype=ENTRY)
    declared = demand.output_tokens if demand.max_tokens is None else demand.max_tokens
    entries["declared"] = declared
    hashed = np.minimum(np.diff(offsets) * demand.hash_block_size, demand.prompt_tokens)
    entries["node"] = NONE
    longest = max(n, 2 * int(seats.max())) + 2
    return Arrays(
        settings=attributes(settings),
        ranks=attributes(ranks),
        entries=attributes(entries),
        running=np.zeros(int(seats.sum()), dtype=np.int64),
        batch=np.zeros(int(seats.sum()), dtype=np.int64),
        flying_prompts=np.zeros(int(seats.sum()), dtype=np.int64),
        flying_ends=np.zeros(int(seats.sum()), dtype=np.int64),
        scratch=np.zeros((4, longest), dtype=np.int64),
        tree=Tree(
            nodes=attributes(np.zeros(0, dtype=NODE)),
            slots=np.zeros(0, dtype=np.int32),
            leaves=np.zeros(0, dtype=np.int64),
            hashed=np.ascontiguousarray(hashed, dtype=np.int64),
            hash_offsets=np.ascontiguousarray(offsets, dtype=np.int64),
            hash_ids=np.ascontiguousarray(ids, dtype=np.int64),
            sizes=np.array([0, max(demand.hash_block_size, 1)], dtype=np.int64),
        ),
        fault=np.zeros(3, dtype=np.int64),
    )


def _set(entry: Any, limits: Any, policy: Sglang) -> None:
    entry["init_ratio"] = policy.init_new_token_ratio
    entry["min_ratio"] = policy.min_new_token_ratio
    entry["decay"] = policy.new_token_ratio_decay
    entry["block_size"] = limits.block_size
    entry["total_tokens"] = limits.num_blocks * limits.block_size
    entry["chunk_tokens"] = limits.max_num_batched_tokens if policy.chunked_prefill else NONE
    entry["max_prefill_tokens"] = policy.max_prefill_tokens
    entry["order"] = ORDERS[policy.schedule_policy]
    entry["radix"] = policy.radix_cache
    entry["mixed"] = policy.enable_mixed_chunk and policy.chunked_prefill
    entry["exact_release"] = policy.exact_release
