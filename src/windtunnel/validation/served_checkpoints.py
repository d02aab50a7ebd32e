"""Which checkpoint served a row whose path and precision do not name it."""

from windtunnel.model import Model, Quantization, load_model

CHECKPOINTS = {
    ("MiniMaxAI/MiniMax-M2.5", "fp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("meta-llama/Llama-3.1-70B", "fp8"): "nvidia/Llama-3.1-70B-Instruct-FP8",
    ("moonshotai/Kimi-K2.5", "fp4"): "nvidia/Kimi-K2.5-NVFP4",
    ("Qwen/Qwen3-32B", "fp8"): "Qwen/Qwen3-32B-FP8",
    ("Qwen/Qwen3-32B", "fp4"): "nvidia/Qwen3-32B-NVFP4",
    ("deepseek-ai/DeepSeek-R1", "fp4"): "nvidia/DeepSeek-R1-NVFP4",
    ("deepseek-ai/DeepSeek-V3", "fp4"): "nvidia/DeepSeek-R1-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "fp4"): "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ("zhipuai/GLM-5", "fp8"): "zai-org/GLM-5-FP8",
    ("zhipuai/GLM-5", "fp4"): "nvidia/GLM-5-NVFP4",
}
"""(model_path, precision) → the checkpoint that was served, where the path does not name it."""

QUANTIZED = {
    ("meta-llama/Llama-3.1-70B", "fp4"): "nvfp4",
    ("Qwen/Qwen3.5-397B-A17B", "fp8"): "fp8_block",
}
"""Quantised checkpoints that the catalogue lacks: the 16-bit model with its weights in this format."""


def served_model(model_path: str, precision: str) -> Model:
    """The model of a row, as its checkpoint has it. Raises InputError for one that is not known."""
    model = load_model(CHECKPOINTS.get((model_path, precision), model_path))
    method = QUANTIZED.get((model_path, precision))
    return model.with_quantization(Quantization(method)) if method else model


def quantized_on_load(model: Model, precision: str) -> str | None:
    """The ``quantization`` of an engine that serves a 16-bit checkpoint in 8 bits."""
    return "fp8" if precision == "fp8" and model.quantization is None else None
