"""Exported schedules in vLLM: its own engine, with random weights on the CPU, computes the same batches."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.optimum.certificate import certify
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.export import exported
from windtunnel.optimum.heuristics import simulated
from windtunnel.optimum.objective import MAKESPAN
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Batch, Schedule, as_early_as_possible
from windtunnel.policy import Limits
from windtunnel.policy.unified import infermax_grid

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
DRIVER = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
plan, folder, size, blocks, tokens, seqs = json.load(open(sys.argv[1])), sys.argv[2], *map(int, sys.argv[3:7])
from windtunnel.optimum.vllm_plugin import Planned
steps, schedule = [], Planned.schedule
def recorded(self, *args, **kwargs):
    output = schedule(self, *args, **kwargs)
    if output.num_scheduled_tokens:
        steps.append({str(self.names.index(name)): n for name, n in output.num_scheduled_tokens.items()})
    return output
Planned.schedule = recorded
llm = LLM(folder, skip_tokenizer_init=True, load_format="dummy", scheduler_cls=Planned, async_scheduling=False,
          enable_prefix_caching=False, block_size=size, num_gpu_blocks_override=blocks + 1, max_model_len=128,
          max_num_batched_tokens=tokens, max_num_seqs=seqs, enforce_eager=True)
prompts = [{"prompt_token_ids": [1 + i] * n} for i, n in enumerate(plan["prompt_tokens"])]
params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0, detokenize=False) for n in plan["output_tokens"]]
outputs = llm.generate(prompts, params)
print("STEPS", json.dumps([steps, [len(one.outputs[0].token_ids) for one in outputs]]))
"""


def problem() -> Problem:
    rng = np.random.default_rng(5)
    return Problem.of(
        rng.integers(4, 40, 10), rng.integers(2, 20, 10), Limits(6, 128, 128, 6, 32), Cost(200.0, 4.0, 1.0)
    )


def in_vllm(tmp_path: Path, schedule: Schedule) -> tuple[list[dict[str, int]], list[int]]:
    """The batches that vLLM computes, and the tokens that each request gets."""
    pytest.importorskip("vllm")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    plan = tmp_path / "plan.json"
    plan.write_text(exported(problem(), schedule), encoding="utf-8")
    limits = problem().limits
    numbers = (limits.block_size, limits.num_blocks, limits.max_num_batched_tokens, limits.max_num_seqs)
    environment = os.environ | {
        "WINDTUNNEL_SCHEDULE": str(plan),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    words = [sys.executable, "-c", DRIVER, str(plan), str(tmp_path), *map(str, numbers)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("STEPS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    batches, outputs = json.loads(lines[0][6:])
    return batches, outputs


def planned(schedule: Schedule) -> list[dict[str, int]]:
    return [{str(i): tokens for i, tokens in batch.tokens.items()} for batch in schedule.batches]


@pytest.mark.long
def test_the_best_schedule_found(tmp_path: Path) -> None:
    schedule = certify(problem(), MAKESPAN, program="none", seconds=1.0).schedule
    assert in_vllm(tmp_path, schedule) == (planned(schedule), problem().output_tokens.tolist())


@pytest.mark.long
@pytest.mark.parametrize("name", ["vllm-chunked-longest-fcfs", "vllm-newest-fcfs"])
def test_chunks_and_evictions(tmp_path: Path, name: str) -> None:
    schedule = simulated(problem(), infermax_grid()[name])
    assert any(batch.evicted for batch in schedule.batches)
    assert in_vllm(tmp_path, schedule) == (planned(schedule), problem().output_tokens.tolist())


def test_an_export_names_requests_by_arrival() -> None:
    late = Problem.of([4, 3], [1, 2], Limits(2, 8, 16, 16, 1), Cost(1.0, 1.0), arrival=[5.0, 0.0])
    schedule = as_early_as_possible(late, [Batch(0.0, {1: 3}), Batch(0.0, {1: 1}), Batch(0.0, {0: 4})])
    document: dict[str, Any] = json.loads(exported(late, schedule))
    assert document["prompt_tokens"] == [3, 4]
    assert document["arrival"] == [0.0, 5.0]
    assert [batch["tokens"] for batch in document["batches"]] == [{"0": 3}, {"0": 1}, {"1": 4}]
