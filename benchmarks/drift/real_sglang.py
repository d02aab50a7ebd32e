"""Run the real scheduler of SGLang 0.5.23 without a model: ``python real_sglang.py FOLDER < inputs > answers``.

FOLDER holds the unpacked wheel; the interpreter needs what the wheel's scheduler imports (torch, transformers < 5.20,
fastapi, msgspec, …). Scheduler, policies, prefill adder, batches, radix tree, allocators and the processing of results
are the engine's; model, sampling, metrics and streaming do nothing. Both loops, ``event_loop_normal`` and
``event_loop_overlap`` of managers/scheduler.py, are written here again. Times are whole ticks of 100 ns.

A request may wait for others (``after``, ``think_time``) and begin with the prompt and the answer of an earlier one
(``begins``), so what each generates is known beforehand.
"""

import hashlib
import importlib
import json
import logging
import os
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from heapq import heappop, heappush
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import host_memory  # type: ignore[import-not-found, unused-ignore]
import stand_ins  # type: ignore[import-not-found, unused-ignore]

ABSENT = (
    *("xgrammar", "sgl_kernel", "flashinfer", "vllm", "outlines", "llguidance", "decord", "torchao", "deep_gemm"),
    *("flash_attn", "sgl_deep_gemm", "tilelang", "cutlass", "cuda", "pynvml", "modelscope", "smg_grpc_servicer"),
    *("torch_memory_saver", "tvm_ffi", "nvshmem", "quack", "humming_kernels", "IPython", "datasets", "py_spy"),
    *("blobfile", "uvloop", "tml_renderers", "deep_ep", "triton_kernels", "flash_mla", "msgpack"),
)
OPTIONAL = ("torchaudio", "torchcodec", "timm", "soundfile", "av", "mistral_common", "gguf", "kernels")
"""What transformers asks for and can do without."""
TICKS = 10_000_000
IDLE_LIMIT = 3
CLOCK = [0.0]
"""Seconds, for what the engine measures with ``time.perf_counter``: it goes on a little with every look at it."""
A_LITTLE = 1e-11
FIRST_TOKEN, LAST_TOKEN, MASK = 100, 1 << 30, 0xFFFFFFFF
TIMES = {"base": 0.01, "per_prefill_tok": 1e-4, "per_decode": 1e-4, "per_ctx": 1e-7}

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
    s.page_size = page
    s.req_to_token_pool = engine("mem_cache.memory_pool").ReqToTokenPool(slots, longest + 8, "cpu", False)
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
    s.max_running_requests, s.max_queued_requests = slots, None
    s.enable_overlap = s.enable_skip_finishing_decode = not config.get("disable_overlap_schedule", True)


def add_delayer(s: Any, config: Json) -> None:
    """The prefill delayer of the only rank, which talks to nobody."""
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
            _gather_info=lambda **told: torch.tensor([[int(value) for value in in_order(told)]]),
            attn_dp_enabled=True,
            num_dp_ranks=1,
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


def add_absent(s: Any) -> None:
    """What is never used, and what does nothing."""
    modes = engine("disaggregation.utils").DisaggregationMode
    s.spec_algorithm = engine("speculative.spec_info").SpeculativeAlgorithm.NONE
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
    s.is_hybrid_swa = s.require_mlp_sync = False
    s.dllm_config = s.dynamic_chunk_sizer = s.truncation_align_size = s.hisparse_coordinator = None
    s.chunked_req = s._pending_chunked_abort_req = s.decode_offload_manager = s.scheduler_stage_metrics = None
    s.forward_ct = s.processed_tokens_counter = 0
    s.waiting_queue, s.last_batch, s.result_queue = [], None, deque()
    s.running_batch = engine("managers.schedule_batch").ScheduleBatch(reqs=[], batch_is_full=False)
    s.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
    s.beam_coordinator, s.session_controller, s.metrics_reporter = Nothing(), Nothing(), Nothing()
    vars(s.beam_coordinator).update(pending_member_rows=lambda _: 0, commit_decode=lambda _: set())
    vars(s.metrics_reporter).update(enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0)
    s.dp_attn_adapter = SimpleNamespace(
        maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
        maybe_convert_decode_to_extend=lambda batch: batch,
    )
    s.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
    s.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=object(), prefill_aware_swa=False))
    s.load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda **_: 0)
    s.model_config = Plain(is_encoder_decoder=False, vocab_size=1 << 31)
    s.send_abort_output = s._prefetch_kvcache = lambda *_: None


def build(config: Json, longest: int) -> Any:
    """A scheduler made without its constructor, which would start workers."""
    slots = config.get("max_running_requests", 64)
    publish(config, slots)
    cls = engine("managers.scheduler").Scheduler
    s = cls.__new__(cls)
    add_memory(s, config, slots, longest)
    add_settings(s, config, slots)
    add_absent(s)
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
        model_worker=None,
        logprob_result_processor=Nothing(),
        output_streamer=Nothing(),
        abort_request=lambda *_: None,
        **{name: getattr(s, name) for name in (*shared, *more)},
    )
    return s


# Requests.


def stream(name: str, count: int) -> list[int]:
    """The first tokens of the stream of this name."""
    draw = random.Random(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16))
    return [draw.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def request(row: Json, config: Json, texts: dict[str, list[int]]) -> Any:
    """The engine's request; it ends at ``output_len``, whatever it declares. ``texts``: of earlier ones, by their ids,
    prompt and answer; its own is added."""
    batches = engine("managers.schedule_batch")
    name, (other, count) = str(row["id"]), row.get("begins") or ("", 0)
    tokens = texts[other][:count] if count else []
    for segment, count in row.get("prefix", []):
        tokens += stream(f"shared {segment}", count)
    del tokens[row["prompt_len"] :]
    tokens += stream(f"own {name}", row["prompt_len"] - len(tokens))
    params = engine("sampling.sampling_params").SamplingParams(
        max_new_tokens=config.get("declared_max_new_tokens") or row["output_len"],
        ignore_eos=config.get("ignore_eos", False),
    )
    params.normalize(None)
    priority = row.get("priority", 0) if config.get("enable_priority_scheduling") else None
    key = row.get("routing_key")
    req = batches.Req(name, "", array("q", tokens), params, eos_token_ids=None, priority=priority, routing_key=key)

    def update_finish_state(_: int = 1) -> None:
        if not req.finished() and len(req.output_ids) >= row["output_len"]:
            req.finished_reason = batches.FINISH_LENGTH(length=row["output_len"])
            req.finished_len = row["output_len"]

    req.update_finish_state = update_finish_state
    req.answer = stream(f"answer of {name}", row["output_len"])
    texts[name] = tokens + req.answer
    return req


def look_at_clock() -> float:
    """In place of ``time.perf_counter``."""
    CLOCK[0] += A_LITTLE
    return CLOCK[0]


def mixed(x: int) -> int:
    """A number of 32 bits as good as random, as windtunnel draws it (lowbias32 of C. Wellons' hash prospector): whom
    ``random`` takes is no rule."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


# The loops.


class Flying(NamedTuple):
    """A batch whose outcome the scheduler does not know yet."""

    batch: Any
    reqs: list[Any]
    step: Json


class Witness:
    """Notes whom the engine retracts, aborts and preempts."""

    def __init__(self) -> None:
        self.retracted: list[str] = []
        self.aborted: list[str] = []
        self.preempted: list[str] = []
        batch, adder = engine("managers.schedule_batch").ScheduleBatch, engine("managers.schedule_policy").PrefillAdder
        retract, preempt, witness = batch.retract_decode, adder.preempt_to_schedule, self

        def retract_decode(self: Any, *arguments: Any) -> Any:
            found = retract(self, *arguments)
            witness.retracted += [req.rid for req in found[0]]
            witness.aborted += [req.rid for req in found[2]]
            return found

        def preempt_to_schedule(self: Any, req: Any, *arguments: Any) -> Any:
            before = len(self.preempt_list)
            made = preempt(self, req, *arguments)
            # the engine keeps those that go together in a set: here they queue in the order in which they came
            self.preempt_list[before:] = sorted(self.preempt_list[before:], key=lambda one: one.rank)
            witness.preempted += [one.rid for one in self.preempt_list[before:]]
            return made

        batch.retract_decode, adder.preempt_to_schedule = retract_decode, preempt_to_schedule

    def clear(self) -> None:
        """A new round begins."""
        self.retracted, self.aborted, self.preempted = [], [], []


def record(s: Any, batch: Any, witness: Witness, arrived: list[str]) -> Json:
    """What the scheduler decided."""
    extends = batch.forward_mode.is_extend()
    decodes = [req.rid for req in (batch.decoding_reqs or [])] if extends else [req.rid for req in batch.reqs]
    names = [req.rid for req in batch.reqs]
    if extends:
        tokens = dict(zip(names, batch.extend_lens, strict=True))
        start = dict(zip(names, batch.prefix_lens, strict=True))
    else:
        tokens = dict.fromkeys(names, 1)
        start = dict(zip(names, [int(n) - 1 for n in batch.seq_lens_cpu.tolist()], strict=True))
    return {
        "mode": "decode" if not extends else "mixed" if decodes else "extend",
        "arrived": arrived,
        "scheduled": tokens,
        "start_pos": start,
        "retracted": witness.retracted,
        "preempted": sorted(witness.preempted, key=lambda name: int(name[1:])),
        "aborted": witness.aborted,
        "new_token_ratio": round(s.new_token_ratio_tracker.current, 6),
        "chunked_req": s.chunked_req.rid if s.chunked_req else None,
        "running": [req.rid for req in s.running_batch.reqs],
        "waiting": [req.rid for req in s.waiting_queue],
        "batch_is_full": bool(s.running_batch.batch_is_full),
        **memory(s, ""),
        "decodes": decodes,
    }


def memory(s: Any, when: str) -> Json:
    """Free and evictable tokens."""
    free, evictable = s.token_to_kv_pool_allocator.available_size(), s.tree_cache.evictable_size()
    return {f"available{when}": free, f"evictable{when}": evictable}


def launch(s: Any, batch: Any, step: Json, ticks: Json, times: tuple[int, int]) -> Flying:
    """The batch runs, for as long as the recorders' formula says. ``times``: it was decided, and may start."""
    (decided, start), decodes = times, step.pop("decodes")
    prompts = sum(tokens for name, tokens in step["scheduled"].items() if name not in decodes)
    length = ticks["base"] + ticks["per_prefill_tok"] * prompts + ticks["per_decode"] * len(decodes)
    length += ticks["per_ctx"] * sum(step["start_pos"].values())
    step |= {"t_sched": decided, "t_start": start, "t_end": start + length}
    s.processed_tokens_counter += prompts
    s.forward_ct += 1
    batch.input_ids = None
    return Flying(batch.copy() if s.enable_overlap else batch, list(batch.reqs), step)


def land(s: Any, flying: Flying) -> Json:
    """The outcome is processed: the finished step. What was computed once too often is any token."""
    before = [len(req.output_ids) for req in flying.reqs]
    sampled = [
        (*req.answer, FIRST_TOKEN)[min(count, len(req.answer))] for req, count in zip(flying.reqs, before, strict=True)
    ]
    extends = flying.batch.forward_mode.is_extend()
    feed = s.results.process_batch_result_prefill if extends else s.results.process_batch_result_decode
    feed(
        flying.batch,
        Plain(
            next_token_ids=importlib.import_module("torch").tensor(sampled),
            can_run_cuda_graph=False,
            grammar_advanced=False,
            num_correct_drafts=0,
            get_num_generated_tokens=lambda count: count,
            skipped_output_comm=False,
        ),
    )
    emitted = [req for req, count in zip(flying.reqs, before, strict=True) if len(req.output_ids) > count]
    ends = [req.rid for req in emitted if req.finished()]
    step = flying.step | {"emitted": [req.rid for req in emitted], "finished": ends}
    return step | memory(s, "_after_update")


class Coming:
    """The requests that have not arrived."""

    def __init__(self, document: Json) -> None:
        """Of a recording's input: those that wait for others come in the order of the file, else in that of arrival."""
        rows: list[Json] = document["requests"]
        if not any("after" in row or "begins" in row for row in rows):
            rows = sorted(rows, key=lambda row: row["arrival"])
        texts: dict[str, list[int]] = {}
        self.reqs = [request(row, document["config"], texts) for row in rows]
        self.arrival = [round(row.get("arrival", 0) * TICKS) for row in rows]
        self.waits = {rank: set(row["after"]) for rank, row in enumerate(rows) if row.get("after")}
        self.think = [round(row.get("think_time", 0) * TICKS) for row in rows]
        self.heap = sorted((time, rank) for rank, time in enumerate(self.arrival) if rank not in self.waits)
        for rank, req in enumerate(self.reqs):
            req.rank = rank
        for number, req in enumerate(sorted(self.reqs, key=lambda one: one.rid)):
            req.number = number

    def arrived(self, now: int) -> Iterator[Any]:
        """Those that are there."""
        while self.heap and self.heap[0][0] <= now:
            yield self.reqs[heappop(self.heap)[1]]

    def ended(self, names: list[str], time: int) -> None:
        """Who waited for these comes after its think time."""
        for rank, waits in list(self.waits.items()):
            if waits & set(names):
                waits.difference_update(names)
                if not waits:
                    del self.waits[rank]
                    heappush(self.heap, (time + self.think[rank], rank))


def run(document: Json, witness: Witness) -> Iterator[Json]:
    """Every step of one workload."""
    config, coming = document["config"], Coming(document)
    ticks = {name: round(value * TICKS) for name, value in (TIMES | document.get("batch_time", {})).items()}
    s = build(config, 2 * max(row["prompt_len"] + row["output_len"] for row in document["requests"]))
    flying, now, idle, sorts = deque[Flying](), 0, 0, 0

    def shuffle(waiting: list[Any]) -> None:
        nonlocal sorts
        sorts += 1
        waiting.sort(key=lambda req: mixed(mixed(req.number) ^ mixed(sorts)))

    engine("managers.schedule_policy").random = SimpleNamespace(shuffle=shuffle)
    while (flying or not all(req.finished() for req in coming.reqs)) and idle <= IDLE_LIMIT:
        arrived, CLOCK[0] = [], now / TICKS
        for req in coming.arrived(now):
            s._add_request_to_queue(req)
            arrived.append(req.rid)
        witness.clear()
        s.result_queue = deque((one.batch, None) for one in flying)
        plan = s.get_next_batch_to_run(running_batch=s.running_batch, last_batch=s.last_batch)
        s.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch is not None:
            start = max(now, flying[-1].step["t_end"]) if flying else now
            flying.append(launch(s, batch, record(s, batch, witness, arrived), ticks, (now, start)))
            idle = 0
        if s.last_batch is not None if s.enable_overlap else batch is not None:
            now = max(now, flying[0].step["t_end"])
            step = land(s, flying.popleft())
            coming.ended(step["finished"], step["t_end"])
            yield step
        elif batch is None:
            s.new_token_ratio_tracker.reset()
            now, idle = (max(now, coming.heap[0][0]), 0) if coming.heap else (now, idle + 1)
        s.last_batch = batch
    if s.waiting_queue:
        raise RuntimeError("goes on for ever")


def in_seconds(step: Json) -> Json:
    """With times as recordings have them."""
    return step | {name: round(step[name] / TICKS, 7) for name in ("t_sched", "t_start", "t_end")}


def main() -> None:
    """Answer standard input."""
    sys.path.insert(0, sys.argv[1])
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "0")
    time.perf_counter = look_at_clock
    stand_ins.install(ABSENT, absent_for="transformers", optional=OPTIONAL)
    torch = importlib.import_module("torch")
    stand_ins.pretend_versions()
    real = torch.library.register_fake
    torch.library.register_fake = lambda op, *a, **k: (
        (lambda function: function) if str(op).startswith("torchvision::") else real(op, *a, **k)
    )
    logging.disable(logging.WARNING)
    with redirect_stdout(sys.stderr):
        for name in ("managers.schedule_batch", "mem_cache.allocation", "mem_cache.common"):
            engine(name).is_pin_memory_available = lambda *_, **__: False
        engine("managers.schedule_batch").SamplingBatchInfo = NoSampling
        witness = Witness()
    for line in sys.stdin:
        steps, died = list[Json](), ""
        try:
            with redirect_stdout(sys.stderr):  # an engine that dies prints its tree
                steps.extend(map(in_seconds, run(json.loads(line), witness)))
        except (RuntimeError, AssertionError, ValueError) as error:
            died = f"{type(error).__name__}: {error}"[:300]
        sys.stdout.write(json.dumps({"steps": steps, "died": died}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
