"""One scheduler with parameters: InferMax's finding that the field's schedulers are one loop (arXiv 2411.07447)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any, ClassVar, Literal, Self

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_words
from windtunnel.policy.settings import Limits, Settings, check_seconds

GroupOrder = Literal["prefill_first", "decode_first"]
Allocation = Literal["on_demand", "prompt", "prompt_and_output", "max_model_len", "look_ahead"]
Preemption = Literal["recompute", "swap", "none"]
Victim = Literal["newest", "oldest", "shortest", "longest", "lowest_priority"]
Order = Literal[
    "fcfs",
    "priority",
    "shortest_prompt",
    "longest_prompt",
    "shortest_output",
    "longest_output",
    "shortest_job",
    "longest_job",
]
Batching = Literal["continuous", "dynamic", "static"]

RESERVING = ("prompt_and_output", "max_model_len")
"""Allocations under which a running request never lacks a block."""


@dataclass(frozen=True)
class Policy(Settings):
    """A scheduler as a value: which requests a step computes, in the words of InferMax's GetNextBatch.

    A step visits the groups of running requests and the queue in ``group_order``. Decodes are one group: in each step
    all of them take part or none. A running request that lacks blocks evicts others; a waiting one never does, and
    none is admitted in a step that evicted. Blocks go to running requests first, whatever the order of the groups.
    """

    follows: ClassVar[frozenset[str]] = frozenset({"enable_chunked_prefill"})
    leaves_async_to_engine: ClassVar[bool] = True
    can_cache_prefixes: ClassVar[bool] = False

    group_order: GroupOrder = "decode_first"
    """Who gets tokens first: waiting and part-way prefills (vLLM v0, Orca's successors: time to first token), or
    decodes, then part-way prefills, then the queue (Sarathi-Serve, arXiv 2403.02310: time between tokens)."""
    mixed: bool = True
    """Prefills and decodes share a step (Orca's selective batching, OSDI 2022; hybrid batching in InferMax); otherwise
    a step is either, the first group in the order that has anything to compute."""
    chunked_prefill: bool = False
    """A prompt may be computed in parts (Sarathi-Serve; DeepSpeed-FastGen's split fuse): as much of it as the limits
    leave."""
    refuse_long_prompts: bool = False
    """Without chunks, a prompt that no step can hold is refused when it comes (TensorRT-LLM); otherwise the limits must
    leave room for the longest one there may be."""

    max_num_batched_tokens: int = 0
    """C, tokens of one step, at most those of the deployment; 0: as many. Sarathi-Serve's chunk_size."""
    max_num_prefill_tokens: int = 0
    """P, prefill tokens of one step, beside C (InferMax); 0: no such limit."""
    max_num_seqs: int = 0
    """R_max, requests that run at once, beside the deployment's own limit: the smaller one holds; 0: only that."""
    padded_prefills: bool = False
    """Prompts of a step count as if padded to the longest: their number times its tokens is at most C (early vLLM;
    Vidur's max_tokens_in_batch)."""
    long_prefill_token_threshold: int = 0
    """Tokens that one prompt may compute in a step; a longer prompt is long (vLLM, config/scheduler.py); 0: any."""
    max_num_partial_prefills: int = 0
    """Prompts that may be part-way at once; one that would be too many is passed over (vLLM v0, same file); 0: any
    number."""
    max_long_partial_prefills: int = 0
    """Long ones among them, so that shorter prompts overtake (same file); 0: any number."""

    allocation: Allocation = "on_demand"
    """Blocks that an admission takes: those of the tokens of its step (vLLM's paged attention, SOSP 2023), of the whole
    prompt (Sarathi-Serve), of prompt and declared output (TensorRT-LLM's no-evict; "reserve" in InferMax), of the
    longest sequence there may be (FasterTransformer, Orca as re-implemented by Sarathi-Serve); or those of its step,
    if the peak that all running requests can reach with it fits memory (LightLLM)."""
    look_ahead_margin: int = 0
    """Tokens added to what each request has left to generate, when the peak is estimated (LightLLM: 6)."""
    watermark: float = 0.0
    """Share of all blocks that an admission must leave free while anything runs (vLLM v0, Sarathi-Serve: 0.01)."""
    decodes_ask_for_a_block: bool = False
    """Decodes, visited in order of admission, each demand a free block, also where their last one has room; one
    that runs alone does not (Sarathi-Serve, vLLM v0: can_append_slot)."""

    preemption: Preemption = "recompute"
    """What happens to an evicted request: it drops its blocks and computes them again later, they move to the host, or
    no request is ever evicted (checklist 316-318; vLLM v0's two modes)."""
    host_blocks: int = 0
    """Blocks of the host that hold evicted requests; when none is left, and for part-way prompts, recompute."""
    swap_time_per_block: float = 0.0
    """Seconds to move one block over PCIe, in either direction; the step waits for it. 0: that of the device's bus."""
    victim: Victim = "newest"
    """Whom to evict: admitted last or first, fewest or most tokens in the cache (InferMax v4: shortest first), or
    lowest priority. Of equals the newest."""
    victim_key: Callable[..., float] | None = None
    """In place of ``victim``: the largest key goes. See ``windtunnel.core.hooks``."""

    admit_after_eviction: bool = False
    """A step that evicted may still admit, even the evicted one if it fits (Sarathi-Serve, vLLM v0 with chunks)."""
    running_order: Literal["admission", "arrival"] = "admission"
    """The order in which running requests ask for memory; the newest is the last in it. They differ only where not all
    can go at any time, as in a pipeline (Vidur sorts by arrival)."""

    admission_order: Order = "fcfs"
    """Whom to admit next. First come first served puts evicted requests before all others, the latest victim first;
    the others order them like all requests, equals by arrival. A job is prompt and declared output."""
    admission_key: Callable[..., float] | None = None
    """In place of ``admission_order``: the smallest key first, equals by arrival. See ``windtunnel.core.hooks``."""
    pass_over: bool = False
    """Try the next waiting request when one does not fit (InferMax's loop); otherwise all wait behind it (vLLM)."""
    batching: Batching = "continuous"
    """When the queue is open: in every step (Orca); or when none runs, until the batch decodes for the first time
    (FasterTransformer; in a pipeline each step in flight has its own batch); or the same, but only a full batch, or one
    whose head has waited (Triton's dynamic batching)."""
    max_queue_delay: float = 0.0
    """Seconds that the head waits for a full batch with dynamic batching (Triton's max_queue_delay_microseconds)."""
    reschedule_interval: int = 1
    """Decode steps from one look at the queue to the next (checklist 308: 16); it is open while none decodes."""
    queue_ratio: float = 0.0
    """Look at the queue when it is this many times as long as the running list (checklist 309: 1.2), or while none
    decodes; 0: no such rule. With an interval, too, either opens it."""
    queue_look_time: float = 0.0
    """Seconds that a step waits while the queue is gone through, in the steps in which it is open: what an interval or
    a ratio saves (checklist 307). 0: the tables' host work, the same in every step, holds it."""
    delay_factor: float = 0.0
    """Keep the queue closed until its head has waited for this many times the duration of the last step with prefills,
    unless none runs (vLLM v0, --scheduler-delay-factor)."""
    prefill_batch: int = 0
    """Prompts prefilled together: the queue opens when this many places are free, or as many as wait if that is less,
    and no more are admitted in a step (MindSpore's report, checklist 341-356); 0: no such rule."""
    prefill_batch_share: float = 0.0
    """That number as a share of the places, at least 1 (the report's coefficient, 1/64)."""
    prefill_batch_max: int = 0
    """Prompts admitted in a step once the queue is open, if more have places; 0: no more than open it (its code ends a
    call at more than batch_size // 32 of them: 5 of 128)."""
    balance_timeout: int = 0
    """Data-parallel ranks in lockstep, while all of them decode, admit when each has a request waiting, or when this
    many steps have passed without (TensorRT-LLM's attention_dp_config: enable_balance, timeout_iters); 0: each as it
    can."""
    pipeline_parallel_size: int = 1
    """Stages of a pipeline, as many steps in flight; no request of them is scheduled again before its step has ended
    (TensorRT-LLM, _executor_loop_pp of pyexecutor/py_executor.py; Vidur, arXiv 2405.05465)."""
    places_per_step: bool = False
    """R_max bounds the requests of a step, and of all steps in flight together as many times the stages
    (TensorRT-LLM's max_batch_size); otherwise all that run (Vidur's batch_size_cap)."""
    decide_on_arrival: bool = False
    """In a pipeline, a step is decided as soon as there is a place in flight and something to compute, also when a
    request arrives (Vidur); otherwise when a step ends, as in the engines. One stage always does."""
    stage_end: Callable[..., float] | None = None
    """When a stage of a pipeline has done a step: what schedules micro-batches within stages, Vidur's third tier (arXiv
    2405.05465). See ``windtunnel.core.hooks``."""
    token_budget: Callable[..., int] | None = None
    """Tokens of the next step, at least one for each decode and at most C. See ``windtunnel.core.hooks``."""

    def __post_init__(self) -> None:
        require_words(self)
        for name in _AMOUNTS:
            if not 0 <= getattr(self, name) < inf:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 0 and finite; 0 means no such rule")
        for name in ("swap_time_per_block", "queue_look_time", "max_queue_delay"):
            check_seconds(name, getattr(self, name))
        if self.pipeline_parallel_size < 1:
            raise InputError(f"pipeline_parallel_size={self.pipeline_parallel_size}: must be ≥ 1")
        if self.reschedule_interval < 1:
            raise InputError(f"reschedule_interval={self.reschedule_interval}: must be ≥ 1, 1 looks in every step")
        for name in ("watermark", "prefill_batch_share"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"{name}={getattr(self, name)}: must be in [0, 1)")
        for contradicts, words in _CONTRADICTIONS:
            if contradicts(self):
                raise InputError(words)

    def with_flags(self, flags: Mapping[str, Any]) -> Self:
        """The settings of an engine with these arguments; max_num_batched_tokens is TensorRT-LLM's max_num_tokens."""
        chunked = flags["enable_chunked_prefill"] is not False
        stages = flags["pipeline_parallel_size"]
        return replace(self, chunked_prefill=chunked, refuse_long_prompts=not chunked, pipeline_parallel_size=stages)

    def with_host(self, limits: Limits, block_bytes: int, pcie_bandwidth: float) -> Self:
        """The settings; where they swap and leave the time open, with that of the device's bus."""
        del limits
        if self.preemption != "swap" or self.swap_time_per_block:
            return self
        return replace(self, swap_time_per_block=block_bytes / pcie_bandwidth)

    def tokens(self, limits: Limits) -> int:
        """Tokens of a step (C)."""
        return self.max_num_batched_tokens or limits.max_num_batched_tokens

    def prefill_tokens(self, limits: Limits) -> int:
        """Tokens of prompts in a step (P), or C where that is less."""
        return min(self.max_num_prefill_tokens or self.tokens(limits), self.tokens(limits))

    def places(self, limits: Limits) -> int:
        """Requests that a step may compute (R_max)."""
        return min(self.max_num_seqs or limits.max_num_seqs, limits.max_num_seqs)

    def most_running(self, limits: Limits) -> int:
        """Requests that run at once, in all steps in flight together."""
        return self.places(limits) * (self.pipeline_parallel_size if self.places_per_step else 1)

    def watermark_blocks(self, limits: Limits) -> int:
        """Blocks that an admission must leave free."""
        return int(self.watermark * limits.num_blocks)

    def prefills_together(self, limits: Limits) -> int:
        """Prompts prefilled together; 0: any number."""
        if self.prefill_batch_share:
            return max(int(self.places(limits) * self.prefill_batch_share), 1)
        return self.prefill_batch

    def prefills_at_most(self, limits: Limits) -> int:
        """Prompts admitted in a step at most; 0: any number."""
        return self.prefill_batch_max or self.prefills_together(limits)

    def longest_prompt(self, limits: Limits) -> int:
        """Tokens of a prompt that a step can hold, or of which it can hold a part."""
        return limits.max_model_len if self.chunked_prefill else self.prefill_tokens(limits)

    def reserved_tokens(self, prompt_tokens: int, max_tokens: int, limits: Limits) -> int:
        """Tokens whose blocks an admission takes at least; the last token never gets a place in the cache."""
        if self.allocation == "prompt_and_output":
            return min(prompt_tokens + max_tokens, limits.max_model_len) - 1
        return limits.max_model_len if self.allocation == "max_model_len" else 0

    def check(self, limits: Limits) -> None:
        """Raise InputError if the policy cannot run within the limits."""
        if self.max_num_batched_tokens > limits.max_num_batched_tokens:
            raise InputError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be ≤ the deployment's "
                f"{limits.max_num_batched_tokens}: raise that, or give the scheduler less"
            )
        if self.prefill_batch > self.places(limits):
            raise InputError(f"prefill_batch={self.prefill_batch}: must be ≤ max_num_seqs={self.places(limits)}")
        if 0 < self.prefill_batch_max < self.prefills_together(limits):
            raise InputError(
                f"prefill_batch_max={self.prefill_batch_max}: must be ≥ the {self.prefills_together(limits)} that "
                "prefill_batch or prefill_batch_share wait for"
            )
        if self.tokens(limits) < self.places(limits):
            raise InputError(
                f"max_num_seqs={self.places(limits)}: must be ≤ max_num_batched_tokens={self.tokens(limits)}, so that "
                "every running request can decode in each step: lower it, or raise the tokens"
            )
        if self.longest_prompt(limits) < limits.max_model_len and not self.refuse_long_prompts:
            raise InputError(
                f"max_num_batched_tokens={self.prefill_tokens(limits)}: must be ≥ max_model_len="
                f"{limits.max_model_len} without chunked prefill: raise it, or enable chunked prefill"
            )


_AMOUNTS = (
    "max_num_batched_tokens",
    "max_num_prefill_tokens",
    "max_num_seqs",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "look_ahead_margin",
    "host_blocks",
    "swap_time_per_block",
    "max_queue_delay",
    "queue_ratio",
    "queue_look_time",
    "delay_factor",
    "prefill_batch",
    "prefill_batch_max",
    "balance_timeout",
)


def _not_in_a_pipeline(name: str, plain: float) -> Callable[[Policy], bool]:
    return lambda p: p.pipeline_parallel_size > 1 and getattr(p, name) != plain


def _in_a_pipeline(name: str, value: str) -> Callable[[Policy], bool]:
    return lambda p: p.pipeline_parallel_size > 1 and getattr(p, name) == value


_CONTRADICTIONS: tuple[tuple[Callable[[Policy], bool], str], ...] = (
    (
        lambda p: p.preemption == "none" and p.allocation not in RESERVING,
        "preemption='none': a request may lack a block and wait for ever; use allocation='prompt_and_output' or "
        "'max_model_len', or let a request be evicted",
    ),
    (
        lambda p: p.refuse_long_prompts and (p.chunked_prefill or p.preemption != "none"),
        "refuse_long_prompts: no prompt is too long with chunked_prefill, and one that is evicted could become so: use "
        "preemption='none' without chunks",
    ),
    (
        lambda p: p.decodes_ask_for_a_block and p.allocation in RESERVING,
        "decodes_ask_for_a_block: no meaning where all blocks are taken at admission; use another allocation",
    ),
    (
        lambda p: p.preemption != "swap" and bool(p.host_blocks or p.swap_time_per_block),
        "host_blocks, swap_time_per_block: no meaning without preemption='swap'",
    ),
    (
        lambda p: p.preemption == "swap" and p.host_blocks == 0,
        "preemption='swap': give host_blocks, the room on the host",
    ),
    (
        lambda p: (
            p.allocation == "on_demand"
            and p.chunked_prefill
            and (p.victim not in {"newest", "lowest_priority"} or p.victim_key is not None)
        ),
        "chunked_prefill with allocation='on_demand' and this victim: part-way prompts could evict each other for "
        "ever; use allocation='prompt' or victim='newest'",
    ),
    (
        lambda p: p.allocation == "look_ahead" and p.chunked_prefill,
        "allocation='look_ahead': counts whole prompts; use chunked_prefill=false",
    ),
    (
        lambda p: (
            bool(p.long_prefill_token_threshold or p.max_num_partial_prefills or p.max_long_partial_prefills)
            and not p.chunked_prefill
        ),
        "long_prefill_token_threshold, max_num_partial_prefills, max_long_partial_prefills: no prompt is ever part-way "
        "without chunked_prefill",
    ),
    (
        lambda p: bool(p.max_long_partial_prefills) and not p.long_prefill_token_threshold,
        "max_long_partial_prefills: give long_prefill_token_threshold, which says what is long",
    ),
    (
        lambda p: bool(p.look_ahead_margin) and p.allocation != "look_ahead",
        "look_ahead_margin: no meaning without allocation='look_ahead'",
    ),
    (
        lambda p: bool(p.max_queue_delay) and p.batching != "dynamic",
        "max_queue_delay: no meaning without batching='dynamic'",
    ),
    (
        lambda p: p.batching == "dynamic" and (p.admission_order != "fcfs" or p.admission_key is not None),
        "batching='dynamic': the head of its queue is the oldest; use admission_order='fcfs'",
    ),
    (
        lambda p: bool(p.prefill_batch and p.prefill_batch_share),
        "prefill_batch and prefill_batch_share are one rule: give only one of them",
    ),
    (
        lambda p: p.token_budget is not None and not p.chunked_prefill,
        "token_budget: a prompt that never fits it would wait for ever; use chunked_prefill=true",
    ),
    (
        lambda p: p.admission_key is not None and p.admission_order != "fcfs",
        "admission_key takes the place of admission_order: leave that out",
    ),
    (
        lambda p: p.victim_key is not None and p.victim != "newest",
        "victim_key takes the place of victim: leave that out",
    ),
    (
        lambda p: p.pipeline_parallel_size > 1 and p.places_per_step and p.mixed and p.group_order == "prefill_first",
        "places_per_step: decodes that are left out of a step would be too many for the next; use mixed=false or "
        "group_order='decode_first'",
    ),
    (
        lambda p: p.padded_prefills and (p.mixed or p.chunked_prefill),
        "padded_prefills: counts whole prompts in steps of their own; use mixed=false and chunked_prefill=false",
    ),
    (
        lambda p: p.running_order == "arrival" and (p.chunked_prefill or p.preemption == "swap"),
        "running_order='arrival': part-way prompts, and those back from the host, go in the order of their admission; "
        "use chunked_prefill=false and no swapping",
    ),
    *(
        (_not_in_a_pipeline(name, plain), f"{name}: not simulated in a pipeline; leave it out, or use one stage")
        for name, plain in (
            ("reschedule_interval", 1),
            ("queue_ratio", 0.0),
            ("delay_factor", 0.0),
            ("balance_timeout", 0),
        )
    ),
    *(
        (_in_a_pipeline(name, value), f"{name}={value!r}: not simulated in a pipeline; use another, or one stage")
        for name, value in (("preemption", "swap"),)
    ),
    (
        _in_a_pipeline("allocation", "look_ahead"),
        "allocation='look_ahead': LightLLM, whose rule it is, runs in one stage, and so does Vidur's; use "
        "allocation='prompt_and_output' with stages",
    ),
    (
        lambda p: p.pipeline_parallel_size > 1 and p.batching != "continuous" and p.chunked_prefill,
        "batching='static' and 'dynamic': in a pipeline a batch is what one step admits, whole prompts; use "
        "chunked_prefill=false",
    ),
)
"""Combinations that make no scheduler, and what to do about them."""


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
"""FasterTransformer (sarathi/core/scheduler/faster_transformer_scheduler.py): request-level batches; no request joins
until the last one has finished."""

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

TRTLLM_MAX_UTILIZATION = Policy(allocation="prompt", places_per_step=True)
"""TensorRT-LLM, MAX_UTILIZATION (capacityScheduler.cpp, microBatchScheduler.cpp): every request runs whose next step
fits; the last started one is paused when it does not. Contexts next to all generations, the blocks of a whole prompt
with its first chunk."""

TRTLLM_GUARANTEED_NO_EVICT = Policy(
    allocation="prompt_and_output", preemption="none", refuse_long_prompts=True, places_per_step=True
)
"""TensorRT-LLM, GUARANTEED_NO_EVICT (same files): admitted only if the blocks of prompt and declared output are free,
so that no request is ever paused; prompts beyond max_num_tokens are refused."""

MINDSPORE = Policy(group_order="prefill_first", mixed=False, max_num_seqs=128, prefill_batch_share=1 / 64)
"""ms-llm-serve as in the MindSpore tuning report (checklist 330-358): prefill first, in batches of a share of the
decode batch of 128; 1/64 is the report's coefficient, its code breaks at 1/32."""

FCFS_INTERVAL = Policy(group_order="prefill_first", mixed=False, reschedule_interval=16)
"""Interval scheduling (checklist 308): the queue is looked at every 16 decode steps."""

QUEUE_RATIO = Policy(group_order="prefill_first", mixed=False, queue_ratio=1.2)
"""Queue-ratio scheduling (checklist 309): the queue is looked at when it is 1.2 times as long as the running list."""

OURS_UNKNOWN = Policy(
    chunked_prefill=True,
    pass_over=True,
    watermark=0.02,
    max_num_prefill_tokens=1024,
    admission_order="shortest_prompt",
    allocation="prompt",
)
"""Ours, found by search (docs/experiments/ours.md), where nothing is known of outputs: the shortest prompt that fits
first, in portions, and a fiftieth of memory kept for those that run."""

OURS_KNOWN = replace(OURS_UNKNOWN, admission_order="shortest_job")
"""Ours, where requests declare the lengths of their outputs: the shortest job that fits first."""

OURS_RANKED = replace(OURS_UNKNOWN, admission_order="priority")
"""Ours, where priorities say which output is longer, and nothing how long it is."""

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
    "ours-known": OURS_KNOWN,
    "ours-ranked": OURS_RANKED,
    "ours-unknown": OURS_UNKNOWN,
}
"""The presets of the unified scheduler."""


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
