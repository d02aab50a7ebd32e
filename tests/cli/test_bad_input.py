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

from windtunnel.__main__ import main as command
from windtunnel.cli import DONE, INTERRUPTED, WRONG, main
from windtunnel.cli.run import MISSED

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
        (
            ("sweep", "Qwen/Qwen3-8B", "--request-rate", "2", "4", "8"),
            "unexpected 4 8 after --request-rate: leave them",
        ),
        (("run", "Qwen/Qwen3-8B", "qps"), "unexpected qps: leave it out"),
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
        (("run", "--goodput", "ttft"), "METRIC:TIME"),
        (("run", "--goodput", "tbt:5"), "unknown goodput metric"),
        (("run", "--slo", "ttft=0.3"), "ttft_p99=0.3"),
        (("run", "-tp", "3"), "64 heads"),
        (("run", "-tp", "12"), "tensor_parallel_size=12"),
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
        (("run", "--request-rate", "5", "--burstiness", "1e-12"), "burstiness: so small that all"),
        (("sweep", "--rates", "--isl", "100"), "--rates: needs at least one value"),
        (("proxy", "http://", "--model", "Qwen/Qwen3-8B", "--output", "none"), "must be the URL of a server"),
        (("proxy", "http://:80/v1", "--model", "Qwen/Qwen3-8B", "--output", "none"), "must be the URL of a server"),
        (("ui", "--studies", __file__), "is no study"),
        (("serve", "Qwen/Qwen3-8B", "--port", "0", "--record", f"{__file__}/load.jsonl"), "cannot be written"),
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
    "a column twice": ("arrival,arrival,prompt_tokens,output_tokens\n0,1,5,5\n", "column 'arrival': stands twice"),
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
    assert "40 requests" in done.stdout  # the table is not lost with the file
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
    assert main([*RUN, *LOAD, "--seed", "1", "--output", str(kept)]) == WRONG
    out, err = capsys.readouterr()
    assert "GOAL MET" in out
    assert "No space left" in err
    assert err.count("\n") == 1
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


ROWS = '{"arrival": 0, "prompt_tokens": 5, "output_tokens": 5}\n'
OVERWRITING = {
    "a trace is converted into itself": ("trace", "convert", "{}/a.jsonl", "{}/a.jsonl"),
    "and by another name": ("trace", "convert", "{}/a.jsonl", "{}/../{name}/a.jsonl"),
    "and by a link": ("trace", "convert", "{}/a.jsonl", "{}/link.jsonl"),
    "the page replaces the trace": (*RUN, "--trace", "{}/a.jsonl", "--report", "{}/a.jsonl"),
    "the page replaces the scenario": (*RUN, "--scenario", "{}/s.yaml", "--report", "{}/s.yaml"),
    "the page replaces the model": ("run", "{}/config.json", "--html", "{}/config.json"),
    "two outputs in one file": (*RUN, "--report", "{}/page", "--perfetto", "{}/page"),
    "the page replaces the store": ("plan", "--store", "{}/a.db", "--report", "{}/a.db"),
    "the page replaces the variants": ("compare", "--variants", "{}/s.yaml", "--report", "{}/s.yaml"),
    "a recording's steps replace it": ("replay", "{}/s.yaml", "--scheduler", "vllm-0.32", "--output", "{}/s.yaml"),
}


@pytest.mark.parametrize("words", OVERWRITING.values(), ids=OVERWRITING.keys())
def test_no_output_replaces_an_input_or_another_output(capsys: Capture, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "a.jsonl").write_text(ROWS)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "s.yaml").write_text("max_num_seqs: 8\n")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    filled = [word.replace("{}", str(tmp_path)).replace("{name}", tmp_path.name) for word in words]
    assert "choose another name" in complaint(capsys, *filled)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_converted_trace_says_by_its_name_what_it_is(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(ROWS)
    err = complaint(capsys, "trace", "convert", str(tmp_path / "a.jsonl"), str(tmp_path / "b.csv"))
    assert "must end in .jsonl or .parquet" in err


TWICE = {
    "scenario": ("run", "--scenario", "max_num_seqs: 8\nmax_num_seqs: 9\n"),
    "variants": ("compare", "--variants", "a: {max_num_seqs: 8}\na: {max_num_seqs: 9}\n"),
    "words of a variant": ("compare", "--variants", "a: {max_num_seqs: 8, max_num_seqs: 9}\n"),
    "space": ("plan", "--space", "device: h100\ndevice: l40s\n"),
    "calibration": ("run", "--calibration", "schema_version: 1\nschema_version: 1\n"),
    "trace": ("run", "--trace", '{"arrival": 0, "prompt_tokens": 5, "prompt_tokens": 5, "output_tokens": 5}\n'),
}


@pytest.mark.parametrize("words", TWICE.values(), ids=TWICE.keys())
def test_a_key_that_stands_twice(capsys: Capture, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text(words[2])
    assert "stands twice: leave one out" in complaint(capsys, *words[:2], str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (json.dumps(LLAMA | {"hidden_size": float("nan")}), "hidden_size=nan"),
        (json.dumps(LLAMA | {"hidden_size": float("inf")}), "hidden_size=inf"),
        (json.dumps(LLAMA)[:-1] + ', "hidden_size": 512}', "'hidden_size' stands twice"),
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
    ],
    ids=["nan", "inf", "twice", "brackets", "braces"],
)
def test_a_config_that_no_model_has(capsys: Capture, tmp_path: Path, config: str, says: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert says in complaint(capsys, "run", str(tmp_path))


@pytest.mark.parametrize("words", ["max_num_seqs: yes", "request_rate: on", "replicas: true", "model: no"])
def test_a_truth_is_no_number_and_no_name(capsys: Capture, tmp_path: Path, words: str) -> None:
    (tmp_path / "s.yaml").write_text(words + "\n")
    assert "must not be true or false" in complaint(capsys, "run", "--scenario", str(tmp_path / "s.yaml"))
    (tmp_path / "v.yaml").write_text(f"variant: {{{words}}}\n")
    assert "must not be true or false" in complaint(capsys, "compare", "--variants", str(tmp_path / "v.yaml"))


PLAN = ("plan", "Qwen/Qwen3-8B", *LOAD)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*RUN, "--num-prompts", "1000000000", "--isl", "9"), "must be ≤ 50,000,000"),
        ((*RUN, "--repeat", "1000000000"), "must be ≤ 50,000,000"),
        ((*RUN, "--scheduler", "fcfs-interval:queue_look_time=1e308"), "must be ≤ 86,400 s"),
        ((*RUN, "--scheduler", "static:max_queue_delay=2e9"), "must be ≤ 86,400 s"),
        ((*RUN, "--scheduler", "lightllm:preemption=swap,host_blocks=9,swap_time_per_block=1e9"), "must be ≤ 86,400 s"),
        ((*RUN, "--replicas", "1000000"), "replicas=1000000: must be ≤ 4,096"),
        ((*RUN, "-tp", "1000000"), "tensor_parallel_size=1000000: must be ≤ 4,096"),
        ((*RUN, "-dp", "1000000"), "data_parallel_size=1000000: must be ≤ 4,096"),
        ((*RUN, "--max-num-seqs", "99999999"), "max_num_seqs=99999999: must be ≤ 65,536"),
        ((*RUN, "--max-num-seqs", "60000"), "activations"),
        ((*RUN, "--max-num-batched-tokens", "99999999"), "max_num_batched_tokens=99999999: must be ≤ 1,048,576"),
        ((*PLAN, "--target-request-rate", "1e9"), "target_request_rate=1e+09: must be < 100,000"),
        ((*PLAN, "--target-request-rate", "nan"), "target_request_rate=nan"),
        ((*RUN, "--block-size", "7"), "block_size=7"),
        ((*RUN, "--block-size", "24"), "block_size=24"),
        ((*PLAN, "--devices", "h100", "h1000"), "unknown device 'h1000'"),
        ((*PLAN, "--gpus", "l40s=4"), "gpus l40s=4: is not searched"),
        ((*PLAN, "--gpus", "h1000=4"), "unknown device 'h1000'"),
        ((*PLAN, "--axis", "router=round_robbin"), "did you mean 'round_robin'"),
        ((*PLAN, "--axis", "scheduler=sarathy"), "did you mean 'sarathi'"),
        ((*PLAN, "--axis", "scheduler=sarathi:chunks=5"), "did you mean 'chunk'"),
        ((*PLAN, "--axis", "router=none.py:score"), "there is no file"),
        ((*PLAN, "--axis", "scheduling_policy=fcsf"), "did you mean 'fcfs'"),
        ((*PLAN, "--axis", "dtype=bf16,float16"), "did you mean 'bfloat16'"),
        ((*PLAN, "--axis", "kv_cache_dtype=fp9"), "unknown kv_cache_dtype 'fp9'"),
        ((*PLAN, "--axis", "engine=vllm-0.34"), "vllm-0.33"),
        (("run", *LOAD, "--seeds", "100000000"), "seeds=100000000"),
        (("compare", *LOAD, "--with", "max_num_seqs=4", "--seeds", "100000000"), "seeds=100000000"),
        (("run", "--isl", "9", "--request-rate", "0"), "inf: all at once"),
        (("run", "--isl", "9", "--request-rate", "nan"), "inf: all at once"),
        (("run", "--trace", "azure-conv", "--columns", "arrival=start"), "'azure-conv' is built in"),
        (("trace", "convert", "azure-conv", "x.jsonl", "--columns", "arrival=start"), "'azure-conv' is built in"),
        (("trace", "convert", "azure-conv", "x.jsonl", "--format", "csv"), "'azure-conv' is built in"),
        (("run", *LOAD, "--slo", "ttft_p99=0.3", "ttft_p99=0.1"), "given twice"),
        (("run", "--isl", "9", "--random-input-len", "8"), "--random-input-len 8: given twice: leave one out"),
        (("run", "--isl", "9", "--isl", "8"), "--isl 8: given twice: leave one out"),
        (
            ("optimum", "azure-conv", "--model", "Qwen/Qwen3-8B"),
            "a trace is given as --trace azure-conv",
        ),
        (("run", *LOAD, "--async-scheduling", "--no-async-scheduling"), "given twice: leave one out"),
        (("run", *LOAD, "--scheduler", "sarathi:chunk=512", "--max-num-batched-tokens", "2048"), "says 512"),
        (("sweep", "--isl", "9", "--rates", "4", "4"), "rates=4: stands twice"),
        (("sweep", "--isl", "9", "--rates", "1:10"), "rates='1:10': must be numbers, or LOW:HIGH:STEP, e.g. 2:10:2"),
        (("sweep", "--isl", "9", "--rates", "9:1:2"), "must be numbers, or LOW:HIGH:STEP"),
        (("sweep", "--isl", "0", "--rates", "4"), "random_input_len=0"),
        (("calibrate", "none", "--perf", "measurd"), "did you mean 'measured'"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_a_slip_of_the_pen_is_refused_at_once(capsys: Capture, words: tuple[str, ...], says: str) -> None:
    assert says in complaint(capsys, *words)


APART = ("--prefill", "", "--decode", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*APART, "--fail", "pool=decod"), "fail: unknown pool 'decod': did you mean 'decode'?"),
        ((*APART, "--fail", "at=soon pol=decode"), "fail: unknown key 'pol': did you mean 'pool'?"),
        ((*APART, "--fail", "mtbf=-1 pool=decod"), "fail: unknown pool 'decod'"),
        ((*APART, "--fail", "on_failure=retri"), "fail: unknown on_failure 'retri': did you mean 'retry'?"),
        ((*APART, "--fail", "at=soon part=lnk"), "fail: unknown part 'lnk': did you mean 'link'?"),
        (("--mixed", "name=big", "--mixed", "", "--fail", "pool=bigg"), "unknown pool 'bigg': did you mean 'big'?"),
        (("--fail", "pool=decod"), "fail: unknown pool 'decod': known: pool"),
        ((*APART, "--store", "pool=decod"), "store: unknown pool 'decod': did you mean 'decode'?"),
        ((*APART, "--store", "tier=disk pool=al"), "store: unknown pool 'al': did you mean 'all'?"),
        ((*APART, "--store", "tier=hst"), "store: unknown tier 'hst': did you mean 'host'?"),
        ((*APART, "--store", "capacity=x tierr=host"), "store: unknown key 'tierr': did you mean 'tier'?"),
        ((*APART, "--autoscale", "least=9 most=3 pool=decod"), "autoscale: unknown pool 'decod'"),
        ((*APART, "--autoscale", "policy=forecast pool=decod"), "autoscale: unknown pool 'decod'"),
        ((*APART, "--autoscale", "policy=planner up=0 target=laetncy"), "did you mean 'latency'?"),
        (("--prefill", "device=h10"), "prefill: unknown device 'h10': did you mean 'h100'?"),
        (("--mixed", "replicas=x devise=h100"), "mixed: unknown key 'devise': did you mean 'device'?"),
        ((*APART, "--link", "latency=x bandwith=5"), "link: unknown key 'bandwith': did you mean 'bandwidth'?"),
        ((*APART, "--handover", "lease=-1 on_expiry=fale"), "handover: unknown on_expiry 'fale': did you mean 'fail'?"),
        (
            ("--router", "prefix_aware:queue=x,lod=1"),
            "unknown setting 'lod' of router 'prefix_aware': did you mean 'load'?",
        ),
        (
            ("--scheduler", "sarathi:chunk=x,ordr=1"),
            "unknown setting 'ordr' of scheduler 'sarathi': did you mean 'order'?",
        ),
        (("--random-lengths", "zipff:1"), "random_lengths: unknown distribution 'zipff': did you mean 'zipf'?"),
        (("--goodput", "ttf"), "unknown goodput metric 'ttf': did you mean 'ttft'?"),
        (("--slo", "ttf_p99=x"), "unknown metric 'ttf': did you mean 'ttft'?"),
        (
            ("--columns", "arival=x", "--trace", "azure-conv"),
            "columns: name those of a file, and 'azure-conv' is built in: leave them out",
        ),
    ],
)
def test_an_unknown_name_is_named_before_what_is_missing_or_wrong(
    capsys: Capture, words: tuple[str, ...], says: str
) -> None:
    assert says in complaint(capsys, *RUN, *words)


def test_a_part_of_a_batch_that_does_not_exist(capsys: Capture) -> None:
    words = ("explain", "Qwen/Qwen3-8B", "--batch", "decod=3@x")
    assert "unknown part 'decod': did you mean 'decode'?" in complaint(capsys, *words)


def test_pools_of_a_file_are_known_to_the_flags(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("mixed: [{name: big}, {name: small}]")
    load = ("--isl", "9", "--osl", "2", "--num-prompts", "2", "--no-bands")
    assert main([*RUN, *load, "--pools", str(file), "--fail", "pool=small at=0"]) == 0
    capsys.readouterr()
    says = complaint(capsys, *RUN, *load, "--pools", str(file), "--fail", "pool=smal")
    assert "fail: unknown pool 'smal': did you mean 'small'?" in says


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_model_of_a_milliard(capsys: Capture, tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: 10**10}))
    assert f"{key}=1e+10 in config.json: must be ≤" in complaint(capsys, "run", str(tmp_path))


def test_times_in_the_wrong_unit(capsys: Capture, tmp_path: Path) -> None:
    rows = (10**12, 10**12 + 1000)
    lines = (json.dumps({"arrival": at, "prompt_tokens": 5, "output_tokens": 5}) for at in rows)
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert "are these milliseconds?" in complaint(capsys, *RUN, "--trace", str(tmp_path / "t.jsonl"))


NOTHING = ("--isl", "5000", "--osl", "9", "--num-prompts", "9", "--request-rate", "5", "--max-model-len", "4096")
FILES = ("--report", "--perfetto", "--save-result", "--prometheus", "--output")


def test_a_run_in_which_nothing_finishes(capsys: Capture, tmp_path: Path) -> None:
    files = [word for flag in FILES for word in (flag, str(tmp_path / flag))]
    says = complaint(capsys, *RUN, *NOTHING, *files, "--goodput", "ttft:99")
    assert "no request fits: 9 of 9 requests can never run" in says
    worker = "trtllm-serve Qwen/Qwen3-8B --max_batch_size 8 --max_num_tokens 64"  # a decode server's, with other notes
    says = complaint(
        capsys, "run", "--from", worker, "--device", "h100", "--isl", "512", "--osl", "8", "--num-prompts", "9"
    )
    assert "no request fits: 9 of 9 requests can never run" in says
    assert "their prompts the 64 tokens of a step" in says
    assert list(tmp_path.iterdir()) == []
    assert "no request fits" in complaint(capsys, *RUN, *NOTHING, "--json", "--seeds", "2")
    assert main(["compare", *RUN[1:], *NOTHING, "--with", "max_num_seqs=8", "--seeds", "2"]) == DONE


def test_a_plan_in_which_nothing_fits(capsys: Capture) -> None:
    axes = ("--axis", "max_model_len=4096", "--tensor-parallel-size", "1", "--max-num-seqs", "64")
    few = ("--max-num-batched-tokens", "2048", "--workers", "1")
    assert main(["plan", *RUN[1:], *NOTHING[:-2], *axes, *few]) == MISSED
    assert "no request fits max_model_len=4096" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.exit(3)",
        "import sys\nclass S:\n    def __init__(self): sys.exit(3)\n    def schedule(self, *_): pass",
        "import sys\nclass S:\n    def schedule(self, *_): sys.exit(0)",
        "class S:\n    def __init__(self): raise OSError('no such model')\n    def schedule(self, *_): pass",
    ],
    ids=["while it is read", "while it is made", "while it decides", "another error"],
)
def test_a_file_of_the_user_that_ends_the_program(capsys: Capture, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    err = complaint(capsys, *RUN, *LOAD, "--scheduler", f"{tmp_path / 'mine.py'}:S")
    assert "SystemExit" in err or "no such model" in err


def test_columns_of_a_file_of_ones_own(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "gateway.csv"
    path.write_text("id;begin;in;out\na;5;10;2\nb;6;20;3\n")
    assert "columns='arrival=…" in complaint(capsys, *RUN, "--trace", str(path))
    assert "must be OURS=THEIRS" in complaint(capsys, *RUN, "--trace", str(path), "--columns", "arrival")
    assert "add trace" in complaint(capsys, *RUN, "--columns", "arrival=begin")
    names = ("--columns", "arrival=begin,prompt_tokens=in", "output_tokens=out")
    assert main(["trace", "convert", str(path), str(tmp_path / "own.jsonl"), *names]) == DONE
    assert main(["trace", "describe", str(path), *names]) == DONE
    assert "2 in 1" in capsys.readouterr().out
    assert main([*RUN, "--trace", str(path), *names, "--no-bands", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["requests"]["finished"] == 2


def test_an_interrupt_while_modules_are_read(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupts:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "windtunnel.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "windtunnel.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupts, *sys.meta_path])
    assert command() == INTERRUPTED
    assert capsys.readouterr().err == "windtunnel: interrupted\n"


@pytest.mark.parametrize("flag", ["--router", "--scheduler"])
def test_what_goes_wrong_in_a_function_of_ones_own_is_a_line_with_its_line(
    capsys: Capture, tmp_path: Path, flag: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from windtunnel.policy import Policy\n"
        "def score(replica, outstanding, prompt_tokens, arrival):\n"
        "    return 1 / (arrival - arrival)\n"
        "def key(prompt_tokens, max_tokens, priority, generated, arrival):\n"
        "    return [][prompt_tokens]\n"
        "mine = Policy(admission_key=key, chunked_prefill=True)\n"
    )
    name, says = {
        "--router": ("score", "route_score: ZeroDivisionError: float division by zero (mine.py, line 3)"),
        "--scheduler": ("mine", "admission_key: IndexError: list index out of range (mine.py, line 5)"),
    }[flag]
    assert says in complaint(capsys, *RUN, *LOAD, "--replicas", "2", flag, f"{file}:{name}")
