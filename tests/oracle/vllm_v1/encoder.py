"""Images and other inputs that an encoder turns into embeddings, in vLLM's v1 scheduler (0.33:
v1/core/encoder_cache_manager.py, _try_schedule_encoder_inputs of v1/core/sched/scheduler.py)."""

from collections import OrderedDict
from dataclasses import dataclass

from oracle.vllm_v1.request import Image, Request


@dataclass(frozen=True)
class EncoderLimits:
    """What encoder inputs may take; without any, requests have none."""

    compute_budget: int = 0
    """Embeddings of a step."""
    cache_size: int = 0
    """Embeddings that are kept at once."""
    disable_chunked_mm_input: bool = False
    """No chunk of a prompt ends within an input."""
    shift: int = 0
    """Tokens by which an input is wanted before its place is computed (EAGLE: 1)."""


class Encoder:
    """The cache of embeddings, and what a step computes. Entries without a reference stay until room is needed."""

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self.budget = limits.compute_budget
        self.free = self.freeable = limits.cache_size
        self.references: dict[str, set[Request]] = {}
        self.idle: OrderedDict[str, int] = OrderedDict()
        """Entries without a reference, the longest so first, and their embeddings."""
        self.dropped: list[str] = []
        self.wanted: list[int] = []
        """Inputs that the request that is looked at computes if it is scheduled."""
        self.scheduled: dict[Request, list[int]] = {}

    def begin_step(self) -> None:
        """Nothing is computed yet."""
        self.budget, self.dropped, self.scheduled = self.limits.compute_budget, [], {}

    def tokens_with_inputs(self, request: Request, computed: int, tokens: int) -> int:
        """Of the next tokens, those whose inputs are cached or can be computed now."""
        names: set[str] = set()
        self.wanted, embeddings = [], 0
        for i, image in enumerate(request.images):
            if image.offset >= computed + tokens + self.limits.shift:
                break
            if image.end <= computed or image.name in names or self._refer(request, image):
                continue
            splits = computed < image.offset and computed + tokens < image.end
            cut = self.limits.disable_chunked_mm_input and splits
            if cut or not self._has_room(image, embeddings):
                tokens = max(image.offset - computed - self.limits.shift, 0)
                break
            embeddings += image.embeddings
            self.budget -= image.embeddings
            names.add(image.name)
            self.wanted.append(i)
        if tokens == 0:
            self.leave_out(request)
        return tokens

    def _refer(self, request: Request, image: Image) -> bool:
        """Whether an input is cached; the request then holds it."""
        if image.name not in self.references:
            return False
        if not self.references[image.name]:
            self.freeable -= self.idle.pop(image.name)
        self.references[image.name].add(request)
        return True

    def _has_room(self, image: Image, embeddings: int) -> bool:
        """Whether an input can be computed next to these embeddings; drops others where that helps."""
        needed = image.embeddings + embeddings
        if image.embeddings > self.budget or (needed > self.free and needed > self.freeable):
            return False
        while needed > self.free:
            name, size = self.idle.popitem(last=False)
            del self.references[name]
            self.dropped.append(name)
            self.free += size
        return True

    def compute(self, request: Request) -> None:
        """The request that was looked at is scheduled with its inputs."""
        for i in self.wanted:
            image = request.images[i]
            self.references.setdefault(image.name, set()).add(request)
            self.free -= image.embeddings
            self.freeable -= image.embeddings
        if self.wanted:
            self.scheduled[request] = self.wanted
        self.wanted = []

    def leave_out(self, request: Request) -> None:
        """It is not."""
        self.budget += sum(request.images[i].embeddings for i in self.wanted)
        self.wanted = []

    def withdraw(self, request: Request) -> None:
        """A request is preempted: its inputs are no longer held, and those of this step not computed."""
        self.budget += sum(request.images[i].embeddings for i in self.scheduled.pop(request, []))
        self.release(request)

    def release(self, request: Request, computed: int | None = None) -> None:
        """A request needs none of its inputs, or none that ends with its computed tokens, any more."""
        for image in request.images:
            holders = self.references.get(image.name)
            if holders and request in holders and (computed is None or image.end <= computed):
                holders.discard(request)
                if not holders:
                    self.idle[image.name] = image.embeddings
                    self.freeable += image.embeddings
