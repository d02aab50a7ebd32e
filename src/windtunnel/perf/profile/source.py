"""Source: a profile's estimates as the predictor of a pool; what the profile lacks is modelled."""

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_errors import relative_error
from windtunnel.perf.kernel_times import INTERPOLATED, KernelTimes, either
from windtunnel.perf.predictor import Predictor, graph_gap, roofline
from windtunnel.perf.profile.estimates import Estimates, read_estimates
from windtunnel.perf.profile.folder import is_device, unsteady
from windtunnel.perf.profile.shapes import HOST, shape_of

PREFIX = "profile:"

NORM = (("input_layernorm", 0.5), ("post_attention_layernorm", 0.5), ("add", 0.5))
"""Two norms a layer, each with its residual; Vidur counts one addition a layer."""

MEASURED_AS: Mapping[str, tuple[tuple[str, float], ...]] = {
    "embedding": (("emb", 1.0),),
    "norm": NORM,
    "final_norm": (("input_layernorm", 1.0),),
    "qkv_proj": (("attn_pre_proj", 1.0),),
    "rotary_embedding": (("attn_rope", 1.0),),
    "kv_cache_write": (("attn_kv_cache_save", 1.0),),
    "decode_attention": (("attn_decode", 1.0),),
    "prefill_attention": (("attn_prefill", 1.0),),
    "o_proj": (("attn_post_proj", 1.0),),
    "gate_up_proj": (("mlp_up_proj", 1.0),),
    "up_proj": (("mlp_up_proj", 1.0),),
    "activation": (("mlp_act", 1.0),),
    "down_proj": (("mlp_down_proj", 1.0),),
    "qkv_down_proj": (("latent_down_proj", 1.0),),
    "kv_down_proj": (("latent_down_proj", 1.0),),
    "q_up_proj": (("latent_q_proj", 1.0),),
    "q_proj": (("latent_q_proj", 1.0),),
    "decode_latent_attention": (("attn_decode", 1.0),),
    "prefill_latent_attention": (("attn_prefill", 1.0),),
    "shared_gate_up_proj": (("shared_up_proj", 1.0),),
    "shared_activation": (("shared_act", 1.0),),
    "shared_down_proj": (("shared_down_proj", 1.0),),
    "shared_experts_add": (("add", 1.0),),
    "router": (("router", 1.0),),
    "expert_choice": (("expert_choice", 1.0),),
    "experts": (("experts", 1.0),),
    "expert_all_reduce": (("all_reduce", 1.0),),
    "quantize_input": (("attn_pre_proj", 0.0),),  # part of the product that follows
    "quantize_attention": (("attn_post_proj", 0.0),),
    "embedding_all_reduce": (("all_reduce", 1.0),),
    "attention_all_reduce": (("all_reduce", 1.0),),
    "mlp_all_reduce": (("all_reduce", 1.0),),
    "lm_head": (("lm_head", 1.0),),
    "sampling": (("sampling", 1.0),),
}
"""Operator of a step → (operator of a profile, how many of it)."""

SLOWER, FASTER = 1000.0, 0.3
"""How much longer or shorter than the least possible time a large product may take before its unit is doubted."""


@dataclass(frozen=True)
class Profiled(Kernel):
    """A kernel whose times a profile has."""

    kernel: Kernel
    measured_as: tuple[tuple[str, float], ...]

    def flops(self, a: Floats, b: Floats) -> Floats:
        """The kernel's."""
        return self.kernel.flops(a, b)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """The kernel's."""
        return self.kernel.bytes_moved(a, b)

    def bandwidth(self, device: Device) -> float:
        """The kernel's."""
        return self.kernel.bandwidth(device)

    def describe(self) -> str:
        """The kernel's shape, and what it was measured as."""
        return f"{self.kernel.describe()}, profiled as {' + '.join(name for name, _ in self.measured_as)}"

    @property
    def error_family(self) -> str:
        """The kernel's."""
        return self.kernel.error_family

    @property
    def efficiency_family(self) -> str:
        """The kernel's."""
        return self.kernel.efficiency_family


@dataclass(eq=False)
class ProfilePredictor(Predictor):
    """Answers from a profile where it has the operator and its estimator predicts a time above zero, from the roofline
    elsewhere."""

    estimates: Estimates = field(kw_only=True)
    tp: int = field(kw_only=True)

    def own(self, name: str, kernel: Kernel) -> Kernel:
        """See Predictor."""
        terms = tuple(term for term in MEASURED_AS.get(name, ()) if self.estimates.has(term[0], self.tp))
        return Profiled(kernel, terms) if terms else kernel

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> KernelTimes:
        """See Predictor."""
        if not isinstance(kernel, Profiled):
            return super().times(kernel, a, b)
        a, b = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
        at = np.where(a > 0, a, 1.0)
        parts = [(self.estimates.times(name, self.tp, at, b), factor) for name, factor in kernel.measured_as]
        found = replace(
            parts[0][0],
            seconds=np.where(a > 0, np.sum([factor * part.seconds for part, factor in parts], axis=0), 0.0),
            sources=np.where(a > 0, np.max([part.sources for part, _ in parts], axis=0), INTERPOLATED).astype(np.int8),
        )
        found = replace(found, error=relative_error(kernel, found))
        possible = np.all([(part.seconds > 0) | (a <= 0) for part, _ in parts], axis=0)
        if possible.all():
            return found
        lacking = super().times(kernel.kernel, a[~possible], b[~possible])
        return either(possible, found.at(possible), lacking)

    def host_seconds(self, requests: Floats) -> Floats | None:
        """See Predictor: of ``windtunnel profile`` for a step and each request in it, of Vidur by its parts."""
        host = self.estimates.about.get("host")
        if host:
            return float(host["step"]) + float(host["request"]) * requests
        parts = [name for name in HOST if self.estimates.has(name, self.tp)]
        zero = np.zeros_like(requests)
        return (
            sum((self.estimates.times(name, self.tp, requests, zero).seconds for name in parts), zero)
            if parts
            else None
        )

    def send_seconds(self, moved: Floats, across: bool) -> Floats | None:
        """See Predictor."""
        group = 1 if across else 2
        if not self.estimates.has("send_recv", group):
            return None
        tokens = moved / (2.0 * self.estimates.shape.n_embd)
        return self.estimates.times("send_recv", group, tokens, np.zeros_like(tokens)).seconds

    @property
    def launches(self) -> bool:
        """See Predictor."""
        return bool(self.estimates.about)

    @property
    def trouble(self) -> str:
        """See Predictor."""
        return unsteady(self.estimates.about)

    @property
    def origin(self) -> dict[str, str]:
        """For the provenance."""
        return {"source": "profile", "device": self.estimates.device, "stamp": self.estimates.stamp}


def profile_predictor(pool: Pool, source: str) -> ProfilePredictor:
    """The predictor of a pool from ``profile:FOLDER``.

    Raises:
        InputError: the folder has not this model, device or degree of tensor parallelism, or its times are not
            milliseconds.
    """
    folder, device, tp = Path(source.removeprefix(PREFIX)), pool.device, pool.engine.tensor_parallel_size
    names = (device.name, *device.aliases)
    found = read_estimates(folder, names, shape_of(pool))
    if not is_device(found.device, names):
        raise InputError(
            f"profile {str(folder)!r}: measured on {found.device}, the deployment has {device.name}: "
            f"use --device {found.device}, with --devices-file if it is your own"
        )
    if tp not in found.shards:
        degrees = ", ".join(map(str, found.shards)) or "none"
        raise InputError(
            f"profile {str(folder)!r}: has no shards of tensor_parallel_size={tp} ({degrees} measured); profile them"
        )
    if tp > 1 and not found.has("all_reduce", tp):
        raise InputError(f"profile {str(folder)!r}: has no all_reduce of {tp} {found.device}; profile it, or use 1")
    _check_unit(found, device, tp, folder)
    return ProfilePredictor(
        roofline(device),
        None,
        "what a profile lacks is modelled" + _other_degrees(found, tp),
        0.0 if found.about else graph_gap(pool),
        estimates=found,
        tp=tp,
    )


def _other_degrees(found: Estimates, tp: int) -> str:
    """Which host work is there for other degrees alone."""
    degrees = sorted({int(name.rpartition("@")[2]) for name in found.trained if name.partition("@")[0] in HOST})
    if not degrees or tp in degrees:
        return ""
    return (
        f"; its CPU overheads are of TP {', '.join(map(str, degrees))}, not {tp}, so the host's work is modelled, too"
    )


def _check_unit(found: Estimates, device: Device, tp: int, folder: Path) -> None:
    """Whether a large product takes what one can take on this device."""
    largest = found.shape.largest
    tokens, zero = np.array([found.reach[f"{largest}@{tp}"].a]), np.zeros(1)
    least = float(found.shape.kernel(largest, tp).bound(device, tokens, zero)[0])
    ratio = float(found.times(largest, tp, tokens, zero).seconds[0]) / least
    if not FASTER <= ratio <= SLOWER:
        raise InputError(
            f"profile {str(folder)!r}: {largest} takes {ratio:.2g} times the least that {device.name} could: "
            "times must be in ms; convert them, or name the right device"
        )
