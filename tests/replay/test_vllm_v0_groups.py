"""Requests of several sequences: the core equals vLLM's own scheduler and block manager, driven as vLLM 0.6.3 did."""

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from replay.vllm_v0_driver import answers
from windtunnel.core.records import GONE, IGNORED, PREFILLING, QUEUED, SWAPPED
from windtunnel.errors import InputError
from windtunnel.replay.recording import TICKS_PER_SECOND, RecordedRequest, Recording
from windtunnel.replay.vllm_v0 import Decision, Scheduler

VLLM = os.environ.get("WINDTUNNEL_VLLM_V0")
CASES = int(os.environ.get("WINDTUNNEL_VLLM_V0_CASES", "400"))
FIRST_SEED = int(os.environ.get("WINDTUNNEL_VLLM_V0_SEED", "0"))
TIMES = {"base": 0.01, "per_prefill_tok": 1e-4, "per_decode": 1e-4, "per_ctx": 1e-7, "per_swap_block": 1e-3}
COMPARED = (
    "scheduled", "num_prefill_groups", "preempted_recompute", "swapped_out", "swapped_in", "blocks_swap_out",
    "blocks_swap_in", "ignored", "free_gpu", "free_cpu", "running_order", "waiting_order", "swapped_order",
    "free_after_update", "t_start", "finished",
)  # fmt: skip

Record = dict[str, Any]


class Groups:
    """A lane of the core whose requests have several sequences, each a row."""

    def __init__(self, document: Record) -> None:
        self.groups = document["requests"]
        rows = [(g, output) for g, row in enumerate(self.groups) for output in row["outputs"]]
        self.group_of = [g for g, _ in rows]
        self.first = [self.group_of.index(g) for g in range(len(self.groups))]
        requests = tuple(
            RecordedRequest(
                f"{self.groups[g]['id']}/{i}", i, round(self.groups[g]["arrival"] * TICKS_PER_SECOND),
                self.groups[g]["prompt_len"], output, 0, tuple(range(-self.groups[g]["prompt_len"], 0)),
            )
            for i, (g, output) in enumerate(rows)
        )  # fmt: skip
        self.scheduler = Scheduler(Recording(document["config"], {}, requests))
        columns, sizes = self.scheduler.columns, np.bincount(self.group_of)
        columns["family"] = [self.first[g] for g in self.group_of]
        columns["samples"] = [sizes[g] if self.first[g] == i else 1 for i, g in enumerate(self.group_of)]
        self.scheduler.lane["spare"] = max(sizes)
        self.now, self.coming = 0.0, list(range(len(self.groups)))

    def go(self) -> Iterator[Record]:
        """The steps, until nothing is left to do or nothing can go on."""
        idle = 0
        while self.coming or self.scheduler.has_unfinished:
            while self.coming and self.groups[self.coming[0]]["arrival"] <= self.now + 1e-12:
                self.scheduler.deliver(self.first[self.coming.pop(0)])
                idle = 0
            if not self.scheduler.has_unfinished or idle > 1:
                if not self.coming:
                    return
                self.now = self.groups[self.coming[0]]["arrival"]
                continue
            before = self.scheduler.columns["state"].copy()
            decision = self.scheduler.schedule(self.now)
            if decision is None:
                idle = 2
                continue
            record = self.words(decision, before)
            start, idle = self.now, 0 if decision.changed else idle + 1
            self.now += self.seconds(decision)
            self.scheduler.update(decision, self.now)
            ended = [g for g in range(len(self.groups)) if self.over(g) and not self.over(g, before)]
            names = {r["id"]: r for r in self.groups}
            yield (
                record
                | {
                    "t_start": round(start, 9),
                    "finished": sorted(
                        self.groups[g]["id"] for g in ended if self.groups[g]["id"] not in record["ignored"]
                    ),
                    "free_after_update": self.scheduler.free_blocks,
                }
                | {"names": len(names)}
            )

    def over(self, g: int, states: Any = None) -> bool:
        """Whether all sequences of a request have ended."""
        states = self.scheduler.columns["state"] if states is None else states
        return all(states[i] in (GONE, IGNORED) for i, one in enumerate(self.group_of) if one == g)

    def seconds(self, decision: Decision) -> float:
        """What the step takes."""
        if not decision.parts:
            return 0.0
        tokens = sum(part.tokens for part in decision.prefills)
        context = sum(part.start for part in decision.parts)
        seconds = TIMES["base"] + TIMES["per_prefill_tok"] * tokens + TIMES["per_decode"] * len(decision.decodes)
        copied = decision.blocks_in + decision.blocks_out
        return seconds + TIMES["per_ctx"] * context + TIMES["per_swap_block"] * copied

    def ids(self, rows: list[int]) -> list[str]:
        """Names of the requests of these rows, each once."""
        return list(dict.fromkeys(self.groups[self.group_of[r]]["id"] for r in rows))

    def words(self, decision: Decision, before: Any) -> Record:
        """The recorder's words for a decision."""
        scheduler, after = self.scheduler, self.scheduler.columns["state"]
        moved = {"preempted_recompute": (PREFILLING, QUEUED), "swapped_out": (PREFILLING, SWAPPED),
                 "swapped_in": (SWAPPED, PREFILLING)}  # fmt: skip
        return {
            "scheduled": dict.fromkeys(self.ids([part.r for part in decision.parts])),
            "num_prefill_groups": len(decision.prefills),
            "blocks_swap_out": decision.blocks_out,
            "blocks_swap_in": decision.blocks_in,
            "ignored": self.ids(decision.ignored),
            "free_gpu": scheduler.free_blocks,
            "free_cpu": int(scheduler.lane["cpu_free"]),
            "running_order": self.ids(scheduler.running),
            "waiting_order": self.ids(scheduler.waiting),
            "swapped_order": self.ids(scheduler.swapped),
        } | {name: self.ids(np.flatnonzero((before == a) & (after == b)).tolist()) for name, (a, b) in moved.items()}


def random_input(rng: random.Random) -> Record:
    """Requests of one to four sequences, of equal or unequal lengths, where memory or places run short."""
    block_size = rng.choice((1, 2, 4, 8, 16))
    blocks = rng.choice((12, 20, 40, 120, 250))
    config = {
        "max_num_seqs": rng.choice((4, 8, 16)),
        "max_num_batched_tokens": rng.choice((64, 120, 400)),
        "num_gpu_blocks": blocks,
        "num_cpu_blocks": rng.choice((blocks, 4 * blocks, 30 * blocks)),
        "block_size": block_size,
        "max_model_len": 2048,
        "preemption_mode": rng.choice((None, None, None, "swap")),
        "delay_factor": rng.choice((0, 0, 0, 1.0)),
    }
    longest = max(2, min(blocks * block_size // 2, rng.choice((20, 60, 150))))
    gap, now, requests, equal = rng.choice((0.0, 0.002, 0.01, 0.05)), 0.0, [], rng.random() < 0.6
    for i in range(rng.choice((3, 8, 15, 30))):
        now += rng.choice((0.0, rng.expovariate(1.0) * gap))
        n, most = rng.choice((1, 2, 3, 4)), rng.choice((4, 20, max(4, longest)))
        outputs = [rng.randint(1, most)] * n if equal else [rng.randint(1, most) for _ in range(n)]
        requests.append(
            {
                "id": f"r{i}",
                "arrival": round(now, 6),
                "prompt_len": rng.randint(1, longest),
                "output_len": max(outputs),
                "outputs": outputs,
            }
        )
    return {"config": config, "batch_time": TIMES, "requests": requests}


def ours(document: Record) -> tuple[list[Record], str | None]:
    """Our steps, and the words of the error that ended them."""
    steps: list[Record] = []
    try:
        steps.extend(Groups(document).go())
    except InputError as error:
        return steps, str(error)
    return steps, None


def spelled_out(document: Record) -> Record:
    """The input with each prompt's tokens."""
    rows = [row | {"tokens": [1000 * i + k for k in range(row["prompt_len"])]}
            for i, row in enumerate(document["requests"])]  # fmt: skip
    return document | {"requests": rows}


@pytest.mark.long
@pytest.mark.skipif(not VLLM, reason="WINDTUNNEL_VLLM_V0 names no folder with vLLM 0.8.5")
def test_equals_the_real_scheduler_with_several_sequences() -> None:
    """Every step, up to where the real engine ends, or computes a sequence of several again."""
    documents = [random_input(random.Random(seed)) for seed in range(FIRST_SEED, FIRST_SEED + CASES)]
    theirs = answers(str(VLLM), [spelled_out(document) for document in documents])
    swaps = whole = 0
    for number, (document, answer) in enumerate(zip(documents, theirs, strict=True)):
        steps, ended = ours(document)
        where = f"seed {FIRST_SEED + number}: theirs {answer['ended']!r}, ours {ended!r}"
        for at, (mine, real) in enumerate(zip(steps, answer["records"], strict=False)):
            for name in COMPARED:
                if name == "scheduled":
                    assert list(mine[name]) == list(real[name]), f"{where}, step {at}"
                elif name == "finished":
                    assert mine[name] == sorted(real[name]), f"{where}, step {at}"
                else:
                    assert mine[name] == real[name], f"{where}, step {at}: {name}"
        swaps += sum(len(step["swapped_out"]) for step in steps)
        if not answer["ended"] and not ended:
            assert answer["circles"] or len(steps) == len(answer["records"]), where
            whole += not answer["circles"]
    assert whole > CASES / 2
    assert swaps > CASES
