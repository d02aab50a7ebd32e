"""The queue of the unified scheduler: its order, and when it is open."""

from bisect import insort
from collections.abc import Callable

from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.request import Request
from windtunnel.policy import Limits, Policy

KEYS: dict[str, Callable[[Request, int], float]] = {
    "priority": lambda request, _: request.priority,
    "shortest_prompt": lambda request, _: request.prompt_tokens,
    "longest_prompt": lambda request, _: -request.prompt_tokens,
    "shortest_output": lambda _, declared: declared,
    "longest_output": lambda _, declared: -declared,
    "shortest_job": lambda request, declared: request.prompt_tokens + declared,
    "longest_job": lambda request, declared: -request.prompt_tokens - declared,
}
"""Key of a request by the order of admission, from the request and its declared output; the smallest comes first."""


def declared_output(request: Request, limits: Limits) -> int:
    """Tokens that a request may generate by what it declares."""
    return min(request.max_tokens, limits.max_model_len - request.prompt_tokens)


class Queue:
    """Waiting requests. A request's key is taken when it arrives and when it comes back; equals go by arrival."""

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self.policy, self.limits = policy, limits
        self.keyed = policy.admission_key is not None or policy.admission_order != "fcfs"
        self.requests: list[Request] = []
        self.keys: dict[Request, float] = {}

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def head(self) -> Request:
        """The next request."""
        return self.requests[0]

    def add(self, request: Request) -> None:
        """A request arrives."""
        if self.keyed:
            self._insert(request)
        else:
            self.requests.append(request)

    def add_evicted(self, request: Request) -> None:
        """A request was evicted: without keys it comes before all others."""
        if self.keyed:
            self._insert(request)
        else:
            self.requests.insert(0, request)

    def pop(self) -> Request:
        """Take the head."""
        return self.requests.pop(0)

    def restore(self, aside: list[Request]) -> None:
        """Put those back that were passed over, in the same order."""
        self.requests = aside + self.requests

    def _insert(self, request: Request) -> None:
        declared = declared_output(request, self.limits)
        if self.policy.admission_key is not None:
            key = self.policy.admission_key(
                request.prompt_tokens, declared, request.priority, request.generated, request.arrival
            )
        else:
            key = KEYS[self.policy.admission_order](request, declared)
        self.keys[request] = float(key)
        insort(self.requests, request, key=lambda one: (self.keys[one], one.arrival, one.id))


class Door:
    """Whether the queue is looked at in a step."""

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self.policy = policy
        self.places = policy.most_running(limits)
        self.of_step = policy.places(limits)
        self.together = policy.prefills_together(limits)
        self.most = policy.prefills_at_most(limits)
        self.forming = True
        """No request of the present batch has decoded yet (static and dynamic batching)."""
        self.clock = 0
        """Decode steps so far."""
        self.opens_at_clock = 0
        self.last_prefill_time = 0.0
        """Seconds of the last step with prefills."""

    def begin_step(self, running: int) -> None:
        """A new batch may form when nothing runs."""
        self.forming = self.forming or running == 0

    def end_step(self, batch: Batch) -> None:
        """A step with decodes ends the forming of a batch, and the look at the queue."""
        if batch.decodes:
            self.forming = False
            if self.clock >= self.opens_at_clock:
                self.opens_at_clock = self.clock + self.policy.reschedule_interval
            self.clock += 1

    def is_open(self, now: float, queue: Queue, running: int, decodes: int) -> bool:
        """Whether a request may be admitted in the step that starts at ``now``."""
        policy, waiting = self.policy, len(queue)
        if waiting == 0 or self.places - running < min(self.together, waiting):
            return False
        if policy.batching != "continuous":
            closed = decodes > 0 if policy.pipeline_parallel_size > 1 else not self.forming
            if closed:
                return False
        if running == 0 or (policy.batching == "dynamic" and policy.pipeline_parallel_size > 1):
            return now >= self.opens(queue, running)
        if policy.delay_factor and not now - queue.head.arrival > policy.delay_factor * self.last_prefill_time:
            return False
        return decodes == 0 or self._is_due(waiting, running)

    def _is_due(self, waiting: int, running: int) -> bool:
        """Whether the interval or the ratio, where there are such rules, ask for a look beside decodes."""
        interval, ratio = self.policy.reschedule_interval, self.policy.queue_ratio
        if interval == 1 and ratio == 0.0:
            return True
        long_enough = ratio > 0.0 and waiting > ratio * running
        return long_enough or (interval > 1 and self.clock >= self.opens_at_clock)

    def opens(self, queue: Queue, running: int = 0) -> float:
        """When it opens while no batch runs: one that is not full waits with dynamic batching."""
        if self.policy.batching == "dynamic" and len(queue) < min(self.of_step, self.places - running):
            return queue.head.arrival + self.policy.max_queue_delay
        return 0.0
