"""Scripts: what bash would start, without running it."""

from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.launch.shell import Shell, read_script, split_words, statements

CONTINUED = """#!/bin/bash
# a comment with vllm serve in it
set -euo pipefail
MODEL="Qwen/Qwen3-8B"   # inline
export TP=${TP:-4}
EXTRA=(--max-num-seqs 64)
EXTRA+=(--kv-cache-dtype fp8)
if [ "$X" = 1 ]; then
  TP=1
fi
VLLM_USE_V1=1 exec vllm serve "$MODEL" \\
  --tensor-parallel-size $TP \\
  --speculative-config '{"method": "mtp", "num_speculative_tokens": 2}' \\
  "${EXTRA[@]}" > server.log 2>&1 &
"""


def test_variables_arrays_and_continued_lines() -> None:
    (line,) = read_script(CONTINUED)
    assert (line.engine, line.model) == ("vllm", "Qwen/Qwen3-8B")
    assert line.flags == {
        "tensor-parallel-size": 4,
        "speculative-config.method": "mtp",
        "speculative-config.num-speculative-tokens": 2,
        "max-num-seqs": 64,
        "kv-cache-dtype": "fp8",
    }
    assert line.env["VLLM_USE_V1"] == "1"


@pytest.mark.parametrize(
    ("text", "engine", "model"),
    [
        ("python3 -m vllm.entrypoints.openai.api_server --model M --port 1", "vllm", "M"),
        ("docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.10.0 --model M", "vllm", "M"),
        ("docker run lmsysorg/sglang:latest python3 -m sglang.launch_server --model-path M", "sglang", "M"),
        ("sglang serve --model M", "sglang", "M"),
        ("mpirun -n 8 trtllm-llmapi-launch trtllm-serve M --tp_size 8", "trtllm", "M"),
        ("bash -c 'vllm serve M --port 1'", "vllm", "M"),
        ("python3 -m dynamo.vllm --model M", "vllm", "M"),
        ("nohup numactl -N 0 vllm serve M | tee log", "vllm", "M"),
    ],
)
def test_what_starts_a_server(text: str, engine: str, model: str) -> None:
    (line,) = read_script(text)
    assert (line.engine, line.model) == (engine, model)


def test_a_file_that_the_script_writes_holds_settings() -> None:
    text = """
cat > options.yaml <<EOF
enable_attention_dp: true
kv_cache_config:
  dtype: fp8
EOF
trtllm-serve M --tp_size 4 --extra_llm_api_options options.yaml
"""
    (line,) = read_script(text)
    assert line.flags["enable-attention-dp"] is True
    assert line.flags["kv-cache-config.dtype"] == "fp8"


def test_a_file_of_settings_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match=r"gone\.yaml: the line's file of settings is not here"):
        read_script("trtllm-serve M --extra_llm_api_options gone.yaml")


def test_a_file_of_settings_next_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text("max_batch_size: 7\n")
    (line,) = read_script("trtllm-serve M --config o.yaml", tmp_path)
    assert line.flags["max-batch-size"] == 7


def test_the_front_is_no_server() -> None:
    assert read_script("trtllm-serve disaggregated -c front.yaml\necho vllm\npip install vllm") == []


def test_words_are_those_of_bash() -> None:
    shell = Shell({"A": ["one two"], "L": ["x y", "z"]})
    assert split_words("""a'b c'"d $A"\\ e $A "${L[@]}" $(seq 1 2) $B >f 2>&1""", shell) == [
        "ab cd one two e",
        *("one", "two", "x y", "z", "$(seq 1 2)", "$B"),
    ]
    assert [part for part in statements("a; b && c 'd;e' $(f; g) | h # i\nj") if part] == [
        *("a", "b", "c 'd;e' $(f; g)", "h", "j"),
    ]


def test_what_the_script_says_beside_its_flags() -> None:
    (line,) = read_script("# windtunnel: device=b200 link='bandwidth=5e10 latency=0'\nvllm serve M\n")
    assert line.facts == {"device": "b200", "link": "bandwidth=5e10 latency=0"}
    with pytest.raises(InputError, match="must be word=value"):
        read_script("# windtunnel: b200\nvllm serve M")


@pytest.mark.parametrize(
    ("image", "preset"),
    [
        ("vllm/vllm-openai:v0.26.1", "vllm-0.25"),
        ("vllm/vllm-openai:latest", None),
        ("lmsysorg/sglang:v0.5.10-cu130", "sglang-0.4.6"),
        ("nvcr.io/nvidia/tensorrt-llm/release:1.1.0", "trtllm-1.1"),
    ],
)
def test_an_image_says_which_release_runs(image: str, preset: str | None) -> None:
    start = {"v": "", "l": "python3 -m sglang.launch_server ", "n": "trtllm-serve "}[image[0]]
    (line,) = read_script(f"docker run --gpus all {image} {start}--model-path M")
    assert line.facts.get("engine") == preset
    (line,) = read_script(f"# windtunnel: engine=vllm-0.32\ndocker run {image} {start}--model-path M")
    assert line.facts["engine"] == "vllm-0.32"


def test_what_is_assigned_is_one_word() -> None:
    """As in bash: ``A=$B command`` gives A all of B."""
    (line,) = read_script("n=$(seq 3)\nDEVICES=$n VLLM_USE_NCCL_SYMM_MEM=1 vllm serve m -tp 2 &\nwait")
    assert (line.env["DEVICES"], line.env["VLLM_USE_NCCL_SYMM_MEM"]) == ("$(seq 3)", "1")
