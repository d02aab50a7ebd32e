"""A scheduler of the user's, in Python, in the place of an engine's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from windtunnel.errors import InputError
from windtunnel.policy.settings import Limits, Settings

NAME = "a scheduler of your own"


@dataclass(frozen=True)
class Own(Settings):
    """Decides what an engine computes; whatever else there is of an engine stays."""

    can_cache_prefixes: ClassVar[bool] = False
    why_unfinished: ClassVar[str] = "no replica is there for it"
    why_not_live: ClassVar[str] = f"{NAME}: not served live; use an engine's own scheduler"

    make: Callable[[], Any]
    """Makes a ``PythonScheduler`` of ``windtunnel.reference.custom`` for each rank."""
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

    @property
    def beyond_the_core(self) -> tuple[str, ...]:
        """See Settings."""
        return (NAME,)

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
