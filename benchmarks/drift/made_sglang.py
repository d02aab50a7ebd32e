"""SGLang's scheduler made without its constructor, which would start workers: what decides is the engine's, what would
need a model or a device does nothing."""

import importlib
from collections import deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import host_memory  # type: ignore[import-not-found, unused-ignore]
import ranks  # type: ignore[import-not-found, unused-ignore]

Json = dict[str, Any]


def engine(name: str) -> Any:
    """A module of the engine."""
    return importlib.import_module(f"sglang.srt.{name}")


class Nothing:
    """Does nothing, keeps nothing, is false."""

    def __getattr__(self, name: str) -> Any:
        """Itself."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Itself."""
        return self

    def __bool__(self) -> bool:
        """False."""
        return False


class NoSampling:
    """In place of the sampling parameters of a batch."""

    penalizer_orchestrator = SimpleNamespace(is_required=False)

    @classmethod
    def from_schedule_batch(cls, *_: Any) -> Any:
        """Those of any batch."""
        return cls()

    def filter_batch(self, *_: Any) -> None:
        """Some requests leave."""

    def merge_batch(self, *_: Any) -> None:
        """Others come."""


class Plain(SimpleNamespace):
    """An object whose other attributes are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


class NoDrafts:
    """In place of what a drafter keeps of a batch."""

    def filter_batch(self, **_: Any) -> None:
        """Some requests leave."""

    def merge_batch(self, _: Any) -> None:
        """Others come."""


ALGORITHMS = {"eagle": "EAGLE", "draft_model": "STANDALONE"}
"""Method of a recording's ``spec`` → SGLang's word."""


# The scheduler.


def publish(config: Json, slots: int) -> None:
    """Let the engine read these server arguments."""
    context = engine("runtime_context")
    names = {
        "schedule_policy": "fcfs",
        "schedule_conservativeness": 1.0,
        "page_size": 1,
        "disable_radix_cache": False,
        "chunked_prefill_size": 512,
        "enable_mixed_chunk": False,
        "max_prefill_tokens": 16384,
        "disable_overlap_schedule": True,
        "enable_priority_scheduling": False,
        "schedule_low_priority_values_first": False,
        "radix_eviction_policy": "lru",
        "retraction_policy": None,
        "prefill_max_requests": None,
        "enable_prefill_delayer": False,
        "prefill_delayer_queue_min_ratio": None,
        "prefill_delayer_max_delay_ms": None,
    }
    given = {name: config.get(name, default) for name, default in names.items()}
    given |= {"max_running_requests": slots, "pp_max_micro_batch_size": slots, "device": "cpu"}
    given["attention_backend"] = "torch_native"
    if spec := config.get("spec"):
        given |= {"speculative_num_steps": spec["k"], "speculative_eagle_topk": 1}
        given |= {"speculative_algorithm": ALGORITHMS[spec["method"]], "speculative_num_draft_tokens": spec["k"] + 1}
    given = {name: value for name, value in given.items() if value is not None}
    context.get_context().override_server_args(**given).install()
    ranks = dict.fromkeys(("tp_rank", "attn_tp_rank", "pp_rank", "attn_dp_rank", "attn_cp_rank"), 0)
    for name, value in (ranks | {"pp_max_micro_batch_size": slots}).items():
        with suppress(Exception):  # some are not there without ranks
            context.get_parallel().override_permanently(**{name: value})


def add_memory(s: Any, config: Json, slots: int, longest: int) -> None:
    """Pools, and the tree of prefixes."""
    torch = importlib.import_module("torch")
    page, chunk = config.get("page_size", 1), config.get("chunked_prefill_size", 512)
    total = config.get("max_total_tokens", 4096) // page * page
    ahead = 2 * (config["spec"]["k"] + 1) + 2 * page if config.get("spec") else 0
    s.page_size = page
    s.req_to_token_pool = engine("mem_cache.memory_pool").ReqToTokenPool(slots, longest + 8 + ahead, "cpu", False)
    if page == 1:
        plain = engine("mem_cache.allocator.token").TokenToKVPoolAllocator
        s.token_to_kv_pool_allocator = plain(total, torch.float16, "cpu", Nothing(), False)
    else:
        paged = engine("mem_cache.allocator.paged").PagedTokenToKVPoolAllocator
        s.token_to_kv_pool_allocator = paged(total, page, torch.float16, "cpu", Nothing(), False)
        s.token_to_kv_pool_allocator.use_triton_kernels = False
    s.tree_cache = engine("mem_cache.unified_radix_cache").UnifiedRadixCache(
        engine("mem_cache.cache_init_params").CacheInitParams(
            disable=config.get("disable_radix_cache", False),
            req_to_token_pool=s.req_to_token_pool,
            token_to_kv_pool_allocator=s.token_to_kv_pool_allocator,
            page_size=page,
            eviction_policy=config.get("radix_eviction_policy", "lru"),
            tree_components=(engine("mem_cache.unified_cache.component_type").ComponentType.FULL,),
            chunked_prefill_size=chunk if chunk > 0 else None,
            is_eagle=bool(config.get("spec")) and config["spec"]["method"] == "eagle",
        )
    )


def add_settings(s: Any, config: Json, slots: int) -> None:
    """What the scheduler decides by."""
    chunk, low_first = config.get("chunked_prefill_size", 512), config.get("schedule_low_priority_values_first", False)
    by_priority = config.get("enable_priority_scheduling", False)
    s.schedule_policy = config.get("schedule_policy", "fcfs")
    s.enable_priority_scheduling, s.schedule_low_priority_values_first = by_priority, low_first
    s.enable_priority_preemption = by_priority and not config.get("disable_priority_preemption", False)
    s.priority_scheduling_preemption_threshold = config.get("priority_scheduling_preemption_threshold", 10)
    s.abort_on_priority_when_disabled = False
    policy = engine("managers.schedule_policy").SchedulePolicy
    s.policy = policy(s.schedule_policy, s.tree_cache, False, by_priority, low_first)
    s.new_token_ratio_tracker = engine(
        "managers.scheduler_components.new_token_ratio_tracker"
    ).NewTokenRatioTracker.from_config()
    delay = engine("managers.min_free_slots_delayer")
    free = delay.resolve_min_free_slots(config.get("min_free_slots"), slots)
    s.min_free_slots_delayer = delay.MinFreeSlotsDelayer(free) if free else None
    s.prefill_decode_interval = config.get("prefill_decode_interval", 0)
    s.prefill_decode_interval_min_bs = config.get("prefill_decode_interval_min_bs", 0)
    s._prefill_decode_interval_remaining = 0
    add_delayer(s, config)
    s.chunked_prefill_size = chunk if chunk > 0 else None
    s.is_mixed_chunk = chunk > 0 and config.get("enable_mixed_chunk", False)
    s.max_prefill_tokens = config.get("max_prefill_tokens", 16384)
    s.max_running_requests, s.max_queued_requests = slots, config.get("max_queued_requests")
    s.enable_overlap = s.enable_skip_finishing_decode = not config.get("disable_overlap_schedule", True)


def add_delayer(s: Any, config: Json) -> None:
    """The prefill delayer."""
    delayer = engine("managers.prefill_delayer")
    s.prefill_bs_tracker, s.max_prefill_bs, s.prefill_delayer = delayer.RecentPrefillBatchSizeTracker(), 0, None
    if config.get("enable_prefill_delayer", False):
        torch = importlib.import_module("torch")
        found = s.prefill_delayer = delayer.PrefillDelayer.__new__(delayer.PrefillDelayer)
        vars(found).update(
            _max_delay_passes=config.get("prefill_delayer_max_delay_passes", 30),
            _token_usage_low_watermark=config.get("prefill_delayer_token_usage_low_watermark"),
            _queue_min_ratio=config.get("prefill_delayer_queue_min_ratio"),
            _queue_trigger_enabled="prefill_delayer_queue_min_ratio" in config,
            _max_delay_ms=config.get("prefill_delayer_max_delay_ms", 5000.0),
            _prefill_max_requests=config.get("prefill_max_requests"),
            _metrics_collector=None,
            _debug_log_enabled=False,
            _curr_state=None,
            _gather_info=lambda **told: torch.tensor(ranks.tell([int(value) for value in in_order(told)])),
            attn_dp_enabled=True,
            num_dp_ranks=config.get("attention_dp_size", 1),
            skip_first_delayer=True,
        )
        s.pool_stats_observer = SimpleNamespace(get_pool_stats=lambda: usage(s))


def in_order(told: Json) -> list[Any]:
    """What a rank tells others, as the delayer packs it."""
    names = ("local_prefillable", "local_token_watermark_force_allow", "running_batch", "max_prefill_bs")
    return [told[name] for name in (*names, "waiting_queue_len", "queue_timeout_expired")]


def usage(s: Any) -> Any:
    """How full memory is (PoolStatsObserver)."""
    pool = s.token_to_kv_pool_allocator
    free = pool.available_size() + s.tree_cache.evictable_size()
    return SimpleNamespace(get_max_pool_usage=lambda: (pool.size - free) / pool.size)


def add_absent(s: Any, config: Json) -> None:
    """What is never used, and what does nothing."""
    modes = engine("disaggregation.utils").DisaggregationMode
    algorithms = engine("speculative.spec_info").SpeculativeAlgorithm
    s.spec_algorithm = algorithms.from_string(ALGORITHMS[config["spec"]["method"]] if config.get("spec") else None)
    s.disaggregation_mode, s.is_generation, s.device = modes.NULL, True, "cpu"
    for name in (
        "hierarchical_cache",
        "hicache_storage",
        "lmcache",
        "unified_cache_external_linker",
        "lora",
        "hisparse",
    ):
        setattr(s, f"enable_{name}", False)
    s.is_hybrid_swa = False
    s.dllm_config = s.dynamic_chunk_sizer = s.truncation_align_size = s.hisparse_coordinator = None
    s.chunked_req = s._pending_chunked_abort_req = s.decode_offload_manager = s.scheduler_stage_metrics = None
    s.drafts, s.ahead = config.get("spec"), {}
    s.forward_ct = s.processed_tokens_counter = 0
    s.waiting_queue, s.last_batch, s.result_queue = [], None, deque()
    s.running_batch = engine("managers.schedule_batch").ScheduleBatch(reqs=[], batch_is_full=False)
    s.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
    s.beam_coordinator, s.session_controller, s.metrics_reporter = Nothing(), Nothing(), Nothing()
    vars(s.beam_coordinator).update(pending_member_rows=lambda _: 0, commit_decode=lambda _: set())
    vars(s.metrics_reporter).update(enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0)
    s.dp_attn_adapter = SimpleNamespace(
        maybe_prepare_mlp_sync_batch=lambda batch, need_sync=True: together(s, batch) if need_sync else batch,
        maybe_convert_decode_to_extend=lambda batch: batch,
    )
    s.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
    s.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=object(), prefill_aware_swa=False))
    s.load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda **_: 0)
    s.model_config = Plain(is_encoder_decoder=False, vocab_size=1 << 31)
    s._prefetch_kvcache, s.refused = lambda *_: None, []
    s.send_abort_output = lambda message, req: refuse(s, message, req)


def refuse(s: Any, message: Any, req: Any) -> None:
    """A request ends because the queue is full."""
    s.refused.append(req)
    req.finished_reason = message.finished_reason


def together(s: Any, batch: Any) -> Any:
    """What a rank runs while others run something: an idle batch if it has none (prepare_mlp_sync_batch_raw)."""
    if not s.require_mlp_sync:
        return batch
    told = ranks.tell((batch is not None, batch is not None and batch.forward_mode.is_extend()))
    if batch is None and any(runs for runs, _ in told):
        pools = s.req_to_token_pool, s.token_to_kv_pool_allocator, s.tree_cache
        kind = engine("managers.schedule_batch").ScheduleBatch
        batch = kind.init_new([], *pools, s.model_config, s.enable_overlap, s.spec_algorithm)
        batch.prepare_for_idle()
    if batch is not None:
        batch.is_extend_in_batch = any(extends for _, extends in told)
    return batch


def build(config: Json, longest: int) -> Any:
    """A scheduler made without its constructor, which would start workers."""
    slots = config.get("max_running_requests", 64)
    publish(config, slots)
    cls = engine("managers.scheduler").Scheduler
    s = cls.__new__(cls)
    add_memory(s, config, slots, longest)
    add_settings(s, config, slots)
    add_absent(s, config)
    s.require_mlp_sync = config.get("attention_dp_size", 1) > 1
    if tokens := config.get("hicache_tokens"):
        host_memory.add_host_memory(s, tokens, config.get("hicache_write_policy", "write_through"))
    shared = ("token_to_kv_pool_allocator", "tree_cache", "hisparse_coordinator", "req_to_token_pool")
    more = ("decode_offload_manager", "metrics_reporter", "beam_coordinator", "model_config", "enable_overlap")
    s.results = engine("managers.scheduler_components.batch_result_processor").SchedulerBatchResultProcessor(
        is_generation=True,
        disaggregation_mode=s.disaggregation_mode,
        enable_overlap_mlx=False,
        metrics_collector=Nothing(),
        draft_worker=None,
        model_worker=Nothing(),
        logprob_result_processor=Nothing(),
        output_streamer=Nothing(),
        abort_request=lambda *_: None,
        **{name: getattr(s, name) for name in (*shared, *more)},
    )
    return s
