"""Run the real scheduler of SGLang 0.5.23 without a model: ``python real_sglang.py FOLDER < inputs > answers``.

FOLDER holds the unpacked wheel; the interpreter needs what the wheel's scheduler imports (torch, transformers < 5.20,
fastapi, msgspec, …). Scheduler, policies, prefill adder, batches, radix tree, allocators and the processing of results
are the engine's; model, sampling, metrics and streaming do nothing. Both loops, ``event_loop_normal`` and
``event_loop_overlap`` of managers/scheduler.py, are written here again. Times are whole ticks of 100 ns.

A request may wait for others (``after``, ``think_time``) and begin with the prompt and the answer of an earlier one
(``begins``), so what each generates is known beforehand. Ranks of attention data parallelism
(``attention_dp_size``) get the requests in turn.
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
from heapq import heappop, heappush
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import ranks  # type: ignore[import-not-found, unused-ignore]
import stand_ins  # type: ignore[import-not-found, unused-ignore]
from made_sglang import (  # type: ignore[import-not-found, unused-ignore]
    NoDrafts,
    NoSampling,
    Plain,
    build,
    engine,
)

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


def write_slots(rows: Any, table: Any, first: Any, after: Any, slots: Any, count: int) -> None:
    """In place of the kernel that writes where the tokens of requests are."""
    at = 0
    for k in range(count):
        low, high = int(first[k]), int(after[k])
        table[rows[k], low:high] = slots[at : at + high - low].to(table.dtype)
        at += high - low


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
        self.retracted: list[Any] = []
        self.aborted: list[Any] = []
        self.preempted: list[Any] = []
        batch, adder = engine("managers.schedule_batch").ScheduleBatch, engine("managers.schedule_policy").PrefillAdder
        retract, preempt, witness = batch.retract_decode, adder.preempt_to_schedule, self

        def retract_decode(self: Any, *arguments: Any) -> Any:
            found = retract(self, *arguments)
            witness.retracted += found[0]
            witness.aborted += found[2]
            return found

        def preempt_to_schedule(self: Any, req: Any, *arguments: Any) -> Any:
            before = len(self.preempt_list)
            made = preempt(self, req, *arguments)
            # the engine keeps those that go together in a set: here they queue in the order in which they came
            self.preempt_list[before:] = sorted(self.preempt_list[before:], key=lambda one: one.rank)
            witness.preempted += self.preempt_list[before:]
            return made

        batch.retract_decode, adder.preempt_to_schedule = retract_decode, preempt_to_schedule

    def clear(self) -> None:
        """A new round begins."""
        self.retracted, self.aborted, self.preempted = [], [], []


def record(s: Any, batch: Any, witness: Witness, arrived: list[str]) -> Json:
    """What the scheduler decided."""

    def its_own(reqs: list[Any]) -> list[str]:
        return [req.rid for req in reqs if req.home is s]

    extends = batch.forward_mode.is_extend()
    decodes = [req.rid for req in (batch.decoding_reqs or [])] if extends else [req.rid for req in batch.reqs]
    names = [req.rid for req in batch.reqs]
    if extends:
        tokens = dict(zip(names, batch.extend_lens, strict=True))
        start = dict(zip(names, batch.prefix_lens, strict=True))
    elif not batch.spec_algorithm.is_none():
        tokens = dict.fromkeys(names, 1 + s.drafts["k"])
        start = {req.rid: req.kv.kv_committed_len + s.ahead.get(req.rid, 0) for req in batch.reqs}
    else:
        tokens = dict.fromkeys(names, 1)
        start = dict(zip(names, [int(n) - 1 for n in batch.seq_lens_cpu.tolist()], strict=True))
    return {
        "mode": "decode" if not extends else "mixed" if decodes else "extend",
        "arrived": arrived,
        "scheduled": tokens,
        "start_pos": start,
        "retracted": its_own(witness.retracted),
        "preempted": in_turn([req for req in witness.preempted if req.home is s]),
        "aborted": its_own(witness.aborted),
        **(
            {"refused": in_turn([req for req in s.refused if req not in witness.aborted])}
            if s.max_queued_requests
            else {}
        ),
        "new_token_ratio": round(s.new_token_ratio_tracker.current, 6),
        "chunked_req": s.chunked_req.rid if s.chunked_req else None,
        "running": [req.rid for req in s.running_batch.reqs],
        "waiting": [req.rid for req in s.waiting_queue],
        "batch_is_full": bool(s.running_batch.batch_is_full),
        **memory(s, ""),
        "decodes": decodes,
    }


def in_turn(reqs: list[Any]) -> list[str]:
    """Their names, by number."""
    return sorted((req.rid for req in reqs), key=lambda name: int(name[1:]))


def memory(s: Any, when: str) -> Json:
    """Free and evictable tokens."""
    free, evictable = s.token_to_kv_pool_allocator.available_size(), s.tree_cache.evictable_size()
    return {f"available{when}": free, f"evictable{when}": evictable}


def launch(s: Any, batch: Any, step: Json, ticks: Json) -> Flying:
    """The batch runs, for as long as the recorders' formula says (``takes``)."""
    decodes = step.pop("decodes")
    prompts = sum(tokens for name, tokens in step["scheduled"].items() if name not in decodes)
    verified = sum(step["scheduled"][name] for name in decodes)
    length = ticks["base"] + ticks["per_prefill_tok"] * prompts + ticks["per_decode"] * verified
    step["takes"] = length + ticks["per_ctx"] * sum(step["start_pos"].values())
    s.processed_tokens_counter += prompts
    s.forward_ct += 1
    batch.input_ids = None
    if s.drafts:
        batch.spec_info = NoDrafts()
    return Flying(batch.copy() if s.enable_overlap else batch, list(batch.reqs), step)


def land(s: Any, flying: Flying) -> Json:
    """The outcome is processed: the finished step. What was computed once too often is any token."""
    before = [len(req.output_ids) for req in flying.reqs]
    extends = flying.batch.forward_mode.is_extend()
    width = 1 if extends or not s.drafts else 1 + s.drafts["k"]
    sampled = [
        (*req.answer, *[FIRST_TOKEN] * width)[min(place, len(req.answer))]
        for req, count in zip(flying.reqs, before, strict=True)
        for place in range(count, count + width)
    ]
    feed = s.results.process_batch_result_prefill if extends else s.results.process_batch_result_decode
    tensor = importlib.import_module("torch").tensor
    feed(
        flying.batch,
        Plain(
            next_token_ids=tensor(sampled),
            accept_lens=tensor([yields(req, s.drafts, width) for req in flying.reqs]),
            num_non_draft_tokens_per_req=1,
            speculative_num_draft_tokens=width,
            can_run_cuda_graph=False,
            grammar_advanced=False,
            num_correct_drafts=0,
            num_block_accept_tokens=0,
            num_cap_tokens=0,
            get_num_generated_tokens=lambda count: count,
            skipped_output_comm=False,
        ),
    )
    emitted = [req for req, count in zip(flying.reqs, before, strict=True) if len(req.output_ids) > count]
    ends = [req.rid for req in emitted if req.finished()]
    del flying.step["takes"]
    step = flying.step | {"emitted": [req.rid for req in emitted], "finished": ends}
    if width > 1:
        known = dict(zip((req.rid for req in flying.reqs), before, strict=True))
        step["accepted"] = {req.rid: min(len(req.output_ids), len(req.answer)) - known[req.rid] for req in emitted}
    return step | memory(s, "_after_update")


def yields(req: Any, drafts: Json | None, width: int) -> int:
    """Tokens of a request in a round: 1, and the leading drafts that are right after what it has by then."""
    if drafts is None or width == 1:
        return 1
    stream, right = random.Random(f"{req.rid}:{len(req.output_ids)}"), 0
    while right < drafts["k"] and stream.random() < drafts["accept"]:
        right += 1
    return 1 + right


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


class Rank:
    """A scheduler, and its batches in flight."""

    def __init__(self, config: Json, longest: int) -> None:
        self.s = build(config, longest)
        self.flying = deque[Flying | None]()
        """None: an idle batch."""
        self.arrived: list[str] = []
        self.sorts = 0
        self.batch: Any = None

    def take(self, req: Any) -> None:
        """A request arrives."""
        req.home = self.s
        self.s._add_request_to_queue(req)
        self.arrived.append(req.rid)

    def decide(self) -> None:
        """The next batch."""
        s = self.s
        s.result_queue = deque((one.batch, None) for one in self.flying if one is not None)
        s.ahead = {}
        for one in self.flying:
            if s.drafts and one is not None and one.batch.forward_mode.is_decode():
                s.ahead |= {req.rid: yields(req, s.drafts, 2) for req in one.reqs if not req.finished()}
        plan = s.get_next_batch_to_run(running_batch=s.running_batch, last_batch=s.last_batch)
        s.running_batch, self.batch = plan.running_batch, plan.batch_to_run

    def launch(self, witness: Witness, ticks: Json) -> int:
        """The batch is in flight; how long it takes alone."""
        works = bool(self.batch.reqs)
        step = record(self.s, self.batch, witness, self.arrived) if works else {}
        self.flying.append(launch(self.s, self.batch, step, ticks) if works else None)
        takes: int = step.get("takes", 0)
        return takes

    def rest(self) -> None:
        """Idle (``on_idle``)."""
        s = self.s
        if s.running_batch.is_empty() and s.chunked_req is None and not s.waiting_queue:
            s.new_token_ratio_tracker.reset()


def run(document: Json, witness: Witness) -> Iterator[Json]:
    """Every step of one workload."""
    config, coming = document["config"], Coming(document)
    ticks = {name: round(value * TICKS) for name, value in (TIMES | document.get("batch_time", {})).items()}
    longest = 2 * max(row["prompt_len"] + row["output_len"] for row in document["requests"])
    all_ranks = [Rank(config, longest) for _ in range(config.get("attention_dp_size", 1))]
    flying, now, idle, ran = deque[Json](), 0, 0, False
    most_idle = IDLE_LIMIT + config.get("prefill_decode_interval", 0)
    if config.get("enable_prefill_delayer", False):
        most_idle += config.get("prefill_delayer_max_delay_passes", 30)

    def shuffle(waiting: list[Any]) -> None:
        rank = all_ranks[ranks.number()]
        rank.sorts += 1
        waiting.sort(key=lambda req: mixed(mixed(req.number) ^ mixed(rank.sorts)))

    engine("managers.schedule_policy").random = SimpleNamespace(shuffle=shuffle)
    while (flying or not all(req.finished() for req in coming.reqs)) and idle <= most_idle:
        CLOCK[0] = now / TICKS
        for req in coming.arrived(now):
            all_ranks[req.rank % len(all_ranks)].take(req)
        witness.clear()
        ranks.decide([rank.decide for rank in all_ranks])
        runs = all_ranks[0].batch is not None
        if runs:
            start = max(now, flying[-1]["t_end"]) if flying else now
            takes = max(rank.launch(witness, ticks) for rank in all_ranks)
            flying.append({"t_sched": now, "t_start": start, "t_end": start + takes})
            idle = 0
        for rank in all_ranks:
            coming.ended([req.rid for req in rank.s.refused], now)
            rank.arrived, rank.s.refused = [], []
        if ran if all_ranks[0].s.enable_overlap else runs:
            step = flying.popleft()
            now = max(now, step["t_end"])
            found = [None if (one := rank.flying.popleft()) is None else land(rank.s, one) for rank in all_ranks]
            for words in found:
                coming.ended(words["finished"] if words else [], step["t_end"])
            yield step | ({"ranks": found} if len(found) > 1 else found[0] or {})
        elif not runs:
            for rank in all_ranks:
                rank.rest()
            now, idle = (max(now, coming.heap[0][0]), 0) if coming.heap else (now, idle + 1)
        ran = runs
        for rank in all_ranks:
            rank.s.last_batch = rank.batch
    if any(rank.s.waiting_queue or rank.s.chunked_req for rank in all_ranks):
        raise RuntimeError("goes on for ever")


def in_seconds(step: Json) -> Json:
    """With times as recordings have them."""
    return step | {name: round(step[name] / TICKS, 7) for name in ("t_sched", "t_start", "t_end")}


def main() -> None:
    """Answer standard input."""
    sys.path.insert(0, sys.argv[1])
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "0")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an engine that dies prints its tree
    time.perf_counter = look_at_clock
    stand_ins.install(ABSENT, absent_for="transformers", optional=OPTIONAL)
    torch = importlib.import_module("torch")
    stand_ins.pretend_versions()
    real = torch.library.register_fake
    torch.library.register_fake = lambda op, *a, **k: (
        (lambda function: function) if str(op).startswith("torchvision::") else real(op, *a, **k)
    )
    logging.disable(logging.WARNING)
    for name in ("managers.schedule_batch", "mem_cache.allocation", "mem_cache.common"):
        engine(name).is_pin_memory_available = lambda *_, **__: False
    engine("managers.schedule_batch").SamplingBatchInfo = NoSampling
    engine("mem_cache.allocation").assign_req_to_token_pool_func = write_slots
    witness = Witness()
    for line in sys.stdin:
        steps, died = list[Json](), ""
        try:
            steps.extend(map(in_seconds, run(json.loads(line), witness)))
        except (RuntimeError, AssertionError, ValueError) as error:
            died = f"{type(error).__name__}: {error}"[:300]
        answers.write(json.dumps({"steps": steps, "died": died}) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
