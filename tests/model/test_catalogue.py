import csv
import json
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.model import Model, load_model, model_names
from windtunnel.model.catalogue import OWN

SHARED = Path(__file__).parents[3] / "shared"

# Billions of parameters, all and active, as the models' cards and papers give them.
PUBLISHED = {
    "Llama-2-7b-hf": (6.738, 6.738),
    "Llama-2-70b-hf": (68.98, 68.98),
    "CodeLlama-34b-Instruct-hf": (33.74, 33.74),
    "Meta-Llama-3-8B": (8.030, 8.030),
    "Llama-3.1-70B": (70.55, 70.55),
    "Llama-3.1-405B": (405.9, 405.9),
    "Llama-3.2-1B": (1.236, 1.236),
    "Llama-3.2-3B": (3.213, 3.213),
    "Mistral-7B-v0.1": (7.242, 7.242),
    "Mixtral-8x7B-Instruct-v0.1": (46.70, 12.9),
    "Qwen2.5-0.5B-Instruct": (0.494, 0.494),
    "Qwen2.5-7B-Instruct": (7.616, 7.616),
    "Qwen2.5-72B-Instruct": (72.71, 72.71),
    "Qwen3-4B": (4.022, 4.022),
    "Qwen3-14B": (14.77, 14.77),
    "Qwen3-32B": (32.76, 32.76),
    "Qwen3-30B-A3B-Instruct-2507": (30.53, 3.35),
    "Qwen1.5-MoE-A2.7B": (14.3, 2.7),
    "phi-2": (2.780, 2.780),
    "Phi-3-mini-4k-instruct": (3.821, 3.821),
    "phi-4": (14.66, 14.66),
    "gemma-7b": (8.538, 8.538),
    "gemma-2-2b": (2.614, 2.614),
    "gemma-2-9b": (9.242, 9.242),
    "gemma-2-27b": (27.23, 27.23),
    "gemma-3-27b-it": (27.01, 27.01),  # 27.43 with the vision tower of 0.42
    "opt-125m": (0.1252, 0.1252),
    "opt-13b": (12.85, 12.85),
    "opt-66b": (65.72, 65.72),
    "opt-175b": (174.6, 174.6),
    "DeepSeek-V2": (235.7, 21.4),
    "DeepSeek-V2-Lite": (15.71, 2.66),
    "GLM-4.5-Air": (106.85, 13.4),
}
SHIPPED = {
    "Qwen3-8B": (8.191, 8.191),
    "Qwen3-235B-A22B": (235.1, 22.2),
    "Qwen3-Coder-480B-A35B-Instruct": (480.2, 35.5),
    "Mixtral-8x22B-v0.1": (140.6, 39.1),
    "DeepSeek-V3": (671.0, 37.5),
    "Kimi-K2-Instruct": (1026.4, 32.9),
    "gpt-oss-120b": (116.8, 5.7),
    "gpt-oss-20b": (20.9, 4.2),
    "Qwen3.5-27B": (26.9, 26.9),
    "Qwen3.5-397B-A17B": (396.3, 17.35),
    "GLM-5": (743.9, 41.8),
    "DeepSeek-V3.2": (671.9, 38.4),
    "MiniMax-M2.5": (228.7, 11.0),
    "MiMo-7B-Base": (7.62, 7.62),
    "MiMo-V2-Flash": (309.0, 15.4),
    "Llama-4-Scout-17B-16E-Instruct": (107.8, 17.2),
    "Llama-4-Maverick-17B-128E-Instruct": (400.7, 17.2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    model = load_model(name)
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the kernel database is not installed")
def test_parameters_of_the_kernel_databases_models_are_the_published_ones(name: str) -> None:
    total, active = SHIPPED[name]
    model = load_model(name)
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "qwen/qwen3-32b", "Qwen3-32B", "QWEN3-32b"])
def test_names_are_found_without_organisation_and_in_any_case(name: str) -> None:
    assert load_model(name).name == "Qwen/Qwen3-32B"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown model 'Qwen3-33B': did you mean 'Qwen/Qwen3-32B'\?"):
        load_model("Qwen3-33B")


def test_no_name_is_no_model() -> None:
    with pytest.raises(InputError, match=r"model ' ': give a config\.json, its folder, or a model's name"):
        load_model(" ")


def test_every_model_of_our_own_loads_or_is_refused_by_name() -> None:
    models = tomllib.loads(OWN.read_text(encoding="utf-8"))
    refused = []
    for name in (name for of_one_architecture in models.values() for name in of_one_architecture):
        try:
            assert isinstance(load_model(name), Model)
        except InputError as error:
            refused.append((name, str(error)))
    assert refused == []
    assert len(model_names()) > 70
    assert "MiniMaxAI/MiniMax-M3" in model_names()


def used_elsewhere() -> set[str]:
    """Models of the public measurements that this project compares itself with."""
    names = set()
    for run in SHARED.glob("truth/*/run.json"):
        names.add(json.loads(run.read_text())["model"])
    for config in SHARED.glob("vidur/reference/*/config.json"):
        found = json.dumps(json.loads(config.read_text()))
        names |= {part for part in found.split('"') if part.startswith("meta-llama/")}
    package = find_spec("aiconfigurator_core")
    for folder in (package.submodule_search_locations or []) if package else []:
        with (Path(folder) / "systems" / "silicon_sample.csv").open(newline="") as file:
            names |= {row["model_path"] for row in csv.DictReader(file)}
    return names


@pytest.mark.skipif(not used_elsewhere(), reason="neither ../shared nor the kernel database is here")
def test_models_of_measured_runs_load_or_are_refused_for_a_layer_that_is_not_simulated() -> None:
    refused = {}
    for name in used_elsewhere():
        try:
            load_model(name)
        except InputError as error:
            refused[name] = str(error)
    assert set(refused) <= {"Qwen/Qwen3.5-397B-A17B", "zhipuai/GLM-5"}
    for text in refused.values():
        assert "not simulated yet" in text
        assert "attention layers" in text


def test_a_config_file_and_its_folder_are_models_too(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(str(folder))
    assert model == load_model(str(folder / "config.json"))
    assert model.name == "tiny"
    (folder / "mixture.json").write_text(json.dumps(config))
    assert load_model(str(folder / "mixture.json")).name == "mixture"
    attention, mlp = 4 * 64 * 64, 3 * 64 * 128
    assert model.num_parameters == 2 * 100 * 64 + 2 * (attention + mlp + 2 * 64) + 64
    (folder / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}'
    )
    quantized = load_model(str(folder))
    assert quantized.weight_dtype("qkv") == "fp8"
    assert quantized.weight_dtype("lm_head") == "bfloat16"


@pytest.mark.parametrize(("text", "rule"), [("{", "not JSON"), ("[1]", "must hold a JSON object")])
def test_files_that_are_no_config_are_refused(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rule):
        load_model(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_model(str(tmp_path / "nowhere.json"))
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model(str(tmp_path))


def test_a_folder_that_only_has_a_models_name_hides_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen3-32B").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_model("Qwen3-32B").name == "Qwen/Qwen3-32B"
