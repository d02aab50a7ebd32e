"""A store of KV behind a scheduler's own blocks, in tokens and seconds."""

from typing import Literal, NamedTuple

from windtunnel.dataclass import dataclass

Eviction = Literal["lru", "fifo"]
Sharing = Literal["replica", "pool", "deployment"]


@dataclass(frozen=True)
class Tier:
    """What a scheduler and the event loop need to know of a store; ``deployment.Store`` says it in bytes."""

    name: str
    chunks: int
    """That fit."""
    chunk_tokens: int
    """Tokens that are written and found together."""
    read_s: float
    """Seconds a token; one replica reads one thing after the other."""
    write_s: float
    """Seconds a token, as for ``read_s``; writing waits for nothing else."""
    latency: float
    """Seconds before the first token of a read or a write."""
    shared_by: Sharing
    eviction: Eviction = "lru"
    write_after: int = 0
    """How often a chunk has to have been looked for before it is written; 0: every chunk is, once it is computed."""
    generated: bool = False
    """What is generated is written as well."""
    on_eviction: bool = False
    """Nothing is written before the GPU gives it up."""


class TierUse(NamedTuple):
    """Tokens that passed between a pool and a store."""

    pool: int
    name: str
    found: int
    """Of prompts, when they were first admitted."""
    read: int
    """For these and for requests that came back preempted."""
    written: int
