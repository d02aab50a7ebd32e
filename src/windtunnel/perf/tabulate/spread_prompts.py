"""What prefill context parallelism makes of a step: each copy of the layers runs a part of the tokens, and gathers the
keys of all (vllm/v1/attention/ops/pcp.py; sglang/srt/layers/cp and layer_boundary)."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from windtunnel.deployment import Pool
from windtunnel.deployment.engine import GATHERED
from windtunnel.deployment.spread_prompts import spreads_decodes
from windtunnel.model import MLA, Attention, CompressedAttention
from windtunnel.model.mixer import Mixer
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.part_of_context import PartOfPrompt, PartOfRows
from windtunnel.perf.tabulate.operator import Operator

EXPERTS = "experts"
AROUND = ("expert_all_gather", "choice_all_gather", "expert_reduce_scatter")
"""What brings the tokens of all copies to experts, and takes their sums back."""
SUM, SUM_OF_DECODES = "expert_all_reduce", "expert_sum_of_decodes"


def sums_decodes(pool: Pool) -> bool:
    """Whether all copies have all decodes, whose experts are then one sum over them."""
    spread = pool.engine.prefill_context_parallel_size > 1 and not spreads_decodes(pool.engine)
    return spread and pool.engine.all2all_backend == GATHERED


def in_parts_of_prompts(pool: Pool, operators: Iterable[Operator]) -> Iterator[Operator]:
    """The operators of one copy, and what copies gather."""
    parts = pool.engine.prefill_context_parallel_size
    if parts == 1:
        yield from operators
        return
    for operator in operators:
        yield replace(operator, kernel=_of_one(pool, operator))
    everywhere = float(spreads_decodes(pool.engine))
    widths = [
        (f"{what}_gather_of_copies", count, width)
        for count, layer in pool.model.layers
        for what, width in (_gathered(layer.attention, pool.engine.tensor_parallel_size) if layer.attention else ())
    ]
    if pool.model.samples:
        widths.append(("state_gather_of_copies", 1, pool.model.hidden_size))
    for name, count, width in widths:
        kernel = PartOfRows(Collective("all_gather", parts, width), 1.0, everywhere)
        yield Operator(name, "communication", "tokens", count, kernel)


def _of_one(pool: Pool, operator: Operator) -> Kernel:
    """The kernel of one copy."""
    kernel, parts = operator.kernel, pool.engine.prefill_context_parallel_size
    if operator.phase == "prefill":
        return PartOfPrompt(kernel, parts)
    if operator.phase == "sequences":
        return kernel
    with_prompts, of_decodes = _shares(pool, operator)
    if operator.phase == "decode":
        with_prompts = of_decodes
    return kernel if with_prompts == of_decodes == 1.0 else PartOfRows(kernel, with_prompts, of_decodes)


def _shares(pool: Pool, operator: Operator) -> tuple[float, float]:
    """The share of a batch's tokens that the operator sees on one copy, with prompts and of decodes. SGLang's decodes
    are whole on each: nothing is gathered for their experts, and what DeepEP's kernels send from every copy is computed
    as often."""
    parts, decodes_too = pool.engine.prefill_context_parallel_size, spreads_decodes(pool.engine)
    if operator.name in AROUND:
        return 1.0, float(decodes_too)
    if operator.name == EXPERTS:
        return 1.0, 1.0 if decodes_too or sums_decodes(pool) else float(parts)
    if operator.name == SUM_OF_DECODES:
        return 0.0, 1.0
    if operator.name == SUM and sums_decodes(pool):
        return 1.0 / parts, 0.0
    return 1.0 / parts, 1.0 / parts if decodes_too else 1.0


def _gathered(mixer: Mixer, tp: int) -> Iterator[tuple[str, int]]:
    """16-bit numbers of a token that all copies gather: keys and values, or what stands for them, and keys of an
    index."""
    if isinstance(mixer, MLA):
        yield "latent", mixer.kv_lora_rank + mixer.qk_rope_head_dim
    elif isinstance(mixer, CompressedAttention):
        yield "latent", mixer.head_dim
    elif isinstance(mixer, Attention) and not mixer.shares_cache:
        heads = mixer.kv_heads_per_gpu(tp)
        yield "key", heads * mixer.head_dim
        yield "value", heads * mixer.v_head_dim
    if width := getattr(mixer, "index_head_dim", 0) * bool(getattr(mixer, "index_heads", 0)):
        yield "index", width
