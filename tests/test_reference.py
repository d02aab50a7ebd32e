"""The reference engine equals schedules recorded from the real vLLM v1 scheduler, step by step."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from windtunnel.policy import Limits, Policy
from windtunnel.reference.replica import Group
from windtunnel.reference.request import Request
from windtunnel.reference.scheduler import Batch

RECORDINGS = Path(__file__).parents[2] / "shared" / "vllm_schedules"
NAMES = (
    "v1/01_basic_poisson",
    "v1/03_max_num_seqs_binding",
    "v1/07_no_chunked_prefill",
    "v1/19_reserve_full_isl",
    "v1/23_async_sched_basic",
    "v1-0.20.2/01_basic_poisson",
    "v1-0.10.2/01_basic_poisson",
)
"""Those that need neither prefix hits nor priorities nor thresholds."""


class Recording:
    """Settings, requests and the steps that the real scheduler took."""

    def __init__(self, name: str) -> None:
        self.input = json.loads((RECORDINGS / f"{name}.in.json").read_text())
        with gzip.open(RECORDINGS / f"{name}.trace.jsonl.gz", "rt") as lines:
            records = [json.loads(line) for line in lines]
        self.header = records[0]
        self.steps = [record for record in records if record["type"] == "step"]

    def group(self) -> Group:
        config = self.header["config"]
        limits = Limits(
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            num_blocks=config["num_gpu_blocks"] - 1,
            block_size=config["block_size"],
        )
        reserve = config.get("scheduler_reserve_full_isl", True) and self.header["vllm"] >= "0.20"
        policy = Policy(
            chunked_prefill=config.get("enable_chunked_prefill", True),
            reserve_full_prompt=reserve,
            watermark=config.get("watermark", 0.0),
            async_scheduling=config.get("async_scheduling", False),
        )
        return Group(limits, policy, self.batch_time)

    def batch_time(self, batches: list[Batch]) -> float:
        """The recorder's formula; a last chunk of one token counts like a decode."""
        time = self.header["batch_time"]
        prefill = decodes = context = 0
        for part in batches[0].scheduled:
            context += part.start
            if part.tokens > 1 or not part.emits:
                prefill += part.tokens
            else:
                decodes += 1
        seconds = time["base"] + time["per_prefill_tok"] * prefill + time["per_decode"] * decodes
        return float(round(seconds + time["per_ctx"] * context, 7))

    def requests(self) -> list[Request]:
        """In order of arrival, ties in file order."""
        rows = sorted(self.input["requests"], key=lambda row: row["arrival"])
        return [
            Request(i, row["arrival"], row["prompt_len"], row["output_len"], row["output_len"])
            for i, row in enumerate(rows)
        ]

    @property
    def ids(self) -> list[str]:
        return [row["id"] for row in sorted(self.input["requests"], key=lambda row: row["arrival"])]


def replay(recording: Recording) -> Iterator[dict[str, Any]]:
    """The recorder's loop around our scheduler, one record per call that schedules or preempts something."""
    group = recording.group()
    scheduler = group.schedulers[0]
    arrivals = recording.requests()
    names = recording.ids
    in_flight: list[tuple[float, Batch, dict[str, Any]]] = []
    now = last_end = 0.0
    while arrivals or scheduler.waiting or scheduler.running or in_flight:
        while len(in_flight) < group.depth:
            while arrivals and arrivals[0].arrival <= now + 1e-12:
                scheduler.waiting.append(arrivals.pop(0))
            batch = scheduler.schedule()
            if not batch.scheduled and not batch.preempted:
                break
            start = max(now, last_end)
            last_end = round(start + (group.batch_time([batch]) if batch.scheduled else 0.0), 7)
            preempted = sorted(batch.preempted, key=lambda request: request.id)
            record = {
                "t_start": start,
                "t_end": last_end,
                "scheduled": {names[part.request.id]: part.tokens for part in batch.scheduled},
                "start_pos": {names[part.request.id]: part.start for part in batch.scheduled},
                "preempted": [names[request.id] for request in preempted],
                "running_order": [names[request.id] for request in scheduler.running],
                "waiting_order": [names[request.id] for request in scheduler.waiting],
                "free_blocks": scheduler.free_blocks,
            }
            in_flight.append((last_end, batch, record))
        if not in_flight:
            now = arrivals[0].arrival
            continue
        now, batch, record = in_flight.pop(0)
        emitted, finished = scheduler.update(batch, now)
        record["emitted"] = [names[request.id] for request in emitted]
        record["finished"] = [names[request.id] for request in finished]
        record["free_after_update"] = scheduler.free_blocks
        yield record


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the recordings are not here")
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_real_scheduler(name: str) -> None:
    recording = Recording(name)
    steps = list(replay(recording))
    assert len(steps) == len(recording.steps)
    for number, (ours, theirs) in enumerate(zip(steps, recording.steps, strict=True)):
        for key, value in ours.items():
            if key in ("t_start", "t_end"):
                assert value == pytest.approx(theirs[key], abs=1e-7), (number, key)
            else:
                assert value == theirs[key], (number, key)
                if isinstance(value, dict):
                    assert list(value) == list(theirs[key]), (number, key)
