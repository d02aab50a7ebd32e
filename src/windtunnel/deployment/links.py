"""Link: the network over which the KV cache of a prompt goes from a prefill replica to a decode replica."""

from dataclasses import fields
from math import inf, isnan
from typing import Any, Literal

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_words, unknown

Sharing = Literal["fifo", "fair"]
Contention = Literal["none", "source", "destination", "both"]


@dataclass(frozen=True)
class Link:
    """How long a hand-over takes. A replica's NICs count as one; without any settings the link costs nothing.

    A transfer is work of ``per_request`` + max(bytes / ``bandwidth``, descriptors · ``per_descriptor``) seconds for the
    NICs at which transfers contend, and is there ``latency`` after that.
    """

    bandwidth: float = inf
    """Bytes/s of all NICs of one replica."""
    latency: float = 0.0
    """Seconds on the way, during which the next transfer can begin."""
    per_request: float = 0.0
    """Seconds of work for each transfer, however short."""
    per_descriptor: float = 0.0
    """Seconds of work for each contiguous piece of memory that is sent."""
    sharing: Sharing = "fair"
    """Transfers at the same NICs take turns (``fifo``), or each gets an equal share of them (``fair``)."""
    contention: Contention = "source"
    """Which NICs are too few: the prefill replica's, the decode replica's, those of both, or none."""

    def __post_init__(self) -> None:
        if isnan(self.bandwidth) or not self.bandwidth > 0:
            raise InputError(f"link: bandwidth={self.bandwidth!r}: must be > 0 bytes/s; leave it out for a free link")
        for name in ("latency", "per_request", "per_descriptor"):
            if not 0 <= getattr(self, name) < inf:
                raise InputError(f"link: {name}={getattr(self, name)!r}: must be seconds ≥ 0")
        require_words(self, " of a link")

    @property
    def free(self) -> bool:
        """Nothing takes any time."""
        return self.bandwidth == inf and self.latency == self.per_request == self.per_descriptor == 0

    def work(self, size: Any, descriptors: Any = 0.0, share: Any = 1.0) -> Any:
        """Seconds that a share of ``size`` bytes in this many pieces keeps NICs busy which nothing else uses; of arrays
        element by element."""
        from numpy import maximum  # loaded by every run, and by no help

        return self.per_request + share * maximum(size / self.bandwidth, descriptors * self.per_descriptor)

    def spec(self) -> dict[str, Any]:
        """The link for JSON; a bandwidth without limit is None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"bandwidth": None if self.bandwidth == inf else self.bandwidth}


LINKS: dict[str, Link] = {
    "free": Link(),
    "vllm-mooncake-8x400g": Link(bandwidth=146.1e9, latency=0.38e-3),
    "sglang-mooncake-4x400g": Link(bandwidth=171.1e9, latency=1.84e-3),
}
"""Links by name. The measured ones are latency + bytes / bandwidth through the transfers that Mooncake publishes
(docs/source/performance: Qwen3-8B at TP 8 on H800 with eight NICs, residuals ≤ 7 %; Qwen3-235B at TP 8 on H20 with
four, ≤ 6.4 %)."""


def find_link(name: str) -> Link:
    """The link of this name. Raises InputError where there is none."""
    if name not in LINKS:
        raise unknown("link", name, LINKS)
    return LINKS[name]
