"""Server: one replica, by the names of the flags."""

from dataclasses import KW_ONLY, field, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.engine_scheduler import require_one_size
from windtunnel.deployment.prices import priced, prices_of
from windtunnel.errors import InputError
from windtunnel.files import parse_json
from windtunnel.hardware import Device, device
from windtunnel.model import load_model
from windtunnel.perf import require_source

MAIN_JOB = {"model": "Qwen/Qwen3-32B", "tensor_parallel_size": 2}
"""What is simulated when no model is named."""
ENGINE = Group("Engine, in vLLM's words", sort_key=1)
"""Where the help has the flags of an engine."""


@dataclass(frozen=True)
class Server:
    """One replica: a model on GPUs, run by an engine."""

    model: str = "Qwen/Qwen3-32B"
    """A name of ``windtunnel list models``, or a config.json or its folder. Without one: Qwen3-32B on two GPUs."""
    _: KW_ONLY
    hf_overrides: str | None = None
    """Other values for keys of the model's config.json, as JSON: '{"max_position_embeddings": 131072}'."""
    device: str = "h100"
    """The GPU, a name of ``windtunnel list devices``."""
    devices_file: Path | None = None
    """TOML file with your own devices, or other values for known ones."""
    gpus_per_node: int | None = None
    """GPUs of a node, beyond which their sums and sends go over the network; None: as many as the device usually has.
    """
    prices: str | None = None
    """A cloud's prices of ``windtunnel list prices``: aws, or with how you pay: gcp:reserved, nebius:spot."""
    perf: str = "auto"
    """Kernel times: measured where there is data and modelled elsewhere (auto), or one of the two alone; roofline:
    perfect kernels and no host work, what no server can beat; profile:FOLDER: what windtunnel profile or Vidur
    measured there."""
    engine: Annotated[Engine, Parameter(name="*", group=ENGINE)] = field(default_factory=Engine)

    def __post_init__(self) -> None:
        """Refuse a source of kernel times that there is not."""
        require_source(self.perf)
        if self.prices is not None:
            prices_of(self.prices)
        self.overrides()

    def overrides(self) -> dict[str, Any]:
        """Other values for keys of the model's config. Raises InputError for what is no JSON object."""
        found = parse_json(self.hf_overrides) if self.hf_overrides else {}
        if not isinstance(found, dict):
            raise InputError(f"hf_overrides={self.hf_overrides}: must be a JSON object")
        return found

    def gpu(self) -> Device:
        """The device. Raises InputError for an unknown name, a file that cannot be read, or one that is not sold."""
        found = device(self.device, (self.devices_file,) if self.devices_file else ())
        return priced(self._in_nodes(found), self.prices)

    def _in_nodes(self, found: Device) -> Device:
        """The device in nodes of the user's size. Raises InputError for a size that its links do not join."""
        size = self.gpus_per_node
        if size is None:
            return found
        if size < 1:
            raise InputError(f"gpus_per_node={size}: must be ≥ 1")
        domain = found.gpus_per_domain if found.gpus_per_domain > found.gpus_per_node else size
        return replace(found, gpus_per_node=size, gpus_per_domain=max(domain, size))

    def pool(self, replicas: int = 1) -> Pool:
        """So many of these replicas, every default of the engine filled in. Raises InputError for what cannot run."""
        require_one_size(self.engine)
        return Pool(load_model(self.model, self.overrides()), self.gpu(), self.engine, replicas)
