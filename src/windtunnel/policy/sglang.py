"""SGLang's scheduler as data (0.4.6.post5 and 0.5.23: managers/scheduler.py, schedule_policy.py, server_args.py)."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, Self

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_words
from windtunnel.policy.drafts import Drafts
from windtunnel.policy.settings import Limits, Settings

Order = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "hrrn", "shortest-prefill-first", "routing-key"]
Eviction = Literal["lru", "lfu", "slru", "priority", "fifo", "filo", "mru"]
OLD: Mapping[str, frozenset[str]] = {"schedule_policy": frozenset({"fcfs", "lpm", "dfs-weight", "lof", "random"})}
"""Values that 0.4.6 has of settings with more values since."""

INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
"""Constants of sglang/global_config.py."""

LEAST = {
    "pipeline_parallel_size": 1,
    "page_size": 1,
    "prefill_max_requests": 0,
    "prefill_decode_interval": 0,
    "prefill_decode_interval_min_bs": 0,
    "min_free_slots_delay": 0,
    "max_queued_requests": 0,
    "priority_scheduling_preemption_threshold": 0,
    "prefill_delayer_max_delay_passes": 1,
    "prefill_delayer_token_usage_low_watermark": 0,
    "prefill_delayer_queue_min_ratio": 0,
    "prefill_delayer_max_delay_ms": 0,
}
"""The smallest value of each."""
NEWER = frozenset(LEAST) - {"pipeline_parallel_size"} | {
    "radix_eviction_policy",
    "retraction_policy",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "disable_priority_preemption",
    "enable_prefill_delayer",
}
"""What only 0.5.23 has here."""


@dataclass(frozen=True)
class Sglang(Settings):
    """SGLang's rules, in its words: rounds of prefills alone, otherwise one decode of all; memory counted in tokens.

    A round prefills waiting requests as long as the memory that they and the running ones are expected to need is
    free; what running ones still need is guessed by a ratio, which falls while decoding goes well and jumps when
    memory ran out and a request had to be retracted. Page size 1.
    """

    follows: ClassVar[frozenset[str]] = frozenset({"enable_chunked_prefill", "enable_prefix_caching"})
    why_unfinished: ClassVar[str] = (
        "one that was retracted asks for more memory than there is, with what it had generated"
    )
    counts_tokens_late: ClassVar[bool] = True

    version: Literal["0.4.6", "0.5.23"] = "0.5.23"
    """The release whose rules are followed."""
    chunked_prefill: bool = True
    """Cut prompts at max_num_batched_tokens, which is chunked_prefill_size."""
    max_prefill_tokens: int = 16384
    """Prompt tokens of one round, where the first request may exceed it."""
    schedule_policy: Order = "fcfs"
    """First come first served, longest prefix match, depth first through the tree, longest output first, drawn by the
    seed of the run; highest response ratio, shortest prompt first, those whose routing key (their session) most running
    requests have (0.5)."""
    radix_cache: bool = True
    """Prompts that share a beginning share its tokens, and what ended stays until room is needed."""
    schedule_conservativeness: float = 1.0
    """Factor of the ratio at the start."""
    enable_mixed_chunk: bool = False
    """Running requests also decode in the prefill rounds."""
    ignore_eos: bool = False
    """Every request declares its true length: without radix cache, admission follows the memory to each one's end."""

    disable_overlap_schedule: bool = False
    """Decide a round when the one before it has ended, and not while that one runs."""
    pipeline_parallel_size: int = 1
    """Stages of a pipeline, with a micro-batch of its own each; they have no overlap schedule (event_loop_pp of
    managers/scheduler.py)."""

    # What 0.5 has and 0.4.6 has not, or not here.
    page_size: int = 1
    """Tokens that are handed out, cached and found at once."""
    radix_eviction_policy: Eviction = "lru"
    """Which cached beginnings are evicted first."""
    retraction_policy: Literal["default", "priority"] = "default"
    """Whether the priority counts before what was generated when one has to be sent back."""
    prefill_max_requests: int = 0
    """Requests of a prefill round; 0: as many as fit."""
    prefill_decode_interval: int = 0
    """Rounds without prompts after one with them."""
    prefill_decode_interval_min_bs: int = 0
    """Running requests below which that does not hold."""
    min_free_slots_delay: int = 0
    """New prompts run beside others only if this many seats are free (``--min-free-slots-delay``)."""
    max_queued_requests: int = 0
    """Requests that wait at most; one more is refused, or, with priorities, the least urgent that waits if that is less
    urgent, of equals the newest. So are those that are sent back. 0: any number; prefill and decode servers ignore it
    (managers/scheduler.py, ``_abort_on_queued_limit``)."""
    enable_priority_scheduling: bool = False
    """The most urgent request of the queue is first; the larger its number the more urgent."""
    schedule_low_priority_values_first: bool = False
    """The smaller the number the more urgent."""
    priority_scheduling_preemption_threshold: int = 10
    """A request that finds no seat sends those back whose priority differs by more than this."""
    disable_priority_preemption: bool = False
    """None is sent back for that."""
    enable_prefill_delayer: bool = False
    """Ranks of attention let prompts run together: when all have one, and then when as many seats are free as a round
    with prompts had lately."""
    prefill_delayer_max_delay_passes: int = 30
    """Prompts are held fewer rounds in a row than this."""
    prefill_delayer_token_usage_low_watermark: float = 0.0
    """None are held while a rank that has one uses less than this share of its memory."""
    prefill_delayer_queue_min_ratio: float = 0.0
    """They are also held while fewer requests wait than this share of those that run, or than a round with prompts had
    lately, if that is less; 0: no such rule."""
    prefill_delayer_max_delay_ms: float = 5000.0
    """At most so long for that."""
    drafts: Drafts | None = None
    """What a drafter proposes, which rounds verify; None: nothing."""

    def __post_init__(self) -> None:
        if self.max_prefill_tokens < 1:
            raise InputError(f"max_prefill_tokens={self.max_prefill_tokens}: must be ≥ 1")
        if not self.schedule_conservativeness >= 0:
            raise InputError(f"schedule_conservativeness={self.schedule_conservativeness}: must be ≥ 0")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ {least}")
        if self.pipeline_parallel_size > 1 and self.enable_mixed_chunk:
            raise InputError("enable_mixed_chunk: SGLang has none with pipeline_parallel_size > 1; leave it out")
        if self.pipeline_parallel_size > 1 and self.max_queued_requests:
            most = f"max_queued_requests={self.max_queued_requests}"
            raise InputError(f"{most}: not simulated with pipeline_parallel_size > 1; leave it out")
        if self.drafts and not self.takes_drafts:
            raise InputError(
                "drafts: not simulated with version='0.4.6', enable_mixed_chunk or pipelines; leave them out"
            )
        require_words(self)
        self._check_version()
        self._check_orders()

    def _check_version(self) -> None:
        """Raise InputError for what 0.4.6 has not."""
        if self.version != "0.4.6":
            return
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in NEWER and value != field.default:
                raise InputError(f"{field.name}={value}: SGLang has it from 0.5 on, here as 0.5.23; leave out version")
            if field.name in OLD and value not in OLD[field.name]:
                known = " or ".join(sorted(OLD[field.name]))
                raise InputError(f"{field.name}={value}: must be {known} with version='0.4.6'")

    def _check_orders(self) -> None:
        """Raise InputError for settings that need each other."""
        if self.enable_priority_scheduling and self.schedule_policy not in ("fcfs", "lof"):
            raise InputError(f"schedule_policy={self.schedule_policy!r}: must be 'fcfs' or 'lof' with priorities")
        if self.schedule_policy == "shortest-prefill-first" and not self.radix_cache:
            raise InputError("schedule_policy='shortest-prefill-first': needs the radix cache")
        if self.retraction_policy == "priority" and not self.enable_priority_scheduling:
            raise InputError("retraction_policy='priority': needs enable_priority_scheduling")
        if self.enable_prefill_delayer and not self.async_scheduling:
            raise InputError(
                "enable_prefill_delayer: needs the overlap schedule: leave out disable_overlap_schedule and pipelines"
            )
        if self.enable_prefill_delayer and self.exact_release:
            raise InputError("enable_prefill_delayer: not simulated with ignore_eos without the radix cache")

    @property
    def async_scheduling(self) -> bool:
        """A round is decided while the one before it runs: a request that arrives meanwhile is seen a round later, and
        one that ends takes part in one more (0.5: only if it ends before its declared length)."""
        return not self.disable_overlap_schedule and self.pipeline_parallel_size == 1

    @property
    def prefix_caching(self) -> bool:
        """Prompts that share a beginning share its tokens."""
        return self.radix_cache

    @property
    def takes_drafts(self) -> bool:
        """See Settings."""
        return self.version != "0.4.6" and self.pipeline_parallel_size == 1 and not self.enable_mixed_chunk

    @property
    def tokens_ahead(self) -> int:
        """Tokens that a running request holds beyond those that are known: those of a round, and as many for one in
        flight (0.5.23: mem_cache/allocation_sizing.py, ``get_alloc_reserve_per_decode``)."""
        return 2 * (1 + self.drafts.num_speculative_tokens) if self.drafts else 0

    def with_drafts(self, drafts: Drafts | None) -> Self:
        """The settings with speculation."""
        return replace(self, drafts=drafts)

    @property
    def takes_stores(self) -> bool:
        """See Settings: HiCache of 0.5, host memory behind the tree."""
        plain = self.pipeline_parallel_size == 1 and self.radix_eviction_policy == "lru"
        return self.radix_cache and self.version != "0.4.6" and plain

    @property
    def recalls_the_ended(self) -> bool:
        """Seats and the tree name the requests that they came from."""
        return True

    @property
    def init_new_token_ratio(self) -> float:
        """The ratio at the start, and again after every idle round."""
        return min(INIT_NEW_TOKEN_RATIO * self.schedule_conservativeness, 1.0)

    @property
    def min_new_token_ratio(self) -> float:
        """Where the decay ends."""
        return min(self.init_new_token_ratio * MIN_NEW_TOKEN_RATIO_FACTOR, 1.0)

    @property
    def new_token_ratio_decay(self) -> float:
        """What a decode round without retraction takes from the ratio."""
        return (self.init_new_token_ratio - self.min_new_token_ratio) / NEW_TOKEN_RATIO_DECAY_STEPS

    @property
    def exact_release(self) -> bool:
        """Admission follows the memory to each request's end (schedule_policy.py, ``add_one_req_ignore_eos``)."""
        return self.ignore_eos and not self.radix_cache

    def longest_round(self, limits: Limits) -> int:
        """Most tokens of a round without chunks: of the first request, or up to max_prefill_tokens. Exact release
        looks at that limit only before it admits a request, which may then exceed it."""
        if self.exact_release:
            return self.max_prefill_tokens - 1 + limits.max_model_len
        return max(self.max_prefill_tokens, limits.max_model_len)

    def micro_batch(self, limits: Limits) -> int:
        """Requests of a micro-batch (managers/scheduler.py, ``max_micro_batch_size``)."""
        return max(limits.max_num_seqs // self.pipeline_parallel_size, 1)

    def check(self, limits: Limits) -> None:
        """Raise InputError if a round may exceed max_num_batched_tokens."""
        if not self.chunked_prefill and limits.max_num_batched_tokens < (longest := self.longest_round(limits)):
            what = "max_prefill_tokens − 1 plus" if self.exact_release else "the larger of max_prefill_tokens and"
            raise InputError(
                f"max_num_batched_tokens={limits.max_num_batched_tokens}: must be ≥ {longest} without "
                f"chunked_prefill, {what} max_model_len"
            )

    def in_role(self, role: str) -> Self:
        """Decode servers keep no radix cache (server_args.py: ``disable_radix_cache``), and delay no prompts; neither
        they nor prefill servers limit their queue."""
        without = self if role == "mixed" else replace(self, max_queued_requests=0)
        return replace(without, radix_cache=False, enable_prefill_delayer=False) if role == "decode" else without

    def with_flags(self, flags: Mapping[str, Any]) -> Self:
        """The settings of an engine with these arguments; max_num_batched_tokens is its chunked_prefill_size."""
        return replace(
            self,
            chunked_prefill=flags["enable_chunked_prefill"] is not False,
            radix_cache=bool(flags["enable_prefix_caching"]),
            disable_overlap_schedule=flags["async_scheduling"] is False,
            pipeline_parallel_size=flags["pipeline_parallel_size"],
        )

    def longest_request(self, limits: Limits) -> int:
        """Tokens of prompt and output together that a request may declare: what memory and max_model_len hold, less
        two. Source: managers/scheduler.py, ``max_req_len``."""
        return min(limits.max_model_len, limits.num_blocks * limits.block_size) - 2
