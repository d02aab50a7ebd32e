"""Prefill and decode apart on the command line: run, explain, compare and plan, and how wrong words end."""

import json
from pathlib import Path

import pytest
from plan.answer.checker import wrong

from windtunnel.cli import DONE, WRONG, main
from windtunnel.cli.plan.disaggregation import Disaggregation
from windtunnel.errors import InputError
from windtunnel.plan.space import load_space

LOAD = ("--isl", "200", "--osl", "20", "--num-prompts", "40", "--request-rate", "10")
APART = ("--prefill", "replicas=2", "--decode", "device=a100")

Capture = pytest.CaptureFixture[str]


def test_a_run_says_what_each_pool_did(capsys: Capture, tmp_path: Path) -> None:
    words = ("run", "Qwen/Qwen3-8B", *LOAD, *APART, "--no-bands", "--output", str(tmp_path / "run"))
    assert main(words) == DONE
    out = capsys.readouterr().out
    title = "Qwen/Qwen3-8B: prefill on 2 replicas of 1 × H100 SXM; decode on 1 × A100 SXM; vllm-0.32"
    for text in (title, "2 × 1 × H100 SXM", "1 × 1 × A100 SXM", "KV peak", "KV transfer"):
        assert text in out
    assert main(["report", str(tmp_path / "run"), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert [(pool["role"], pool["gpus"]) for pool in found["pools"]] == [("prefill", 2), ("decode", 1)]
    assert found["pools"][0]["decode_tokens"] == 0
    assert found["cost_usd"] == pytest.approx(sum(pool["cost_usd"] for pool in found["pools"]))


def test_a_file_of_pools_says_the_same_as_flags(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("prefill: {replicas: 2}\ndecode: {device: a100}\n", encoding="utf-8")
    (tmp_path / "scenario.yaml").write_text(
        "model: Qwen/Qwen3-8B\nprefill: {replicas: 2}\ndecode: [{device: a100}]\n", encoding="utf-8"
    )
    documents = []
    for words in (
        ("Qwen/Qwen3-8B", *APART),
        ("Qwen/Qwen3-8B", "--pools", str(file)),
        ("--scenario", str(tmp_path / "scenario.yaml")),
    ):
        assert main(["run", *words, *LOAD, "--no-bands", "--json"]) == DONE
        documents.append(capsys.readouterr().out)
    assert documents[0] == documents[1] == documents[2]


def test_variants_may_have_other_pools(capsys: Capture) -> None:
    variant = "decode='replicas=2 device=a100'"
    words = ("compare", "Qwen/Qwen3-8B", *LOAD, *APART, "--seeds", "1", "--with", variant, "--json")
    assert main(words) == DONE
    found = json.loads(capsys.readouterr().out)
    assert [variant["name"] for variant in found["variants"]] == ["baseline", variant]


def test_explain_prices_each_side(capsys: Capture) -> None:
    words = ("explain", "Qwen/Qwen3-8B", *APART, "--batch", "decode=8@1000,prefill=512", "--json")
    assert main(words) == DONE
    first, second = json.loads(capsys.readouterr().out)["pools"]
    assert (first["pool"]["role"], first["batch"]) == ("prefill", "prefill=1x512@0")
    assert (second["pool"]["role"], second["batch"]) == ("decode", "decode=8@1000")
    alone = ("explain", "Qwen/Qwen3-8B", "--device", "a100", "--batch", "decode=8@1000", "--json")
    assert main(alone) == DONE
    assert json.loads(capsys.readouterr().out)["total_seconds"] == second["total_seconds"]
    assert main(["explain", "Qwen/Qwen3-8B", *APART, "--batch", "prefill=512"]) == DONE
    assert "a100" not in capsys.readouterr().out
    assert main(["explain", "Qwen/Qwen3-8B", *APART, "--plot", "roofline"]) == WRONG
    assert "shows one pool" in capsys.readouterr().err


def test_plan_says_whether_separate_or_together(capsys: Capture, tmp_path: Path) -> None:
    axes = ("--tensor-parallel-size", "1", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048")
    words = ("plan", "Qwen/Qwen3-8B", *LOAD, *axes, "--kv-cache-dtype", "auto", "--quantization", "stored")
    search = ("--pools", "both", "--ratio", "1", "--objective", "qps-per-gpu", "--goodput", "ttft:300", "tpot:30")
    more = ("--tolerance", "0.1", "--handover", "ideal", "--executor", "serial")
    assert main([*words, *search, *more, "--launch", str(tmp_path)]) == DONE
    out = capsys.readouterr().out
    assert "separate or together" in out
    assert main([*words, *search, *more, "--json"]) == DONE
    verdict = json.loads(capsys.readouterr().out)["separate_or_together"]
    assert set(verdict) == {"separate", "ratio", "interval_95", "binds", "words", "evidence"}
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("run", "--prefill", "replicaz=2", "--decode", ""),
            "prefill: unknown key 'replicaz': did you mean 'replicas'",
        ),
        (("run", "--prefill", "replicas=2"), "prefill without decode: add decode"),
        (("run", "--pools", "none.yaml"), "pools 'none.yaml': cannot be read"),
        (("run", *APART, "--link", "bandwith=1e9"), "link: unknown key 'bandwith': did you mean 'bandwidth'"),
        (("run", *APART, "--handover", "nixl"), "unknown handover 'nixl'"),
        (("run", *APART, "--mixed", ""), "mixed pools with prefill and decode pools"),
        (
            ("plan", "--prefill", "device=h100"),
            "prefill: is for disaggregated prefill and decode: add --pools separate or both",
        ),
        (("plan", "--pools", "separate", "--decode", "device"), "decode 'device': must be WORD=VALUE,VALUE"),
    ],
)
def test_wrong_words_end_in_one_line(capsys: Capture, words: tuple[str, ...], message: str) -> None:
    assert main(words) == WRONG
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


SPACE_OF_POOLS = """
model: Llama-3.1-8B
device: h100
max_model_len: 2048
max_num_batched_tokens: 1024
prefill: {max_num_seqs: [8, 64]}
decode: {max_num_seqs: [64], enable_expert_parallel: false}
ratio: 2
handover: ideal
constraints: {max_gpus: 3}
"""


def test_a_file_of_a_space_says_what_prefill_and_decode_are(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(SPACE_OF_POOLS)
    decode = ("max_num_seqs=64", "enable_expert_parallel=false")
    flags = Disaggregation(pools="separate", prefill=("max_num_seqs=8,64",), decode=decode, ratio=2, handover="ideal")
    assert Disaggregation().of_file(file) == flags
    with pytest.raises(InputError, match="leave out the flags"):
        Disaggregation(pools="both").of_file(file)
    with pytest.raises(InputError, match="make a PoolSpace"):
        load_space(file)
    for wrong_words, message in (
        ("ratio: two", "ratio='two'"),
        ("pools: apart", "pools='apart'"),
        ("decode: 3", "decode=3"),
    ):
        file.write_text(f"device: h100\n{wrong_words}\n")
        with pytest.raises(InputError, match=message):
            Disaggregation().of_file(file)


def test_the_best_goodput_of_pools_has_a_certificate(capsys: Capture, tmp_path: Path) -> None:
    file, proof = tmp_path / "space.yaml", tmp_path / "proof.json"
    file.write_text(SPACE_OF_POOLS)
    load = ("--isl", "300", "--osl", "40", "--num-prompts", "60", "--request-rate", "40", "--seeds", "1")
    search = ("--objective", "goodput-per-gpu", "--goodput", "ttft:100", "tpot:12", "--executor", "serial")
    assert main(["plan", "--space", str(file), *load, *search, "--certificate", str(proof), "--json"]) == DONE
    answer = json.loads(capsys.readouterr().out)
    assert answer["undecided"] == 0 and len(answer["ranking"]) == 1
    assert wrong(json.loads(proof.read_text())) == []
