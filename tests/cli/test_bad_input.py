"""Wrong input: one line that says what to do, exit code 2, and nothing half-written."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli import DONE, WRONG, main

RUN = ("run", "Qwen/Qwen3-8B")
LOAD = ("--isl", "200", "--osl", "20", "--num-prompts", "40", "--request-rate", "10")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}

Capture = pytest.CaptureFixture[str]


def complaint(capsys: Capture, *words: str) -> str:
    """What a command that must fail says, which is one line and nothing on standard output."""
    assert main(list(words)) == WRONG
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("windtunnel: ")
    assert err.count("\n") == 1
    assert len(err) < 400
    return err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("rum",), "Did you mean"),
        (("run", "--devise", "h100"), "--device"),
        (("run", "--max-num-seq", "4"), "--max-num-seqs"),
        (("run", "--max-num-seqs"), "--max-num-seqs"),
        (("run", "--max-num-seqs", "many"), "--max-num-seqs"),
        (("run", "--max-num-seqs", "1.5"), "must be a whole number"),
        (("run", "--cudagraph-capture-sizes", "8", "16.5"), "must be a whole number"),
        (("run", "a", "b"), "b"),
        (("run", "Qwen/Qwen3-23B"), "did you mean 'Qwen/Qwen3-"),
        (("run", "--device", "h1000"), "did you mean 'h100"),
        (("run", "--engine", "vllm-0.34"), "vllm-0.33"),
        (("run", "--router", "round_robbin"), "did you mean 'round_robin'"),
        (("run", "--perf", "mesured"), "measured"),
        (("run", "--dtype", "bf16"), "bfloat16"),
        (("run", "--devices-file", "none.toml"), "no such file"),
        (("run", "--scenario", "none.yaml"), "cannot be read"),
        (("run", "--trace", "azure-cnv"), "did you mean 'azure-conv'"),
        (("run", "--trace", "none.csv"), "no such file"),
        (("run", "--request-rate", "0"), "request_rate=0"),
        (("run", "--request-rate", "nan"), "request_rate=nan"),
        (("run", "--osl", "0"), "random_output_len=0: must be ≥ 1"),
        (("run", "--isl", "0"), "random_input_len=0: must be ≥ 1"),
        (("run", "--seeds", "0"), "seeds=0: must be ≥ 1"),
        (("run", "--replicas", "0"), "replicas=0"),
        (("run", "--goodput", "ttft"), "METRIC:MILLISECONDS"),
        (("run", "--goodput", "tbt:5"), "unknown goodput metric"),
        (("run", "--slo", "ttft=0.3"), "ttft_p99=0.3"),
        (("run", "-tp", "3"), "64 heads"),
        (("run", "-tp", "16"), "tensor_parallel_size=16"),
        (("run", "--scheduling-policy", "lifo"), "unknown scheduling_policy"),
        (("run", "--gpu-memory-utilization", "1.5"), "gpu_memory_utilization=1.5"),
        (("run", "meta-llama/Llama-3.1-70B"), "tensor_parallel_size"),
        (("run", "--max-model-len", "10000000"), "max_model_len"),
        (("report", "none"), "not a run"),
        (("explain", "--batch", "decode"), "decode=32@4096"),
        (("explain", "--batch", "decode=100000@1"), "max_num"),
        (("explain", "--batch", ""), "empty"),
        (("list", "gpus"), "devices"),
        (("trace", "describe", "none.csv"), "no such file"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_mistakes_are_answered_in_one_line(capsys: Capture, words: tuple[str, ...], says: str) -> None:
    assert says in complaint(capsys, *words)


def test_a_model_that_does_not_fit_says_what_would(capsys: Capture) -> None:
    err = complaint(capsys, "run", "meta-llama/Llama-3.1-70B")
    assert "GB" in err or "GiB" in err


def test_a_model_without_a_key(capsys: Capture, tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_attention_heads"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "num_attention_heads" in complaint(capsys, "run", str(tmp_path / "config.json"))


def test_an_unknown_architecture(capsys: Capture, tmp_path: Path) -> None:
    config = {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "config.json has no key" in complaint(capsys, "run", str(tmp_path))


def test_a_config_that_is_no_json(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in complaint(capsys, "run", str(tmp_path / "config.json"))


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TRACES = {
    "empty": ("", "is empty"),
    "only a header": (HEADER, "no rows"),
    "a column is missing": ("TIMESTAMP,ContextTokens\n2023-11-16 18:00:00,5\n", "GeneratedTokens"),
    "unsorted": (HEADER + "2023-11-16 18:00:02,5,5\n2023-11-16 18:00:01,5,5\n", "sort"),
    "no output": (HEADER + "2023-11-16 18:00:02,5,0\n", "output_tokens=0"),
    "a word": (HEADER + "2023-11-16 18:00:02,five,5\n", "five"),
    "negative time": ('{"arrival": -1.0, "prompt_tokens": 5, "output_tokens": 5}\n', "arrival=-1"),
    "no time": ('{"arrival": NaN, "prompt_tokens": 5, "output_tokens": 5}\n', "arrival"),
    "negative tokens": ('{"arrival": 0, "prompt_tokens": -5, "output_tokens": 5}\n', "prompt_tokens=-5"),
    "unknown column": ('{"arrival": 0, "prompt_tokens": 5, "output_tokens": 5, "prioritty": 1}\n', "priority"),
    "torn": ('{"arrival": 0, "prompt_tokens": 5, "output', "row 1"),
}


@pytest.mark.parametrize(("text", "says"), TRACES.values(), ids=TRACES.keys())
def test_bad_traces(capsys: Capture, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.data"
    path.write_text(text)
    err = complaint(capsys, *RUN, "--trace", str(path), "--output", str(tmp_path / "run"))
    assert says in err
    assert "trace.data" in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.data"]


@pytest.mark.parametrize(
    "limit", [("--max-model-len", "500"), ("--num-gpu-blocks-override", "40", "--max-model-len", "600")]
)
def test_what_can_never_run_is_rejected_not_waited_for(capsys: Capture, tmp_path: Path, limit: tuple[str, ...]) -> None:
    rows = [{"arrival": i, "prompt_tokens": prompt, "output_tokens": 5} for i, prompt in enumerate((10, 5000, 20))]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*RUN, "--trace", str(path), *limit, "--json"]) == DONE
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["requests"] == {"total": 3, "finished": 2, "rejected": 1, "aborted": 0}
    assert any("rejected" in warning for warning in found["warnings"])


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("simulated although the output cannot be written")


@pytest.mark.parametrize("flag", ["--output", "--report", "--perfetto", "--save-result", "--prometheus"])
def test_a_folder_that_cannot_be_written_is_found_before_the_simulation(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    folder = Path("/proc") if os.access(locked, os.W_OK) else locked  # root may write everywhere but there
    monkeypatch.setattr(sys.modules["windtunnel.simulate.simulate"], "run_core", refuse)
    assert "cannot be written" in complaint(capsys, *RUN, *LOAD, flag, str(folder / "result"))


@pytest.mark.parametrize("flag", ["--output", "--report", "--perfetto", "--save-result", "--prometheus"])
def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, flag: str) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    command = "import sys; from windtunnel.cli import main; sys.exit(main(sys.argv[1:]))"
    words = (*RUN, *LOAD, flag, str(tmp_path / "result"))
    done = subprocess.run(
        (sys.executable, "-c", command, *words), capture_output=True, text=True, preexec_fn=small_files, check=False
    )
    assert done.returncode == WRONG, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "cannot be written" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_older_run_survives_a_full_disk(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    kept = tmp_path / "run"
    assert main([*RUN, *LOAD, "--output", str(kept)]) == DONE
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    capsys.readouterr()

    def full(_: Any, where: Path, **__: Any) -> None:
        Path(where).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq, "write_table", full)
    assert "No space left" in complaint(capsys, *RUN, *LOAD, "--seed", "1", "--output", str(kept))
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damaged_run(capsys: Capture, tmp_path: Path) -> None:
    kept = tmp_path / "run"
    assert main([*RUN, *LOAD, "--output", str(kept)]) == DONE
    capsys.readouterr()
    (kept / "requests.parquet").write_bytes(b"PAR1")
    assert "unreadable run" in complaint(capsys, "report", str(kept))
    (kept / "run.json").write_text("{")
    assert "unreadable run" in complaint(capsys, "report", str(kept))
    (kept / "run.json").write_text('{"schema_version": 99}')
    assert "schema_version 99" in complaint(capsys, "report", str(kept))
