"""vLLM's v0 scheduler as the event loop wants it: see ``reference.batch.StepScheduler``."""

from windtunnel.policy import Limits, VllmV0
from windtunnel.policy.vllm_v0 import no_end, patience
from windtunnel.reference import vllm_v0_request as v0
from windtunnel.reference.batch import Batch, Scheduled
from windtunnel.reference.request import Request
from windtunnel.reference.vllm_v0 import Scheduler as SchedulerV0
from windtunnel.reference.vllm_v0_settings import Settings


class Scheduler:
    """Translates requests and batches of the loop to those of v0, and back. One step is in flight at most.

    Requests on the host wait, and so do ignored ones until the step ends in which they were.
    """

    def __init__(self, limits: Limits, policy: VllmV0) -> None:
        self.policy = policy
        self.v0 = SchedulerV0(Settings.of(limits, policy))
        self.requests: dict[v0.Request, Request] = {}
        self.decision = v0.Batch()
        self.paused: set[v0.Request] = set()
        """Requests that decode, but missed the latest step with decodes: their next token is a stall."""

        self.patience = patience(limits)
        self.fruitless = 0
        """Steps in a row that gave nobody a token."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, on the host, or just ignored."""
        return len(self.v0.waiting) + len(self.v0.swapped) + len(self.decision.ignored)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks on the device."""
        return len(self.v0.running)

    @property
    def used_blocks(self) -> int:
        """Blocks of the device that are not free."""
        return self.v0.tables.gpu.num_blocks - self.v0.tables.gpu.num_free

    def add(self, request: Request) -> None:
        """A request joins the end of the queue."""
        known = request.tokens[: request.prompt_tokens]
        own = tuple((request.id, i) for i in range(len(known), request.prompt_tokens))
        added = v0.Request(
            str(request.id), request.id, request.arrival, known + own, request.output_tokens, request.priority
        )
        self.requests[added] = request
        self.v0.add(added)

    def schedule(self, now: float) -> Batch:
        """Decide the step that starts at ``now`` (s)."""
        self.decision = decision = self.v0.schedule(now)
        batch = Batch()
        for part in decision.prefills:
            request = self.requests[part.request]
            if part.start == 0:
                batch.admitted[request] = part.hit
                self._admit(request, part.hit)
            tokens, start = part.tokens - part.hit, part.start + part.hit
            emits = tokens == part.request.num_tokens - start
            batch.scheduled.append(Scheduled(request, tokens, start, False, emits))
        for part in decision.decodes:
            batch.scheduled.append(Scheduled(self.requests[part.request], part.tokens, part.start, True, True))
        self._resume(decision)
        for victim in decision.preempted + decision.swapped_out:
            self.requests[victim].preemptions = victim.preemptions
            batch.preempted.append(self.requests[victim])
        batch.ignored = [self.requests[request] for request in decision.ignored]
        batch.transfer_time = self.policy.transfer_time(decision.blocks_swapped_out, decision.blocks_swapped_in)
        return batch

    def _admit(self, request: Request, hit: int) -> None:
        request.resumed = request.preemptions > 0
        if request.preemptions == 0:
            request.cached_tokens = hit

    def _resume(self, decision: v0.Batch) -> None:
        """Tokens that follow a pause of this request alone are stalls, not gaps of the step's length."""
        for part in decision.decodes:
            self.requests[part.request].resumed = part.request in self.paused
        self.paused.update(request for request in decision.swapped_out if not request.prefilling)
        if decision.decodes:
            served = {part.request for part in decision.decodes}
            self.paused.update(request for request in self.v0.running if not request.prefilling)
            self.paused -= served
        self.paused.difference_update(decision.preempted)

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The batch has run: (requests that got a token, those that ended)."""
        emitted, finished = self.v0.update(self.decision, time)
        self.fruitless = 0 if emitted or batch.ignored else self.fruitless + 1
        if self.fruitless > self.patience:
            raise no_end(self.v0.settings.max_num_batched_tokens)
        served = [self.requests[request] for request in emitted]
        for request in served:
            request.receive_token(time)
        for request in batch.ignored:
            request.refused = True
        ended = [self.requests.pop(request) for request in finished + self.decision.ignored]
        self.decision = v0.Batch()
        return served, ended
