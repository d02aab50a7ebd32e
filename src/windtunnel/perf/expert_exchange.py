"""Expert exchange: what takes tokens to the experts of other ranks, and what brings them back."""

from windtunnel.deployment import Pool
from windtunnel.deployment.engine import AUTO, GATHERED, HIGH_THROUGHPUT, LOW_LATENCY
from windtunnel.model import MoE
from windtunnel.perf.fusion import Operator
from windtunnel.perf.kernels import Collective, Exchange, Experts

LAYOUTS = {GATHERED: "", LOW_LATENCY: "masked", HIGH_THROUGHPUT: "contiguous", AUTO: "auto"}
"""How the tokens of experts lie in memory, by what brought them."""

IN_8_BITS = ("fp8", "fp8_block")
"""Formats of experts whose tokens are cast before they are sent."""


def there_and_back(pool: Pool, moe: MoE, experts: Experts) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """The operators before and after the experts of ranks in lockstep.

    With DeepEP a rank sends its own tokens, and their choices with them; with vLLM's default every rank sees the tokens
    of all.
    """
    engine, width = pool.engine, experts.hidden
    if engine.all2all_backend != GATHERED:
        tp, ranks = engine.tensor_parallel_size, engine.tensor_parallel_size * engine.data_parallel_size
        sizes = (width, moe.top_k, moe.num_experts, ranks, pool.device.gpus_per_domain, tp)
        mode = engine.all2all_backend.removeprefix("deepep_")
        sent = "fp8" if experts.dtype in IN_8_BITS and not experts.weight_only else "bfloat16"
        dispatch, combine = Exchange("dispatch", mode, *sizes, dtype=sent), Exchange("combine", mode, *sizes)
        return (_each("expert_dispatch", "tokens", dispatch),), (_each("expert_combine", "tokens", combine),)
    gather, scatter = (Collective(op, engine.data_parallel_size, width) for op in ("all_gather", "reduce_scatter"))
    choices = Collective("all_gather", engine.data_parallel_size, 4 * moe.top_k)  # 32-bit weights and indices
    there = (_each("expert_all_gather", "all_tokens", gather), _each("choice_all_gather", "all_tokens", choices))
    return there, (_each("expert_reduce_scatter", "all_tokens", scatter),)


def _each(name: str, phase: str, kernel: Collective | Exchange) -> Operator:
    return Operator(name, "communication", phase, 1, kernel)
