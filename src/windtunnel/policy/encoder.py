"""Images and other inputs that an encoder turns into embeddings, as data."""

from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        for name in ("compute_budget", "cache_size"):
            if getattr(self, name) < 0:
                raise InputError(f"encoder {name}={getattr(self, name)}: must be ≥ 0 embeddings")
