"""Pools: separate prefill and decode, or unlike servers behind one router, in the words of a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Engine, Link, Pool, Store, require_pool
from windtunnel.errors import InputError, unknown
from windtunnel.files import typed_words
from windtunnel.policy.scaling import Autoscale, Faults
from windtunnel.scenario.joined import handover_of, joint_text, link_of
from windtunnel.scenario.server import Server
from windtunnel.scenario.words import parse_words, read_words, word, written

ROLES = ("prefill", "decode", "mixed")
JOINTS = ("link", "handover")
ENGINE_WORDS = {word(entry.name).replace("-", "_"): entry.name for entry in fields(Engine)}
"""Words of a pool that its engine reads → fields of the engine."""
OWN_WORDS = {"name": str, "replicas": int, "device": str, "price_per_hour": float}
"""Words of a pool in addition to those of its engine; a price is USD per GPU and hour."""
Several = Annotated[tuple[str, ...], Parameter(show_default=False)]


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Pools of servers; without any of these words, one pool of equal servers."""

    pools_file: Path | None = None
    """YAML file with the words below as keys; flags go before it."""
    prefill: Several = ()
    """Servers that compute prompts: "replicas=2 tensor_parallel_size=4 device=h100". Defaults to the
    run's settings. Repeat it for more pools, of other devices or sizes."""
    decode: Several = ()
    """Servers that take the prompts' KV and decode, in the same words."""
    mixed: Several = ()
    """Different servers behind one router that do both, in the same words."""
    link: str | None = None
    """From prefill to decode: "bandwidth=50e9 latency=0.0004" (bytes/s of a replica, s), a name of ``windtunnel list
    links``, or both. Defaults to the devices' network."""
    handover: str | None = None
    """Hand-over rules: a name of ``windtunnel list handovers``, and other values for some of its words, as in
    "vllm-0.32-nixl-pull lease=60". Default: those of the decode pool's engine."""
    store: Several = ()
    """Where KV goes that does not fit on the GPUs, the fastest first: "tier=host capacity=200e9" (bytes of a
    replica), "tier=disk capacity=4e12 read=7e9 write=5e9", "tier=shared capacity=10e12 chunk_tokens=256"; pool=decode
    or pool=all: not only where prompts are computed."""
    autoscale: Several = ()
    """Replicas that start and stop: "policy=thresholds least=1 most=8 interval=180 startup=60 kv_up=0.4",
    policy=planner, or policy=forecast or foresight with rps=5, the requests/s that one replica serves. Repeat it with
    pool=prefill and pool=decode."""
    fail: Several = ()
    """Replicas that fail: "replica=0 at=600 down=120", or at random "mtbf=86400 down=300"; on_failure=lost, retry or
    migrate; pool=decode where there are several; part=link for the link between them."""
    decode_router: str | None = None
    """Which decode replica gets a request; default: as ``router``."""

    def __post_init__(self) -> None:
        """Refuse words that no pool has, and names that are no pool's, which a file may yet bring."""
        for role in ROLES:
            for text in getattr(self, role):
                pool_words(role, text)
        if self.pools_file is not None:
            return
        for what, others in (("store", ("all",)), ("autoscale", ()), ("fail", ())):
            for text in getattr(self, what):
                require_pool(what, parse_words(text, what).get("pool", ""), [*self._names(), *others])
        stores_of(self.store)
        scalings_of(self.autoscale)
        faults_of(self.fail)

    def _names(self) -> list[str]:
        """What the pools are called."""
        if not self.several:
            return [Pool.name]
        return [_name(role, place, getattr(self, role)) for role in ROLES for place in range(len(getattr(self, role)))]

    @property
    def several(self) -> bool:
        """Whether pools are named at all."""
        return any(getattr(self, role) for role in ROLES)

    def resolved(self) -> "Pools":
        """With what the file says where the flags say nothing. Raises InputError for a file that cannot be read."""
        if self.pools_file is None:
            return self
        found = read_pools(self.pools_file)
        given = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "pools_file"}
        return Pools(**found | {name: value for name, value in given.items() if value})

    def deployment(self, server: Server, replicas: int, router: str) -> Deployment:
        """The deployment, every default filled in; what a pool does not say is as in the server.

        Raises InputError for roles that contradict each other, or what cannot run.
        """
        found = self.resolved()
        apart = bool(found.prefill or found.decode)
        if not apart and (given := [name for name in (*JOINTS, "decode_router") if getattr(found, name) is not None]):
            raise InputError(f"{given[0]}: is for prefill and decode pools: add both, or leave it out")
        stores = stores_of(found.store)
        scalings, faults = scalings_of(found.autoscale), faults_of(found.fail)
        if not found.several:
            pool = server.pool(scalings[0].most if scalings else replicas)
            return Deployment(_with_stores((pool,), stores), router, scaling=scalings, faults=faults)
        most = {scaling.pool: scaling.most for scaling in scalings}
        pools = tuple(
            _pool(server, most, replicas, role, _name(role, place, texts), text)
            for role in ROLES
            for texts in (getattr(found, role),)
            for place, text in enumerate(texts)
        )
        pools = _with_stores(pools, stores)
        if not apart:
            return Deployment(pools, router, scaling=scalings, faults=faults)
        found._require_both()
        link, handover = link_of(found.link, pools), handover_of(found.handover, pools)
        if found.link is None and handover.transfer == "none":
            link = Link()
        return Deployment(pools, router, link, handover, found.decode_router, scalings, faults)

    def _require_both(self) -> None:
        """Raise InputError for one side without the other, or together with mixed pools."""
        if self.mixed:
            raise InputError("mixed pools with prefill and decode pools: a deployment has one kind or the other")
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if getattr(self, role) and not getattr(self, other):
                raise InputError(f"{role} without {other}: add {other}, e.g. {other}='replicas=1'")


def pool_words(role: str, text: str) -> dict[str, Any]:
    """The words of one pool, each of its type. Raises InputError for an unknown one, with the nearest."""
    hints = get_type_hints(Engine)
    types = OWN_WORDS | {key: hints[name] for key, name in ENGINE_WORDS.items()}
    given = parse_words(text, role) if text.strip() else {}
    if "model" in given:
        raise InputError(f"{role} {text!r}: model: is that of the run, for all pools")
    return typed_words(given, types, f"{role}: ")


def stores_of(texts: Sequence[str]) -> tuple[Store, ...]:
    """The stores of these words. Raises InputError for an unknown word or a wrong value."""
    types = get_type_hints(Store)
    return tuple(Store(**typed_words(parse_words(text, "store"), types, "store: ")) for text in texts)


def _with_stores(pools: tuple[Pool, ...], stores: tuple[Store, ...]) -> tuple[Pool, ...]:
    """The pools with what stands behind each."""
    behind = [tuple(store for store in stores if store.stands_behind(pool.name, pool.role)) for pool in pools]
    return tuple(replace(pool, stores=found) for pool, found in zip(pools, behind, strict=True))


def scalings_of(texts: Sequence[str]) -> tuple[Autoscale, ...]:
    """The autoscalers of these words. Raises InputError for an unknown word or a wrong value."""
    return tuple(map(scaling_of, texts))


def scaling_of(text: str) -> Autoscale:
    """The autoscaler of these words. Raises InputError for an unknown word or a wrong value."""
    return Autoscale.of(parse_words(text, "autoscale"))


def faults_of(texts: Sequence[str]) -> tuple[Faults, ...]:
    """The faults of these words. Raises InputError for an unknown word or a wrong value."""
    types = get_type_hints(Faults)
    return tuple(Faults(**typed_words(parse_words(text, "fail"), types, "fail: ")) for text in texts)


def _name(role: str, place: int, texts: Sequence[str]) -> str:
    """What the pool in this place is called: as it says, or by its role."""
    usual = role if len(texts) == 1 else f"{role} {place + 1}"
    return str(pool_words(role, texts[place]).get("name", usual))


def _pool(server: Server, most: Mapping[str, int], replicas: int, role: str, name: str, text: str) -> Pool:
    """The pool of these words; ``most``: replicas of those that are scaled. Raises InputError, which names the pool,
    for what cannot run."""
    own = pool_words(role, text)
    engine = {ENGINE_WORDS[key]: value for key, value in own.items() if key in ENGINE_WORDS}
    try:
        described = replace(server, device=own.get("device", server.device), engine=replace(server.engine, **engine))
        pool = described.pool(own.get("replicas", most.get(name, replicas)))
        price = own.get("price_per_hour")
        device = pool.device if price is None else replace(pool.device, price_per_hour=price)
        return replace(pool, role=role, name=name, device=device)
    except InputError as error:
        raise InputError(f"{role}: {error}") from error


def read_pools(path: Path) -> dict[str, Any]:
    """The words of pools that a YAML file gives. Raises InputError for a wrong file, word or value."""
    name = f"pools {str(path)!r}"
    known = [entry.name for entry in fields(Pools) if entry.name != "pools_file"]
    found = {}
    for key, value in read_words(path, name).items():
        if key.replace("-", "_") not in known:
            raise InputError(f"{name}: {unknown('key', key, known)}")
        found[key.replace("-", "_")] = value
    return as_texts(found, f"{name}: ")


def as_texts(words: Mapping[str, Any], origin: str = "") -> dict[str, Any]:
    """Words of a scenario whose pools, and what joins them, are written as flags write them, where they are mappings.

    Raises InputError, which names the origin, for pools that are neither text nor mapping.
    """
    found = dict(words)
    for key, value in words.items():
        name = key.replace("-", "_")
        if name in (*ROLES, "store", "fail", "autoscale"):
            found[key] = tuple(_texts(name, value, origin))
        elif name in JOINTS:
            found[key] = joint_text(value)
    return found


def _texts(role: str, value: Any, origin: str) -> Iterator[str]:
    pools = list(value) if isinstance(value, list | tuple) else [value]
    for pool in pools:
        if isinstance(pool, str):
            yield pool
        elif isinstance(pool, Mapping):
            yield written({key: each for key, each in pool.items() if each is not None})
        else:
            raise InputError(f"{origin}{role}={pool!r}: has no devices: give words of a pool, e.g. {{replicas: 1}}")
