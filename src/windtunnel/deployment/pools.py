"""What is sized: pools of replicas, and the deployment they form."""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

from windtunnel.deployment.engine import Engine
from windtunnel.deployment.engine_scheduler import decides_late
from windtunnel.deployment.presets import preset
from windtunnel.deployment.resolve import effective_model, resolve_engine
from windtunnel.errors import InputError, unknown
from windtunnel.hardware import Device
from windtunnel.model import Attention, Model
from windtunnel.model.spec import stages

ROLES = ("mixed", "prefill", "decode")


@dataclass(frozen=True)
class Pool:
    """Equal replicas of one engine. The engine is resolved, and the model takes the engine's dtype and quantisation."""

    model: Model
    device: Device
    engine: Engine = field(default_factory=Engine)
    replicas: int = 1
    role: str = "mixed"
    name: str = "pool"

    def __post_init__(self) -> None:
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int) or self.replicas < 1:
            raise InputError(f"replicas={self.replicas!r}: must be an integer ≥ 1")
        if self.role not in ROLES:
            raise unknown("role", self.role, ROLES)
        if self.role != "mixed":
            raise InputError(
                f"role={self.role!r}: separate prefill and decode pools are not simulated yet; use 'mixed'"
            )
        object.__setattr__(self, "engine", resolve_engine(self.engine, self.model, self.device))
        object.__setattr__(self, "model", effective_model(self.model, self.device, self.engine))

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.engine.world_size

    @property
    def lockstep(self) -> bool:
        """Data-parallel ranks of a replica step together: they exchange tokens in every mixture-of-experts layer."""
        return self.engine.data_parallel_size > 1 and self.model.has_moe

    @property
    def has_windows(self) -> bool:
        """Some layers, but not all, see only a window of the context."""
        windows = {isinstance(layer.attention, Attention) and layer.attention.window for _, layer in self.model.layers}
        return len(windows) > 1

    def warnings(self) -> list[str]:
        """What differs from the real engine, or should be known about the model."""
        found = []
        chosen = preset(self.engine.preset)
        if self.engine.pipeline_parallel_size > 1 and not chosen.pipelines[0]:
            found.append(
                f"{chosen.name} may admit a preempted request again before its token in flight has arrived; in a "
                "pipeline it waits here, as in vllm-0.32"
            )
        if decides_late(self.engine):
            found.append(
                f"{chosen.name} decides on a step while the one before it runs; here it decides when that one has "
                "ended, and only its host work runs beside the GPU"
            )
        if self.engine.enable_dbo and self.engine.backend == "vllm":
            found.append(
                f"{chosen.name} splits a step into two micro-batches only when every rank's batch is large enough and "
                "more than half as long as the longest; here the longest decides for all"
            )
        if self.has_windows:
            found.append(
                f"{self.model.name} mixes sliding windows and full attention: its KV cache is simulated as one pool of "
                "equal blocks, which is a lower bound of the engine's capacity"
            )
        return found + [f"{self.model.name}: {note}" for note in self.model.notes]

    def spec(self) -> dict[str, Any]:
        """The pool for JSON: names, sizes and every engine setting."""
        quantization = self.model.quantization
        return {
            "name": self.name,
            "role": self.role,
            "model": self.model.name,
            "architecture": self.model.architecture,
            "quantization": quantization.methods if quantization else None,
            "device": self.device.name,
            "replicas": self.replicas,
            "gpus": self.gpus,
            "engine": self.engine.spec(),
        }


def stage_pools(pool: Pool) -> tuple[Pool, ...]:
    """The pool once for each stage of its pipeline, with the stage's part of the model. The engine stays as it is."""
    found = []
    for part in stages(pool.model, pool.engine.pipeline_parallel_size):
        stage = copy(pool)
        object.__setattr__(stage, "model", part)
        found.append(stage)
    return tuple(found)


@dataclass(frozen=True)
class Deployment:
    """Pools, and how requests are spread over the replicas."""

    pools: tuple[Pool, ...]
    router: str = "round_robin"

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", tuple(self.pools))
        if not self.pools:
            raise InputError("pools=(): a deployment needs at least one pool")
        if len(self.pools) > 1:
            raise InputError(f"{len(self.pools)} pools: several pools in one deployment are not simulated yet; use one")

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def replicas(self) -> int:
        """Replicas of all pools."""
        return sum(pool.replicas for pool in self.pools)

    @property
    def price_per_hour(self) -> float:
        """USD per hour for all GPUs; 0 where a device's price is not known."""
        return sum(pool.gpus * pool.device.price_per_hour for pool in self.pools)

    def spec(self) -> dict[str, Any]:
        """The deployment for JSON."""
        return {"router": self.router, "pools": [pool.spec() for pool in self.pools]}


def warnings(deployment: Deployment) -> list[str]:
    """Each thing that a reader of this deployment's results should know, once."""
    return list(dict.fromkeys(text for pool in deployment.pools for text in pool.warnings()))
