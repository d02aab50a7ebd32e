"""Models that Vidur does not know: experts, latent attention, weights in 8 bits."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from profiling.handmade import EXTENT, LLAMA_8B, seconds
from profiling.test_measure import CONFIG, SMALL
from windtunnel.cli import main
from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.profile.folder import read_profile
from windtunnel.perf.profile.shapes import HEAD, Shape, shape_of
from windtunnel.profiling import engine_kernels
from windtunnel.profiling.clock import reading
from windtunnel.profiling.engine_kernels import vllm_experts
from windtunnel.profiling.journal import Journal
from windtunnel.profiling.operators import Shard, bytes_of_experts, cold_layers
from windtunnel.profiling.sizes import decode_sizes, octaves, prefill_sizes
from windtunnel.profiling.tables import write_tables

MIXTURE = json.loads(CONFIG) | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 16,
}  # fmt: skip
LATENT = json.loads(CONFIG) | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "moe_layer_freq": 1,
}  # fmt: skip
EIGHT_BITS = {
    "int8": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        }},
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "experts": MIXTURE,
    "experts as wide as the model": MIXTURE | {"moe_intermediate_size": 64},
    "latent": LATENT,
    **{name: json.loads(CONFIG) | {"quantization_config": how} for name, how in EIGHT_BITS.items()},
}


def shape(folder: Path, config: dict[str, Any], **engine: Any) -> Shape:
    (folder / "config.json").write_text(json.dumps(config))
    return shape_of(Pool(load_model(str(folder / "config.json")), device("h100"), Engine(**engine)))


def test_what_each_kind_is_made_of(tmp_path: Path) -> None:
    mixture = shape(tmp_path, MIXTURE)
    assert (mixture.num_experts, mixture.top_k, mixture.expert_inter, mixture.n_expanded_embd) == (8, 2, 32, 0)
    assert not {"mlp_up_proj", "mlp_act"} & set(mixture.token_operators)
    assert mixture.needed == ("attn_pre_proj", "attn_post_proj", "experts", "attn_prefill", "attn_decode")
    latent = shape(tmp_path, LATENT)
    assert (latent.kv_lora_rank, latent.shared_inter, latent.n_expanded_embd, latent.head_dim) == (32, 64, 128, 24)
    assert {"latent_down_proj", "shared_up_proj", "mlp_up_proj", "experts"} <= set(latent.needed)
    assert "attn_pre_proj" not in latent.token_operators
    assert latent.kernel("latent_q_proj", 2).describe() == "n=48 k=64 bfloat16"
    assert shape(tmp_path, KINDS["int8"]).kernel("mlp_up_proj", 1).describe() == "n=256 k=64 int8"
    assert shape(tmp_path, json.loads(CONFIG)).spec().keys() == LLAMA_8B.spec().keys()


def test_what_has_no_profile(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a profile has times of equal layers of attention"):
        shape(tmp_path, MIXTURE | {"quantization_config": EIGHT_BITS["fp8"]})
    with pytest.raises(InputError, match="a profile has experts that tensor parallelism divides"):
        shape(tmp_path, MIXTURE, tensor_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_read_as_they_were_written(tmp_path: Path, kind: str) -> None:
    made, wanted = Journal(tmp_path / "measured.jsonl"), shape(tmp_path, KINDS[kind])
    for operator in (*wanted.token_operators, *wanted.cache_operators, *HEAD):
        for a in octaves(512):
            made.readings[operator, 1, a, 0] = reading([seconds(operator, 1, a, 0, wanted)] * 3)
    planes = {"attn_decode": decode_sizes(16, 2048), "attn_prefill": prefill_sizes(512, 2048)}
    for operator, places in planes.items():
        for a, b in places:
            made.readings[operator, 1, a, b] = reading([seconds(operator, 1, a, b, wanted)] * 3)
    write_tables(tmp_path, kind, "h100_sxm", wanted, made, EXTENT, {"step": 1e-3, "request": 1e-5})
    found = read_profile(tmp_path, ("h100_sxm",), wanted)
    assert found.shape == wanted
    assert found.shards == (1,)
    assert {name for name, _ in found.points} == {
        *wanted.token_operators, *wanted.cache_operators, *HEAD, "attn_decode", "attn_prefill"
    }  # fmt: skip
    with pytest.raises(InputError, match="has no model of this shape"):
        read_profile(tmp_path, ("h100_sxm",), replace(wanted, top_k=wanted.top_k + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_measured_on_this_machine_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind]))
    command = ["profile", "config.json", "--output", "mine", "--name", "here", "--threads", "1", *SMALL]
    assert main(command) == 0
    run = ["explain", "--model", "config.json", "--device", "here", "--devices-file", "mine/device.toml"]
    run += ["--perf", "profile:mine", "--batch", "decode=2@32,prefill=1x8@16", "--max-num-batched-tokens", "32"]
    capsys.readouterr()
    assert main([*run, "--max-num-seqs", "4", "--max-model-len", "64"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("profiled as experts" in said) == (kind.startswith("experts") or kind == "latent")
    assert ("latent_attention" in said) == (kind == "latent")
    assert main(["estimate", "mine", "--output", "trained"]) == 0
    load = ["--isl", "16", "--osl", "8", "--num-prompts", "20", "--request-rate", "5", "--json"]
    for folder in ("mine", "trained"):
        words = ["run", "config.json", *run[3:7], "--perf", f"profile:{folder}", *run[-2:], *load]
        capsys.readouterr()
        assert main([*words, "--max-num-seqs", "4", "--max-model-len", "64"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["requests"]["finished"] == 20
        assert found["time_share"]["interpolated"] > 0.9


@dataclass
class Kernel:
    """Stands in for ``vllm._custom_ops``: packed weights are numbered, and calls written down."""

    calls: list[tuple[int, int, Any, str]] = field(default_factory=list)
    packed: list[str] = field(default_factory=list)

    def cpu_prepack_moe_weight(self, weight: Any, layout: str) -> int:
        assert tuple(weight.shape) in {(8, 64, 64), (8, 64, 32)}
        self.packed.append(layout)
        return len(self.packed)

    def cpu_fused_moe(self, out: Any, x: Any, up: int, down: int, _: None, __: None, *rest: Any) -> None:
        shares, chosen, activation, layout = rest
        assert out.shape == x.shape == (5, 64)
        assert shares.shape == chosen.shape == (5, 2)
        assert activation == "silu"
        self.calls.append((up, down, chosen.tolist(), layout))


def test_vllm_next_to_it_measures_experts_with_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, kernel, wanted = pytest.importorskip("torch"), Kernel(), shape(tmp_path, MIXTURE)
    monkeypatch.setattr(engine_kernels, "vllm_ops", lambda _: kernel)
    shard = Shard(torch, wanted, 1, "cpu", torch.bfloat16)
    call = shard.call("experts", 5, 0)
    for _ in range(2 * 16):
        call()
    layers = [(up, down) for up, down, _, _ in kernel.calls]
    assert layers == [(2 * i + 1, 2 * i + 2) for i in range(16)] * 2, "layers take turns"
    assert len({str(chosen) for _, _, chosen, _ in kernel.calls}) > 8, "and so do choices"
    assert {layout for *_, layout in kernel.calls} == set(kernel.packed) <= {"vec", "amx"}
    assert vllm_experts(torch, "cuda", wanted, 1) is None
    assert vllm_experts(torch, "cpu", replace(wanted, expert_inter=48), 1) is None, "it takes multiples of 32"
    assert vllm_experts(torch, "cpu", wanted, 2) is None


def test_layers_of_experts_take_turns_up_to_what_a_cache_holds(tmp_path: Path) -> None:
    wanted = shape(tmp_path, MIXTURE)
    assert bytes_of_experts(wanted, 1) == 2 * 3 * 8 * 64 * 32
    assert cold_layers(wanted, 1) == 16
    assert cold_layers(replace(wanted, n_embd=4096, expert_inter=160), 1) == 3, "96 MiB over 30"
    assert cold_layers(replace(wanted, n_embd=4096, expert_inter=160), 2) == 6
    assert cold_layers(replace(wanted, num_experts=128, n_embd=2048, expert_inter=768), 1) == 1
