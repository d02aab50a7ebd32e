"""What the host needs for a layer that runs from no graph, in engines that do not compile: SGLang and TensorRT-LLM.

Their batches with prompts go through PyTorch module by module. A step is then no shorter than the host needs for all of
them, which is several times the launches alone: Python, checks, allocations, quantisation and routing around each.

The constants were set by hand so that the first tokens of served points with up to 8 clients and 1,024 tokens come out
right, on the first half of the points (``validation.served_errors``) where that has the layer and the generation:
latent attention on DeepSeek-R1 and V3, sparse on GLM-5, linear on Qwen3.5 with an H200. State space layers were set so
that what prompts add to the gaps between tokens comes out, mean tpot less the median gap: 37 ms for Nemotron-3 Super on
four H200, 13 to 15 for Nano on B200 (SGLang with 256 clients, the speed benchmarks of its cookbook's pages on the two).
"""

from dataclasses import dataclass

from windtunnel.deployment import Pool
from windtunnel.model import MLA, CompressedAttention, LinearAttention, MoE, StateSpace
from windtunnel.model.layers import Layer

BLACKWELL = 100
"""Compute capability × 10 from which servers have newer hosts."""


@dataclass(frozen=True)
class EagerCost:
    """Seconds of one core for the modules of a layer."""

    attention: float
    """Plain; block-sparse too, whose modules hold the launches that the kernel database timed."""
    latent: float
    """Projections down and up, and absorbed products."""
    sparse: float
    """The same beside an indexer, beyond what the kernel database timed with the module; compressed attention too, of
    which no served point is known."""
    linear: float
    """Convolution, gates, and the recurrence in parts."""
    state_space: float
    """Convolution, and the scan in five."""
    dense: float
    """A dense feed-forward part."""
    experts: float
    """Router, choice, alignment, two products, sum, and the shared expert."""

    def of(self, layer: Layer) -> float:
        """Seconds of one layer."""
        attention = self.attention if layer.attention else 0.0
        if isinstance(layer.attention, MLA):
            attention = self.sparse if layer.attention.index_top_k else self.latent
        elif isinstance(layer.attention, CompressedAttention):
            attention = self.sparse
        elif isinstance(layer.attention, LinearAttention):
            attention = self.linear
        elif isinstance(layer.attention, StateSpace):
            attention = self.state_space
        if layer.mlp is None:
            return attention
        beside = self.dense if layer.beside else 0.0
        return attention + beside + (self.experts if isinstance(layer.mlp, MoE) else self.dense)


EAGER = {
    ("sglang", False): EagerCost(0.5e-3, 2.5e-3, 1.8e-3, 4.0e-3, 1.5e-3, 0.30e-3, 0.70e-3),
    ("sglang", True): EagerCost(0.3e-3, 1.5e-3, 1.2e-3, 4.0e-3, 0.9e-3, 0.15e-3, 0.45e-3),
    ("trtllm", False): EagerCost(0.4e-3, 3.5e-3, 1.8e-3, 4.0e-3, 1.5e-3, 0.25e-3, 0.80e-3),
    ("trtllm", True): EagerCost(0.2e-3, 2.0e-3, 1.2e-3, 4.0e-3, 0.9e-3, 0.12e-3, 0.50e-3),
}
"""By engine, and whether the device is Blackwell."""

HOSTS = {"b300_sxm": 0.5}
"""Time of the hosts of a device relative to its generation's: of SGLang 0.5.9 with Qwen3.5, B200 against B300."""


def eager_floor(pool: Pool) -> float:
    """Least seconds of a step without a graph."""
    cost = EAGER[pool.engine.backend, pool.device.sm_version >= BLACKWELL]
    return HOSTS.get(pool.device.name, 1.0) * sum(count * cost.of(layer) for count, layer in pool.model.layers)
