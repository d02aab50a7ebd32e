"""Space: every deployment that is considered, as axes by vLLM's names, which of them can run, and the constraints."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from itertools import product
from math import gcd, prod
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Protocol, get_args, get_type_hints

from windtunnel.core.stores.chunks import require_taking
from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Engine, Pool, Store
from windtunnel.deployment.engine_scheduler import engine_scheduler, require_one_size
from windtunnel.deployment.memory import kv_blocks
from windtunnel.deployment.prices import priced, prices_of
from windtunnel.errors import InputError, UnknownName, unknown
from windtunnel.files import read_yaml, typed
from windtunnel.hardware import device
from windtunnel.model import Model, load_model
from windtunnel.policy.named import find_router, find_scheduler
from windtunnel.policy.scaling import Autoscale

WORDS = {"preset": "engine"}
"""Fields of Engine whose word is another than their name, as in scenario files."""
ENGINE_AXES = {WORDS.get(entry.name, entry.name): entry.name for entry in fields(Engine)}
AXES: Mapping[str, Any] = MappingProxyType(
    {word: get_type_hints(Engine)[name] for word, name in ENGINE_AXES.items()}
    | {"device": str, "replicas": int, "router": str, "store": str, "autoscale": str}
)
"""What can vary → its type."""

NONE = "none"
"""On the axes ``store`` and ``autoscale``, whose other values are the words of one."""
DEFAULT = "default"
"""On axes whose value the engine may choose."""
AND = " + "
"""Between the stores of one value."""
SIZES = {"max_num_seqs": (8, 2048), "max_num_batched_tokens": (128, 32768)}
"""Axes whose values double, and the smallest and largest that are worth a trial."""


SHORT = {
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "data_parallel_size": "DP",
    "prefill_context_parallel_size": "PCP",
    "enable_expert_parallel": "EP",
    "max_num_seqs": "seqs",
    "max_num_batched_tokens": "tokens",
    "quantization": "weights",
    "kv_cache_dtype": "KV",
}
"""Axes by their short names, which head the columns of tables."""
OF_SHORT = {short: axis for axis, short in SHORT.items()}


POOLS = ("pools", "prefill", "decode", "decode_router", "ratio", "placement", "link", "handover")
"""Words of a file of a space that say how prefill and decode are separated, as the flags of these names do."""
EXCLUDED = "left out by exclude"
UNPRICED = "not known: give it in a --devices-file, or count GPUs with --objective gpus or qps-per-gpu"
"""What is said of a device that an objective in dollars leaves out."""


class Bought(Protocol):
    """What constraints look at: a deployment, or as much of one."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Its pools."""

    @property
    def gpus(self) -> int:
        """Of all pools."""

    @property
    def price_per_hour(self) -> float:
        """USD for all GPUs."""


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Upper limits on a deployment; None or absent: no limit."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs available, by the device's name."""
    max_gpus: int | None = None
    """GPUs of the whole deployment."""
    max_gpus_per_node: int | None = None
    """GPUs of one tensor-parallel group must be in one node; the device's own limit applies too."""
    max_price_per_hour: float | None = None
    """USD per hour for all GPUs."""

    def __post_init__(self) -> None:
        """Refuse limits that no deployment can keep."""
        limits = {f"gpus of {name}": count for name, count in self.gpus.items()}
        limits |= {"max_gpus": self.max_gpus, "max_gpus_per_node": self.max_gpus_per_node}  # type: ignore[dict-item]
        for name, value in limits.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"{name}={value!r}: must be an integer ≥ 1")
        if self.max_price_per_hour is not None and not self.max_price_per_hour > 0:
            raise InputError(f"max_price_per_hour={self.max_price_per_hour:g}: must be > 0")

    def broken_by(self, deployment: "Bought") -> str | None:
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


@dataclass(frozen=True, eq=False)
class Candidate:
    """One point of a space that can run."""

    index: int
    """Its place in the order of the space: of equals the first wins."""
    settings: Mapping[str, Any]
    """The value on each axis."""
    deployment: Deployment

    @property
    def name(self) -> str:
        """The settings in one line."""
        return in_words(self.settings)

    def scaled(self, times: int) -> Deployment:
        """So many times the smallest deployment with these shares of replicas: of one pool, this many replicas. Of a
        number that is not an autoscaler's most, all of them run all the time."""
        pools = self.deployment.pools
        whole = gcd(*(pool.replicas for pool in pools))
        if times == whole:
            return self.deployment
        scaled = tuple(replace(pool, replicas=times * (pool.replicas // whole)) for pool in pools)
        return replace(self.deployment, pools=scaled, scaling=None)


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings in one line."""
    return ", ".join(f"{axis} {said(value)}" for axis, value in settings.items())


def said(value: Any) -> str:
    """A value of an axis as people read it and a file of a space may have it; None leaves the choice to the engine."""
    if isinstance(value, tuple):
        return str(list(value))
    return {"None": DEFAULT, "True": "on", "False": "off"}.get(str(value), str(value))


@dataclass(frozen=True, eq=False)
class Enumeration:
    """The points of a space, sorted."""

    candidates: tuple[Candidate, ...]
    pruned: Counter[str]
    """Why points cannot run → how many."""

    @property
    def size(self) -> int:
        """Points in all."""
        return len(self.candidates) + self.pruned.total()


@dataclass(frozen=True, eq=False)
class Space:
    """The product of all axes. Axes are words of ``AXES``: any setting of an engine, device, replicas, router."""

    model: str
    axes: Mapping[str, Sequence[Any]]
    constraints: Constraints = field(default_factory=Constraints)
    devices_file: Path | None = None
    """A TOML file with your own devices, or other prices."""
    open: frozenset[str] = frozenset()
    """Axes that may get more values where the best stands at their end."""
    prices: str | None = None
    """The cloud whose prices hold, see ``prices.prices_of``; devices that it does not sell are left out."""
    exclude: tuple[Mapping[str, Sequence[Any]], ...] = ()
    """Combinations to leave out: axes with values, of which a point has one on each; so an axis varies for some values
    of another alone."""

    def __post_init__(self) -> None:
        """Refuse unknown axes, and axes without or with equal values."""
        for axis, values in self.axes.items():
            if axis not in AXES:
                raise unknown("axis", axis, AXES)
            if not values:
                raise InputError(f"{axis}=[]: an axis needs at least one value")
            if len({repr(value) for value in values}) < len(values):
                raise InputError(f"{axis}={list(values)}: a value stands twice")
        if "device" not in self.axes:
            raise InputError("a space needs the axis device, e.g. device: [h100, l40s]")
        searched = {device(name, self._device_files).name for name in self.axes["device"]}
        available = {device(name, self._device_files).name: count for name, count in self.constraints.gpus.items()}
        for name, count in available.items():
            if name not in searched:
                raise InputError(
                    f"gpus {name}={count}: is not searched, only {', '.join(sorted(searched))}: leave it out"
                )
        object.__setattr__(self, "constraints", replace(self.constraints, gpus=available))
        if self.prices is not None:
            prices_of(self.prices)
        for rule in self.exclude:
            _require_within(rule, self.axes)
        checks: dict[str, Callable[[str], Any]] = {
            "router": find_router,
            "scheduler": find_scheduler,
            "store": stores_in,
            "autoscale": autoscaler,
        }
        for axis, check in checks.items():
            for text in set(self.axes.get(axis, ())) - {None, NONE}:
                check(text)
        if "replicas" in self.axes and set(self.axes.get("autoscale", ())) - {NONE}:
            raise InputError(
                "replicas: are an autoscaler's to start and stop: leave the axis out, or say least and most"
            )

    @property
    def size(self) -> int:
        """Points in all, those that cannot run included."""
        return prod(len(values) for values in self.axes.values())

    @property
    def _device_files(self) -> tuple[Path, ...]:
        return (self.devices_file,) if self.devices_file else ()

    @cached_property
    def _model(self) -> Model:
        return load_model(self.model)

    def points(self) -> Iterator[dict[str, Any]]:
        """Every combination of values; the last axis varies fastest."""
        for values in product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    def deployment(self, settings: Mapping[str, Any]) -> Deployment:
        """The deployment at a point. Raises InputError for what cannot run."""
        engine = Engine(**{ENGINE_AXES[axis]: value for axis, value in settings.items() if axis in ENGINE_AXES})
        require_one_size(engine)
        gpu = priced(device(settings["device"], self._device_files), self.prices)
        pool = Pool(self._model, gpu, engine, settings.get("replicas", 1))
        try:
            kv_blocks(pool)
        except InputError as error:
            split = f"{engine.world_size // engine.data_parallel_size} × {gpu.name}"
            raise InputError(f"{self._model.name} does not fit into the memory of {split}") from error
        if (text := settings.get("store", NONE)) != NONE:
            pool = replace(pool, stores=stores_in(text))
            require_taking([pool.stores], [engine_scheduler(pool.engine)])
        router = settings.get("router", "round_robin")
        if (text := settings.get("autoscale", NONE)) != NONE:
            scaling = autoscaler(text)
            return Deployment((replace(pool, replicas=scaling.most),), router, scaling=scaling)
        return Deployment((pool,), router)

    def enumerate(self, *, with_price: bool = False) -> Enumeration:
        """The points that can run and keep the constraints, and why the others do not.

        Points that come to the same settings once defaults are filled in are taken once. ``with_price`` leaves out
        devices without a price.
        """
        found: list[Candidate] = []
        pruned: Counter[str] = Counter()
        seen: set[str] = set()
        for index, settings in enumerate(self.points()):
            if any(all(settings[axis] in values for axis, values in rule.items()) for rule in self.exclude):
                pruned[EXCLUDED] += 1
                continue
            try:
                deployment = self.deployment(settings)
            except UnknownName:
                raise
            except InputError as error:
                pruned[str(error)] += 1
                continue
            reason = self.constraints.broken_by(deployment)
            if reason is None and with_price and deployment.price_per_hour == 0:
                reason = f"the price of {settings['device']} is {UNPRICED}"
            spec = "" if reason is not None else repr((deployment.spec(), deployment.scaling))
            if spec in seen:
                reason = "the same as another once defaults are filled in"
            if reason is None:
                seen.add(spec)
                found.append(Candidate(index, settings, deployment))
            else:
                pruned[reason] += 1
        return Enumeration(tuple(found), pruned)

    def beyond(self, settings: Mapping[str, Any]) -> "Space | None":
        """The space with more values of the open axes at whose end a point stands; None where there is no such axis."""
        more = {axis: value for axis, value in ends(self.axes, settings).items() if axis in self.open}
        if not more:
            return None
        return replace(self, axes=dict(self.axes) | {axis: (*self.axes[axis], more[axis]) for axis in more})

    def spec(self) -> dict[str, Any]:
        """The space for JSON."""
        limits = {entry.name: getattr(self.constraints, entry.name) for entry in fields(Constraints)}
        return {
            "model": self.model,
            "axes": {axis: list(values) for axis, values in self.axes.items()},
            "constraints": {
                name: dict(value) if isinstance(value, Mapping) else value for name, value in limits.items()
            },
            "exclude": [{axis: list(values) for axis, values in rule.items()} for rule in self.exclude],
            "devices_file": str(self.devices_file) if self.devices_file else None,
            "prices": self.prices,
        }


def stores_in(text: str) -> tuple[Store, ...]:
    """The stores of these words, the fastest first: ``tier=host capacity=1e11 + tier=disk capacity=4e12 …``. Raises
    InputError for an unknown or a wrong one."""
    return tuple(Store.of(each) for each in text.split(AND))


def autoscaler(text: str) -> Autoscale:
    """The autoscaler of these words, ``policy=hpa least=2 most=8``. Raises InputError for an unknown or a wrong one."""
    return Autoscale.of(dict(word.partition("=")[::2] for word in text.split()))


def _require_within(rule: Mapping[str, Sequence[Any]], axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise InputError for an axis or a value that is not searched."""
    if not rule:
        raise InputError("exclude: an entry without axes leaves out everything")
    for axis, values in rule.items():
        if axis not in axes:
            raise InputError(f"exclude: {unknown('axis', axis, axes)}")
        for value in values:
            if value not in axes[axis]:
                raise InputError(f"exclude: {axis} {said(value)}: is not searched, only {_listed(axes[axis])}")


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(said(value) for value in values)


def ends(axes: Mapping[str, Sequence[Any]], settings: Mapping[str, Any]) -> dict[str, int]:
    """Axes of sizes at whose smallest or largest value a point stands, and the value that would come next."""
    found = {}
    for axis, (least, most) in SIZES.items():
        values, value = [one for one in axes.get(axis, ()) if one is not None], settings.get(axis)
        if value is None or len(values) < 2:
            continue
        following = value // 2 if value == min(values) else 2 * value if value == max(values) else 0
        if least <= following <= most:
            found[axis] = following
    return found


def load_space(path: Path, model: str | None = None, devices_file: Path | None = None) -> Space:
    """A space from a YAML file: ``model``, one key an axis (a value or a list of values), ``constraints``.

    ``model`` and ``devices_file`` override the file's. Raises InputError for a file that cannot be read, an unknown
    key (with the nearest) or a wrong value, and for one of several models.
    """
    found = load_spaces(path, () if model is None else (model,), devices_file)
    if len(found) > 1:
        raise InputError(f"space {str(path)!r}: has {len(found)} models: say which")
    return found[0]


def load_spaces(
    path: Path, models: Sequence[str] = (), devices_file: Path | None = None, *, pools: bool = False
) -> list[Space]:
    """The space of each model of a file, or of those ``models``. The file's ``model`` is a name, a list of names, or a
    mapping of names to the axes that this model has otherwise; ``pools``: it may say how prefill and decode are
    separated, which ``pools_of`` reads. Raises InputError as ``load_space``."""
    try:
        document = _document(path)
        for word in POOLS:
            if document.pop(word, None) is not None and not pools:
                raise InputError(f"{word}: is read by windtunnel plan --space: leave it out, or make a PoolSpace")
        limits, left_out = _constraints(document.pop("constraints", {})), _excluded(document.pop("exclude", []))
        listed, own_devices = document.pop("model", None), document.pop("devices_file", None)
        named = listed if isinstance(listed, dict) else dict.fromkeys(listed if isinstance(listed, list) else [listed])
        own = {str(name): axes or {} for name, axes in named.items() if name}
        if not (models or own):
            raise InputError("model is missing: add `model: NAME`")
        files = devices_file or (Path(own_devices) if own_devices else None)
        found = []
        for name in models or own:
            axes = document | {word_of(key): value for key, value in _own_axes(name, own).items()}
            typed_axes = {axis: typed_values(axis, value) for axis, value in axes.items()}
            found.append(Space(name, typed_axes, limits, files, exclude=left_out))
        return found
    except InputError as error:
        raise InputError(f"space {str(path)!r}: {error}") from error


def pools_of(path: Path) -> dict[str, Any]:
    """What a file says of prefill and decode apart, by the words of POOLS."""
    try:
        document = _document(path)
    except InputError as error:
        raise InputError(f"space {str(path)!r}: {error}") from error
    return {word: document[word] for word in POOLS if word in document}


def _own_axes(model: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The axes that a file has for one model alone."""
    axes = own.get(model, {})
    if not isinstance(axes, dict):
        raise InputError(f"model {model}={axes!r}: must be lines of `axis: [values]` for this model alone")
    return axes


def _excluded(value: Any) -> tuple[Mapping[str, Sequence[Any]], ...]:
    if not isinstance(value, list) or not all(isinstance(rule, dict) for rule in value):
        raise InputError(
            f"exclude={value!r}: must be a list of axes with values, e.g. [{{device: l40s, router: vllm_dp}}]"
        )
    return tuple(
        {axis: typed_values(axis, given) for key, given in rule.items() for axis in [word_of(key)]} for rule in value
    )


def word_of(key: Any) -> str:
    """An axis by its word, however it is written: with dashes, or as tables head its column."""
    return OF_SHORT.get(str(key), str(key).replace("-", "_").replace(" ", "_"))


def _document(path: Path) -> dict[str, Any]:
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise InputError("must be lines of `axis: [values]`, e.g. tensor_parallel_size: [1, 2, 4]")
    return {word_of(key): value for key, value in document.items()}


def typed_values(axis: str, value: Any) -> tuple[Any, ...]:
    """The values of an axis, each of its type; a single one may stand alone. Raises InputError for others."""
    if axis not in AXES:
        raise unknown("axis", axis, (*AXES, "model", "constraints", "exclude", "devices_file", *POOLS))
    values = value if isinstance(value, list) else [value]
    try:
        return tuple(None if one == DEFAULT and _may_be_open(axis) else typed(AXES[axis], one) for one in values)
    except InputError as error:
        raise InputError(f"{axis}={value!r}: {error}") from error


def _may_be_open(axis: str) -> bool:
    """Whether None is a value of it."""
    return NoneType in get_args(AXES[axis])


def _constraints(value: Any) -> Constraints:
    names = [entry.name for entry in fields(Constraints)]
    if not isinstance(value, dict):
        raise InputError(f"constraints={value!r}: must be lines of `word: value` with {', '.join(names)}")
    for name in value:
        if name not in names:
            raise unknown("constraint", str(name), names)
    gpus = value.get("gpus", {})
    if not isinstance(gpus, dict):
        raise InputError(f"gpus={gpus!r}: must be lines of `device: number`")
    return Constraints(**{**value, "gpus": {str(name): count for name, count in gpus.items()}})
