"""Names of checkpoints that are other versions, or other formats, of known architectures."""

import pytest

from windtunnel.errors import InputError
from windtunnel.model import load_model
from windtunnel.model.relatives import find_relative, where_to_get

KNOWN = ("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-R1", "nvidia/DeepSeek-R1-NVFP4", "nvidia/Big-1-NVFP4", "a/Llama-3.1-8B")


@pytest.mark.parametrize(
    ("name", "found", "method"),
    [
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B", "fp8"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "Qwen/Qwen3-8B", "fp8"),
        ("Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B", "awq"),
        ("x/Qwen3-8B-Instruct-2507-W8A8", "Qwen/Qwen3-8B", "compressed-tensors"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-R1", None),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", "nvidia/DeepSeek-R1-NVFP4", None),
        ("amd/DeepSeek-R1-MXFP4", "deepseek-ai/DeepSeek-R1", "mxfp4"),
        ("nvidia/Big-1", "nvidia/Big-1-NVFP4", ""),
        ("nvidia/Big-1-BF16", "nvidia/Big-1-NVFP4", ""),
    ],
)
def test_a_name_is_taken_apart(name: str, found: str, method: str | None) -> None:
    """None: as the other is stored; empty: in 16 bits."""
    relative = find_relative(name, KNOWN)
    assert relative is not None and relative.name == found
    assert (relative.quantization and relative.quantization["quant_method"]) == (method or relative.quantization)
    assert (relative.quantization is None) == (method is None)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-9B", "a/Llama-3.1", "x", "deepseek-ai/DeepSeek-R1-Distill"])
def test_other_models_are_no_relatives(name: str) -> None:
    assert find_relative(name, KNOWN) is None


def test_what_is_read_says_so_and_takes_the_bytes_of_its_format() -> None:
    whole, half = load_model("Qwen/Qwen3-14B"), load_model("Qwen/Qwen3-14B-FP8")
    assert half.name == "Qwen/Qwen3-14B-FP8"
    assert any("by its name" in note for note in half.notes)
    assert 0.5 < half.weight_bytes(1) / whole.weight_bytes(1) < 0.6
    assert half.num_parameters == whole.num_parameters


def test_local_folders_by_their_last_part() -> None:
    assert load_model("/models/Qwen3-8B/").hidden_size == load_model("Qwen/Qwen3-8B").hidden_size


def test_a_name_of_the_hub_that_is_not_known_says_where_its_config_is() -> None:
    with pytest.raises(InputError, match=r"save https://huggingface.co/nobody/Nothing-1B/resolve/main/config.json as"):
        load_model("nobody/Nothing-1B")
    with pytest.raises(InputError, match=r"^unknown model 'JetBrains/Mellum2-12B-A2.5B-Instruct'; save"):
        load_model("JetBrains/Mellum2-12B-A2.5B-Instruct")  # no Qwen2.5-1.5B-Instruct, however alike they are spelled
    with pytest.raises(InputError, match="did you mean 'google/gemma-4-"):
        load_model("google/gemma-4-12B-it")
    assert where_to_get("nothing") == ""
    with pytest.raises(InputError) as raised:
        load_model("/checkpoints/nothing-of-ours")
    assert str(raised.value) == (
        "unknown model '/checkpoints/nothing-of-ours'; no folder /checkpoints/nothing-of-ours is on this machine: "
        "copy its config.json to a folder here and give --model FOLDER"
    )


def test_a_model_with_an_encoder_says_that_its_text_part_stands_for_it() -> None:
    assert any("only the text part" in note for note in load_model("Qwen/Qwen2.5-VL-7B-Instruct").notes)
    assert load_model("Qwen/Qwen2.5-VL-7B-Instruct").num_parameters == load_model("Qwen/Qwen2.5-7B").num_parameters


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 80, 3.8),
        ("stepfun-ai/Step-3.5-Flash", 196, 12),
        ("moonshotai/Kimi-K2-Thinking", 1026, 33),
        ("poolside/Laguna-XS-2.1", 33, 3),
        ("poolside/Laguna-S-2.1", 118, 8.4),
        ("nvidia/NVIDIA-Nemotron-Nano-12B-v2", 12.3, 12.3),
        ("mistralai/Mistral-Large-3-675B-Instruct-2512", 673, 40),
        ("baidu/ERNIE-4.5-21B-A3B-PT", 21.8, 3.4),
        ("baidu/ERNIE-4.5-300B-A47B-PT", 300, 48),
        ("zai-org/GLM-4.6", 353, 33.6),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", 36, 36),
        ("mistralai/Ministral-3-8B-Instruct-2512", 8.5, 8.5),
        ("mistralai/Mistral-Large-Instruct-2407", 123, 123),
        ("microsoft/Phi-4-mini-instruct", 3.8, 3.8),
        ("google/gemma-2b", 2.5, 2.5),
    ],
)
def test_parameters_are_those_that_are_published(name: str, total: float, active: float) -> None:
    """Billions; without layers of multi-token prediction, and of text alone."""
    model = load_model(name)
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.03)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.05)
