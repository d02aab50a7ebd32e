"""Run the real v0 scheduler of vLLM 0.8.5 without a model: ``python vllm_v0_driver.py FOLDER < workloads > lines``.

FOLDER holds the wheel's ``vllm/*.py`` and the package msgspec. Standard input is a JSON list of recordings' inputs with
the prompts' tokens spelled out (``tokens``), arrivals in seconds. For each, a line with the list of its step records
comes back, and with the words of the error that ended it, or null. Whatever the scheduler imports beside itself is
replaced.
"""

import enum
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGES = ("vllm", "vllm.core", "vllm.core.block")
REAL = (
    "vllm.sequence",
    "vllm.core.scheduler",
    "vllm.core.block_manager",
    "vllm.core.evictor",
    "vllm.core.interfaces",
    "vllm.core.block.block_table",
    "vllm.core.block.common",
    "vllm.core.block.cpu_gpu_block_allocator",
    "vllm.core.block.interfaces",
    "vllm.core.block.naive_block",
    "vllm.core.block.prefix_caching_block",
    "vllm.core.block.utils",
)
DEFAULTS = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": 2048,
    "preemption_mode": None,
    "delay_factor": 0,
    "policy": "fcfs",
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
}
TIMES = {"base": 0.01, "per_prefill_tok": 1e-4, "per_decode": 1e-4, "per_ctx": 1e-7, "per_swap_block": 0.0}
PATIENCE = 400
ENDS = (AssertionError, IndexError, RuntimeError, ValueError)
"""What the engine raises when it gives up."""


class Device(enum.Enum):
    GPU = enum.auto()
    CPU = enum.auto()


class Fresh:
    """In place of the engine's cache of objects: a new one each time."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.get_object = build

    def reset(self) -> None:
        """Nothing is kept."""


def chunks(tokens: list[int], size: int) -> Iterator[list[int]]:
    return (tokens[i : i + size] for i in range(0, len(tokens), size))


def silent(*_: object) -> None:
    """A log that is not read."""


NEEDED: dict[str, dict[str, Any]] = {
    "vllm.logger": {"init_logger": lambda _: SimpleNamespace(warning=silent, info=silent, debug=silent)},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_hpu=lambda: False)},
    "vllm.utils": {
        "Device": Device,
        "PyObjectCache": Fresh,
        "cdiv": lambda a, b: -(-a // b),
        "chunk_list": chunks,
    },
}


class Replacements(Loader, MetaPathFinder):
    """Imports modules of empty classes, but for the NEEDED names, in place of what is not REAL."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname in REAL or fullname.partition(".")[0] not in ("vllm", "torch"):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = [f"{sys.argv[1]}/{spec.name.replace('.', '/')}"] if spec.name in PACKAGES else []
        return module

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(NEEDED.get(module.__name__, {}))
        if module.__name__ not in PACKAGES:
            vars(module)["__getattr__"] = lambda name: type(name, (dict,), {})


class Clock:
    """The scheduler's ``time``; what it measures of itself stays real."""

    def __init__(self) -> None:
        self.now = 0.0
        self.perf_counter = time.perf_counter

    def time(self) -> float:
        return self.now


def build(config: dict[str, Any], clock: Clock) -> Any:
    module: Any = importlib.import_module("vllm.core.scheduler")
    module.time = clock
    given = {name: config[name] for name in DEFAULTS if config.get(name) is not None}
    scheduler = SimpleNamespace(**DEFAULTS | given)
    scheduler.chunked_prefill_enabled = config.get("enable_chunked_prefill", False)
    scheduler.runner_type, scheduler.is_multi_step, scheduler.send_delta_data = "generate", False, False
    scheduler.num_scheduler_steps, scheduler.num_lookahead_slots = 1, 0
    if scheduler.max_num_partial_prefills > 1 and scheduler.long_prefill_token_threshold == 0:
        scheduler.long_prefill_token_threshold = int(scheduler.max_model_len * 0.04)  # as SchedulerConfig does
    cache = SimpleNamespace(
        block_size=config.get("block_size", 16),
        num_gpu_blocks=config["num_gpu_blocks"],
        num_cpu_blocks=config.get("num_cpu_blocks", 0),
        enable_prefix_caching=config.get("enable_prefix_caching", False),
        sliding_window=None,
        is_attention_free=False,
    )
    return module.Scheduler(scheduler, cache, None)


def group(rank: int, row: dict[str, Any], block_size: int) -> Any:
    """A request; with ``outputs`` one of so many sequences, as the engine made them up to 0.6.3."""
    sequence: Any = importlib.import_module("vllm.sequence")
    inputs = {"type": "token", "prompt_token_ids": row["tokens"]}
    seq = sequence.Sequence(rank, inputs=inputs, block_size=block_size)
    outputs = row.get("outputs") or [row["output_len"]]
    params = SimpleNamespace(n=len(outputs), outputs=outputs)
    found = sequence.SequenceGroup(
        row["id"], [seq], arrival_time=row["arrival"], sampling_params=params, priority=row.get("priority", 0)
    )
    if len(outputs) > 1:
        alone = found.get_max_num_running_seqs
        found.get_max_num_running_seqs = lambda: len(outputs) if len(outputs) > found.num_seqs() else alone()
    return found


def state_of(group: Any) -> str:
    """What its sequences that have not ended are."""
    return str(next((seq.status.name for seq in group.seqs if not seq.is_finished()), "FINISHED"))


def forked(scheduler: Any, group: Any, numbers: Iterator[int]) -> list[Any]:
    """The sequences that share its first token (SingleStepOutputProcessor of 0.6.3): those that go on fork."""
    (parent,) = group.seqs
    outputs = group.sampling_params.outputs
    for tokens in outputs[1:]:
        child = parent.fork(next(numbers))
        group.seqs.append(child)
        group.seqs_dict[child.seq_id] = child
        if tokens > 1:
            scheduler.fork_seq(parent, child)
    group.is_single_seq = len(outputs) == 1
    return list(group.seqs)


class Run:
    """One workload through the scheduler."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.clock = Clock()
        self.block_size = document["config"].get("block_size", 16)
        self.scheduler = build(document["config"], self.clock)
        self.times = TIMES | document.get("batch_time", {})
        self.groups = [group(i, row, self.block_size) for i, row in enumerate(document["requests"])]
        self.coming = list(self.groups)
        self.fresh = 1 << 32
        self.numbers = count(len(self.groups))
        self.records: list[dict[str, Any]] = []
        self.fruitless = self.idle = 0

    def go(self) -> None:
        """Add records until all requests have ended, or none has got a token for long."""
        s = self.scheduler
        while self.coming or s.has_unfinished_seqs():
            arrived = 0
            while self.coming and self.coming[0].arrival_time <= self.clock.now + 1e-12:
                s.add_seq_group(self.coming.pop(0))
                arrived += 1
            if not s.has_unfinished_seqs():
                self.clock.now = self.coming[0].arrival_time
                continue
            self.step()
            if arrived:
                self.fruitless, self.idle = 0, min(self.idle, 1)
            if self.fruitless >= PATIENCE:
                break
            if self.idle > 1 and self.coming:
                self.clock.now = self.coming[0].arrival_time

    def step(self) -> None:
        s, before = self.scheduler, self.states()
        start = self.clock.now
        metadata, outputs, _ = s.schedule()
        parts = [(part.seq_group, part.token_chunk_size) for part in outputs.scheduled_seq_groups]
        hits, context = self.hits(metadata, parts, outputs.num_prefill_groups)
        record = self.decision(before, outputs, parts, hits)
        idle = not parts and before == self.states()
        self.idle = self.idle + 1 if idle else 0
        if parts:
            prompts = sum(n for _, n in parts[: outputs.num_prefill_groups]) - sum(hits.values())
            copied = record["blocks_swap_in"] + record["blocks_swap_out"]
            decodes = sum(g.get_max_num_running_seqs() for g, _ in parts[outputs.num_prefill_groups :])
            each = self.times
            seconds = each["base"] + each["per_prefill_tok"] * prompts + each["per_decode"] * decodes
            self.clock.now += seconds + each["per_ctx"] * context + each["per_swap_block"] * copied
        emitted, finished = self.feed(metadata, parts)
        s.free_finished_seq_groups()
        self.fruitless = 0 if emitted or record["ignored"] else self.fruitless + 1
        record["free_after_update"] = s.block_manager.get_num_free_gpu_blocks()
        ends = {"t_start": round(start, 9), "t_end": round(self.clock.now, 9), "emitted": emitted, "finished": finished}
        self.records.append(record | ends)

    def states(self) -> dict[str, str]:
        return {g.request_id: state_of(g) for g in self.groups}

    def hits(self, metadata: Any, parts: Any, prefills: int) -> tuple[dict[str, int], int]:
        """Cached tokens of each prefill of this step, and the tokens that the step's parts stand on."""
        hits, context = dict[str, int](), 0
        for number, (data, (g, tokens)) in enumerate(zip(metadata, parts, strict=True)):
            seq = next((seq for seq in g.seqs if not seq.is_finished()), g.seqs[0])
            computed = seq.data.get_num_computed_tokens()
            cached = min(len(data.computed_block_nums or ()) * self.block_size - computed, tokens - 1)
            if number < prefills and cached > 0:
                hits[g.request_id] = cached
            running = [seq for seq in g.seqs if number >= prefills and not seq.is_finished()] or [seq]
            context += sum(seq.data.get_num_computed_tokens() for seq in running) + hits.get(g.request_id, 0)
        return hits, context

    def decision(self, before: dict[str, str], outputs: Any, parts: Any, hits: dict[str, int]) -> dict[str, Any]:
        s = self.scheduler
        queues = {"running_order": s.running, "waiting_order": s.waiting, "swapped_order": s.swapped}
        return {
            "scheduled": {g.request_id: n for g, n in parts},
            "num_prefill_groups": outputs.num_prefill_groups,
            "cached_hit": hits,
            "preempted_recompute": self.moved(before, "RUNNING", "WAITING"),
            "swapped_out": self.moved(before, "RUNNING", "SWAPPED"),
            "swapped_in": self.moved(before, "SWAPPED", "RUNNING"),
            "blocks_swap_out": len(outputs.blocks_to_swap_out),
            "blocks_swap_in": len(outputs.blocks_to_swap_in),
            "ignored": [g.request_id for g in outputs.ignored_seq_groups],
            "free_gpu": s.block_manager.get_num_free_gpu_blocks(),
            "free_cpu": s.block_manager.get_num_free_cpu_blocks(),
        } | {name: [g.request_id for g in queue] for name, queue in queues.items()}

    def moved(self, before: dict[str, str], old: str, new: str) -> list[str]:
        return [name for name, state in self.states().items() if state == new and before[name] == old]

    def feed(self, metadata: Any, parts: Any) -> tuple[list[str], list[str]]:
        status: Any = importlib.import_module("vllm.sequence").SequenceStatus
        emitted, finished = list[str](), list[str]()
        for data, (g, tokens) in zip(metadata, parts, strict=True):
            g.update_num_computed_tokens(tokens)
            if not data.do_sample:
                continue
            emitted.append(g.request_id)
            first = g.seqs[0].get_output_len() == 0 and not g.seqs[0].is_finished()
            running = forked(self.scheduler, g, self.numbers) if first else g.get_seqs(status.RUNNING)
            ended = []
            for seq in running:
                self.fresh += 1
                seq.append_token_id(self.fresh, {self.fresh: SimpleNamespace(logprob=0.0)})
                if seq.get_output_len() == g.sampling_params.outputs[g.seqs.index(seq)]:
                    seq.status = status.FINISHED_LENGTH_CAPPED
                    ended.append(seq)
            if len(g.seqs) > 1:
                for seq in ended:
                    self.scheduler.free_seq(seq)
            if g.is_finished():
                finished.append(g.request_id)
        return emitted, finished


def main() -> None:
    """Answer standard input."""
    sys.meta_path.insert(0, Replacements())
    sys.path.insert(0, sys.argv[1])
    for document in json.load(sys.stdin):
        run, ended = Run(document), None
        try:
            run.go()
        except ENDS as error:
            ended = f"{type(error).__name__}: {error}"
        sys.stdout.write(
            json.dumps({"records": run.records, "ended": ended, "circles": run.fruitless >= PATIENCE}) + "\n"
        )
        sys.stdout.flush()


def answers(folder: str, documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the real scheduler does with each input, in a process of its own."""
    done = subprocess.run(
        (sys.executable, __file__, folder), input=json.dumps(documents), capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main()
