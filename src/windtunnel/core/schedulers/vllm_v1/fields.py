"""What vLLM's v1 scheduler appends to the records of pools, lanes and requests."""

import numpy as np

from windtunnel.core.blocks import CACHE_OF_LANE
from windtunnel.core.pipelines.stages import PIPE_OF_LANE
from windtunnel.core.records import Fields
from windtunnel.core.schedulers.vllm_v1 import encoder
from windtunnel.core.stores import chunks

SETTINGS = (
    "chunked_prefill",
    "reserve_full_prompt",
    "async_scheduling",
    "stop_at_last_token",
    "skip_unfit_prompts",
    "long_prefill_token_threshold",
    "adaptive_threshold",
    "threshold_when_alone",
    "plain_blocks_first",
    "return_victim_tokens",
    "track_place",
    "go_on_after_own_preemption",
    "prefill_schedule_interval",
    "interval_when_alone",
    "max_loras",
    "reserve_for_loads",
)
"""Fields of VllmV1 that are copied to a pool's record."""

LONG_AGO = -(1 << 60)

POOL_FIELDS: Fields = [
    (name, np.int64)
    for name in (
        *SETTINGS[:2],
        *SETTINGS[3:],
        "watermark_blocks",
        "by_priority",
        "evict_worst",
        "stages",
        "admits_below",  # requests are admitted below this many running: max_num_seqs, or 0 before the engine sleeps
    )
]
POOL_FIELDS += encoder.POOL_FIELDS

LANE_FIELDS: Fields = [
    ("held", np.int64),  # the turn after the latest step that held decodes back
    ("held_from", np.int64),  # none of them, or of those that joined since, has a seat before this one
    ("held_beside", np.int64),  # the latest step that held decodes back while others took part
    ("resumed", np.int64),  # decodes of this step that were held back alone: their gap is a stall
    ("spared", np.int64),  # leaving requests whose discarded token this step does not compute, held back as they are
    ("silent", np.int64),  # decisions since the last token
    # prefill_schedule_interval
    ("executed", np.int64),  # steps so far that computed anything in any rank of the group
    ("last_prefill_step", np.int64),  # the latest of them with prompts
    ("capacity_bound", np.int64),  # requests wait for seats or memory
    ("holds_prompts", np.int64),  # prompts get nothing in this step
    ("prefills", np.int64),  # they get something
    # max_loras
    ("adapters", np.int64),  # of the running requests
    ("deferred", np.int64),  # requests that were passed over in this step
    *CACHE_OF_LANE,
    *PIPE_OF_LANE,
    *chunks.STORES_OF_LANE,
    *encoder.LANE_FIELDS,
]

REQUEST_FIELDS: Fields = [
    ("key", np.float64),  # its priority
    ("held_clock", np.int32),  # its turn after a step that held it back
    ("certain", np.int32),  # tokens that could be offered when it was last looked at
    ("last_step", np.int32),  # the latest one that computed anything of it, while it waits or is held
    ("adapter", np.int32),  # 0: the base model
]
