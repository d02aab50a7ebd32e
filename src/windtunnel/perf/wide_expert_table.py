"""Measured experts behind DeepEP's exchange: DeepGEMM's grouped products over whole experts, spread over many GPUs."""

from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.hardware import Device
from windtunnel.perf.answer import INTERPOLATED, Answer, note_once
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.causes import ALL, Causes
from windtunnel.perf.competing_curve import CompetingCurve
from windtunnel.perf.costs import describe
from windtunnel.perf.curves import blend, held_below
from windtunnel.perf.database import Database
from windtunnel.perf.expert_rows import experts_curve
from windtunnel.perf.expert_table import routing
from windtunnel.perf.kernels import Experts
from windtunnel.perf.roofline import bound

TABLES = {"masked": "wideep_generation_moe_perf", "contiguous": "wideep_context_moe_perf"}
SIZES = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")


@dataclass(eq=False)
class WideExpertTable:
    """The tables of one device; SGLang measured them, vLLM calls the same kernels (its DeepGEMM experts)."""

    database: Database
    device: Device
    causes: Causes = ALL
    notes: list[str] = field(default_factory=list)
    """What was not measured, for the provenance."""
    _curves: dict[Experts, dict[int, CompetingCurve]] = field(default_factory=dict)

    def times(self, kernel: Experts, a: Floats) -> Answer | None:
        """Seconds for ``a`` tokens of all ranks, or None where nobody measured experts of this shape so.

        Between measured numbers of GPUs the time of equal tokens for each GPU is a power of the number; beyond them the
        efficiency of the last one holds.
        """
        curves = self._of(kernel)
        if not curves:
            note_once(
                self.notes, f"experts {describe(kernel)}: nobody measured them behind DeepEP, so priced as without it"
            )
            return None
        if kernel.ep not in curves:
            note_once(
                self.notes,
                f"experts {describe(kernel)}: measured behind DeepEP on {', '.join(map(str, sorted(curves)))} GPUs",
            )
        gpus = sorted(curves)
        parts = [
            (weight, self._at(kernel, gpus[i], curves[gpus[i]], a))
            for i, weight in blend(np.array(gpus, dtype=float), float(kernel.ep))
        ]
        _, found = max(parts, key=lambda part: part[0])
        if kernel.ep in curves:
            own = self.database.backend == "sglang"
            return found if own else replace(found, sources=np.maximum(found.sources, INTERPOLATED))
        log_seconds = sum(weight * np.log(part.seconds) for weight, part in parts)
        return replace(found, seconds=np.exp(log_seconds)).modelled()

    def _at(self, kernel: Experts, gpus: int, curve: CompetingCurve, a: Floats) -> Answer:
        """Experts on a measured number of GPUs with as many tokens each; the efficiency of that number where ``kernel``
        has more or fewer GPUs than any that was measured."""
        x = a * gpus / kernel.ep
        found = held_below(curve, x, curve.least)
        ends = kernel.ep < min(self._of(kernel)) or kernel.ep > max(self._of(kernel))
        if not ends:
            return found
        zero = np.zeros_like(x)
        least = bound(kernel, self.device, x * kernel.ep / gpus, zero)
        return replace(found, seconds=found.seconds * least / curve.least(x))

    def _of(self, kernel: Experts) -> dict[int, CompetingCurve]:
        """GPUs → curve over the tokens of all of them; the newest version that has a number of GPUs answers."""
        shape = replace(kernel, ep=1)
        if shape not in self._curves:
            self._curves[shape] = self._read(kernel)
        return self._curves[shape]

    def _read(self, kernel: Experts) -> dict[int, CompetingCurve]:
        found: dict[int, CompetingCurve] = {}
        sizes = (kernel.hidden, kernel.inter, kernel.top_k, kernel.num_experts, kernel.tp)
        wanted = dict(zip(SIZES, sizes, strict=True))
        spread = routing(kernel.num_experts) if self.causes.expert_imbalance else "uniform"
        backend = None if self.database.backend == "sglang" else "sglang"
        for table in self.database.versions("moe", TABLES[kernel.layout], ("moe_dtype", "distribution"), backend):
            rows = table.where(moe_dtype=kernel.dtype, distribution=spread, **wanted)
            for gpus in np.unique(rows["moe_ep_size"]).tolist():
                part = rows.where(moe_ep_size=gpus)
                tokens, which = np.unique(part["num_tokens"], return_inverse=True)
                seconds = np.full(len(tokens), np.inf)
                np.minimum.at(seconds, which, part["latency"] * 1e-3)
                x = tokens.astype(float)
                found.setdefault(gpus, experts_curve(replace(kernel, ep=gpus), self.device, x, seconds))
        return found
