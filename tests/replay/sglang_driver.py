"""Run the real scheduler of SGLang 0.4.6.post5 without a model: ``python sglang_driver.py FOLDER < workloads > lines``.

FOLDER holds the unpacked wheel; the interpreter needs torch. Standard input is a JSON list of recordings' inputs with
the prompts' tokens spelled out (``tokens``). For each, a line comes back: its step records, up to the error that ended
it if there is one. The compiled parts of the engine, and all it imports beside its scheduler, are
replaced by objects that do nothing.
"""

import importlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

REAL = {
    "sglang.global_config",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.managers.schedule_policy",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.scheduler_output_processor_mixin",
    "sglang.srt.mem_cache.base_prefix_cache",
    "sglang.srt.mem_cache.chunk_cache",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.model_executor.forward_batch_info",
    "sglang.srt.sampling.sampling_params",
    "sglang.srt.speculative.spec_info",
}
PACKAGES = {name.rpartition(".")[0] for name in REAL} | {"sglang", "sglang.srt"}
REPLACED = ("sglang", "triton", "psutil", "setproctitle", "zmq")
IDLE_LIMIT = 5
FIRST_TOKEN = 1 << 62


class Nothing(type):
    """Classes that are false, have every attribute, and return themselves, or the function they decorate."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "is_nothing" not in cls.__dict__:
            return super().__call__(*args, **kwargs)
        decorates = len(args) == 1 and callable(args[0]) and not isinstance(args[0], Nothing)
        return args[0] if decorates else cls

    def __bool__(cls) -> bool:
        return False

    def __enter__(cls) -> None:
        pass

    def __exit__(cls, *_: object) -> None:
        pass


def nothing(name: str) -> Any:
    return Nothing(name, (), {"is_nothing": True})


class Replacements(Loader, MetaPathFinder):
    """Imports empty packages, and modules with everything in them, in place of what is not REAL."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname in REAL or fullname.partition(".")[0] not in REPLACED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = [f"{sys.argv[1]}/{spec.name.replace('.', '/')}"] if spec.name in PACKAGES else []
        return module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = lambda name: Nothing.__getattr__(Nothing("module", (), {}), name)


def build(config: dict[str, Any]) -> Any:
    """A scheduler made without its constructor, which would start workers."""
    managers, cache = "sglang.srt.managers", "sglang.srt.mem_cache"
    batches = importlib.import_module(f"{managers}.schedule_batch")
    cls = importlib.import_module(f"{managers}.scheduler").Scheduler
    torch = importlib.import_module("torch")
    pools = importlib.import_module(f"{cache}.memory_pool")
    slots, total = config.get("max_running_requests", 64), config.get("max_total_tokens", 4096)
    chunk = config.get("chunked_prefill_size", 512)
    stages = config.get("pp_size", 1)
    batches.global_server_args_dict.update(
        max_micro_batch_size=max(slots // stages, 1), attention_backend="torch_native"
    )
    s = cls.__new__(cls)
    s.req_to_token_pool = pools.ReqToTokenPool(slots + (stages == 1), total + 8, "cpu", False)
    s.token_to_kv_pool_allocator = pools.TokenToKVPoolAllocator(total, torch.float16, "cpu", None)
    arguments = {
        "req_to_token_pool": s.req_to_token_pool,
        "token_to_kv_pool_allocator": s.token_to_kv_pool_allocator,
        "page_size": 1,
    }
    if config.get("disable_radix_cache", False):
        s.tree_cache = importlib.import_module(f"{cache}.chunk_cache").ChunkCache(**arguments)
        s.tree_cache.disable = True
    else:
        s.tree_cache = importlib.import_module(f"{cache}.radix_cache").RadixCache(**arguments)
    order = config.get("schedule_policy", "fcfs")
    s.policy = importlib.import_module(f"{managers}.schedule_policy").SchedulePolicy(order, s.tree_cache, False)
    s.chunked_prefill_size = chunk if chunk > 0 else None
    s.is_mixed_chunk = s.chunked_prefill_size is not None and config.get("enable_mixed_chunk", False)
    s.max_prefill_tokens = config.get("max_prefill_tokens", 16384)
    s.waiting_queue, s.grammar_queue, s.lora_paths = [], [], None
    s.running_batch = batches.ScheduleBatch(reqs=[], batch_is_full=False)
    s.last_batch = s.chunked_req = None
    s.enable_hierarchical_cache = s.enable_metrics = False
    s.enable_overlap = not config.get("disable_overlap_schedule", True)
    s.pp_size = stages
    s.page_size = s.attn_tp_rank = s.decode_mem_cache_buf_multiplier = 1  # of all ranks, the first one logs
    s.forward_ct_decode = s.num_generated_tokens = 0
    s.is_generation, s.disaggregation_mode = True, None
    s.model_config = SimpleNamespace(is_encoder_decoder=False, vocab_size=2)
    s.spec_algorithm = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.NONE
    s.server_args = SimpleNamespace(
        enable_dp_attention=False,
        enable_sp_layernorm=False,
        enable_custom_logit_processor=False,
        speculative_algorithm=None,
        page_size=1,
    )
    s.init_new_token_ratio = min(0.7 * config.get("schedule_conservativeness", 1.0), 1.0)
    s.min_new_token_ratio = min(s.init_new_token_ratio * 0.14, 1.0)
    s.new_token_ratio_decay = (s.init_new_token_ratio - s.min_new_token_ratio) / 600
    s.new_token_ratio = s.init_new_token_ratio
    s.stream_output = s.set_next_batch_sampling_info_done = lambda *_: None
    return s


def request(row: dict[str, Any], config: dict[str, Any]) -> Any:
    """The engine's request; it ends at ``output_len``, whatever it declares."""
    batches = importlib.import_module("sglang.srt.managers.schedule_batch")
    params = importlib.import_module("sglang.srt.sampling.sampling_params").SamplingParams(
        max_new_tokens=config.get("declared_max_new_tokens") or row["output_len"],
        ignore_eos=config.get("ignore_eos", False),
    )
    req = batches.Req(row["id"], "", list(row["tokens"]), params)

    def check_finished() -> None:
        if len(req.output_ids) >= row["output_len"]:
            req.finished_reason = batches.FINISH_LENGTH(length=row["output_len"])

    req.check_finished = check_finished
    return req


def record(s: Any, batch: Any, queued: list[str]) -> dict[str, Any]:
    """What the scheduler decided. ``queued``: ids that were waiting before."""
    mode = {1: "extend", 2: "decode", 3: "mixed"}[batch.forward_mode.value]
    new = batch.reqs[: len(batch.reqs) - len(batch.decoding_reqs or ())] if mode != "decode" else []
    start = {r.rid: len(r.prefix_indices) for r in new}
    tokens = {r.rid: r.extend_input_len for r in new}
    for r, length in zip(batch.reqs[len(new) :], batch.seq_lens.tolist()[len(new) :], strict=True):
        start[r.rid] = length - 1
        tokens[r.rid] = 1
    return {
        "mode": mode,
        "scheduled": tokens,
        "start_pos": start,
        "retracted": [r.rid for r in s.waiting_queue if r.rid not in queued],
        "new_token_ratio": round(s.new_token_ratio, 6),
        "chunked_req": s.chunked_req.rid if s.chunked_req else None,
        "running": [r.rid for r in s.running_batch.reqs],
        "waiting": [r.rid for r in s.waiting_queue],
        "batch_is_full": s.running_batch.batch_is_full,
        "available": s.token_to_kv_pool_allocator.available_size(),
        "evictable": s.tree_cache.evictable_size(),
    }


class Flying(NamedTuple):
    """A batch whose outcome the scheduler does not know yet."""

    batch: Any
    tokens: Any
    step: dict[str, Any]


def launch(s: Any, batch: Any, step: dict[str, Any], start: int, fresh: int) -> Flying:
    """The batch runs, as the recorder's default batch times say; its tokens are numbers from ``fresh`` on."""
    decodes = len(batch.reqs) if step["mode"] == "decode" else len(batch.decoding_reqs or ())
    prompts = sum(step["scheduled"].values()) - decodes
    step["t_start"] = start
    step["t_end"] = start + 100_000 + 1000 * prompts + 1000 * decodes + sum(step["start_pos"].values())
    batch.output_ids = importlib.import_module("torch").arange(fresh, fresh + len(batch.reqs))
    return Flying(batch.copy() if s.enable_overlap else batch, batch.output_ids, step)


def land(s: Any, flying: Flying) -> dict[str, Any]:
    """The outcome is processed: the finished step."""
    batch, tokens, step = flying
    before = [len(r.output_ids) for r in batch.reqs]
    feed: Callable[..., None] = (
        s.process_batch_result_decode if step["mode"] == "decode" else s.process_batch_result_prefill
    )
    outputs = {"logits_output": None, "next_token_ids": tokens, "can_run_cuda_graph": False}
    resolved = (SimpleNamespace(next_token_logprobs=None), tokens.tolist(), False)
    s.tp_worker = SimpleNamespace(resolve_last_batch_result=lambda _: resolved)
    feed(batch, SimpleNamespace(**outputs, extend_input_len_per_req=None, extend_logprob_start_len_per_req=None))
    emitted = [r for r, n in zip(batch.reqs, before, strict=True) if len(r.output_ids) > n]
    step["emitted"] = [r.rid for r in emitted]
    step["finished"] = [r.rid for r in emitted if r.finished()]
    return step


def run(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every step of one workload; arrivals in ticks, batch times as the recorder's defaults.

    As ``event_loop_normal`` does, or ``event_loop_overlap``, which processes a batch when the next one is launched.
    """
    s = build(document["config"])
    coming = [(row["arrival"], request(row, document["config"])) for row in document["requests"]]
    requests, now, idle, fresh = [req for _, req in coming], 0, 0, FIRST_TOKEN
    flying = deque[Flying]()
    while (flying or not all(req.finished() for req in requests)) and idle < IDLE_LIMIT:
        while coming and coming[0][0] <= now:
            s.waiting_queue.append(coming.pop(0)[1])
        queued = [r.rid for r in s.waiting_queue]
        batch = s.get_next_batch_to_run()
        if batch is not None:
            start = flying[-1].step["t_end"] if flying else now
            flying.append(launch(s, batch, record(s, batch, queued), start, fresh))
            fresh += len(batch.reqs)
            idle = 0
        if s.last_batch is not None if s.enable_overlap else batch is not None:
            now = flying[0].step["t_end"]
            yield land(s, flying.popleft())
        elif batch is None:
            s.new_token_ratio = s.init_new_token_ratio
            now, idle = (max(now, coming[0][0]), 0) if coming else (now, idle + 1)
        s.last_batch = batch


def run_stages(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every step of one workload in a pipeline, as ``event_loop_pp`` does: each micro-batch decides in its turn, then
    the outcome of the next one is processed. A stage takes 100,000 ticks and 1000 for each token, a send 5000."""
    s = build(document["config"])
    stages = s.pp_size
    coming = [(row["arrival"], request(row, document["config"])) for row in document["requests"]]
    requests, now, idle, fresh, turn, empty = [req for _, req in coming], 0, 0, FIRST_TOKEN, 0, 0
    batches = importlib.import_module("sglang.srt.managers.schedule_batch")
    running = [batches.ScheduleBatch(reqs=[], batch_is_full=False) for _ in range(stages)]
    last, free = [None] * stages, [0] * stages
    flying: list[Flying | None] = [None] * stages
    while (any(flying) or not all(req.finished() for req in requests)) and idle < IDLE_LIMIT:
        k = turn % stages
        s.running_batch, s.last_batch = running[k], last[k]
        while coming and coming[0][0] <= now:
            s.waiting_queue.append(coming.pop(0)[1])
        queued = [r.rid for r in s.waiting_queue]
        batch = s.get_next_batch_to_run()
        running[k] = s.running_batch
        flying[k], empty = None, empty + 1
        if batch is not None:
            step = record(s, batch, queued) | {"slot": k, "t_start": max(now, free[0])}
            flying[k], empty = launch(s, batch, step, step["t_start"], fresh), 0
            fresh += len(batch.reqs)
            end = step["t_start"]
            for stage in range(stages):
                end = max(end, free[stage]) + 100_000 + 1000 * sum(step["scheduled"].values())
                free[stage] = end
                end += 5000 * (stage < stages - 1)
            step["t_end"] = end
        turn += 1
        landing = flying[turn % stages]
        if landing is not None:
            now = landing.step["t_end"]
            last[turn % stages] = landing.batch
            yield land(s, landing)
            flying[turn % stages] = None
        if turn % stages == 0 and empty >= stages:
            s.new_token_ratio = s.init_new_token_ratio
            if empty >= 2 * stages:
                now, idle, empty = (max(now, coming[0][0]), 0, 0) if coming else (now, idle + 1, 0)


def main() -> None:
    """Answer standard input."""
    vars(importlib.import_module("torch"))["compile"] = nothing("compile")  # it would look for a compiler
    sys.meta_path.insert(0, Replacements())
    sys.path.insert(0, sys.argv[1])
    for document in json.load(sys.stdin):
        steps, died = list[dict[str, Any]](), ""
        try:
            with redirect_stdout(sys.stderr):  # an engine that dies prints its tree
                steps.extend((run_stages if document["config"].get("pp_size", 1) > 1 else run)(document))
        except (RuntimeError, AssertionError) as error:
            died = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps({"steps": steps, "died": died}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
