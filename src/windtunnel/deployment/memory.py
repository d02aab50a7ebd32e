"""How many KV cache blocks fit on a GPU, computed as vLLM's worker does after its profile run.

    available = usable memory · gpu_memory_utilization − weights − activation peak − reserve
    num_blocks = ⌊available / bytes of one block over all layers⌋

(``gpu_worker.determine_available_memory`` and ``kv_cache_utils`` of vLLM.) The activation peak belongs to a dry run
with ``max_num_batched_tokens`` tokens and sampling for ``max_num_seqs`` requests; what it takes, and what is reserved,
is the preset's (``MemoryRules``), fitted to server logs by version. CUDA graphs are captured later and take from the
memory beyond the limit, but in vLLM 0.22 to 0.30. Where the engine's own count is known, ``num_gpu_blocks_override``
takes it.
"""

from dataclasses import replace

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Engine, Pool, preset, resolve_engine
from windtunnel.deployment.presets import PRESETS, MemoryRules
from windtunnel.deployment.resolve import possible_tensor_parallel_sizes
from windtunnel.deployment.spread_prompts import divides_head
from windtunnel.errors import InputError
from windtunnel.hardware import GIB, Device
from windtunnel.model import MLA, CompressedAttention, Model, MoE
from windtunnel.model.adapters import adapter_bytes
from windtunnel.model.draft_heads import draft_head
from windtunnel.model.layers import Layer
from windtunnel.model.quantization import DTYPE_BYTES
from windtunnel.model.spec import stages

STREAM_STATES = 2  # states side by side (hyper-connections, alternating updates), before and after a layer
GRAPH_BYTES = GIB // 4096  # per layer and captured size: 0.67 GiB for 32 layers and 67 sizes (H100, 0.10.2)
GB = 1e9
HOPPER = 9  # compute capability
UNBOUNDED = 2**62  # blocks of a stage whose layers cache nothing


@dataclass(frozen=True)
class KVBudget:
    """Memory of one GPU, and the KV cache blocks of one data-parallel rank that fit into it. Bytes."""

    num_blocks: int
    """vLLM's ``num_gpu_blocks``, the null block included."""
    block_size: int
    """Tokens in a block."""
    block_bytes: int
    """One block over all layers (without the windowed ones, where their windows are set aside)."""
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    """CUDA graphs; outside the limit, unless the engine estimates them first (``MemoryRules.graphs_inside``)."""
    reserve_bytes: int
    """CUDA context growth and communication buffers."""
    window_bytes: int
    """Set aside for the windows of ``max_num_seqs`` requests; 0 unless that gives more blocks. Of compressed attention
    in vLLM: for what windows and compressors hold of a step's tokens."""
    state_bytes: int
    """Set aside for the states of ``max_num_seqs`` requests in layers that keep one (linear attention, state space)."""
    max_num_seqs: int
    """Requests that may run at once: the engine's setting, or as many as have room for their states."""
    available_bytes: int
    """For the KV cache; negative when not even the weights fit."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool can hold."""
        return (self.num_blocks - 1) * self.block_size


def kv_blocks(pool: Pool) -> KVBudget:
    """The KV cache of each rank of this pool. In a pipeline all stages have as many blocks as the tightest one can hold
    (get_kv_cache_configs in vllm/v1/core/kv_cache_utils.py), whose memory this is.

    Models that mix sliding windows and full attention get the larger of two lower bounds: all layers as if they were
    full, or the full layers alone after the windows of ``max_num_seqs`` requests were set aside (vLLM's hybrid manager
    shares blocks between layer groups instead).

    Raises InputError when weights, or in vLLM one request of ``max_model_len`` tokens, do not fit: with the bytes
    needed and the tensor parallel size that would do. SGLang and TensorRT-LLM start and take the requests that do fit.
    """
    model, budget = _tightest_stage(pool.model, pool.device, pool.engine)
    shortage = _shortage(model, pool.device, pool.engine, budget)
    if shortage:
        raise InputError(f"{shortage}; {_way_out(pool, budget)}")
    override = pool.engine.num_gpu_blocks_override
    if override is None:
        return budget
    return replace(budget, num_blocks=min(override, budget.num_blocks) if _takes_less(pool.engine) else override)


def _takes_less(engine: Engine) -> bool:
    """Tokens of the cache and of a request are limits, not orders: what does not fit is not taken. SGLang:
    ``max_total_tokens`` in model_runner.py, ``max_req_len`` in managers/scheduler.py; TensorRT-LLM: ``max_tokens`` of
    ``KvCacheConfig``, ``max_seq_len`` in pyexecutor/_util.py."""
    return engine.backend != "vllm"


def room_notes(pool: Pool, budget: KVBudget) -> list[str]:
    """What a reader should know of limits that the KV cache falls short of, where the engine starts all the same."""
    if not _takes_less(pool.engine):
        return []
    tokens, longest = budget.num_tokens, pool.engine.resolved("max_model_len")
    asked, found = pool.engine.num_gpu_blocks_override, []
    if asked is not None and asked > budget.num_blocks:
        found.append(
            f"{budget.num_blocks} KV blocks fit each {pool.device.name}, not num_gpu_blocks_override={asked}, which is "
            f"a limit to {pool.engine.preset}"
        )
    if tokens < longest:
        found.append(
            f"max_model_len={longest} does not fit: the KV cache on each {pool.device.name} holds {tokens} tokens, and "
            f"{pool.engine.preset} refuses requests that need more"
        )
    return found


def state_notes(pool: Pool, budget: KVBudget, alike: bool = False) -> list[str]:
    """What a reader should know about states next to the KV cache; ``alike``: prompts of the workload begin so."""
    found, asked, running = [], pool.engine.resolved("max_num_seqs"), budget.max_num_seqs
    if alike and pool.engine.enable_prefix_caching and pool.model.state_bytes():
        found.append(
            f"{pool.model.name} keeps states: a cached prefix is taken up after any block here, by engines only where "
            "they kept the state"
        )
    if running == asked:
        return found
    return [
        *found,
        f"{running} requests run at once, not max_num_seqs={asked}: their states take {budget.state_bytes / GB:.1f} of "
        f"the {budget.available_bytes / GB:.1f} GB that are left on each {pool.device.name}",
    ]


def _tightest_stage(model: Model, device: Device, engine: Engine) -> tuple[Model, KVBudget]:
    """The stage with the fewest blocks, or the least memory, and its budget."""
    parts = stages(model, engine.pipeline_parallel_size, engine.pipeline_layers)
    found = [(part, _budget(part, device, engine)) for part in parts]
    tightest, budget = min(found, key=lambda each: (each[1].num_blocks, each[1].available_bytes))
    return _drafting(tightest, engine), replace(budget, max_num_seqs=min(each.max_num_seqs for _, each in found))


def _drafting(model: Model, engine: Engine) -> Model:
    """The last stage with the draft layer that multi-token prediction adds (``Model.draft_layers``), which shares
    embedding and head (DeepSeek-V3, arXiv 2412.19437, section 2.2; its projection of two hidden states is left out)."""
    if not (engine.num_speculative_tokens and model.samples):
        return model
    if engine.speculative_model:
        return replace(model, layers=(*model.layers, (1, draft_head(model, engine.speculative_model).layer)))
    return replace(model, layers=(*model.layers, *((1, layer) for layer in model.draft_layers)))


def _budget(model: Model, device: Device, engine: Engine) -> KVBudget:
    tp, dp, expert_parallel = engine.tensor_parallel_size, engine.expert_ranks, engine.enable_expert_parallel
    rules = preset(engine.preset).memory
    whole, model = model, _drafting(model, engine)
    head = draft_head(whole, engine.speculative_model) if engine.speculative_model and whole.samples else None
    weights = (whole if head else model).weight_bytes(tp, dp, expert_parallel) + _absorbed_bytes(model, tp)
    weights += head.weight_bytes(tp) if head else 0
    if engine.max_loras:
        weights += engine.max_loras * adapter_bytes(whole, engine.max_lora_rank, tp, DTYPE_BYTES[model.dtype])
    weights += _padding_bytes(model, device, engine) + _copies(model, engine) - _divided(model, engine)
    weights -= min(weights, int(engine.cpu_offload_gb * GIB))
    sampled = rules.with_flashinfer if engine.flashinfer_sampler else rules
    activations = _activation_bytes(model, engine, sampled if device.sm_version else rules.without_cuda)
    reserve = int(rules.reserve(tp * engine.pipeline_parallel_size * (dp if model.has_moe else 1)) * GIB)
    graphs = len(engine.cudagraph_capture_sizes or ()) * model.num_layers * GRAPH_BYTES
    available = _available(device, engine, weights, activations, reserve + (graphs if rules.graphs_inside else 0))
    size = engine.resolved("block_size")
    state = _state_bytes(model, engine)
    running = _requests_with_state(model, engine, max(available, 0))
    blocks, block_bytes, window_bytes = _pool_of_blocks(model, engine, max(available, 0) - running * state)
    return KVBudget(
        num_blocks=blocks,
        block_size=size,
        block_bytes=block_bytes,
        weight_bytes=weights,
        activation_bytes=activations,
        graph_bytes=graphs,
        reserve_bytes=reserve,
        window_bytes=window_bytes,
        state_bytes=running * state,
        max_num_seqs=running,
        available_bytes=available,
    )


def _requests_with_state(model: Model, engine: Engine, available: int) -> int:
    """Requests whose states are set aside: those of the engine, in half of the memory at most (SGLang's
    mamba_full_memory_ratio of 0.9 is 0.47 of it). Where states and blocks come from one pool (vLLM), as many as leave
    room for their longest contexts, if those are more."""
    state = _state_bytes(model, engine)
    if not state:
        return engine.resolved("max_num_seqs")
    fitting = available // 2 // state
    if engine.backend == "vllm":
        fitting = max(fitting, available // (state + _longest_request_bytes(model, engine)))
    return min(engine.resolved("max_num_seqs"), fitting)


def _state_bytes(model: Model, engine: Engine) -> int:
    """Bytes of the states of one request that decodes; vLLM keeps that of compressed attention in whole blocks. Where
    windows have a separate share, they are no part of it."""
    if engine.swa_full_tokens_ratio is not None:
        whole = model.state_bytes(engine.tensor_parallel_size, engine.kv_cache_dtype)
        return whole - sum(length * each for length, each in _windows(model, engine))
    each = model.state_bytes(engine.tensor_parallel_size, engine.kv_cache_dtype)
    return _held_bytes(model, engine, 1) or each * (engine.states_per_request or 1)


def _held_bytes(model: Model, engine: Engine, tokens: int) -> int:
    """Bytes of the blocks that hold windows and compressors of compressed attention during steps of this many tokens;
    0 in engines that keep no blocks for them."""
    spans = {span for _, layer in model.layers if layer.attention for span in layer.attention.held_spans}
    if not spans or engine.backend != "vllm":
        return 0
    every = model.kv_bytes_per_token(engine.kv_cache_dtype, engine.tensor_parallel_size)
    computed = min(tokens, engine.resolved("max_model_len"))
    blocks = sum(-(-(last - 1 + computed) // page) + 1 for last, page in spans)
    return engine.resolved("block_size") * every * blocks


def _available(device: Device, engine: Engine, weights: int, activations: int, reserve: int) -> int:
    """Bytes for the KV cache: what each engine's share of the memory stands for (``EnginePreset.shares_memory``)."""
    share = engine.gpu_memory_utilization or 0
    if preset(engine.preset).shares_memory:
        return int(device.usable_memory_bytes * share) - weights - activations - reserve
    if engine.backend == "sglang":
        return int(device.usable_memory_bytes * share) - weights - reserve
    return int((device.usable_memory_bytes - weights - activations - reserve) * share)


def _copies(model: Model, engine: Engine) -> int:
    """Bytes of copies of experts (``ep_num_redundant_experts`` of SGLang, ``num_redundant_experts`` of vLLM)."""
    if not (engine.num_redundant_experts and engine.enable_expert_parallel):
        return 0
    each = -(-engine.num_redundant_experts // (engine.tensor_parallel_size * engine.expert_ranks))
    layers = [(count, layer.mlp) for count, layer in model.layers if isinstance(layer.mlp, MoE)]
    numbers = sum(count * mlp.expert_parameters(model.hidden_size) for count, mlp in layers)
    return int(each * numbers * model.bytes_per_weight("experts"))


def _divided(model: Model, engine: Engine) -> int:
    """Bytes that a rank has less of where all divide what each would hold."""
    ranks = engine.prefill_context_parallel_size if divides_head(engine) else engine.data_parallel_size
    parts = model.gpu_parameters(engine.tensor_parallel_size, ranks, engine.enable_expert_parallel)
    head = divides_head(engine) or (engine.shared_head and engine.backend != "trtllm")
    divided = {"lm_head": head, "mlp": engine.shared_dense}
    return int(sum(parts[name] * model.bytes_per_weight(name) * on for name, on in divided.items()) * (1 - 1 / ranks))


def _absorbed_bytes(model: Model, tp: int) -> int:
    """Latent attention decodes with 16-bit copies of kv_b that vLLM makes after loading, next to the original."""
    return DTYPE_BYTES[model.dtype] * sum(
        count * layer.attention.up_parameters(tp) for count, layer in model.layers if isinstance(layer.attention, MLA)
    )


def _padding_bytes(model: Model, device: Device, engine: Engine) -> int:
    """What vLLM adds to experts in MXFP4: their hidden size becomes a multiple of 256, their intermediate size on each
    GPU one of 64 on Hopper (Triton's kernels) and of 128 elsewhere (Marlin, FlashInfer)
    (vllm/model_executor/layers/fused_moe/oracle/mxfp4.py of 0.33)."""
    stored = model.quantization.of("experts") if model.quantization else None
    experts = next((layer.mlp for layer in model.layer_counts if isinstance(layer.mlp, MoE)), None)
    if engine.backend != "vllm" or stored is None or stored.method != "mxfp4" or experts is None:
        return 0
    tp, dp, whole = engine.tensor_parallel_size, engine.expert_ranks, engine.enable_expert_parallel
    width = experts.intermediate_size / (1 if whole else tp * dp)
    hidden = experts.latent_size or model.hidden_size
    step = 64 if device.sm_version // 10 == HOPPER else 128
    ratio = -(-hidden // 256) * 256 / hidden * (-(-width // step) * step / width)
    held = model.gpu_parameters(tp, dp, whole)["experts"] * model.bytes_per_weight("experts")
    return int(held * (ratio - 1.0))


def _activation_bytes(model: Model, engine: Engine, rules: MemoryRules) -> int:
    """Peak of the profile run: the widest layer over all tokens, or sampling, whichever is larger."""
    size, tokens = DTYPE_BYTES[model.dtype], engine.resolved("max_num_batched_tokens")
    kept = tokens * (rules.sampled_states * model.hidden_size + model.layer_inputs) * size
    sampling = int(kept + rules.bytes_per_logit * engine.resolved("max_num_seqs") * model.vocab_size * model.samples)
    if rules.layer_states is None:
        return sampling
    widest = max(_layer_elements(model, engine, layer, rules.layer_states) for layer in model.layer_counts)
    return max(int(tokens * (widest + model.layer_inputs) * size), sampling)


def _layer_elements(model: Model, engine: Engine, layer: Layer, states: int) -> float:
    """Numbers alive per token of this rank in the wider part of a layer; ``states``: hidden states among them."""
    size, tp = DTYPE_BYTES[model.dtype], engine.tensor_parallel_size
    mixed = layer.attention.scratch_elements(size, tp) if layer.attention else 0.0
    streams = STREAM_STATES * max(layer.streams, layer.predictions) * model.hidden_size
    return states * model.hidden_size + streams + max(mixed, _network_elements(model, engine, layer))


def _network_elements(model: Model, engine: Engine, layer: Layer) -> float:
    """The intermediate state of a network; of experts, every token once per chosen one. Of a network before experts its
    sum is kept."""
    tp, dp, mlp = engine.tensor_parallel_size, engine.expert_ranks, layer.mlp
    if layer.beside:
        parts = (replace(layer, mlp=layer.beside, beside=None), replace(layer, beside=None))
        return model.hidden_size + max(_network_elements(model, engine, part) for part in parts)
    if mlp is None:
        return 0.0
    if not isinstance(mlp, MoE):
        return (3 if mlp.gated else 2) * mlp.intermediate_size / tp
    # The fused kernel holds every token once per chosen expert, and sees the tokens of all ranks that share experts.
    width = mlp.intermediate_size / (1 if engine.enable_expert_parallel else tp * dp)
    chosen = mlp.top_k / (tp * dp if engine.enable_expert_parallel else 1)
    hidden, up = mlp.latent_size or model.hidden_size, 2 * width if mlp.gated else width
    return dp * chosen * (max(up, hidden) + width) + 3 * mlp.shared_intermediate_size / tp


def _pool_of_blocks(model: Model, engine: Engine, available: int) -> tuple[int, int, int]:
    """(blocks, bytes of a block, bytes set aside for windows) for this much memory."""
    if engine.swa_full_tokens_ratio is not None:
        return _shared_with_windows(model, engine, available, engine.swa_full_tokens_ratio)
    size, tp = engine.resolved("block_size"), engine.tensor_parallel_size
    every = size * model.kv_bytes_per_token(engine.kv_cache_dtype, tp)
    full = [(count, layer) for count, layer in model.layers if not layer.window]
    step = _held_bytes(model, engine, engine.resolved("max_num_batched_tokens"))
    uniform = (max(available - step, 0) // every if every else UNBOUNDED, every, step)
    if not full or len(full) == len(model.layers):
        return uniform
    full_bytes = size * replace(model, layers=tuple(full)).kv_bytes_per_token(engine.kv_cache_dtype, tp)
    if not full_bytes:
        return uniform
    windows = engine.resolved("max_num_seqs") * _window_bytes(model, engine, with_chunk=False)
    hybrid = (max(available - windows, 0) // full_bytes, full_bytes, windows)
    return hybrid if hybrid[0] > uniform[0] else uniform


def _windows(model: Model, engine: Engine) -> list[tuple[int, int]]:
    """(tokens of the window, bytes of a token in it) of the layers of compressed attention."""
    dtype = model.resolve_kv_cache_dtype(engine.kv_cache_dtype)
    return [
        (layer.attention.local_window, layer.attention.entry_bytes(dtype))
        for count, layer in model.layers
        if isinstance(layer.attention, CompressedAttention)
        for _ in range(count)
    ]


def _shared_with_windows(model: Model, engine: Engine, available: int, ratio: float) -> tuple[int, int, int]:
    """As ``_pool_of_blocks``, where layers with a window have room for a share of the tokens of the others
    (``set_num_tokens_hybrid_swa`` in sglang/srt/model_executor of 0.5)."""
    size, tp = engine.resolved("block_size"), engine.tensor_parallel_size

    def bytes_of(windowed: bool) -> int:
        part = tuple((count, layer) for count, layer in model.layers if bool(layer.window) == windowed)
        return replace(model, layers=part).kv_bytes_per_token(engine.kv_cache_dtype, tp) if part else 0

    windows = bytes_of(True) + sum(each for _, each in _windows(model, engine))
    block = int(size * (bytes_of(False) + ratio * windows))
    return (available // block if block else UNBOUNDED), block, 0


def _window_bytes(model: Model, engine: Engine, with_chunk: bool) -> int:
    """Bytes that the windowed layers keep for one long request, with or without the chunk that is being computed."""
    size, tp = engine.resolved("block_size"), engine.tensor_parallel_size
    chunk = engine.resolved("max_num_batched_tokens") if with_chunk else 1
    total = 0
    for count, layer in model.layers:
        if layer.window:
            tokens = min(layer.window - 1 + chunk, engine.resolved("max_model_len"))
            one = replace(model, layers=((count, layer),)).kv_bytes_per_token(engine.kv_cache_dtype, tp)
            total += (-(-tokens // size) + 1) * size * one
    return total


def _longest_request_bytes(model: Model, engine: Engine) -> int:
    """Bytes of the KV cache for one request of ``max_model_len`` tokens."""
    full = tuple((count, layer) for count, layer in model.layers if not layer.window)
    size = engine.resolved("block_size")
    length = -(-engine.resolved("max_model_len") // size) * size
    tp = engine.tensor_parallel_size
    dense = replace(model, layers=full).kv_bytes_per_token(engine.kv_cache_dtype, tp) if full else 0
    kept = _window_bytes(model, engine, with_chunk=True) + _held_bytes(
        model, engine, engine.resolved("max_num_batched_tokens")
    )
    return length * dense + kept


def _shortage(model: Model, device: Device, engine: Engine, budget: KVBudget) -> str:
    """What does not fit, or nothing."""
    used = budget.weight_bytes + budget.activation_bytes + budget.reserve_bytes
    limit = device.usable_memory_bytes * (engine.gpu_memory_utilization or 0)
    room = f"{limit / GB:.1f} GB ({engine.gpu_memory_utilization:g} of {device.usable_memory_bytes / GB:.1f} GB)"
    if budget.available_bytes <= 0:
        return (
            f"{model.name} needs {used / GB:.1f} GB on each {device.name} (weights {budget.weight_bytes / GB:.1f} GB, "
            f"activations {budget.activation_bytes / GB:.1f} GB), but may use {room}"
        )
    if budget.max_num_seqs < 1:
        state = _state_bytes(model, engine)
        return (
            f"{model.name} keeps a state of {state / GB:.2f} GB for each request on a {device.name}, which the "
            f"{budget.available_bytes / GB:.2f} GB left of {room} do not fit next to the KV cache"
        )
    if _takes_less(engine) and budget.num_blocks > 1:
        return ""
    return _shortage_of_blocks(model, device, engine, budget, room)


def _shortage_of_blocks(model: Model, device: Device, engine: Engine, budget: KVBudget, room: str) -> str:
    """What of the KV cache that is ordered does not fit, or nothing."""
    if engine.num_gpu_blocks_override is not None:
        asked = engine.num_gpu_blocks_override * budget.block_bytes
        left = device.usable_memory_bytes - budget.weight_bytes
        if asked <= left:
            return ""
        return (
            f"num_gpu_blocks_override={engine.num_gpu_blocks_override} needs {asked / GB:.1f} GB on each "
            f"{device.name}, but {left / GB:.1f} GB are left after the weights"
        )
    longest = _longest_request_bytes(model, engine)
    if longest > budget.available_bytes:
        return (
            f"max_model_len={engine.resolved('max_model_len')} of {model.name} needs {longest / GB:.1f} GB of KV cache "
            f"on each {device.name}, but {budget.available_bytes / GB:.1f} GB are left of {room}"
        )
    return ""


def _way_out(pool: Pool, budget: KVBudget) -> str:
    """Settings that would fit."""
    ways = []
    if budget.available_bytes > 0:
        tokens = (budget.num_blocks - 1) * budget.block_size
        if pool.engine.num_gpu_blocks_override is None and tokens > 0:
            ways.append(f"max_model_len={tokens}")
    for size in possible_tensor_parallel_sizes(pool.engine, pool.model, pool.device):
        if size > pool.engine.tensor_parallel_size and _fits(pool, size):
            ways.append(f"tensor_parallel_size={size}")
            break
    if other := _other_memory(pool):
        ways.append(f"preset={other!r}")
    if ways:
        return f"it would fit with {' or '.join(ways)}"
    return f"no tensor parallel size fits on {pool.device.name}: use a larger device or a quantised model"


def _other_memory(pool: Pool) -> str:
    """The newest release of the engine with other rules of memory, if it fits by those; else empty."""
    engine, ours = pool.engine, preset(pool.engine.preset)
    others = (each for each in PRESETS.values() if each.backend == ours.backend and each.memory != ours.memory)
    for other in others:
        budget = _tightest_stage(pool.model, pool.device, replace(engine, preset=other.name))
        return "" if _shortage(budget[0], pool.device, engine, budget[1]) else other.name
    return ""


def _fits(pool: Pool, tensor_parallel_size: int) -> bool:
    engine = resolve_engine(replace(pool.engine, tensor_parallel_size=tensor_parallel_size), pool.model, pool.device)
    model, budget = _tightest_stage(pool.model, pool.device, engine)
    return not _shortage(model, pool.device, engine, budget)
