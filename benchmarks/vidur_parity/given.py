"""A run of Vidur as its folder tells it: config.json, requests.csv, batches.csv and tables.npz."""

import csv
import json
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError

Rows = dict[str, NDArray[np.float64]]
GIB = 1024**3


@dataclass(frozen=True)
class Given:
    """What Vidur was asked, and what came out."""

    folder: Path
    config: dict[str, Any]
    requests: Rows
    """In order of arrival."""
    batches: Rows
    """In the order in which they were formed, those of all replicas together."""

    @property
    def replica(self) -> dict[str, Any]:
        """Model, device and degrees of parallelism."""
        found: dict[str, Any] = self.config["cluster_config"]["replica_config"]
        return found

    @property
    def model(self) -> dict[str, Any]:
        """The model's shapes."""
        found: dict[str, Any] = self.replica["model_config"]
        return found

    @property
    def scheduler(self) -> dict[str, Any]:
        """The replica scheduler's settings."""
        found: dict[str, Any] = self.config["cluster_config"]["replica_scheduler_config"]
        return found

    @property
    def predictor(self) -> dict[str, Any]:
        """Settings of the execution time predictor."""
        found: dict[str, Any] = self.config["execution_time_predictor_config"]
        return found

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return int(self.replica["num_pipeline_stages"])

    @property
    def tp(self) -> int:
        """GPUs that share a layer."""
        return int(self.replica["tensor_parallel_size"])

    @property
    def max_tokens(self) -> int:
        """Of the longest request there may be."""
        generator = self.config["request_generator_config"]
        return int(generator.get("max_tokens") or generator["length_generator_config"]["max_tokens"])

    @property
    def grouped(self) -> bool:
        """Query heads share keys."""
        return bool(self.model["num_q_heads"] > self.model["num_kv_heads"])


def read(folder: Path) -> Given:
    """The run in a folder. Raises InputError for what is missing."""
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{str(folder)!r}: no config.json: give a folder like ../shared/vidur/reference/vllm-conv-q1")
    requests, batches = _table(folder / "requests.csv"), _table(folder / "batches.csv")
    requests = {name: column[np.argsort(requests["id"], kind="stable")] for name, column in requests.items()}
    batches = {name: column[np.argsort(batches["Batch Id"], kind="stable")] for name, column in batches.items()}
    return Given(folder, json.loads(config.read_text(encoding="utf-8")), requests, batches)


def _table(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    values = np.array([[float(value or "nan") for value in row] for row in rows[1:]])
    return {name: values[:, i] for i, name in enumerate(rows[0])}


def slots(given: Given) -> int:
    """Requests of the longest kind for which a replica has memory, as Vidur plans it (notes/vidur.md, section 5)."""
    model, tp = given.model, given.tp
    width, heads = model["embedding_dim"], model["num_q_heads"]
    head, kv_heads = width // heads, ceil(model["num_kv_heads"] / tp)
    matrices = 3 if model["use_gated_mlp"] else 2
    attention = width * head * (heads / tp + 2 * kv_heads) + width * head * heads / tp
    layer = attention + matrices * width * model["mlp_hidden_dim"] // tp
    weights = 2 * layer * (model["num_layers"] / given.stages)
    memory = given.replica["device_config"]["total_memory_gb"] * GIB * (1 - given.replica["memory_margin_fraction"])
    per_request = 2 * 2 * head * kv_heads * given.max_tokens * model["num_layers"]
    return int((memory - weights) // per_request)


def num_blocks(given: Given) -> int:
    """KV blocks of a replica."""
    named = given.scheduler.get("num_blocks")
    return int(named or given.max_tokens // given.scheduler["block_size"] * slots(given) * given.stages)


def lengths(given: Given) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request.

    Vidur writes of a restarted request what was left when it began again, so those are drawn once more as it drew them.
    """
    prompts, outputs = (given.requests[f"num_{part}_tokens"].astype(int) for part in ("prefill", "decode"))
    written = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    restarted = given.requests["num_restarts"] > 0
    if not restarted.any():
        return written
    again = drawn(given)[: len(written)]
    for i, (found, asked) in enumerate(zip(written, again, strict=True)):
        if found != asked and (not restarted[i] or sum(found) != sum(asked)):
            raise InputError(f"{given.folder.name}: request {i} has {found} tokens, not {asked} as it was drawn")
    return again


def drawn(given: Given) -> list[tuple[int, int]]:
    """The lengths as the run's generator draws them."""
    generator = given.config["request_generator_config"]
    lengths, count = generator.get("length_generator_config", generator), len(given.requests["id"])
    if lengths["name"] == "fixed":
        return [(int(lengths["prefill_tokens"]), int(lengths["decode_tokens"]))] * count
    if lengths["name"] == "uniform":
        return _uniform(lengths, generator, count)
    if lengths["name"] == "trace":
        return _shuffled(_trace(given.folder, lengths["trace_file"]), lengths)
    raise InputError(f"{given.folder.name}: lengths of {lengths['name']!r} with restarts: not read; use a run without")


def _uniform(lengths: dict[str, Any], generator: dict[str, Any], count: int) -> list[tuple[int, int]]:
    """Interval and length in turn, from Python's own stream."""
    stream = Random(generator["seed"])
    intervals = generator["interval_generator_config"]["name"]
    found = []
    for _ in range(count):
        if intervals == "poisson":
            stream.random()
        total = stream.uniform(lengths["min_tokens"], lengths["max_tokens"])
        outputs = ceil(total / (1 + lengths["prefill_to_decode_ratio"]))
        found.append((int(total - outputs), outputs))
    return found


def _trace(folder: Path, name: str) -> Rows:
    """The trace that a run names, in its folder or in one above."""
    for place in (folder, *folder.absolute().parents):
        if (place / Path(name).name).is_file():
            return _table(place / Path(name).name)
    raise InputError(f"{folder.name}: {Path(name).name} is not beside it: put it there, its lengths are needed")


def _shuffled(trace: Rows, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """The lengths of a trace, cut in proportion and shuffled as pandas does."""
    prompts = (trace["num_prefill_tokens"] * settings["prefill_scale_factor"]).astype(int)
    outputs = (trace["num_decode_tokens"] * settings["decode_scale_factor"]).astype(int)
    total = prompts + outputs
    beyond = np.clip(total - settings["max_tokens"], 0, None)
    prompts, outputs = (
        np.clip(part - np.ceil(beyond * (part / total)).astype(int), 1, None) for part in (prompts, outputs)
    )
    order = np.random.RandomState(settings["seed"]).choice(len(total), len(total), replace=False)
    return [(int(prompts[i]), int(outputs[i])) for i in order]
