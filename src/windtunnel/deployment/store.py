"""Store: host memory, a disk, or a server in the network that keeps KV which the GPUs have no room for."""

from dataclasses import fields
from math import inf, isnan
from typing import Any, Literal, get_type_hints

from windtunnel.dataclass import dataclass
from windtunnel.deployment.engine import Engine
from windtunnel.errors import InputError, require_words, unknown
from windtunnel.files import typed
from windtunnel.hardware import Device
from windtunnel.policy.tiers import Eviction, Sharing, Tier

Kind = Literal["host", "disk", "shared"]


@dataclass(frozen=True)
class Store:
    """Where KV goes once it is computed, and comes from instead of being computed again.

    As in vLLM's OffloadingConnector, LMCache and Mooncake Store (0.32; CPU, disk and remote backends): full chunks are
    written when they are computed, without anyone waiting. A request that is about to be admitted takes what its
    replica's blocks have, then the chunks that follow from the fastest store that has each; it gets all its blocks at
    once, and waits next to the queue until the KV is there. KV that is found is always loaded, never computed instead.

    Behind SGLang it is HiCache (0.5.23): nodes of the radix tree are written when they have been entered
    ``write_after`` + 1 times, and come back, layer by layer, in the round that admits a request which finds 10 or more
    tokens there.
    """

    tier: Kind = "host"
    """``host``: memory behind PCIe; ``disk``; ``shared``: a pool of memory in the network, one for all replicas."""
    capacity: float = 0.0
    """Bytes: of each replica, or of all together where they share it."""
    read: float = 0.0
    """Bytes/s of a replica; 0: as its GPUs' PCIe (host) or network (shared) has it."""
    write: float = 0.0
    """Bytes/s of a replica, as ``read``."""
    latency: float = 0.0
    """Seconds before a read or a write begins to flow."""
    chunk_tokens: int = 0
    """Tokens that are kept together, a multiple of the engine's block; 0: one block (vLLM), LMCache has 256."""
    eviction: Eviction = "lru"
    """What makes room: the chunk that was used (``lru``) or written (``fifo``) longest ago."""
    write_after: int = 0
    """Write a chunk only after it has been looked for so often (vLLM's ``store_threshold``); 0: at once."""
    shared_by: Sharing | None = None
    """Who finds what one wrote: the ranks of a replica (host, disk), a pool, or the deployment (shared)."""
    generated: bool = False
    """Write what is generated as well, and not prompts alone (vLLM's ``offload_prompt_only=false``; the
    ``save_decode_cache`` of LMCache and Mooncake Store)."""
    pool: str = ""
    """The pool behind which it stands, by its name, or ``all``; without it all that compute prompts."""
    ratio: float = 0.0
    """Instead of ``capacity``: as many times what the replica's GPUs keep (SGLang's ``hicache_ratio``)."""
    on_eviction: bool = False
    """Write a chunk only when the GPUs give it up (SGLang's ``write_back``)."""

    def __post_init__(self) -> None:
        require_words(self, " of a store")
        if not 0 <= self.ratio < inf or (self.ratio and self.capacity):
            raise InputError(f"store {self.tier}: ratio={self.ratio!r}: must be a number > 0, without capacity")
        if isnan(self.capacity) or not (0 < self.capacity < inf or self.ratio):
            raise InputError(f"store {self.tier}: capacity={self.capacity!r}: must be bytes > 0, e.g. 200e9")
        for name in ("read", "write", "latency"):
            if not 0 <= getattr(self, name) < inf:
                raise InputError(f"store {self.tier}: {name}={getattr(self, name)!r}: must be a number ≥ 0")
        for name in ("chunk_tokens", "write_after"):
            if getattr(self, name) < 0:
                raise InputError(f"store {self.tier}: {name}={getattr(self, name)}: must be ≥ 0")
        if self.tier == "disk" and not (self.read and self.write):
            raise InputError("store disk: read and write are not known: give bytes/s, e.g. read=7e9 write=5e9")

    @classmethod
    def of(cls, text: str) -> "Store":
        """The store of these words, ``tier=host capacity=1e12``. Raises InputError for an unknown or a wrong one."""
        types, found = get_type_hints(cls), {}
        for name, _, value in (word.partition("=") for word in text.split()):
            if name not in types:
                raise InputError(f"store {text!r}: {unknown('word', name, types)}")
            try:
                found[name] = typed(types[name], value)
            except InputError as error:
                raise InputError(f"store {text!r}: {name}={value!r}: {error}") from error
        return cls(**found)

    def stands_behind(self, name: str, role: str) -> bool:
        """Whether it belongs to a pool of this name and role."""
        return self.pool in (name, "all") if self.pool else role != "decode"

    def tier_for(self, engine: Engine, device: Device, token_bytes: float, tokens: int = 0) -> Tier:
        """The store as the schedulers of a resolved engine see it; ``token_bytes`` of KV for a token, over all GPUs of
        a rank; these keep ``tokens``.

        Raises InputError for chunks that are not whole blocks, or a store that is smaller than one.
        """
        block = engine.resolved("block_size")
        chunk = self.chunk_tokens or block
        if chunk % block:
            raise InputError(f"store {self.tier}: chunk_tokens={chunk}: must be a multiple of block_size={block}")
        capacity = self.capacity or self.ratio * tokens * token_bytes * engine.data_parallel_size
        if capacity < chunk * token_bytes:
            raise InputError(
                f"store {self.tier}: capacity={capacity:g}: is smaller than a chunk of {chunk} tokens, "
                f"{chunk * token_bytes:,.0f} bytes"
            )
        gpus = engine.world_size // engine.data_parallel_size
        usual = gpus * (device.network_bandwidth if self.tier == "shared" else device.pcie_bandwidth)
        return Tier(
            name=self.tier,
            chunks=int(capacity / (chunk * token_bytes)),
            chunk_tokens=chunk,
            read_s=token_bytes / (self.read or usual),
            write_s=token_bytes / (self.write or usual),
            latency=self.latency,
            shared_by=self.shared_by or ("deployment" if self.tier == "shared" else "replica"),
            eviction=self.eviction,
            write_after=self.write_after,
            generated=self.generated,
            on_eviction=self.on_eviction,
        )

    def spec(self) -> dict[str, Any]:
        """The store for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
