"""A scheduler of the user's, in Python, in the place of an engine's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.policy.settings import Limits, Settings

NAME = "a scheduler of your own"


class RequestView(Protocol):
    """A request as a scheduler sees it: the same object at every question, true when it is looked at."""

    @property
    def id(self) -> int:
        """Its number in the workload."""

    @property
    def arrival(self) -> float:
        """Seconds."""

    @property
    def priority(self) -> int:
        """Lower is better."""

    @property
    def prompt_tokens(self) -> int:
        """Of its prompt."""

    @property
    def max_tokens(self) -> int:
        """Output that it declares."""

    @property
    def output_tokens(self) -> int:
        """Output after which it really ends, for schedulers that are allowed to know the future."""

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""

    @property
    def num_computed_tokens(self) -> int:
        """Those in the cache."""

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""

    @property
    def preemptions(self) -> int:
        """How often it was evicted."""


@dataclass(frozen=True)
class Decision:
    """One step. A running request that is not named keeps its memory and pauses."""

    tokens: Mapping[RequestView, int]
    """Request → tokens to compute: a piece of its prompt, or 1 to decode. Waiting requests are admitted, in this
    order."""
    evict: Sequence[RequestView] = ()
    """Running requests that lose their memory first; they go back to the front of the queue, the first one foremost,
    and compute everything again."""
    hold: bool = False
    """Those named go on decoding, and you are not asked again until a request arrives or lacks a block for its next
    token or, while others wait, until one ends. It takes no effect with a piece of a prompt, nor with a whole prompt
    while others wait. Such steps are made many at once: for rules that look at nothing else that changes meanwhile,
    as ``now`` does."""


class PythonScheduler(Protocol):
    """What you write. One object for each data-parallel rank of each replica."""

    def schedule(
        self, now: float, waiting: Sequence[RequestView], running: Sequence[RequestView], limits: Limits
    ) -> Decision:
        """Decide the step that starts at ``now`` (s).

        ``waiting`` is in order of arrival behind those that were evicted, ``running`` in order of admission. A
        request has ``num_tokens`` known tokens, of which ``num_computed_tokens`` are in the cache, and holds
        ``num_blocks`` of ``limits.num_blocks``. It is asked again when the step has ended, or when a request arrives
        at an idle engine. Known are its tokens, and the one that the step in flight samples.

        In a decode pool a request comes with its KV, and is in ``running`` at once: it is to decode.
        """


class Choosy(PythonScheduler, Protocol):
    """One that has a word in what a decode pool takes; without ``takes`` that is the engine's rule alone."""

    def takes(self, request: RequestView, running: Sequence[RequestView], limits: Limits) -> bool:
        """Whether a request that is computed elsewhere may get memory here, where there is enough for what it brings.

        Those behind it wait for it. ``running`` also has those that have memory and wait for their KV.
        """


class Allocator(PythonScheduler, Protocol):
    """One that also says how many blocks of KV a request holds; without ``allocate`` as many as its tokens fill."""

    def allocate(self, request: RequestView, blocks: int) -> int:
        """Blocks that a request holds from this step on, at least the ``blocks`` that its tokens then fill.

        It is asked for each request that a decision names, in order. What a request holds in addition is taken from
        the free blocks, is shown in its ``num_blocks``, and returns when it ends or is evicted. Decisions are not held.
        """


class ColumnScheduler(Protocol):
    """The same question, put with record arrays: ``schedule_columns`` is a method that uses NumPy, or a static method
    that numba compiles and the core calls without Python."""

    def schedule_columns(self, now: float, waiting: Any, running: Any, limits: Any) -> bool:
        """Write the decision into the columns ``tokens``, ``evict`` and ``turn``; returns whether to hold it.

        The arrays have the attributes of RequestView as fields, ``limits`` those of Limits.
        """


@dataclass(frozen=True)
class UserScheduler(Settings):
    """Decides what an engine computes; whatever else there is of an engine stays."""

    can_cache_prefixes: ClassVar[bool] = False
    why_unfinished: ClassVar[str] = "no replica is there for it"

    make: Callable[[], Any]
    """Makes a ``PythonScheduler`` for each rank."""
    engine: Settings
    """The scheduler that the engine has otherwise."""

    def __str__(self) -> str:
        """What a manifest says of it."""
        return f"{NAME} in the place of {self.engine}"

    @property
    def async_scheduling(self) -> bool:
        """See Settings: as the engine does."""
        return self.engine.async_scheduling

    @property
    def unused_blocks(self) -> int:
        """See Settings: as the engine does."""
        return self.engine.unused_blocks

    @property
    def refuse_long_prompts(self) -> bool:
        """See Settings: as the engine does."""
        return self.engine.refuse_long_prompts

    def longest_request(self, limits: Limits) -> int:
        """See Settings: the engine refuses those that are longer."""
        return self.engine.longest_request(limits)

    def longest_prompt(self, limits: Limits) -> int:
        """See Settings: the engine refuses those that are longer."""
        return self.engine.longest_prompt(limits)

    def with_flags(self, flags: Mapping[str, Any]) -> Self:
        """See Settings: whoever wrote it knows what it obeys."""
        del flags
        return self

    def with_stages(self, stages: int) -> Self:
        """See Settings."""
        if stages > 1:
            raise InputError(f"pipeline_parallel_size={stages}: not simulated for {NAME}; use 1")
        return self
