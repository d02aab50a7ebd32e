"""What SGLang's scheduler keeps in the records of pools, lanes and requests, and how its settings get there."""

from typing import Any

import numpy as np

from windtunnel.core.pipeline import PIPE_OF_LANE
from windtunnel.core.records import Fields
from windtunnel.core.schedulers.sglang_order import ORDERS
from windtunnel.core.schedulers.sglang_radix import TREE_OF_LANE
from windtunnel.core.schedulers.sglang_turns import TURNS_OF_LANE

UNLIMITED = 1 << 60


def _integers(*names: str) -> Fields:
    return [(name, np.int64) for name in names]


POOL_FIELDS: Fields = [
    *((name, np.float64) for name in ("init_ratio", "min_ratio", "decay")),
    *_integers(
        "reported_block",  # in which memory is reported
        "newer",  # the rules of 0.5.23
        "page",  # tokens that are handed out at once
        "cuts",  # a prompt may be computed in several rounds
        "chunk_limit",  # prompt tokens of a round
        "max_prefill_tokens",
        "order",
        "radix_cache",
        "mixed",
        "exact_release",
        "ignore_eos",
        *("by_priority", "low_first", "preempts", "preemption_threshold", "retracts_by_priority"),
        "most_prompts",  # requests of a prefill round
        *("interval", "interval_from"),  # rounds without prompts after one with them, from so many running requests on
        "slots_at_once",  # seats that have to be free before new prompts run beside others
        "looks",  # at an idle lane in which requests wait: an idle round says nothing about the next one
        "stages",
        "micro_batch",  # requests that run in one stage of a pipeline, but for those whose prompt ends in it
    ),
]

LANE_FIELDS: Fields = [
    *((name, np.float64) for name in ("ratio", "last_decode")),  # the latter: when the last decode round ended
    *_integers(
        "ended",  # running requests that have ended
        "batch",  # seats of the latest prefill round
        "mixed",  # it held the running requests, too
        "full",  # batch_is_full
        "joined",  # requests that have come from other lanes and not taken part in a round yet
        "chunked",  # the request whose prompt is part-way
        "part_way",  # the one whose prompt was so after the latest prefill round
        "idle",  # the latest decision found nothing, and nothing was in flight
        "late",  # decodes of the round in flight whose requests had ended before
        "row",  # in the log, the first of the round that was decided
        # the round in flight; flying says whether there is one
        "flying_prompts",  # requests whose prompt it completes
        "flying_decodes",
        "flying_ends",  # requests whose last decode it is
        "flying_row",
        # the round that is being filled
        "computed",  # tokens, in whole pages
        "taken",  # those, and what each request needs beyond them
        "preempted",  # the first of those that make way in this round, linked by next
        "interval_left",  # rounds without prompts
        *("joinings", "processed", "refreshes"),  # so far: requests that queued, prompt tokens, looks at the queue
        "ends",  # entries in the list of ends, NONE before it is made
    ),
    ("reserved", np.float64),
    *TREE_OF_LANE,
    *TURNS_OF_LANE,
    *PIPE_OF_LANE,
]

REQUEST_FIELDS: Fields = _integers(
    "declared",  # tokens; the scheduler knows only this number
    "filled",  # tokens in the cache after the round that computes its prompt
    "node",  # where those before it end in the tree; locked from admission on
    "ends",  # the clock at its last token; NONE until its prompt has run
    "came",  # from another lane, and has not taken part in a round since
    "made_way",  # when it was last sent back, it was for a more urgent one
    "left_out",  # its last token is in flight, and it is not among the running ones any more
    "entered",  # tokens of it that were put into the tree
    "priority",
    "joined",  # when it joined the queue, by the number of those before it
    "processed",  # prompt tokens that had been computed then
    "looked",  # known tokens when it was last looked at
    "found",  # those that the order of the queue found in the tree
    "name",  # what breaks ties of the response ratio
)


def set_pool(pool: Any, limits: Any, policy: Any) -> None:
    """Write one pool's settings."""
    pool["newer"], pool["page"] = policy.version != "0.4.6", policy.page_size
    pool["reported_block"], pool["block_size"] = limits.block_size, 1
    pool["num_blocks"] = limits.num_blocks * limits.block_size // policy.page_size * policy.page_size
    pool["init_ratio"], pool["min_ratio"] = policy.init_new_token_ratio, policy.min_new_token_ratio
    pool["decay"] = policy.new_token_ratio_decay
    pool["cuts"] = policy.chunked_prefill
    pool["chunk_limit"] = limits.max_num_batched_tokens if policy.chunked_prefill else UNLIMITED
    pool["order"] = ORDERS[policy.schedule_policy]
    pool["mixed"] = policy.enable_mixed_chunk and policy.chunked_prefill
    pool["stages"], pool["micro_batch"] = policy.pipeline_parallel_size, policy.micro_batch(limits)
    for name in ("async_scheduling", "max_prefill_tokens", "radix_cache", "exact_release", "ignore_eos"):
        pool[name] = getattr(policy, name)
    pool["by_priority"], pool["low_first"] = (
        policy.enable_priority_scheduling,
        policy.schedule_low_priority_values_first,
    )
    pool["preempts"] = policy.enable_priority_scheduling and not policy.disable_priority_preemption
    pool["preemption_threshold"] = policy.priority_scheduling_preemption_threshold
    pool["retracts_by_priority"] = policy.retraction_policy == "priority"
    pool["most_prompts"] = policy.prefill_max_requests or UNLIMITED
    pool["interval"], pool["interval_from"] = policy.prefill_decode_interval, policy.prefill_decode_interval_min_bs
    at_once = min(policy.min_free_slots_delay, limits.max_num_seqs)
    pool["slots_at_once"] = at_once if at_once > 1 else 0
    pool["looks"] = 2 + policy.prefill_decode_interval
