"""A scheduler for vLLM that follows a schedule of ``windtunnel optimum --export``, batch by batch.

    WINDTUNNEL_SCHEDULE=plan.json vllm serve MODEL --scheduler-cls windtunnel.optimum.vllm_plugin.Planned \\
        --no-async-scheduling --no-enable-prefix-caching

Requests are those of the plan in order of arrival, and must not end early (ignore_eos). vLLM's own scheduler does the
work: before each step it is shown only the requests of the next batch, and no more tokens of each than the batch has;
memory, workers and outputs are its own. A step that differs from the plan is an error. For vLLM 0.32's v1 scheduler.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

VARIABLE = "WINDTUNNEL_SCHEDULE"


class Planned(Scheduler):  # type: ignore[misc]  # without vLLM it is of no known type
    """vLLM's scheduler, led by a plan."""

    running: list[Any]
    waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scheduler_reserve_full_isl = False
        plan = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
        self.left: list[dict[str, Any]] = plan["batches"][::-1]
        self.prompts: list[int] = plan["prompt_tokens"]
        self.names: list[str] = []
        """Id of each request of the plan that has arrived."""
        self.planned: dict[str, int] = {}
        """Tokens by id, of the next step."""

    def add_request(self, request: Any) -> None:
        """The next request of the plan has arrived."""
        number = len(self.names)
        if number == len(self.prompts) or request.num_prompt_tokens != self.prompts[number]:
            raise ValueError(f"request {number} of {request.num_prompt_tokens} tokens is not in the plan at this place")
        self.names.append(request.request_id)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The plan's next batch, or nothing before its last request has arrived."""
        self.planned = {}
        if self.left and all(int(number) < len(self.names) for number in self.left[-1]["tokens"]):
            batch = self.left.pop()
            self.planned = {self.names[int(number)]: tokens for number, tokens in batch["tokens"].items()}
            self._evict([self.names[number] for number in batch["evicted"]])
        running, waiting = self.running, self.waiting
        self.running = [request for request in running if request.request_id in self.planned]
        self.waiting = create_request_queue(self.policy)
        order = {name: place for place, name in enumerate(self.planned)}
        new = [request for request in waiting if request.request_id in order]
        for request in sorted(new, key=lambda one: order[one.request_id]):
            self.waiting.add_request(request)
        output = super().schedule(*args, **kwargs)
        if output.num_scheduled_tokens != self.planned:
            raise RuntimeError(f"vLLM computes {output.num_scheduled_tokens}, the plan has {self.planned}")
        self.running += [request for request in running if request.request_id not in self.planned]
        for request in new:
            waiting.remove_request(request)
        self.waiting = waiting
        return output

    def _evict(self, names: list[str]) -> None:
        """Take their memory from requests, which wait again."""
        for request in [request for request in self.running if request.request_id in names]:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Where vLLM last shortens what a step computes of a request: to the plan's tokens."""
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return min(tokens, self.planned.get(request.request_id, tokens))
