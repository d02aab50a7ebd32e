"""Flags of plan: what is searched, under which limits, for what, and where it runs."""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.model import Model
    from windtunnel.plan.answer.why import Asked
    from windtunnel.plan.disaggregation.pool_space import PoolSpace
    from windtunnel.plan.objective import Purchase
    from windtunnel.plan.space import Constraints, Space
    from windtunnel.plan.workers import Team

SPACE, LIMITS, SEARCH, BUYER, CLUSTER = (
    Group(name, sort_key=place)
    for place, name in enumerate(("Search space", "Available hardware", "Search", "For the buyer", "Execution"))
)
SETTINGS, SETTING = re.compile(r"\w+:\w+="), re.compile(r"\w+=[^\s,]*")
"""The beginning of a word with settings, and one more of them."""
Values = Annotated[tuple[str, ...], Parameter(show_default=False)]
ALONE = ("round_robin",)
FOR_RATES, FOR_LANES = (*ALONE, "least_outstanding", "vllm_dp"), (*ALONE, "session_affinity", "prefix_aware")
"""Routers that are tried where replicas are found."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The values to try, several words or separated by commas; defaults in brackets."""

    devices: Annotated[Values, Parameter(alias="--device")] = ("h100",)
    """GPUs, names of ``windtunnel list devices``."""
    tensor_parallel_size: Values = ()
    """[1 2 4 8]"""
    pipeline_parallel_size: Values = ()
    """[1]"""
    data_parallel_size: Values = ()
    """[1; with mixture of experts 1 2 4 8]"""
    enable_expert_parallel: Values = ()
    """[false; with mixture of experts also true]"""
    max_num_seqs: Values = ()
    """[64 128 256 512]"""
    max_num_batched_tokens: Values = ()
    """[512 1024 2048 4096 8192]"""
    quantization: Values = ()
    """[stored; for a checkpoint of 16 bits also fp8, made on loading]"""
    kv_cache_dtype: Values = ()
    """[auto fp8]"""
    router: Values = ()
    """[round_robin; for a target rate also least_outstanding vllm_dp, for lanes session_affinity prefix_aware]"""
    axis: Values = ()
    """Any other setting: WORD=VALUE,VALUE in the words of ``windtunnel run``, e.g. block_size=16,32
    or "store=none,tier=host capacity=1e12"; several are separated by spaces."""

    def space(
        self, model: str, constraints: "Constraints", devices_file: Path | None, routers: Values = ALONE
    ) -> "Space":
        """The space of these axes, with defaults that suit the model; ``routers``: the usual ones of replicas.

        Raises InputError for what cannot be.
        """
        from windtunnel.deployment.engine_scheduler import sizes_of
        from windtunnel.model import load_model
        from windtunnel.plan.space import Space, typed_values

        given = self._given()
        axes = {"device": split(self.devices)} | defaults(load_model(model), routers) | given
        texts = given.get("scheduler", [])
        for size in set.intersection(*(set(sizes_of(text)) for text in texts)) - set(given) if texts else ():
            del axes[size]
        typed = {word: typed_values(word, values) for word, values in axes.items()}
        return Space(model, typed, constraints, devices_file, frozenset(typed) - {"device", *given})

    def _given(self) -> dict[str, list[str]]:
        """The axes that the user gave, but for devices. Raises InputError for one that is given twice."""
        names = [entry.name for entry in fields(self) if entry.name not in ("devices", "axis")]
        given = {name: values for name in names if (values := split(getattr(self, name)))}
        for text in self.axis:
            word, equals, listed = text.partition("=")
            axis = word.replace("-", "_")
            if not equals:
                raise InputError(f"axis {text!r}: must be WORD=VALUE,VALUE, e.g. block_size=16,32")
            if axis == "model":
                raise InputError(f"axis {text!r}: name models before the flags: plan {listed.replace(',', ' ')}")
            if axis == "device":
                raise InputError(f"axis {text!r}: name devices by --devices {listed.replace(',', ' ')}")
            if axis in given:
                raise InputError(f"axis {text!r}: {axis} is given twice: put its values into one, separated by commas")
            given[axis] = split((listed,))
        return given


def split(words: tuple[str, ...]) -> list[str]:
    """Words separated by commas as well; settings of one, ``prefix_aware:prefix=1,queue=3``, stay together."""
    found: list[str] = []
    for word in words:
        for place, part in enumerate(part for part in word.split(",") if part):
            if place and SETTINGS.match(found[-1]) and SETTING.fullmatch(part):
                found[-1] += f",{part}"
            else:
                found.append(part)
    return found


def defaults(model: "Model", routers: Values) -> dict[str, list[str]]:
    """Default values of the usual axes: what people deploy, the plainest first, which wins of equals."""
    usual = {
        "tensor_parallel_size": ["1", "2", "4", "8"],
        "max_num_seqs": ["64", "128", "256", "512"],
        "max_num_batched_tokens": ["512", "1024", "2048", "4096", "8192"],
        "quantization": ["stored"] if model.quantization else ["stored", "fp8"],
        "kv_cache_dtype": ["auto", "fp8"],
        "router": [*routers],
    }
    if model.has_moe:
        usual |= {"data_parallel_size": ["1", "2", "4", "8"], "enable_expert_parallel": ["false", "true"]}
    return usual


@dataclass(frozen=True, kw_only=True)
class Available:
    """Available hardware."""

    gpus: Values = ()
    """GPUs that are available: DEVICE=NUMBER, e.g. h100=16 l40s=32."""
    max_gpus: int | None = None
    """Most GPUs for the whole deployment."""
    max_gpus_per_node: int | None = None
    """Largest tensor parallel size; the device's own limit holds too."""
    max_price_per_hour: float | None = None
    """Most USD per hour for all GPUs."""
    prices: str | None = None
    """A cloud's prices of ``windtunnel list prices``: aws, or with how you pay: gcp:reserved, nebius:spot. Devices
    that it does not sell are left out."""

    def priced(self, space: "Space") -> "Space":
        """A space at these prices. Raises InputError for an unknown cloud."""
        return space if self.prices is None else replace(space, prices=self.prices)

    def constraints(self) -> "Constraints":
        """These limits as constraints of a space. Raises InputError for what cannot be read."""
        from windtunnel.plan.space import Constraints

        counts = {}
        for text in split(self.gpus):
            name, equals, number = text.partition("=")
            if not equals or not number.isdigit():
                raise InputError(f"gpus {text!r}: must be DEVICE=NUMBER, e.g. h100=16")
            if name in counts:
                raise InputError(f"gpus {text!r}: {name} is given twice: leave one out")
            counts[name] = int(number)
        limits: dict[str, Any] = {
            entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in ("gpus", "prices")
        }
        return Constraints(gpus=counts, **limits)


@dataclass(frozen=True, kw_only=True)
class Buyer:
    """What a buyer asks."""

    why: Values = ()
    """Why it did not win: a device, settings, or both, e.g. ``l40s`` or ``l40s,tensor_parallel_size=2``."""
    whole_nodes: Annotated[bool, Parameter(negative=())] = False
    """GPUs are bought in whole nodes (of eight, most): their cost counts, with a target rate."""
    spare: int = 0
    """Replicas that may fail while the goal still holds, with a target rate; of each pool."""
    growth: Annotated[tuple[float, ...], Parameter(show_default=False)] = ()
    """Times the target rate, e.g. 1.3 2 4: what to buy for each, and what it costs."""

    def __post_init__(self) -> None:
        """Refuse growth to nothing."""
        for factor in self.growth:
            if not 0 < factor < 1e6:
                raise InputError(f"growth={factor:g}: must be a number > 0, e.g. 1.3")

    def purchase(self, space: "Space | PoolSpace") -> "Purchase":
        """What is bought for what serves. Raises InputError for fewer replicas than none, and where an autoscaler's are
        paid for by the second."""
        from windtunnel.plan.objective import Purchase

        if "autoscale" in space.axes and (self.whole_nodes or self.spare):
            raise InputError("autoscale: is paid by the replicas that are up: leave out whole_nodes and spare")
        return Purchase(self.whole_nodes, self.spare)

    def asked(self, space: "Space | PoolSpace") -> "list[Asked]":
        """What is asked about, within a space. Raises InputError for what is not searched."""
        from windtunnel.plan.answer.why import asked_of
        from windtunnel.plan.space import Space

        if self.why and not isinstance(space, Space):
            raise InputError(f"why {self.why[0]!r}: is answered for mixed servers: leave out --pools")
        return [asked_of(words, space) for words in self.why] if isinstance(space, Space) else []


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where simulations run."""

    executor: Literal["processes", "serial", "ray"] = "processes"
    """Processes on this machine, this process alone, or a Ray cluster."""
    workers: int | None = None
    """Parallel simulations; default: one per CPU."""
    address: str | None = None
    """Ray's cluster, e.g. auto or ray://head:10001; default: started on this machine."""

    def __post_init__(self) -> None:
        if self.address is not None and self.executor != "ray":
            raise InputError(f"address={self.address!r}: is for a Ray cluster: add --executor ray")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers={self.workers}: must be ≥ 1")
        if self.executor == "serial" and self.workers not in (None, 1):
            raise InputError(f"workers={self.workers}: a serial search has one: use --executor processes")

    def team(self) -> "Team":
        """The team. Raises InputError where Ray is not installed or cannot be reached."""
        from windtunnel.plan.workers import in_turn, processes

        if self.executor == "ray":
            from windtunnel.plan.workers import on_ray

            return on_ray(self.address, self.workers)
        return processes(self.workers) if self.executor == "processes" else in_turn()
