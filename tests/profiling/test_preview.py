"""What a profile will measure, before it does."""

import json
import sys
from pathlib import Path

import pytest

from profiling.handmade import LLAMA_8B
from profiling.test_measure import CONFIG, SMALL
from windtunnel.cli import main
from windtunnel.hardware import device
from windtunnel.perf.profile.shapes import HEAD, SKEWED, TOKEN_OPERATORS
from windtunnel.profiling.preview import preview
from windtunnel.profiling.sizes import Extent


def test_every_operator_of_every_degree_with_its_points() -> None:
    extent = Extent(max_num_batched_tokens=512, max_num_seqs=16, max_model_len=2048, sizes=8)
    asked = {(one.operator, one.shards): one for one in preview(LLAMA_8B, (1, 2), extent, device("h100"))}
    assert set(asked) == {
        *((name, tp) for name in (*TOKEN_OPERATORS, "attn_kv_cache_save", *HEAD) for tp in (1, 2)),
        *((name, tp) for name in ("attn_decode", SKEWED, "attn_prefill") for tp in (1, 2)),
        ("all_reduce", 2),
        ("send_recv", 2),
    }
    assert asked["mlp_up_proj", 2].describe.startswith("n=14336 k=4096")
    assert (asked["attn_decode", 1].points, asked["attn_decode", 1].largest) == (5 * 8, (16, 2048))
    assert asked[SKEWED, 1].points == 4 * 8
    assert asked["lm_head", 1].points == 8
    up = [asked["mlp_up_proj", tp].seconds or 0.0 for tp in (1, 2)]
    assert up[0] > up[1] > 0
    slower = preview(LLAMA_8B, (1, 2), extent, device("l4"))
    assert sum(one.seconds or 0.0 for one in slower) > sum(one.seconds or 0.0 for one in asked.values())
    assert {one.seconds for one in preview(LLAMA_8B, (1,), extent, None)} == {None}


def test_a_dry_run_needs_no_torch_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(CONFIG)
    assert main(["profile", "config.json", "--dry-run", "--name", "H100", "-tp", "1", "2", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "attn_decode TP 2" in said
    assert "minutes on h100_sxm" in " ".join(said.split())
    assert json.loads(CONFIG)["vocab_size"] == 256
    assert not (tmp_path / "profile").exists()
    assert main(["profile", "config.json", "--dry-run", "-tp", "3", *SMALL]) == 2
    assert "tensor_parallel_size=3: must divide 4 heads" in capsys.readouterr().err
