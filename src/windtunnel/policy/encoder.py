"""Images and other inputs that an encoder turns into embeddings, as data."""

from math import inf

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError


@dataclass(frozen=True)
class Encoder:
    """What encoder inputs may take in vLLM's v1 scheduler (0.33: v1/core/encoder_cache_manager.py)."""

    compute_budget: int
    """Embeddings that one step may compute."""
    cache_size: int
    """Embeddings that are kept at once."""
    disable_chunked_mm_input: bool = False
    """No chunk of a prompt ends within an input."""
    input_size: int = 1
    """Embeddings of an input, where all are alike."""
    seconds: tuple[float, ...] = ()
    """How long the encoder takes for 0, 1, 2, … of them in a step; the last for more. Empty: no time."""

    def __post_init__(self) -> None:
        for name in ("compute_budget", "cache_size"):
            if getattr(self, name) < 0:
                raise InputError(f"encoder {name}={getattr(self, name)}: must be ≥ 0 embeddings")
        if self.input_size < 1 or not all(0 <= value < inf for value in self.seconds):
            raise InputError(
                f"encoder input_size={self.input_size}, seconds={self.seconds}: must be ≥ 1, and times ≥ 0"
            )
