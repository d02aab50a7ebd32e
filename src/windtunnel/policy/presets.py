"""Schedulers by name: values of the settings that their families have."""

from itertools import product
from typing import Any

from windtunnel.policy import vllm_v0, vllm_v1
from windtunnel.policy.sglang import Sglang
from windtunnel.policy.unified import Allocation, Order, Policy, Victim
from windtunnel.policy.vllm_v0 import VllmV0
from windtunnel.policy.vllm_v1 import VllmV1

SARATHI = Policy(
    chunked_prefill=True,
    max_num_batched_tokens=512,
    max_num_seqs=128,
    allocation="prompt",
    watermark=0.01,
    decodes_ask_for_a_block=True,
)
"""Sarathi-Serve (arXiv 2403.02310; sarathi/core/scheduler/sarathi_scheduler.py): decodes first, and one chunk of
prompts fills the step up to chunk_size, so that no decode ever waits for a long prompt."""

ORCA = Policy(allocation="max_model_len", preemption="none")
"""Orca (OSDI 2022, as re-implemented in sarathi/core/scheduler/orca_scheduler.py): requests join and leave at every
iteration, prompts and decodes share it, each holds the memory of the longest sequence."""

FASTERTRANSFORMER = Policy(
    group_order="prefill_first", mixed=False, allocation="max_model_len", preemption="none", batching="static"
)
"""FasterTransformer (sarathi/core/scheduler/faster_transformer_scheduler.py): request-level batches; nobody joins until
the last one has finished."""

DYNAMIC = Policy(
    group_order="prefill_first",
    mixed=False,
    allocation="max_model_len",
    preemption="none",
    batching="dynamic",
    max_queue_delay=0.1,
)
"""Triton's dynamic batcher (model configuration, dynamic_batching): a batch starts when it is full or its oldest
request has waited for max_queue_delay, and runs to its end."""

LIGHTLLM = Policy(group_order="prefill_first", mixed=False, allocation="look_ahead", look_ahead_margin=6)
"""LightLLM (router/req_queue/continues_batch/impl.py): a new prompt is prefilled alone and at once if the peak of all
requests, each running to its declared end, fits memory; in need the newest is paused."""

TRTLLM_MAX_UTILIZATION = Policy()
"""TensorRT-LLM, MAX_UTILIZATION (capacityScheduler.cpp, microBatchScheduler.cpp): everybody runs whose next step fits;
the last started one is paused when it does not. Whole contexts beside all generations."""

TRTLLM_GUARANTEED_NO_EVICT = Policy(allocation="prompt_and_output", preemption="none", refuse_long_prompts=True)
"""TensorRT-LLM, GUARANTEED_NO_EVICT (same files): admitted only if the blocks of prompt and declared output are free,
so that nobody is ever paused; prompts beyond max_num_tokens are refused."""

MINDSPORE = Policy(group_order="prefill_first", mixed=False, prefill_batch_share=1 / 64)
"""ms-llm-serve as in the MindSpore tuning report (checklist 330-358): prefill first, in batches of a share of the
decode batch; 1/64 is the report's coefficient, its code breaks at 1/32."""

FCFS_INTERVAL = Policy(group_order="prefill_first", mixed=False, reschedule_interval=16)
"""Interval scheduling (checklist 308): the queue is looked at every 16 decode steps."""

QUEUE_RATIO = Policy(group_order="prefill_first", mixed=False, queue_ratio=1.2)
"""Queue-ratio scheduling (checklist 309): the queue is looked at when it is 1.2 times as long as the running list."""

POLICIES: dict[str, Policy] = {
    "sarathi": SARATHI,
    "orca": ORCA,
    "fastertransformer": FASTERTRANSFORMER,
    "dynamic": DYNAMIC,
    "lightllm": LIGHTLLM,
    "trtllm-max-utilization": TRTLLM_MAX_UTILIZATION,
    "trtllm-guaranteed-no-evict": TRTLLM_GUARANTEED_NO_EVICT,
    "mindspore": MINDSPORE,
    "fcfs-interval": FCFS_INTERVAL,
    "queue-ratio": QUEUE_RATIO,
}
"""The presets of the unified scheduler."""

PRESETS: dict[str, VllmV1 | VllmV0 | Policy | Sglang] = {
    **vllm_v1.VERSIONS,
    "vllm": vllm_v1.VERSIONS["vllm-0.32"],
    **vllm_v0.VERSIONS,
    "sglang-0.4.6": Sglang(),
    **POLICIES,
}
"""Every scheduler that has a name; ``vllm`` is the version that runs have by default."""


def infermax_grid() -> dict[str, Policy]:
    """InferMax's variants: {vllm, sarathi} × hybrid × chunked × eviction × order, by a name that says all of it.

    Its vLLM visits waiting prefills first, its Sarathi decodes; both take the memory of a whole prompt, pass over what
    does not fit, and have neither a watermark nor another limit than C and M. Look-ahead admission, which counts whole
    prompts, is left out where prompts are chunked.
    """
    bases: dict[str, dict[str, Any]] = {"vllm": {"group_order": "prefill_first"}, "sarathi": {}}
    victims: tuple[Victim, ...] = ("newest", "shortest", "longest")
    reserving: dict[str, Allocation] = {"reserve": "prompt_and_output", "look_ahead": "look_ahead"}
    memory: dict[str, dict[str, Any]] = {name: {"allocation": "prompt", "victim": name} for name in victims}
    memory |= {name: {"allocation": value} for name, value in reserving.items()}
    memory["reserve"]["preemption"] = "none"
    orders: tuple[Order, ...] = ("fcfs", "shortest_prompt", "shortest_output", "shortest_job")
    grid = {}
    for base, mixed, chunked, eviction, order in product(bases, (False, True), (False, True), memory, orders):
        if eviction == "look_ahead" and chunked:
            continue
        words = (base, "hybrid" * mixed, "chunked" * chunked, eviction, order)
        grid["-".join(word for word in words if word)] = Policy(
            **bases[base],
            **memory[eviction],
            mixed=mixed,
            chunked_prefill=chunked,
            admission_order=order,
            pass_over=True,
        )
    return grid
