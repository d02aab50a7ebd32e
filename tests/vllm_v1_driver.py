"""Run the real v1 scheduler of a vLLM release without a model: ``python vllm_v1_driver.py FOLDER < workloads > lines``.

FOLDER holds the ``vllm/*.py`` of the release's wheel and the package msgspec. Standard input is a JSON list of
workloads: ``config`` (complete), ``requests`` with ``tokens`` spelled out and ``arrival`` in ticks of 100 ns, and
``most``, the number of steps after which to end. A request may generate what its ``answer`` says, and come ``think``
ticks after the last of those that its ``after`` names has ended. For each workload, a line with the list of its step
records comes back.
Whatever the scheduler imports beside its own parts is replaced.
"""

import contextlib
import hashlib
import importlib
import inspect
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

PACKAGES = ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched")
REAL = (
    "vllm._bc_linter",
    "vllm.utils.math_utils",
    "vllm.v1.engine",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.outputs",
    "vllm.v1.request",
)
REPLACED = ("vllm", "torch", "transformers", "zmq", "psutil", "regex", "triton", "cbor2", "xgrammar")
STEP_BASE, PER_TOKEN = 100_000, 1_000
"""Ticks of 100 ns; a token of context costs one."""


def any_attribute(_: object, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


class Anything(type):
    """Classes that have every attribute, as their instances do."""

    __getattr__ = any_attribute


class Unset(SimpleNamespace):
    """A configuration in which everything that is not given is off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Tokens(Sequence[int]):
    """In place of the engine's read-only list."""

    def __init__(self, shared: list[int]) -> None:
        self.shared = shared

    def __getitem__(self, index: Any) -> Any:
        return self.shared[index]

    def __len__(self) -> int:
        return len(self.shared)

    def copy(self) -> list[int]:
        return self.shared.copy()


class Sampled(list[int]):
    """Tokens of a request; a row of an array in vLLM 0.11."""

    def tolist(self) -> list[int]:
        return list(self)


def empty_class(name: str) -> type:
    """A class to inherit from, to call and to index."""
    body = {"__init__": lambda *_, **__: None, "__class_getitem__": classmethod(lambda cls, _: cls)}
    return Anything(name, (), body | {"__getattr__": any_attribute})


def logger(name: str) -> Any:
    found: Any = logging.getLogger(name)
    found.info_once = found.warning_once = found.debug_once = lambda *_, **__: None
    return found


NEEDED: dict[str, dict[str, Any]] = {
    "vllm": {
        "bc_linter_include": lambda cls: cls,
        "envs": MagicMock(VLLM_PREFIX_CACHE_RETENTION_INTERVAL=None),
    },
    "vllm.logger": {"init_logger": logger},
    "vllm.utils": {
        "cdiv": lambda a, b: -(-a // b),
        "length_from_prompt_token_ids_or_embeds": lambda ids, _: len(ids),
    },
    "vllm.v1.metrics.stats": {"KV_FETCH_STAGES": ()},
    "vllm.v1.structured_output.request": {
        "StructuredOutputRequest": SimpleNamespace(from_sampling_params=lambda _: None)
    },
    "vllm.v1.utils": {"ConstantList": Tokens, "record_function_or_nullcontext": lambda _: contextlib.nullcontext()},
}


class Replacements(Loader, MetaPathFinder):
    """Imports modules in which every name is a stand-in, except the NEEDED ones, in place of what is not REAL."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        real = fullname in REAL or (fullname.startswith("vllm.v1.core.") and fullname not in PACKAGES)
        if real or fullname.partition(".")[0] not in REPLACED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = [str(Path(sys.argv[1], *spec.name.split(".")))] if spec.name in PACKAGES else []
        return module

    def exec_module(self, module: ModuleType) -> None:
        def stand_in(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            found = NEEDED["vllm.utils"].get(name) or (empty_class(name) if name[0].isupper() else MagicMock(name=name))
            setattr(module, name, found)
            return found

        vars(module).update(NEEDED.get(module.__name__, {}))
        vars(module)["__getattr__"] = stand_in


def known(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Those values that the release's signature has."""
    return {name: value for name, value in values.items() if name in parameters(function)}


@cache
def parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def digest(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def build(config: dict[str, Any]) -> Any:
    """The release's scheduler with these settings."""
    plain = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    overlapping = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    memory: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    size, count = config["block_size"], config["num_gpu_blocks"]
    layer = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": "", "use_mla": False}
    group = memory.KVCacheGroupSpec(["layer"], memory.FullAttentionSpec(**known(memory.FullAttentionSpec, **layer)))
    grammars, media = MagicMock(), MagicMock()
    grammars.should_advance.return_value = media.supports_multimodal_inputs.return_value = False
    values = known(
        plain,
        vllm_config=vllm_config(config),
        kv_cache_config=memory.KVCacheConfig(num_blocks=count, kv_cache_tensors=[], kv_cache_groups=[group]),
        structured_output_manager=grammars,
        block_size=size,
        mm_registry=media,
    )
    return (overlapping if config["async_scheduling"] else plain)(**values)


def vllm_config(config: dict[str, Any]) -> Unset:
    chunked = config["enable_chunked_prefill"]
    return Unset(
        scheduler_config=Unset(**config, chunked_prefill_enabled=chunked, max_num_encoder_input_tokens=0),
        cache_config=Unset(**config),
        model_config=Unset(max_model_len=config["max_model_len"], runner_type="generate"),
        parallel_config=Unset(
            pipeline_parallel_size=config.get("pipeline_parallel_size", 1),
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        observability_config=Unset(),
        ec_manager_config=Unset(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=Unset(enabled=False),
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=config["max_num_batched_tokens"],
        max_concurrent_batches=2,
        use_v2_model_runner=config["async_scheduling"],
    )


def request(row: dict[str, Any], config: dict[str, Any]) -> Any:
    """A request of the release, with its answer beside it."""
    kind: Any = importlib.import_module("vllm.v1.request").Request
    hashing: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    hashing.NONE_HASH = b""
    hasher = hashing.get_request_block_hasher(config["block_size"], digest)
    found = kind(
        **known(
            kind,
            request_id=row["id"],
            prompt_token_ids=row["tokens"],
            sampling_params=Unset(max_tokens=row["output_len"], min_tokens=0),
            pooling_params=None,
            eos_token_id=None,
            arrival_time=row["arrival"] / 1e7,
            priority=row["priority"],
            block_hasher=hasher if config["enable_prefix_caching"] else None,
        )
    )
    found.answer = row.get("answer", ())
    return found


class Loop:
    """The recorder's loop: one step at a time, or two in flight."""

    def __init__(self, workload: dict[str, Any]) -> None:
        config = workload["config"]
        self.scheduler = build(config)
        self.requests = {row["id"]: request(row, config) for row in workload["requests"]}
        self.rows: list[dict[str, Any]] = workload["requests"]
        self.waits = {place: set(row["after"]) for place, row in enumerate(self.rows) if row.get("after")}
        self.coming = [(row["arrival"], place) for place, row in enumerate(self.rows) if place not in self.waits]
        heapify(self.coming)
        self.overlapping = config["async_scheduling"]
        self.in_flight: deque[tuple[int, Any, dict[str, bool], dict[str, Any]]] = deque()
        self.now = self.last_end = self.sampled = self.number = 0
        self.most = workload["most"]
        self.arrived: list[str] = []
        self.came: list[str] = []
        self.admitted: set[str] = set()

    def records(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        while len(records) < self.most and (self.coming or self.requests_left()):
            while len(self.in_flight) <= self.overlapping and self.schedule():
                pass
            if self.in_flight:
                records.append(self.arrive(*self.in_flight.popleft()))
            elif self.coming:
                self.now = self.coming[0][0]
            else:
                break
        return records

    def requests_left(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self.in_flight)

    def schedule(self) -> bool:
        self.take_arrived()
        running = {one.request_id for one in self.scheduler.running}
        sampling = {name: one.num_output_placeholders for name, one in self.requests.items()}
        output = self.scheduler.schedule()
        tokens = dict(output.num_scheduled_tokens)
        left = {one.request_id for one in self.scheduler.waiting} & running
        if not tokens and not left:
            return False
        start = {name: self.requests[name].num_computed_tokens - n for name, n in tokens.items()}
        emits = {name: self.emits(self.requests[name], sampling[name]) for name in tokens}
        begin = self.last_end = max(self.now, self.last_end)
        if tokens:  # the recorder's formula: with its default coefficients prefills and decodes cost the same
            self.last_end += STEP_BASE + PER_TOKEN * sum(tokens.values()) + sum(start.values())
        joined = [name for name in tokens if name not in running]
        record = {
            "type": "step",
            "step": self.number,
            "t_sched": self.now / 1e7,
            "t_start": begin / 1e7,
            "t_end": self.last_end / 1e7,
            "arrived": self.arrived,
            "scheduled": tokens,
            "start_pos": start,
            "new": [name for name in joined if name not in self.admitted],
            "resumed": [name for name in joined if name in self.admitted],
            "cached_hit": {name: start[name] for name in joined if start[name]},
            "preempted": [name for name in self.came if name in left],
            "running_order": [one.request_id for one in self.scheduler.running],
            "waiting_order": [one.request_id for one in self.scheduler.waiting],
            "free_blocks": self.free_blocks(),
        }
        self.in_flight.append((self.last_end, output, emits, record))
        self.number += 1
        self.arrived = []
        self.admitted.update(joined)
        return True

    def take_arrived(self) -> None:
        """Hand over who has come."""
        while self.coming and self.coming[0][0] <= self.now:
            ticks, place = heappop(self.coming)
            name = self.rows[place]["id"]
            self.requests[name].arrival_time = ticks / 1e7
            self.arrived.append(name)
            self.came.append(name)
            self.scheduler.add_request(self.requests[name])

    def emits(self, one: Any, sampling: int) -> bool:
        if self.overlapping:
            return bool(one.num_output_placeholders > sampling)
        return bool(one.num_computed_tokens == one.num_tokens)

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def arrive(self, end: int, output: Any, emits: dict[str, bool], record: dict[str, Any]) -> dict[str, Any]:
        self.now = max(self.now, end)
        kind: Any = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput
        names = list(output.num_scheduled_tokens)
        self.sampled -= len(names)
        values = known(
            kind,
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[
                Sampled([self.token(name, self.sampled + i)] if emits[name] else []) for i, name in enumerate(names)
            ],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            spec_token_ids=None,
        )
        answers = [
            one for part in self.scheduler.update_from_output(output, kind(**values)).values() for one in part.outputs
        ]
        finished = [one.request_id for one in answers if one.finish_reason is not None]
        self.release(finished, end)
        return record | {
            "emitted": [one.request_id for one in answers if one.new_token_ids],
            "finished": finished,
            "free_after_update": self.free_blocks(),
        }

    def token(self, name: str, unlike: int) -> int:
        """The next one of a request's answer; where it has none, or has ended, one that no other text has."""
        answer, at = self.requests[name].answer, self.requests[name].num_output_tokens
        return int(answer[at]) if at < len(answer) else unlike

    def release(self, finished: list[str], end: int) -> None:
        """Who waits for the last of these comes after its think time."""
        for place, names in list(self.waits.items()):
            if names & set(finished):
                names.difference_update(finished)
                if not names:
                    del self.waits[place]
                    heappush(self.coming, (end + self.rows[place]["think"], place))


if __name__ == "__main__":
    sys.meta_path.insert(0, Replacements())
    sys.path.append(sys.argv[1])
    for workload in json.load(sys.stdin):
        print(json.dumps(Loop(workload).records()), flush=True)  # noqa: T201
