"""The machines of the experiments: replicas of OPT on A100 whose steps take DistServe's times, together or apart."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from windtunnel import Deployment, Engine, Pool, Workload, device, generate, load_model, simulate
from windtunnel.metrics.requests import RequestMetrics, request_metrics
from windtunnel.perf.step_law import StepLaw, Terms
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.workload import Both, Gamma, Lognormal

LAWS = Path(__file__).parents[3] / "shared" / "truth" / "disagg" / "step_laws.json"
MODEL = "facebook/opt-13b"
LONGEST = 2048
BLOCK = 16


@dataclass(frozen=True)
class Fitted:
    """One layout of a model, as DistServe measured and fitted it."""

    law: StepLaw
    kv_tokens: int
    """That fit into its memory."""


@cache
def fitted(model: str = MODEL) -> dict[int, Fitted]:
    """Tensor parallel size → its law."""
    found = {}
    for entry in json.loads(LAWS.read_text(encoding="utf-8"))["laws"]:
        if entry["model"] == model:
            terms = {
                name: Terms(*(term * 1e-3 for term in entry[name]))
                for name in ("prefill", "decode_small", "decode_large")
            }
            law = StepLaw(terms["prefill"], terms["decode_small"], terms["decode_large"], entry["large_from"])
            found[int(entry["tp"])] = Fitted(law, int(entry["max_num_tokens"]))
    return found


@dataclass(frozen=True)
class Side:
    """Equal replicas."""

    tp: int
    replicas: int = 1
    role: str = "mixed"
    max_num_batched_tokens: int = 16_384
    max_num_seqs: int = 256
    model: str = MODEL

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.tp * self.replicas

    def pool(self) -> Pool:
        """The replicas, with the memory that DistServe found. Prompts are never cut, as in its engine."""
        engine = Engine(
            tensor_parallel_size=self.tp,
            max_model_len=LONGEST,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_gpu_blocks_override=fitted(self.model)[self.tp].kv_tokens // BLOCK + 1,
            gpu_memory_utilization=1.0,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            async_scheduling=False,
        )
        return Pool(load_model(self.model), device("a100"), engine, self.replicas, self.role)

    def tables(self) -> Tabulated:
        """The law's step times, with what simdistserve adds to them."""
        return _tables(self.model, self.tp, self.max_num_batched_tokens, self.max_num_seqs)


@cache
def _tables(model: str, tp: int, tokens: int, seqs: int) -> Tabulated:
    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "max_model_len": LONGEST}
    return fitted(model)[tp].law.in_simdistserve().tabulated(**limits)


def serve(sides: tuple[Side, ...], workload: Workload) -> RequestMetrics:
    """What the requests see: of one mixed side, or of a prefill and a decode side between which KV travels for free."""
    deployment = Deployment(tuple(side.pool() for side in sides))
    return request_metrics(simulate(deployment, workload, tables=[side.tables() for side in sides]).requests)


def together(tp: int, replicas: int = 1) -> tuple[Side, ...]:
    """Both stages on the same replicas."""
    return (Side(tp, replicas),)


def apart(prefill: tuple[int, int], decode: tuple[int, int]) -> tuple[Side, ...]:
    """(tensor parallel size, replicas) of either side."""
    return Side(*prefill, role="prefill"), Side(*decode, role="decode")


CHAT = Both(Lognormal(755.5, 0.6, 1500), Lognormal(200.3, 1.1, 500))
"""Means of ShareGPT as DistServe used it (table 2 of its paper); the spreads are assumed."""


def chat(rate: float, requests: int = 1000) -> Workload:
    """Poisson arrivals of conversations."""
    return generate(Gamma(rate), CHAT, requests, seed=1)


def goodput(
    sides: tuple[Side, ...], ttft: float, tpot: float, share: float = 0.9, load: Callable[[float], Workload] = chat
) -> float:
    """Most requests/s per GPU of which ``share`` meet either limit, by bisection to 1 %."""

    def holds(rate: float) -> bool:
        found = serve(sides, load(rate))
        late = [np.quantile(found.ttft, share) > ttft, np.nanquantile(found.tpot, share) > tpot]
        return not any(late)

    gpus = sum(side.gpus for side in sides)
    low, high = 0.0, 0.25 * gpus
    while holds(high):
        low, high = high, 2 * high
        if high > 100 * gpus:
            break
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low / gpus
