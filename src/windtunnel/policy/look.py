"""What a rule of an autoscaler sees."""

from typing import NamedTuple


class Traffic(NamedTuple):
    """What the requests of one replica have seen since the tick before, in means."""

    rate: float
    """Requests/s that came."""
    prompt: float
    """Tokens of those that ended."""
    answer: float
    ttft: float
    """Seconds, of those whose first token came."""
    token: float
    """Seconds between two tokens of those that ended."""
    seats: int
    """Requests that the replica may run at once."""


class Look(NamedTuple):
    """What an autoscaler sees at a tick."""

    replicas: int
    """Up, or starting."""
    queued: float
    """Prompt tokens that wait for each replica that is up, by max_model_len."""
    kv: float
    """Share of the KV blocks that requests hold, averaged over these replicas."""
    arrived: float
    """Requests/s since the tick before."""
    before: float
    """Requests/s between that tick and the one before it."""
    coming: float
    """Requests/s in the interval that begins when a replica started now would be up: what only foresight may use."""
    role: str = "mixed"
    """What the pool computes: ``mixed``, ``prefill`` or ``decode``."""
    loads: tuple[tuple[float, float], ...] = ()
    """Of each replica that is up: prompt tokens that wait for a rank, by max_model_len; and the share of the KV blocks
    that its requests hold, or wait for."""
    traffic: tuple[Traffic, ...] = ()
    """Of each replica to which requests came, and of which some ended; for rules that learn."""
