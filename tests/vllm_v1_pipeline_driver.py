"""Run the real v1 scheduler of a vLLM release in a pipeline: ``python vllm_v1_pipeline_driver.py FOLDER < workloads``

Input and FOLDER are those of vllm_v1_driver.py; ``config`` has ``pipeline_parallel_size``, too. The loop keeps steps in
flight as EngineCore.step_with_batch_queue of the release does, and each passes through stages made up here.
"""

import json
import sys
from collections import deque
from typing import Any, NamedTuple

from vllm_v1_driver import PER_TOKEN, STEP_BASE, Loop, Replacements


def passage(stages: int, tokens: int, context: int) -> tuple[list[int], list[int]]:
    """Ticks of a step in each stage, and between them."""
    seconds = [STEP_BASE * (1 + stage % 2) + PER_TOKEN * tokens + context for stage in range(stages)]
    return seconds, [STEP_BASE // 10 + PER_TOKEN // 5 * tokens] * (stages - 1)


class Flying(NamedTuple):
    """A step in flight."""

    end: int
    output: Any
    emits: dict[str, bool]
    record: dict[str, Any]


class PipelineLoop(Loop):
    """Several steps in flight; an empty one takes a place."""

    def __init__(self, workload: dict[str, Any], fills_up: bool) -> None:
        super().__init__(workload)
        config = workload["config"]
        self.max_model_len = config["max_model_len"]
        self.stages = config["pipeline_parallel_size"]
        self.depth = self.stages + self.overlapping
        self.fills_up = fills_up
        """After an empty step, too (vLLM 0.32); before, the oldest step was awaited then."""
        self.stages_free = [0] * self.stages
        self.sampled_at = deque([0] * self.stages)
        self.flying: deque[Flying] = deque()
        self.prefill: dict[str, int] = {}
        """Tokens of each request that were known when it was last admitted."""

    def records(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        while len(records) < self.most and (self.coming or self.has_requests() or self.flying):
            self.take_arrived()
            if self.has_requests():
                self.decide()
                last = self.flying[-1].output.total_num_scheduled_tokens > 0
                if len(self.flying) < self.depth and (last or self.fills_up) and not self.oldest_is_done():
                    continue
            elif not self.flying:
                self.now = self.coming[0][0]
                continue
            step = self.flying.popleft()
            record = self.arrive(step.end, step.output, step.emits, step.record)
            if step.emits:
                records.append(record)
        return records

    def has_requests(self) -> bool:
        return bool(self.scheduler.has_requests())

    def oldest_is_done(self) -> bool:
        return not self.fills_up and self.flying[0].end <= self.now

    def decide(self) -> None:
        sampling = {name: one.num_output_placeholders for name, one in self.requests.items()}
        running = {one.request_id for one in self.scheduler.running}
        output = self.scheduler.schedule()
        tokens = dict(output.num_scheduled_tokens)
        start = {name: self.requests[name].num_computed_tokens - n for name, n in tokens.items()}
        emits = {name: self.emits(self.requests[name], sampling[name]) for name in tokens}
        record = {"scheduled": tokens, "start_pos": start, "free_blocks": self.free_blocks()}
        self.prefill |= {name: self.requests[name].num_tokens for name in tokens if name not in running}
        samples = any(emits[name] and self.goes_on(name, start[name]) for name in tokens)
        end = self.run_stages(sum(tokens.values()), sum(start.values()), samples) if tokens else self.now
        if not tokens:
            self.sampled_at.popleft()
            self.sampled_at.append(0)
        self.flying.append(Flying(end, output, emits, record | {"decided": self.now, "end": end}))

    def goes_on(self, name: str, start: int) -> bool:
        """Whether the first stage waits for the token: not for the only one of a prompt."""
        one = self.requests[name]
        most = min(one.num_prompt_tokens + one.max_tokens, self.max_model_len)
        return bool(start >= self.prefill[name] or one.num_tokens + 1 < most)

    def run_stages(self, tokens: int, context: int, samples: bool) -> int:
        known = self.sampled_at.popleft()
        arrival = max(self.now, known) if self.overlapping else self.now
        seconds, sends = passage(self.stages, tokens, context)
        for stage in range(self.stages):
            arrival = self.stages_free[stage] = max(arrival, self.stages_free[stage]) + seconds[stage]
            if stage < self.stages - 1:
                arrival += sends[stage]
        self.sampled_at.append(arrival if samples else 0)
        return arrival


if __name__ == "__main__":
    sys.meta_path.insert(0, Replacements())
    sys.path.append(sys.argv[1])
    for workload in json.load(sys.stdin):
        print(json.dumps(PipelineLoop(workload, workload["fills_up"]).records()), flush=True)  # noqa: T201
