"""Static batching with padding, see ``windtunnel.policy.whole_batches``."""

from collections import deque

from oracle.vllm_v1.batch import Batch, Scheduled
from oracle.vllm_v1.request import Request
from windtunnel.policy import Limits, WholeBatches


class Scheduler:
    """One rank. Prompts that do not fit one step together are computed in several, before anyone decodes."""

    def __init__(self, limits: Limits, policy: WholeBatches) -> None:
        self.limits, self.policy = limits, policy
        self.waiting: deque[Request] = deque()
        self.batch: list[Request] = []
        """Requests that hold memory, in order of arrival."""
        self.prefilled = 0
        """How many of them have computed their prompt."""
        self.longest_prompt = 0
        self.decoded = 0
        """Steps that the batch has decoded."""
        self.used_blocks = 0
        self.coming = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.waiting)

    @property
    def running(self) -> list[Request]:
        """Requests of the batch whose answers have not left."""
        return [request for request in self.batch if not request.finished]

    @property
    def num_running(self) -> int:
        """How many they are."""
        return len(self.running)

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)

    def settle(self) -> None:
        """What it knows of requests stands in them."""

    def let_go(self, request: Request) -> None:
        """See StepScheduler. Memory comes back with the whole batch."""

    def schedule(self, now: float) -> Batch:
        """See StepScheduler."""
        if not self.batch and self.waiting:
            opens = self.waiting[0].arrival + self.policy.max_queue_delay
            if len(self.waiting) < self.policy.places(self.limits) and now < opens:
                return Batch(ask_again=opens)
            self._form()
        step = Batch()
        if self.prefilled < len(self.batch):
            rows = max(self.limits.max_num_batched_tokens // self.longest_prompt, 1)
            for request in self.batch[self.prefilled : self.prefilled + rows]:
                step.scheduled.append(Scheduled(request, self.longest_prompt, 0, False, True))
            self.prefilled += len(step.scheduled)
        elif self.batch:
            start = self.longest_prompt + self.decoded
            for request in self.batch:
                step.scheduled.append(Scheduled(request, 1, start, True, request.generated < request.output_tokens))
            self.decoded += 1
        return step

    def _form(self) -> None:
        """Take as many waiting requests as memory holds when each has the size of the largest."""
        prompt = output = 0
        while self.waiting and len(self.batch) < self.policy.places(self.limits):
            head = self.waiting[0]
            longest = max(prompt, head.prompt_tokens), max(output, head.max_tokens)
            each = self.limits.blocks(min(sum(longest), self.limits.max_model_len) - 1)
            if each * (len(self.batch) + 1) > self.limits.num_blocks and self.batch:
                break
            (prompt, output), self.used_blocks = longest, each * (len(self.batch) + 1)
            self.batch.append(self.waiting.popleft())
        for request in self.batch:
            request.num_blocks = self.used_blocks // len(self.batch)
        self.longest_prompt, self.prefilled, self.decoded = prompt, 0, 0

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """See StepScheduler. The batch ends with its longest output, and all its answers with it."""
        emitted = [part.request for part in batch.scheduled if part.emits]
        finished = []
        for request in emitted:
            request.generated += 1
            request.last_token = time
            if request.generated == 1:
                request.first_token = time
            if request.generated == request.output_tokens and self.policy.answer_singly:
                finished.append(request)
        everyone = self.prefilled == len(self.batch) and all(one.generated == one.output_tokens for one in self.batch)
        if everyone:
            finished = finished if self.policy.answer_singly else self.batch
            self.batch, self.used_blocks = [], 0
        for request in finished:
            request.finished, request.finish = True, time
        return emitted, finished
