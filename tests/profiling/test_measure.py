"""The whole measurement on this machine's CPU, and what a machine lacks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from profiling import handmade
from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.perf.profile.folder import read_profile, unsteady
from windtunnel.perf.profile.shapes import SKEWED
from windtunnel.profiling.clock import Clock, reading, waited
from windtunnel.profiling.journal import Journal
from windtunnel.profiling.machine import find_machine
from windtunnel.profiling.measure import AGAIN, Session, is_about_memory, spread_out
from windtunnel.profiling.profile import differences
from windtunnel.profiling.sizes import Extent
from windtunnel.profiling.tables import repeatability, skew, write_tables

CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
"torch_dtype": "bfloat16", "max_position_embeddings": 512, "hidden_act": "silu"}"""
SMALL = [
    "--max-num-batched-tokens",
    "32",
    "--max-num-seqs",
    "4",
    "--max-model-len",
    "64",
    "--repeats",
    "2",
    "--sizes",
    "4",
]


def test_without_torch_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(CONFIG)
    assert main(["profile", "config.json"]) == 2
    assert capsys.readouterr().err == "windtunnel: profile needs torch: pip install 'windtunnel[profile]'\n"


def test_measured_stopped_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(CONFIG)
    command = ["profile", "config.json", "--output", "mine", "--name", "here", "--threads", "1", *SMALL]
    assert main(command) == 0
    whole = (tmp_path / "mine" / "measured.jsonl").read_text().splitlines()
    (tmp_path / "mine" / "measured.jsonl").write_text("\n".join(whole[:20]) + "\n")
    assert main(command) == 0
    assert "19 points are there from before" in capsys.readouterr().err
    found = read_profile(tmp_path / "mine")
    assert found.device == "here"
    assert found.points["attn_decode", 1].b.tolist() == [16.0, 32.0, 64.0] * 3
    assert [row.median for row in differences(found, found)] == [0.0] * len(found.points)
    run = ["explain", "--model", "config.json", "--device", "here", "--devices-file", "mine/device.toml"]
    run += ["--perf", "profile:mine", "--batch", "decode=2@32", "--max-num-batched-tokens", "32", "--max-num-seqs", "4"]
    assert main([*run, "--max-model-len", "64"]) == 0


class Fake:
    """A torch of which only a name is asked."""

    bfloat16 = None

    class inference_mode:  # noqa: N801 - torch's name
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...


class Tiny:
    """A machine with memory for little."""

    torch, kind, gpus = Fake(), "cpu", 0

    def free_bytes(self) -> int:
        return 0


def test_a_point_without_memory_is_skipped_and_said(tmp_path: Path) -> None:
    from windtunnel.perf.profile.shapes import Shape

    journal = Journal(tmp_path / "journal")
    extent = Extent(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64, sizes=4, repeats=2)
    machine: Any = Tiny()
    shape, clock = Shape(64, 4, 2, 128, True, 256, 16), Clock(None, "cpu", 2)
    Session(machine, shape, (1,), extent, journal, clock, lambda _: None).all()
    assert not journal.readings
    assert journal.skipped["mlp_up_proj", 1, 8, 0] == "needs 0.0 GiB of memory, 0.0 are free"
    assert is_about_memory(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert not is_about_memory(RuntimeError("shape mismatch"))


def test_sums_of_more_gpus_than_there_are_are_left_out_and_said(tmp_path: Path) -> None:
    from windtunnel.perf.profile.shapes import Shape

    class OneGpu(Tiny):
        gpus = 1

    journal, told = Journal(tmp_path / "journal"), list[str]()
    extent = Extent(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64, sizes=4, repeats=2)
    machine: Any = OneGpu()
    shape, clock = Shape(64, 4, 2, 128, True, 256, 16), Clock(None, "cpu", 2)
    Session(machine, shape, (1, 4), extent, journal, clock, told.append).all()
    assert "TP 4  all_reduce  not measured: 4 GPUs must take part on this host, it has 1" in told
    assert "TP 2  send_recv  not measured: 2 GPUs must take part on this host, it has 1" in told


def test_points_measured_again_say_how_far_a_second_run_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for a, (first, second) in {1: (1.0, 1.1), 2: (2.0, 2.0), 4: (4.0, 3.0)}.items():
        journal.readings["add", 1, a, 0] = reading([first])
        journal.readings[AGAIN + "add", 1, a, 0] = reading([second])
    assert repeatability(journal) == {"add": pytest.approx(0.1)}
    assert spread_out([*range(9)], 3) == [0, 4, 8]


def test_skewed_batches_are_compared_with_even_ones(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for operator, seconds in (("attn_decode", 2.0), (SKEWED, 3.0)):
        journal.readings[operator, 1, 4, 64] = reading([seconds])
    journal.readings[SKEWED, 1, 8, 64] = reading([1.0])  # its even one was skipped
    assert skew(journal) == [{"tp": 1, "requests": 4, "keys": 64, "times": 1.5}]


def test_threads_that_wait_for_a_cpu_are_counted(tmp_path: Path) -> None:
    for thread, line in (("1", "5 1500000000 7"), ("2", "9 250000000 1")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"{line}\n")
    assert waited(tmp_path) == 1.75
    assert waited(tmp_path / "of another system") == 0.0


def test_short_points_do_not_hide_a_busy_machine(tmp_path: Path) -> None:
    made = handmade.journal(tmp_path)  # no point waited
    write_tables(
        tmp_path, "llama", "here", handmade.LLAMA_8B, made, handmade.EXTENT, {"step": 1e-3, "request": 1e-5}, waited=0.7
    )
    assert unsteady(json.loads((tmp_path / "profile.json").read_text())).startswith("threads waited 0.7 s for a CPU")


def test_no_gpu_is_said() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match="torch sees no GPU here"):
        find_machine("cuda", "", 0)
