"""What is sized: pools of replicas, and the deployment they form."""

from collections.abc import Sequence
from copy import copy
from dataclasses import field
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment.engine import Engine
from windtunnel.deployment.engine_scheduler import decides_late, named_settings, own_rules
from windtunnel.deployment.handover import Handover
from windtunnel.deployment.links import Link
from windtunnel.deployment.presets import preset
from windtunnel.deployment.resolve import effective_model, resolve_engine
from windtunnel.deployment.spread_prompts import require_prompts
from windtunnel.deployment.store import Store
from windtunnel.deployment.title import title
from windtunnel.errors import InputError, unknown
from windtunnel.hardware import Device, device
from windtunnel.model import Model, load_model
from windtunnel.model.spec import PREDICTING, stages
from windtunnel.policy.drafts import Drafts, rates_of
from windtunnel.policy.scaling import Autoscale, Failure, Faults
from windtunnel.policy.settings import Settings

ROLES = ("mixed", "prefill", "decode")
"""A pool computes whole requests, their prompts up to the first token, or what follows; see ``core.disaggregation``."""
MOST_REPLICAS = 4096
"""Each has its own tables for the requests that run."""


@dataclass(frozen=True)
class Pool:
    """Equal replicas of one engine. The engine is resolved, and the model takes the engine's dtype and quantisation.

    Model and device may be given by their names: ``Pool("Qwen/Qwen3-8B", "h100")``.
    """

    model: Model
    device: Device
    engine: Engine = field(default_factory=Engine)
    replicas: int = 1
    role: str = "mixed"
    name: str = "pool"
    stores: tuple[Store, ...] = ()
    """Where KV is kept that the GPUs have no room for, the fastest first."""

    def __post_init__(self) -> None:
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int) or self.replicas < 1:
            raise InputError(f"replicas={self.replicas!r}: must be an integer ≥ 1")
        if self.replicas > MOST_REPLICAS:
            raise InputError(f"replicas={self.replicas}: must be ≤ {MOST_REPLICAS:,}, the most that are simulated")
        if self.role not in ROLES:
            raise unknown("role", self.role, ROLES)
        for name, known in (("model", load_model), ("device", device)):
            given: Any = getattr(self, name)
            object.__setattr__(self, name, known(given) if isinstance(given, str) else given)
        object.__setattr__(self, "engine", resolve_engine(self.engine, self.model, self.device))
        require_prompts(self.engine, self.role)
        object.__setattr__(self, "model", effective_model(self.model, self.device, self.engine))

    def __repr__(self) -> str:
        return f"Pool({title([self.spec()])})"

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
        return len({layer.window for _, layer in self.model.layers}) > 1

    def _rules(self) -> Settings | None:
        """The rules of the scheduler; None: the user's own."""
        return own_rules(self.engine) if self.engine.scheduler is None else named_settings(self.engine.scheduler)

    @property
    def drafts(self) -> Drafts | None:
        """Speculation that is simulated step by step, in pools that serve whole requests and keep no KV elsewhere.
        None: there is none, or its steps are means."""
        engine, length = self.engine, self.engine.acceptance_length
        if not engine.num_speculative_tokens or length is None or self.role != "mixed" or self.stores:
            return None
        rules = self._rules()
        if rules is None or not rules.takes_drafts:
            return None
        rates = rates_of(length, engine.num_speculative_tokens)
        return Drafts(engine.num_speculative_tokens, "mtp", rates)

    def warnings(self) -> list[str]:
        """What differs from the real engine, or should be known about the model."""
        found = []
        chosen = preset(self.engine.preset)
        in_turn = chosen.backend == "vllm" and not chosen.before_v1
        if self.engine.pipeline_parallel_size > 1 and in_turn and not chosen.pipelines[0]:
            found.append(
                f"{chosen.name} may admit a preempted request again before its token in flight has arrived; in a "
                "pipeline it waits here, as in vllm-0.32"
            )
        if self.engine.num_speculative_tokens and not self.drafts:
            found.append(
                "speculation is simulated step by step with the schedulers of vLLM's v1, SGLang 0.5 (not with mixed "
                "chunks) and trtllm-1.0, in mixed pools without stores; here a "
                "step yields one token, in its share of the time: gaps between tokens, KV blocks and steps are means"
            )
        if decides_late(self.engine):
            found.append(
                f"{chosen.name} decides on a step while the one before it runs; here it decides when that one has "
                "ended, and only its host work runs alongside the GPU"
            )
        rules = self._rules()
        dealt = self.lockstep and self.role == "mixed" and rules is not None and rules.deals_out
        if self.engine.data_parallel_size > 1 and self.engine.backend == "trtllm" and not dealt:
            found.append(
                f"{chosen.name} hands new requests out to its ranks when it decides on a step, the longest first to "
                "the rank with the fewest prompt tokens; here each has its rank when it comes, by vLLM's rule "
                "(scheduler='trtllm-1.0' deals them out in mixed pools whose ranks share experts)"
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
        drafting = self.engine.num_speculative_tokens > 0
        notes = (note for note in self.model.notes if not (drafting and note == PREDICTING))
        return found + [f"{self.model.name}: {note}" for note in notes]

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
            "lockstep": self.lockstep,
            "engine": self.engine.spec(),
            **({"stores": [store.spec() for store in self.stores]} if self.stores else {}),
        }


def stage_pools(pool: Pool) -> tuple[Pool, ...]:
    """The pool once for each stage of its pipeline, with the stage's part of the model. The engine stays as it is."""
    found = []
    for part in stages(pool.model, pool.engine.pipeline_parallel_size, pool.engine.pipeline_layers):
        stage = copy(pool)
        object.__setattr__(stage, "model", part)
        found.append(stage)
    return tuple(found)


def _require_alike(pool: Pool, other: Pool) -> None:
    """Raise InputError where KV cannot be transferred between two pools."""
    kinds = ("model", "block_size", "kv_cache_dtype")
    layouts = [
        (one.model.name, one.engine.resolved("block_size"), one.model.resolve_kv_cache_dtype(one.engine.kv_cache_dtype))
        for one in (pool, other)
    ]
    for name, value, wanted in zip(kinds, *layouts, strict=True):
        if value != wanted:
            raise InputError(f"{name}={value} and {wanted}: KV is transferred only between pools where it is the same")


@dataclass(frozen=True)
class Deployment:
    """Pools, how requests are spread over their replicas, and how these go from prefill to decode pools."""

    pools: tuple[Pool, ...]
    router: str = "round_robin"
    """Chooses among the replicas of mixed pools, or of prefill pools."""
    link: Link = field(default_factory=Link)
    """Between any prefill replica and any decode replica."""
    handover: Handover = field(default_factory=Handover)
    decode_router: str | None = None
    """Chooses among the replicas of decode pools; None: by the rule of ``router``."""
    scaling: Autoscale | tuple[Autoscale, ...] | None = None
    """Starts and stops replicas, of each pool that is named; the pool has the most that there may be."""
    faults: tuple[Faults, ...] = ()
    """When replicas fail."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", (self.pools,) if isinstance(self.pools, Pool | str) else tuple(self.pools))
        for pool in self.pools:
            if not isinstance(pool, Pool):
                raise InputError(f"pools: {pool!r} is no Pool: make one, such as Pool('Qwen/Qwen3-8B', 'h100')")
        if not self.pools:
            raise InputError("pools=(): a deployment needs at least one pool")
        roles = sorted({pool.role for pool in self.pools})
        if roles not in (["mixed"], ["decode", "prefill"]):
            raise InputError(
                f"roles {', '.join(roles)}: a deployment has mixed pools, or at least one prefill and one decode pool"
            )
        if roles != ["mixed"]:
            for pool in self.pools:
                _require_alike(self.pools[0], pool)
            if self.handover.transfer == "none" and not self.link.free:
                raise InputError("a link between pools, but a hand-over without a transfer: name one, such as 'pull'")
        elif self.handover != Handover() or not self.link.free or self.decode_router:
            raise InputError(
                "link, handover, decode_router: nothing is transferred between mixed pools; leave them out"
            )

        if self.scaling or self.faults:
            self._require_elastic()

    def __repr__(self) -> str:
        router = f"; {self.router}" if self.replicas > 1 else ""
        return f"Deployment({title([self.pool_spec(pool) for pool in self.pools])}{router})"

    def _require_elastic(self) -> None:
        """Raise InputError where replicas or the link cannot come and go."""
        scaled = [self._pool(scaling.pool, "autoscale") for scaling in self._scalings]
        for pool, scaling in zip(scaled, self._scalings, strict=True):
            if scaled.count(pool) > 1:
                raise InputError(f"autoscale: pool={pool.name}: is scaled twice: leave one out")
            if pool.replicas != scaling.most:
                raise InputError(f"replicas={pool.replicas}: must be autoscale's most={scaling.most}")
        if len({fault.on_failure for fault in self.faults}) > 1:
            raise InputError("fail: on_failure must be the same for all faults")
        for fault in self.faults:
            self.failures(fault, 0)

    @property
    def _scalings(self) -> tuple[Autoscale, ...]:
        if self.scaling is None:
            return ()
        return (self.scaling,) if isinstance(self.scaling, Autoscale) else tuple(self.scaling)

    def _pool(self, name: str, what: str) -> Pool:
        """The pool of a name, or the only one. Raises InputError where there is none."""
        names = [pool.name for pool in self.pools]
        require_pool(what, name, names)
        found = [pool for pool in self.pools if name in ("", pool.name)]
        if len(found) != 1:
            raise InputError(f"{what}: pool={name!r}: name one of {', '.join(map(repr, names))}")
        return found[0]

    def autoscaler(self, pool: Pool) -> Autoscale | None:
        """What starts and stops the replicas of a pool."""
        return next((one for one in self._scalings if self._pool(one.pool, "autoscale") is pool), None)

    def failures(self, fault: Faults, seed: int) -> list[Failure]:
        """What fails when, in order. Raises InputError for what is not there."""
        if fault.part == "link" and (not self.disaggregated or self.handover.transfer == "none"):
            raise InputError("fail: part='link': nothing goes over one here: leave it out, or name a transfer")
        if fault.part == "link" and not fault.pool:
            return fault.failures(0, seed)
        pool = self._pool(fault.pool, "fail")
        place = next(i for i, one in enumerate(self.pools) if one is pool)
        return fault.failures(pool.replicas, seed, sum(one.replicas for one in self.pools[:place]))

    @property
    def disaggregated(self) -> bool:
        """Prompts are computed in other pools than what follows."""
        return any(pool.role != "mixed" for pool in self.pools)

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

    def pool_spec(self, pool: Pool) -> dict[str, Any]:
        """One of its pools for JSON, with the fewest replicas that an autoscaler leaves of it."""
        scaling = self.autoscaler(pool)
        return pool.spec() | ({"least_replicas": scaling.least} if scaling else {})

    def spec(self) -> dict[str, Any]:
        """The deployment for JSON."""
        found = {"router": self.router, "pools": [self.pool_spec(pool) for pool in self.pools]}
        if not self.disaggregated:
            return found
        disaggregated = {"decode_router": self.decode_router or self.router, "link": self.link.spec()}
        return found | disaggregated | {"handover": self.handover.spec()}


def network(pools: Sequence[Pool]) -> Link:
    """The network between the nodes of these pools' devices, at the line rate of the slowest replica's GPUs."""
    return Link(bandwidth=min(pool.engine.world_size * pool.device.network_bandwidth for pool in pools))


def require_pool(what: str, name: str, names: Sequence[str]) -> None:
    """Raise InputError unless a pool is so called, or none is named; ``what`` names it."""
    if name and name not in names:
        raise InputError(f"{what}: {unknown('pool', name, names)}")


def warnings(deployment: Deployment) -> list[str]:
    """Each thing that a reader of this deployment's results should know, once."""
    return list(dict.fromkeys(text for pool in deployment.pools for text in pool.warnings()))
