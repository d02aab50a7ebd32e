"""Which batch sizes an engine captures as CUDA graphs; a batch is padded to the next captured size."""

from windtunnel.deployment.engine import Engine
from windtunnel.deployment.exchange import HIGH_THROUGHPUT
from windtunnel.deployment.presets import preset
from windtunnel.hardware import Device

SGLANG_LARGEST = 512
TRTLLM_LARGEST = 2048


def capture_sizes(engine: Engine, device: Device) -> tuple[int, ...]:
    """Captured token counts of a resolved engine, ascending; empty without CUDA graphs.

    vLLM 0.32: up to min(2·max_num_seqs, 512 or 1024 on data-centre Blackwell, max_num_batched_tokens): 1, 2, 4, then by
    8 below 256 and by 16 from there, and max_num_seqs itself.
    """
    if engine.enforce_eager or engine.all2all_backend == HIGH_THROUGHPUT:
        return ()
    chosen = preset(engine.preset)
    if engine.cudagraph_capture_sizes is not None:
        return tuple(size for size in engine.cudagraph_capture_sizes if size <= engine.batched_tokens)
    if chosen.backend != "vllm":
        return _decode_sizes(chosen.backend, min(engine.seqs, engine.batched_tokens))
    limit = chosen.max_capture_size_blackwell if device.is_blackwell_datacentre else chosen.max_capture_size
    largest = min(2 * engine.seqs, limit, engine.batched_tokens)
    sizes = {size for size in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if size <= largest}
    if chosen.captures_max_num_seqs and engine.seqs <= largest:
        sizes.add(engine.seqs)
    return tuple(sorted(sizes))


def _decode_sizes(backend: str, seqs: int) -> tuple[int, ...]:
    """Batches of decodes that engines capture which graph nothing else.

    SGLang 0.5 (server_args.py): 1, 2, 4, 8, 12, 16, by 8 to 256, by 16 to 512, ``cuda_graph_max_bs``. TensorRT-LLM 1.0
    (llm_args.py): 1, 2, 4, by 8 to 128, then doubling.
    """
    if backend == "sglang":
        sizes = {1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, SGLANG_LARGEST + 1, 16), min(seqs, SGLANG_LARGEST)}
    else:
        sizes = {1, 2, 4, *range(8, 129, 8), 256, 512, 1024, 2048, min(seqs, TRTLLM_LARGEST)}
    return tuple(sorted(size for size in sizes if size <= seqs))
