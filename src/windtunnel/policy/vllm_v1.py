"""vLLM's v1 scheduler as data: what differs between its versions and settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_words
from windtunnel.policy.drafts import Drafts
from windtunnel.policy.encoder import Encoder
from windtunnel.policy.settings import Limits, Settings

AdmissionOrder = Literal["fcfs", "priority"]
Victim = Literal["newest", "lowest_priority"]

NUMBERS = ("watermark", "long_prefill_token_threshold", "prefill_schedule_interval", "pipeline_parallel_size")
"""Settings that an engine's arguments have, by the same names."""


@dataclass(frozen=True)
class VllmV1(Settings):
    """vLLM's v1 scheduler: tokens catch up with what is known, first come first served, recompute on preemption.

    There is no prefill and no decode phase (vllm/v1/core/sched/scheduler.py): running requests are visited in the
    order of their admission, then waiting ones from the head of the queue, each getting the tokens it has not
    computed, while the budget lasts. A running request that lacks a block evicts the newest one, and no request
    is admitted in that step.
    """

    follows: ClassVar[frozenset[str]] = frozenset(
        {
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "long_prefill_token_threshold",
            "prefill_schedule_interval",
            "scheduler_reserve_full_isl",
            "scheduling_policy",
            "watermark",
        }
    )

    chunked_prefill: bool = True
    """Cut a prompt that exceeds the rest of the budget; otherwise it waits (max_model_len must fit)."""
    skip_unfit_prompts: bool = False
    """Without chunks, pass over a prompt that exceeds the rest of the budget; otherwise all wait behind it. Those
    passed over go back to the front of the queue, the last one first (vLLM ≤ 0.10)."""
    reserve_full_prompt: bool = True
    """Admit only when the blocks of the whole prompt are free (scheduler_reserve_full_isl, vLLM ≥ 0.19)."""
    watermark: float = 0.0
    """Share of all blocks that an admission must leave free while anything runs (vLLM ≥ 0.24)."""
    max_num_active_seqs: int = 0
    """No request is admitted while this many run; 0: max_num_seqs (vLLM ≥ 0.31)."""
    long_prefill_token_threshold: int = 0
    """Tokens that one request may compute in a step, so that long prompts leave budget to others; 0: no such limit
    (config/scheduler.py)."""
    adaptive_threshold: bool = False
    """Raise the threshold to an equal share of the budget where that is more
    (long_prefill_token_threshold_adaptive, vLLM ≥ 0.31)."""
    threshold_when_alone: bool = False
    """The threshold holds for a request that has the engine to itself, too (vLLM ≤ 0.30)."""
    prefix_caching: bool = False
    """Share full blocks of equal beginnings, and keep those of ended requests until they are needed
    (v1/core/block_pool.py)."""
    plain_blocks_first: bool = True
    """Hand out freed blocks without a reusable prefix before all others; otherwise in the order of their release
    (vLLM ≤ 0.23)."""
    admission_order: AdmissionOrder = "fcfs"
    """Whom to admit next: the head of the queue, preempted requests first, or the lowest (priority, arrival, name)
    (v1/core/sched/request_queue.py; vLLM 0.10 has no names there and ends where the first two are equal)."""
    victim: Victim = "newest"
    """Whom to preempt: who was admitted last, or the worst (priority, arrival)."""
    return_victim_tokens: bool = True
    """Take a victim that was scheduled earlier in the same step out of the batch; otherwise its tokens stay there, are
    lost to the budget and count as computed (vLLM ≤ 0.10, a flaw)."""
    track_place: bool = True
    """After a preemption go on with the next running request; otherwise every victim that stood before the present one
    and returned no tokens makes the pass skip one (vLLM ≤ 0.30)."""
    go_on_after_own_preemption: bool = True
    """After a request that had to preempt itself, because it was the worst, go on with the running requests behind it;
    otherwise they get nothing in that step (vLLM ≤ 0.32). Where the newest goes, there are none behind it."""
    prefill_schedule_interval: int = 1
    """Steps from one with prompts to the next, while other requests decode and the queue is not held up by seats or
    memory; 1: no such rule. Ranks in lockstep run prompts in every so-many-th of their common steps (vLLM ≥ 0.24;
    v1/engine/core.py, where a new wave of requests starts the count anew, which is not simulated)."""
    interval_when_alone: bool = True
    """A scheduler that steps alone keeps the interval as well, counted from its latest step with prompts; False: it
    ignores the interval (vLLM ≤ 0.32)."""
    max_loras: int = 0
    """Adapters that running requests may have among them; who brings another one is passed over. 0: any number."""
    async_scheduling: bool = True
    """Decide step k + 1 before the output of step k is known (AsyncScheduler with two steps in flight)."""
    stop_at_last_token: bool = True
    """An asynchronous scheduler knows when a request's last token is in flight, and does not schedule it once more
    (vLLM ≥ 0.12)."""
    pipeline_parallel_size: int = 1
    """Stages that a step passes through one by one. So many steps are in flight, and one more with asynchronous
    scheduling, where a request then decodes in every so-many-th step only (EngineCore.step_with_batch_queue;
    next_decode_eligible_step, vLLM ≥ 0.23)."""
    wait_for_output: bool = True
    """Pass over a preempted request while a step with it is in flight (num_stale_output_tokens, vLLM ≥ 0.31); otherwise
    it can be admitted before its latest token is known."""
    decide_after_empty_step: bool = True
    """Go on deciding while there is a place in flight; otherwise an empty step is followed by the output of the oldest
    one (vLLM ≤ 0.30)."""
    reserve_for_loads: bool = True
    """Before KV is loaded from a store, memory is set aside for prompts that are under way and for other loads
    (_inflight_prefill_reserved_blocks). Without it (vLLM ≤ 0.22) such requests can wait for each other for ever."""
    drafts: Drafts | None = None
    """What a drafter proposes, which steps verify; None: nothing."""
    encoder: Encoder | None = None
    """What inputs of an encoder, such as images, may take; None: prompts have none."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise InputError(f"watermark={self.watermark}: must be in [0, 1)")
        for name in ("max_num_active_seqs", "long_prefill_token_threshold", "max_loras"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 0; 0 means no such limit")
        if self.prefill_schedule_interval < 1:
            raise InputError(
                f"prefill_schedule_interval={self.prefill_schedule_interval}: must be ≥ 1; 1: no such rule"
            )
        if self.pipeline_parallel_size < 1:
            raise InputError(f"pipeline_parallel_size={self.pipeline_parallel_size}: must be ≥ 1")
        interval = self.prefill_schedule_interval > 1
        if self.pipeline_parallel_size > 1 and (interval or self.max_loras or self.drafts or self.encoder):
            raise InputError(
                "prefill_schedule_interval, max_loras, drafts, encoder: not simulated in a pipeline; leave them out, "
                "or use one stage"
            )
        require_words(self)

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at most."""
        return self.pipeline_parallel_size + self.async_scheduling

    def watermark_blocks(self, limits: Limits) -> int:
        """Blocks that an admission must leave free; the share is of all blocks, block 0 included (vLLM ≥ 0.24)."""
        return int(self.watermark * (limits.num_blocks + 1))

    def with_flags(self, flags: Mapping[str, Any]) -> Self:
        """The settings of an engine with these arguments; a pipeline is simulated with the newest rules, but for what
        follows a request's own preemption."""
        by_priority = flags["scheduling_policy"] == "priority"
        kept = {name: getattr(self, name) for name in ("go_on_after_own_preemption", "interval_when_alone")}
        in_a_pipeline = type(self)(**kept)
        return replace(
            self if flags["pipeline_parallel_size"] == 1 else in_a_pipeline,
            chunked_prefill=flags["enable_chunked_prefill"] is not False,
            reserve_full_prompt=flags["scheduler_reserve_full_isl"] is not False,
            prefix_caching=bool(flags["enable_prefix_caching"]),
            admission_order="priority" if by_priority else "fcfs",
            victim="lowest_priority" if by_priority else "newest",
            async_scheduling=flags["async_scheduling"] is not False,
            **{name: flags[name] for name in NUMBERS},
        )

    @property
    def keeps_turns(self) -> bool:
        """See Settings."""
        return self.pipeline_parallel_size == 1 or (self.wait_for_output and self.decide_after_empty_step)

    @property
    def recalls_the_ended(self) -> bool:
        """See Settings: steps in flight name those whom they give a token."""
        return not self.keeps_turns or self.drafts is not None

    @property
    def takes_stores(self) -> bool:
        """See Settings."""
        plain = self.pipeline_parallel_size == 1 and self.drafts is None and self.encoder is None
        return self.prefix_caching and plain and self.admission_order == "fcfs"

    @property
    def takes_drafts(self) -> bool:
        """See Settings."""
        return True

    def with_drafts(self, drafts: Drafts | None) -> Self:
        """See Settings."""
        return replace(self, drafts=drafts)

    def without_known_prefixes(self) -> Self:
        """A pipeline without its cache, where only preempted requests would get hits."""
        return replace(self, prefix_caching=False) if self.pipeline_parallel_size > 1 else self

    def check(self, limits: Limits) -> None:
        """Raise InputError if the policy cannot run within the limits."""
        if not self.chunked_prefill and limits.max_num_batched_tokens < limits.max_model_len:
            raise InputError(
                f"max_num_batched_tokens={limits.max_num_batched_tokens}: must be ≥ max_model_len="
                f"{limits.max_model_len} without chunked prefill: raise it, or enable chunked prefill"
            )
        if self.max_num_active_seqs > limits.max_num_seqs:
            raise InputError(
                f"max_num_active_seqs={self.max_num_active_seqs}: must be ≤ max_num_seqs={limits.max_num_seqs}"
            )


_NEWEST = VllmV1(prefix_caching=True)
_UNTIL_0_32 = replace(_NEWEST, go_on_after_own_preemption=False, interval_when_alone=False)
_UNTIL_0_30 = replace(
    _UNTIL_0_32, threshold_when_alone=True, track_place=False, wait_for_output=False, decide_after_empty_step=False
)
_UNTIL_0_22 = replace(_UNTIL_0_30, plain_blocks_first=False, reserve_for_loads=False)

VERSIONS: dict[str, VllmV1] = {
    "vllm-0.33": _NEWEST,
    "vllm-0.32": _UNTIL_0_32,
    "vllm-0.24": _UNTIL_0_30,
    "vllm-0.20": _UNTIL_0_22,
    "vllm-0.16": replace(_UNTIL_0_22, reserve_full_prompt=False),
    "vllm-0.12": replace(_UNTIL_0_22, reserve_full_prompt=False, async_scheduling=False),
    "vllm-0.10": replace(
        _UNTIL_0_22,
        reserve_full_prompt=False,
        async_scheduling=False,
        skip_unfit_prompts=True,
        return_victim_tokens=False,
        stop_at_last_token=False,
    ),
}
"""vLLM's v1 schedulers as each version runs them by default."""
