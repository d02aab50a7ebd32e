"""Constraints: what may be used at most."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from windtunnel.deployment import Deployment
from windtunnel.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Upper limits on a deployment; None or absent: none."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs that are to be had, by the device's name."""
    max_gpus: int | None = None
    """GPUs of the whole deployment."""
    max_gpus_per_node: int | None = None
    """GPUs that share every layer (tensor parallelism) must stand in one node; the device's own limit holds too."""
    max_price_per_hour: float | None = None
    """USD per hour for all GPUs."""

    def __post_init__(self) -> None:
        """Refuse limits that nothing can keep."""
        limits = {f"gpus of {name}": count for name, count in self.gpus.items()}
        limits |= {"max_gpus": self.max_gpus, "max_gpus_per_node": self.max_gpus_per_node}  # type: ignore[dict-item]
        for name, value in limits.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"{name}={value!r}: must be an integer ≥ 1")
        if self.max_price_per_hour is not None and not self.max_price_per_hour > 0:
            raise InputError(f"max_price_per_hour={self.max_price_per_hour:g}: must be > 0")

    def broken_by(self, deployment: Deployment) -> str | None:
        """The first limit that a deployment exceeds, in words; None if it keeps all."""
        for pool in deployment.pools:
            available = self.gpus.get(pool.device.name)
            used = sum(other.gpus for other in deployment.pools if other.device == pool.device)
            if available is not None and used > available:
                return f"more than the {available} {pool.device.name} that are available"
            if self.max_gpus_per_node is not None and pool.engine.tensor_parallel_size > self.max_gpus_per_node:
                return f"tensor_parallel_size > max_gpus_per_node={self.max_gpus_per_node}"
        if self.max_gpus is not None and deployment.gpus > self.max_gpus:
            return f"more than max_gpus={self.max_gpus}"
        if self.max_price_per_hour is not None and deployment.price_per_hour > self.max_price_per_hour:
            return f"more than max_price_per_hour={self.max_price_per_hour:g} USD"
        return None
