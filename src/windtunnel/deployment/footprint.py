"""Footprint: what a pool's tokens, steps and hours cost in FLOPs, bytes, watts and dollars."""

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Engine, Pool
from windtunnel.model import Model, MoE
from windtunnel.model.quantization import kv_bytes

NOT_READ = ("embedding", "layer_embeddings", "lm_head", "experts")
"""Parts of the weights of which a step reads some rows only, or that are counted apart."""


@dataclass(frozen=True)
class Footprint:
    """Constants of a pool; plain numbers, so that they can be stored in the manifest of a run.

    FLOPs are those that the model needs, over all GPUs of a data-parallel rank; bytes are per GPU, the fullest one; in
    a pipeline the mean over its stages.
    """

    gpus: int
    """All GPUs of the pool."""
    gpus_per_rank: int
    peak_flops: float
    """Per GPU, dense, in the dtype of the linear layers, FLOP/s."""
    memory_bandwidth: float
    """Per GPU, bytes/s."""
    power_w: float
    idle_power_w: float
    price_per_hour: float
    """Per GPU, USD."""
    linear_flops_per_token: float
    head_flops: float
    """Output head, per request that samples a token."""
    attention: tuple[tuple[int, float, float], ...]
    """For each kind of layer (window, FLOPs per query and context token, cache bytes per token); window 0: none."""
    weight_bytes: float
    """Weights that every step reads, routed experts and input embedding excluded."""
    expert_bytes: float
    """All routed experts on the GPU."""
    expert_share: float
    """top_k / num_experts: the chance that a token visits a given expert; 0 for a dense model."""
    ranks: int
    """Data-parallel ranks whose tokens visit the same experts."""


def footprint(pool: Pool) -> Footprint:
    """The constants of a pool, from its model, device and engine."""
    model, device, engine = pool.model, pool.device, pool.engine
    tp, dp, ep = engine.tensor_parallel_size, engine.expert_ranks, engine.enable_expert_parallel
    stages = engine.pipeline_parallel_size
    parts = model.gpu_parameters(tp, dp, ep)
    sizes = {part: count * model.bytes_per_weight(part) for part, count in parts.items()}
    head = sizes["lm_head"] if parts["lm_head"] else sizes["embedding"]
    chances = [layer.mlp.top_k / layer.mlp.num_experts for _, layer in model.layers if isinstance(layer.mlp, MoE)]
    return Footprint(
        gpus=pool.gpus,
        gpus_per_rank=tp * stages * engine.prefill_context_parallel_size,
        peak_flops=_peak_flops(pool),
        memory_bandwidth=device.memory_bandwidth,
        power_w=device.power_w,
        idle_power_w=device.idle_power_w,
        price_per_hour=device.price_per_hour,
        linear_flops_per_token=model.linear_flops_per_token(lm_head=False),
        head_flops=model.linear_flops_per_token() - model.linear_flops_per_token(lm_head=False),
        attention=_attention(model, engine),
        weight_bytes=(sum(sizes.values()) - sum(sizes[part] for part in NOT_READ) + head) / stages,
        expert_bytes=sizes["experts"] / stages,
        expert_share=max(chances, default=0.0),
        ranks=engine.data_parallel_size,
    )


def _peak_flops(pool: Pool) -> float:
    """Peak of the dtype in which most products are computed: the weights' own, unless only storage is quantised."""
    model = pool.model
    part = "experts" if model.has_moe else "mlp"
    stored = model.quantization.of(part) if model.quantization else None
    if stored is None or stored.weight_only:
        return pool.device.peak_flops(model.dtype)
    dtypes = {"fp8_block": "fp8", "nvfp4": "fp4", "mxfp4": "fp4", "int4": model.dtype}
    method = model.weight_dtype(part)
    return pool.device.peak_flops(dtypes.get(method, method))


def _attention(model: Model, engine: Engine) -> tuple[tuple[int, float, float], ...]:
    """Layers summed by window: (window, FLOPs per query and context token, cache bytes per token on one GPU)."""
    size, tp = kv_bytes(model.resolve_kv_cache_dtype(engine.kv_cache_dtype)), engine.tensor_parallel_size
    by_window: dict[int, tuple[float, float]] = {}
    for count, layer in model.layers:
        for window, flops, stored in layer.attention.reads(size, tp) if layer.attention else ():
            before = by_window.get(window, (0.0, 0.0))
            read = count * stored / engine.pipeline_parallel_size
            by_window[window] = before[0] + count * flops, before[1] + read
    return tuple((window, flops, stored) for window, (flops, stored) in sorted(by_window.items()))
