"""Accelerators: what one GPU can do and costs. The catalogue is ``data/hardware.toml``; a user's file adds to it."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, nearest, unknown
from windtunnel.files import read_toml

CATALOGUE = Path(__file__).parent / "data" / "hardware.toml"
GIB = 2**30
DTYPES = ("bfloat16", "float16", "int8", "fp8", "fp4", "float32")
LINKS = ("nvlink", "pcie", "xgmi")

UNITS: dict[str, tuple[str, float]] = {
    "memory_gib": ("memory_bytes", GIB),
    "usable_memory_gib": ("usable_memory_bytes", GIB),
    "memory_bandwidth": ("memory_bandwidth", 1e9),
    "link_bandwidth": ("link_bandwidth", 1e9),
    "pcie_bandwidth": ("pcie_bandwidth", 1e9),
    "network_bandwidth": ("network_bandwidth", 1e9),
}
"""Keys of the file that are given in another unit than the field: name of the field, factor."""


@dataclass(frozen=True)
class Device:
    """One GPU. Bytes, bytes/s, FLOP/s and watts; bandwidths in one direction."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    """Peak dense FLOP/s of matrix products by dtype (``DTYPES``); float32 is that of the vector units."""
    power_w: float
    idle_power_w: float
    gpus_per_node: int
    link: str
    """How GPUs of a node are joined: ``nvlink``, ``pcie`` or ``xgmi``."""
    link_bandwidth: float
    """Between GPUs of a node, per GPU."""
    pcie_bandwidth: float
    network_bandwidth: float
    """Between nodes, per GPU."""
    gpus_per_domain: int = 0
    """GPUs joined by ``link``: 72 in an NVL72 rack; 0 means ``gpus_per_node``."""
    usable_memory_bytes: int = 0
    """What a program sees as total memory; 0 means ``memory_bytes``."""
    sm_version: int = 0
    """CUDA compute capability × 10; 0 if the device is not NVIDIA's."""
    multiprocessors: int = 0
    """Streaming multiprocessors or compute units; 0: unknown."""
    peer_access: bool = True
    """GPUs of a node read each other's memory; otherwise what they exchange passes through the host's (GeForce by its
    driver; workstation cards and H100 PCIe in the servers that were measured). ``--devices-file`` says otherwise."""
    inline_ecc: bool = False
    """Check bits lie in the memory itself, and are read with the data: 1/16 of both (GDDR of data centres)."""
    price_per_hour: float = 0.0
    """USD per GPU and hour; 0: unknown."""
    price_source: str = ""
    price_date: str = ""
    vendor: str = ""
    source: str = ""
    aliases: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.usable_memory_bytes == 0:
            object.__setattr__(self, "usable_memory_bytes", self.memory_bytes)
        if self.gpus_per_domain == 0:
            object.__setattr__(self, "gpus_per_domain", self.gpus_per_node)
        object.__setattr__(self, "flops", dict(self.flops))
        for key in ("memory_bytes", "memory_bandwidth", "link_bandwidth", "pcie_bandwidth", "network_bandwidth"):
            self._require(getattr(self, key) > 0, key, "must be > 0")
        self._require(self.gpus_per_node >= 1, "gpus_per_node", "must be ≥ 1")
        self._require(self.gpus_per_domain >= self.gpus_per_node, "gpus_per_domain", "must be ≥ gpus_per_node")
        self._require(self.usable_memory_bytes <= self.memory_bytes, "usable_memory_bytes", "must be ≤ memory_bytes")
        self._require(0 <= self.idle_power_w <= self.power_w, "idle_power_w", "must be between 0 and power_w")
        self._require(self.price_per_hour >= 0, "price_per_hour", "must be ≥ 0")
        if self.link not in LINKS:
            raise unknown("link", self.link, LINKS)
        for dtype, rate in self.flops.items():
            if dtype not in DTYPES:
                raise unknown(f"dtype in flops of {self.name}", dtype, DTYPES)
            self._require(rate > 0, "flops", f"{dtype} must be > 0")
        self._require("bfloat16" in self.flops, "flops", "must have bfloat16")

    def _require(self, holds: bool, key: str, rule: str) -> None:
        if not holds:
            raise InputError(f"device {self.name}: {key}={getattr(self, key)}: {rule}")

    def __hash__(self) -> int:
        """By name and memory, which tell devices apart; equality compares everything."""
        return hash((self.name, self.memory_bytes, self.memory_bandwidth))

    def peak_flops(self, dtype: str) -> float:
        """Peak of matrix products in this dtype; bfloat16's where the device has none (values are converted first)."""
        return self.flops.get(dtype, self.flops["bfloat16"])

    @property
    def is_hopper(self) -> bool:
        """H100, H200, H20 and their Grace siblings (compute capability 9.0)."""
        return self.sm_version == 90

    @property
    def is_blackwell_datacentre(self) -> bool:
        """B200, B300 and their Grace siblings (compute capability 10.x)."""
        return 100 <= self.sm_version < 110


def load_devices(*extra_files: Path) -> dict[str, Device]:
    """Every device by name. Each extra file adds devices or overrides keys of those before it.

    Raises InputError for a file that cannot be read, an unknown key (with the nearest) or an impossible value.
    """
    tables: dict[str, dict[str, Any]] = {name: dict(table) for name, table in _catalogue().items()}
    for file in extra_files:
        for name, table in _read(Path(file)).items():
            if not isinstance(table, dict):
                raise InputError(f"{file}: {name!r} must be a table [{name}] of a device's keys")
            known = _find(name, {key: value.get("aliases", ()) for key, value in tables.items()})
            tables[known or name] = {**tables.get(known or name, {}), **table}
    return {name: _device(name, table) for name, table in tables.items()}


@cache
def _built_in() -> Mapping[str, Device]:
    """The devices known by name, made once."""
    return load_devices()


def device(name: str, extra: Iterable[Path] = ()) -> Device:
    """The device with this name or alias (``h100_sxm``, ``H100-SXM``, ``h100``). Raises InputError with the nearest."""
    files = tuple(extra)
    devices = load_devices(*files) if files else _built_in()
    found = _find(name, {key: value.aliases for key, value in devices.items()})
    if found is None:
        spoken = [*devices, *(alias for value in devices.values() for alias in value.aliases)]
        raise unknown("device", name, spoken if nearest(name, spoken) else devices)
    return devices[found]


def _find(name: str, aliases: Mapping[str, Iterable[str]]) -> str | None:
    wanted = _normal(name)
    for key, others in aliases.items():
        if wanted in (_normal(key), *map(_normal, others)):
            return key
    return None


def _normal(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_").removeprefix("nvidia_").removeprefix("amd_")


@cache
def _catalogue() -> dict[str, Any]:
    return _read(CATALOGUE)


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_toml(file)
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file of devices") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{file}: not TOML: {error}") from error


def _device(name: str, table: Mapping[str, Any]) -> Device:
    names = {f.name for f in fields(Device)} - {"name", "memory_bytes", "usable_memory_bytes"} | set(UNITS)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in names:
            raise unknown(f"key of device {name}", key, names)
        target, factor = UNITS.get(key, (key, 1.0))
        values[target] = _converted(name, key, value, factor)
    required = {f.name for f in fields(Device) if f.default is MISSING and f.default_factory is MISSING} - {"name"}
    missing = sorted(required - set(values))
    if missing:
        written = {target: key for key, (target, _) in UNITS.items()}
        raise InputError(f"device {name}: missing key {written.get(missing[0], missing[0])!r}")
    return Device(name=name, **values)


def _converted(name: str, key: str, value: Any, factor: float) -> Any:
    text = key in ("link", "price_source", "price_date", "vendor", "source")
    good = {
        "flops": isinstance(value, dict) and all(_is_number(v) for v in value.values()),
        "aliases": isinstance(value, list) and all(isinstance(v, str) for v in value),
        "inline_ecc": isinstance(value, bool),
        "peer_access": isinstance(value, bool),
    }.get(key, isinstance(value, str) if text else _is_number(value))
    if not good:
        raise InputError(f"device {name}: {key}={value!r}: must be {'text' if text else 'a number'}")
    if key == "flops":
        return {dtype: rate * 1e12 for dtype, rate in value.items()}
    if key == "aliases":
        return tuple(value)
    if text or isinstance(value, bool):
        return value
    whole = key.endswith("_gib") or key in ("sm_version", "multiprocessors", "gpus_per_node", "gpus_per_domain")
    return int(value * factor) if whole else float(value * factor)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
