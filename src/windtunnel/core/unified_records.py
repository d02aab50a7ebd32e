"""What only the unified scheduler reads and writes: its rules as numbers, and more columns for lanes and requests."""

from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.hooks import HOOKS, address
from windtunnel.core.records import NONE, attributes
from windtunnel.policy import Limits, Policy
from windtunnel.policy.unified import RESERVING, Allocation, Batching, Order, Victim

ON_DEMAND, PROMPT, PROMPT_AND_OUTPUT, MAX_MODEL_LEN, LOOK_AHEAD = range(5)
"""Allocations, in the order in which the policy names them."""

NEWEST, OLDEST, SHORTEST, LONGEST, LOWEST_PRIORITY = range(5)
"""Victims, likewise."""

FCFS, PRIORITY, SHORTEST_PROMPT, LONGEST_PROMPT, SHORTEST_OUTPUT, LONGEST_OUTPUT, SHORTEST_JOB, LONGEST_JOB = range(8)
"""Orders of admission, likewise."""

CONTINUOUS, DYNAMIC, STATIC = range(3)
"""Ways of batching, likewise."""

RULES = np.dtype(
    [
        (name, np.int64)
        for name in (
            "prefill_first",
            "mixed",
            "chunked",
            "tokens",
            "prefill_tokens",
            "places",
            "threshold",
            "most_part_way",
            "most_long_part_way",
            "allocation",
            "reserves",
            "margin_tokens",
            "watermark_blocks",
            "decodes_ask",
            "host_blocks",
            "victim",
            "order",
            "keyed",
            "pass_over",
            "batching",
            "interval",
            "together",
            "balance_timeout",
            *HOOKS,
        )
    ]
    + [(name, np.float64) for name in ("swap_time", "max_queue_delay", "queue_ratio", "delay_factor")],
    align=True,
)

QUEUE = np.dtype(
    [
        ("part_way", np.int64),  # running requests that prefill, in order of admission
        ("part_way_tail", np.int64),
        ("part_ways", np.int64),
        ("long_part_ways", np.int64),
        ("swapped", np.int64),  # requests on the host, the first to go first
        ("swapped_tail", np.int64),
        ("on_host", np.int64),
        ("free_host", np.int64),
        ("moved", np.int64),  # blocks that moved since the last step
        ("returned", np.int64),  # requests from the host that have not decoded since
        ("forming", np.int64),  # nobody of the present batch has decoded yet
        ("opens_at_clock", np.int64),
        ("ends", np.int64),  # first entry in the array of declared ends
        ("ends_size", np.int64),
        ("last_prefill_time", np.float64),
        ("started", np.float64),  # start of the step
        ("decoded_at", np.float64),  # end of the last step with decodes
        ("unbalanced", np.int64),  # of the first rank: steps in which not all had somebody to admit
        # the step that is being scheduled
        ("held", np.int64),  # other ranks are not ready to admit
        ("decoding", np.int64),  # decodes take part
        ("evicted", np.int64),
        ("decode_need", np.int64),  # blocks
        ("asked", np.int64),  # the block that the last decode asks for although it has room
        ("chunk_need", np.int64),
    ],
    align=True,
)

MORE = np.dtype(
    [
        ("key", np.float64),
        ("priority", np.int64),
        ("declared", np.int32),
        ("child", np.int32),  # heap of keys
        ("sibling", np.int32),
        ("aside", np.int32),
        ("next_part_way", np.int32),
        ("next_returned", np.int32),
        ("has_returned", np.int32),
    ],
    align=True,
)


class Arrays(NamedTuple):
    """What only this family reads and writes."""

    rules: Any
    """[pools] RULES."""
    queues: Any
    """[lanes] QUEUE."""
    more: Any
    """[requests] MORE."""
    ends: Any
    """Decodes of each lane by the clock at which they reach their declared end, the last first (look-ahead)."""


def rules_of(policy: Policy, limits: Limits) -> tuple[Any, ...]:
    """The record of a policy, in the order of RULES."""
    kept = {name: getattr(policy, name) for name in ("mixed", "pass_over", "queue_ratio", "delay_factor")}
    values: dict[str, Any] = kept | {
        "prefill_first": policy.group_order == "prefill_first",
        "chunked": policy.chunked_prefill,
        "tokens": policy.tokens(limits),
        "prefill_tokens": policy.prefill_tokens(limits),
        "places": policy.places(limits),
        "threshold": policy.long_prefill_token_threshold or 1 << 60,
        "most_part_way": policy.max_num_partial_prefills or 1 << 60,
        "most_long_part_way": policy.max_long_partial_prefills or 1 << 60,
        "allocation": get_args(Allocation).index(policy.allocation),
        "reserves": policy.allocation in RESERVING,
        "margin_tokens": policy.look_ahead_margin,
        "watermark_blocks": policy.watermark_blocks(limits),
        "decodes_ask": policy.decodes_ask_for_a_block,
        "host_blocks": policy.host_blocks,
        "victim": get_args(Victim).index(policy.victim),
        "order": get_args(Order).index(policy.admission_order),
        "keyed": policy.admission_order != "fcfs" or policy.admission_key is not None,
        "batching": get_args(Batching).index(policy.batching),
        "interval": policy.reschedule_interval,
        "together": policy.prefills_together(limits),
        "balance_timeout": policy.balance_timeout,
        "swap_time": policy.swap_time_per_block,
        "max_queue_delay": policy.max_queue_delay,
    }
    values |= {name: address(name, policy) for name in HOOKS}
    names = RULES.names
    assert names is not None
    return tuple(values[name] for name in names)


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Arrays:
    """The arrays of a run."""
    rules = np.zeros(len(pools), dtype=RULES)
    for i, (policy, limits) in enumerate(zip(fleet.policies, fleet.limits, strict=True)):
        policy.check(limits)
        rules[i] = rules_of(policy, limits)
    pool_of_lane = np.repeat(
        np.arange(len(pools)), [count * ranks for count, ranks in zip(fleet.replicas, fleet.lanes, strict=True)]
    )
    queues = np.zeros(len(lanes), dtype=QUEUE)
    for name in ("part_way", "part_way_tail", "swapped", "swapped_tail", "returned"):
        queues[name] = NONE
    queues["free_host"] = rules["host_blocks"][pool_of_lane]
    queues["decoded_at"] = -np.inf
    queues["ends"] = np.concatenate([[0], np.cumsum(rules["places"][pool_of_lane])[:-1]])
    more = np.zeros(len(demand.arrival), dtype=MORE)
    more["declared"] = demand.output_tokens if demand.max_tokens is None else demand.max_tokens
    more["priority"] = 0 if demand.priority is None else demand.priority
    ends = np.zeros(int(rules["places"][pool_of_lane].sum()), dtype=np.int64)
    return Arrays(attributes(rules), attributes(queues), attributes(more), ends)
