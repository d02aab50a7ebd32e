"""Host work of a step: scheduling, input preparation, launching, reading back what was sampled.

None of this is in the kernel database. The constants are for one modern server core at 3-4 GHz, and every table that
holds them calls itself modelled; ``host_overlapped`` and ``host_serial`` are separate tables so that measured runs can
calibrate them.

Batches with prompts of SGLang and TensorRT-LLM go through PyTorch module by module, from no graph and not compiled. A
step is then no shorter than the host needs for all modules, which is several times the launches alone: Python, checks,
allocations, quantisation and routing around each. The constants of EAGER were set by hand so that the first tokens of
served points with up to 8 clients and 1,024 tokens come out right, on the first half of the points
(``validation.served_errors``) where that has the layer and the generation: latent attention on DeepSeek-R1 and V3 (of
TensorRT-LLM by ``benchmarks.accuracy.eager_host``), sparse on GLM-5, linear on Qwen3.5 with an H200. State space layers
were set so that what prompts add to the gaps between tokens comes out, mean tpot less the median gap: 37 ms for
Nemotron-3 Super on four H200, 13 to 15 for Nano on B200 (SGLang with 256 clients, the speed benchmarks of its
cookbook's pages on the two).
"""

from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool, preset
from windtunnel.deployment.engine import PIECES, WHOLE
from windtunnel.model import MLA, CompressedAttention, LinearAttention, MoE, SelectiveScan, StateSpace
from windtunnel.model.layers import Layer
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.predictor import Predictor
from windtunnel.perf.tabulate.operators import operators
from windtunnel.perf.tabulate.tables import Axes


@dataclass(frozen=True)
class HostCost:
    """Seconds of host work per step: fixed, and for each request in the batch."""

    overlapped: float
    overlapped_per_sequence: float
    serial: float
    serial_per_sequence: float

    def tables(self, max_num_seqs: int) -> tuple[Floats, Floats]:
        """(host_overlapped, host_serial), [max_num_seqs + 1] each; a step without requests costs nothing."""
        n = np.arange(max_num_seqs + 1, dtype=float)
        overlapped = self.overlapped + self.overlapped_per_sequence * n
        serial = self.serial + self.serial_per_sequence * n
        return np.where(n > 0, overlapped, 0.0), np.where(n > 0, serial, 0.0)


ASYNCHRONOUS = HostCost(1.5e-3, 12e-6, 0.2e-3, 0.5e-6)
"""The next step is prepared while this one runs; what stays serial is the launch and the copy of sampled tokens: vLLM's
own estimate for asynchronous scheduling is a gap of 200-300 µs between decodes (its issue 10634). The overlapped part
bounds steps of small models: a step cannot be shorter than the host work of one."""

SYNCHRONOUS = HostCost(0.0, 0.0, 0.9e-3, 8e-6)
"""Schedule, prepare, launch and process output one after the other with vLLM's v1 engine core (before v1 the same issue
and its RFC 6854 saw 5-13 ms): about 1 ms for a few requests, 3 ms for 256."""

BEFORE_V1 = HostCost(0.0, 0.0, 1.1e-3, 35e-6)
"""vLLM before v1: Python objects for each request in scheduling, input preparation and sampling, between the steps.
This, the next and CACHED_BLOCK were fitted to the static batches of Llama-3-8B on H100 (../shared/truth);
all other models, and the A100, are checks."""

BEFORE_V1_WORKERS = HostCost(0.0, 0.0, 0.25e-3, 15e-6)
"""What is added with several workers, to which the driver's process sends the inputs of every step."""

BEFORE_V1_ANSWER = 0.3e-3
"""Seconds of a step for each request that a server before v1 answers: the whole answer so far, with its prompt, is
pickled and sent to the front end after each token (vllm/entrypoints/openai/rpc of 0.6.0). Offline batches have none of
it. From the runs with 8 GPUs in ../shared/truth/apex-llama-3.1-70b, mean tpot at 4 and at 10 requests in flight."""

BEFORE_V1_AMD = HostCost(0.0, 0.0, 0.5e-3, 45e-6)
"""What is added beside AMD's GPUs: static batches of Llama-3-8B on one to eight MI300X (../shared/truth)."""

CACHED_BLOCK = 0.24e-6
"""Seconds for each cached block of a decode before v1: tables of blocks are lists of Python, padded and copied in every
step."""

NATIVE = HostCost(0.0, 0.0, 0.3e-3, 8e-6)
"""TensorRT-LLM before 1.0: a session in C++, step after step; from its static batches of Llama-3-8B on A100."""

ON_DEVICE = HostCost(1.5e-3, 12e-6, 0.05e-3, 0.0)
"""Scheduling ahead in SGLang and TensorRT-LLM, whose next step takes the sampled tokens on the device: its graph is
launched before this step has ended (SGLang's overlap schedule, TensorRT-LLM's overlap scheduler), and only their
hand-over is left."""

NO_HOST = HostCost(0.0, 0.0, 0.0, 0.0)
"""What the theoretical bound has."""

DISPATCH_KERNEL = 6e-6
"""Seconds of host time to launch one kernel of a compiled graph piece that is not captured: a CUDA launch takes 3-4 µs
of one core, the generated Python around it as much again."""

DISPATCH_ATTENTION = 5e-5
"""Seconds of host time per layer of a piecewise graph: attention is called from Python between two captured pieces."""


def dispatch_floor(layers: int, kernels_per_layer: float, captured: bool) -> float:
    """Least seconds of a compiled step whose attention is launched by the host; the GPU waits where its own work is
    shorter. ``captured``: the pieces between attention calls are CUDA graphs."""
    return layers * (DISPATCH_ATTENTION + (0.0 if captured else kernels_per_layer * DISPATCH_KERNEL))


AGREEMENT = 1e-3
"""Seconds that ranks in lockstep take to agree on a step: an all-reduce of token counts between processes on the host
(gloo), and the wait for the slower one's preparation (vLLM's dp_utils.py, coordinate_batch_across_dp)."""


def host_tables(
    predictor: Predictor, pool: Pool, max_num_seqs: int, corrections: Corrections = ALL
) -> tuple[Floats, Floats]:
    """(host_overlapped, host_serial) by requests: what was measured with the kernels, which it then follows, or else
    what the engine's host is known for; nothing beside perfect kernels."""
    if predictor.perfect:
        return NO_HOST.tables(max_num_seqs)
    serial = predictor.host_seconds(np.arange(1.0, max_num_seqs + 1))
    if serial is None:
        return host_cost(pool, corrections).tables(max_num_seqs)
    return np.zeros(max_num_seqs + 1), np.concatenate(([0.0], np.maximum(serial, 0.0)))


def host_cost(pool: Pool, corrections: Corrections = ALL) -> HostCost:
    """The host work of a step of a pool's engine."""
    if not corrections.host_overhead:
        return NO_HOST
    engine, chosen = pool.engine, preset(pool.engine.preset)
    if engine.async_scheduling:
        cost = ASYNCHRONOUS if chosen.backend == "vllm" else ON_DEVICE
    elif chosen.before_v1:
        answers = HostCost(0.0, 0.0, 0.0, BEFORE_V1_ANSWER)
        workers = BEFORE_V1_WORKERS if engine.tensor_parallel_size > 1 else NO_HOST
        cost = added(added(BEFORE_V1, answers), workers)
        cost = added(cost, BEFORE_V1_AMD) if pool.device.vendor == "AMD" else cost
    else:
        cost = NATIVE if chosen.one_block_per_head else SYNCHRONOUS
    agrees = pool.lockstep and corrections.rank_synchronisation
    return replace(cost, serial=cost.serial + AGREEMENT) if agrees else cost


def added(one: HostCost, other: HostCost) -> HostCost:
    """Both."""
    return HostCost(*(getattr(one, each.name) + getattr(other, each.name) for each in fields(HostCost)))


def cached_block(pool: Pool, corrections: Corrections = ALL) -> float:
    """Seconds of the host for each block that a decode has cached."""
    return CACHED_BLOCK if preset(pool.engine.preset).before_v1 and corrections.host_overhead else 0.0


def block_tables(pool: Pool, ax: Axes, corrections: Corrections = ALL) -> Floats:
    """[max_num_seqs + 1, contexts] seconds of the host for the tables of the blocks of decodes."""
    blocks = ax.context_knots / pool.engine.resolved("block_size")
    return cached_block(pool, corrections) * np.arange(ax.max_num_seqs + 1)[:, None] * blocks[None, :]


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
    """Those of latent attention beside an indexer, beyond what the kernel database timed with the module; compressed
    attention too, of which no served point is known."""
    linear: float
    """Convolution, gates, and the recurrence in parts."""
    state_space: float
    """Convolution, and the scan in five (Mamba-1: projections to its steps, three norms, and the scan in one)."""
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
        elif isinstance(layer.attention, StateSpace | SelectiveScan):
            attention = self.state_space
        if layer.mlp is None:
            return attention
        beside = self.dense if layer.beside else 0.0
        return attention + beside + (self.experts if isinstance(layer.mlp, MoE) else self.dense)


EAGER = {
    ("vllm", False): EagerCost(0.25e-3, 0.50e-3, 0.50e-3, 0.80e-3, 0.50e-3, 0.17e-3, 0.35e-3),
    ("vllm", True): EagerCost(0.15e-3, 0.30e-3, 0.30e-3, 0.50e-3, 0.30e-3, 0.10e-3, 0.20e-3),
    ("sglang", False): EagerCost(0.5e-3, 2.5e-3, 1.8e-3, 4.0e-3, 1.5e-3, 0.30e-3, 0.70e-3),
    ("sglang", True): EagerCost(0.3e-3, 1.5e-3, 1.2e-3, 4.0e-3, 0.9e-3, 0.15e-3, 0.45e-3),
    ("trtllm", False): EagerCost(0.4e-3, 2.75e-3, 1.8e-3, 4.0e-3, 1.5e-3, 0.25e-3, 0.80e-3),
    ("trtllm", True): EagerCost(0.2e-3, 1.8e-3, 1.2e-3, 4.0e-3, 0.9e-3, 0.12e-3, 0.50e-3),
}
"""By engine, and whether the device is Blackwell. vLLM's are of prompts before v1 (first tokens of Llama-3.1-70B in the
runs with 8 GPUs of ../shared/truth/apex-llama-3.1-70b) and of steps with ``enforce_eager``; for decodes that no graph
holds they stand for every engine: nothing but the modules themselves is launched then."""

CAPTURED_LATENT = 1.6e-3
"""Seconds of one core for a latent attention of TensorRT-LLM between captured pieces (same source)."""

HOSTS = {"b300_sxm": 0.5}
"""Time of the hosts of a device relative to its generation's: of SGLang 0.5.9 with Qwen3.5, B200 against B300."""


def eager_floor(pool: Pool, backend: str | None = None) -> float:
    """Least seconds of a step without a graph or compiled code, of this engine or as another has it."""
    cost = EAGER[backend or pool.engine.backend, pool.device.sm_version >= BLACKWELL]
    return HOSTS.get(pool.device.name, 1.0) * sum(count * cost.of(layer) for count, layer in pool.model.layers)


def captured_floor(pool: Pool, layers: int) -> float:
    """Least seconds of a step whose pieces between attention calls are captured."""
    latent = sum(count for count, layer in pool.model.layers if isinstance(layer.attention, MLA))
    beyond = latent * (CAPTURED_LATENT - DISPATCH_ATTENTION) if pool.engine.backend == "trtllm" else 0.0
    return dispatch_floor(layers, 0, captured=True) + beyond


def dispatch(
    pool: Pool,
    ax: Axes,
    gpu: Floats,
    prompts: bool,
    corrections: Corrections = ALL,
    twice: NDArray[np.bool_] | None = None,
) -> Floats:
    """Seconds that the GPU waits for the host to launch what no graph holds, by tokens, where its work is shorter than
    that. ``prompts``: of batches that hold some, or of decodes alone; ``twice``: batches of two micro-batches."""
    if not corrections.launch_gaps:
        return np.zeros_like(gpu)
    layers = max(1, sum(count for count, layer in pool.model.layers if layer.attention))
    if not pool.engine.enforce_eager and preset(pool.engine.preset).graphs_prefill:
        launched = sum(op.count for op in operators(pool, corrections) if op.phase in ("tokens", "all_tokens")) / layers
        least = dispatch_floor(layers, launched, captured=False)
    else:
        least = eager_floor(pool, pool.engine.backend if prompts else "vllm")
    tokens, mode = np.arange(len(ax.padded)), pool.engine.cudagraph_mode
    in_pieces = (mode != WHOLE) if prompts else (mode == PIECES)
    captured = captured_floor(pool, layers) if in_pieces else 0.0
    floor = np.where(tokens <= (ax.mixed_graph_tokens if prompts else ax.graph_tokens), captured, least)
    waits = np.maximum((floor if twice is None else floor * (1 + twice)) - gpu, 0.0)
    waits[0] = 0.0
    return waits
