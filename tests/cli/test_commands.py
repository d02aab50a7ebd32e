"""The command line: what it prints, which files it writes, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli import DONE, INTERRUPTED, WRONG, main
from windtunnel.cli.run import MISSED
from windtunnel.report.page import span

QUICK = ("run", "Qwen/Qwen3-8B", "--isl", "200", "--osl", "20", "--num-prompts", "40", "--request-rate", "10")
KEYS = (
    "schema_version requests ttft tpot itl e2el queue request_throughput output_throughput goodput attainment cost_usd "
    "cost_per_hour cost_per_million_output_tokens energy_wh max_wait normalised_latency "
    "normalised_interactivity batch_size idle_seconds phase_share kv_blocks utilisation preemptions "
    "prefix_cache_hit_rate prompt_tokens cached_tokens generated_cached_tokens time_share replicas warnings goal"
)

SIMULATED_AGAIN = ("bands", "roofline")
"""Keys that need more simulations."""

Capture = pytest.CaptureFixture[str]


def document(capsys: Capture, *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == DONE
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_json_is_the_whole_output(capsys: Capture) -> None:
    found = document(capsys, *QUICK)
    assert list(found) == [*KEYS.split(), *SIMULATED_AGAIN]
    assert list(document(capsys, *QUICK, "--no-bands")) == KEYS.split()
    assert found["requests"] == {"total": 40, "finished": 40, "rejected": 0, "aborted": 0}


def test_the_same_words_give_the_same_bytes(capsys: Capture) -> None:
    outputs = []
    for _ in range(2):
        main([*QUICK, "--json"])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_the_table(capsys: Capture) -> None:
    assert main([*QUICK, "--goodput", "ttft:5000"]) == DONE
    out = capsys.readouterr().out
    for words in (
        "Qwen/Qwen3-8B on 1 × H100 SXM",
        "TTFT",
        "p99",
        "✓ GOAL MET  100 % of requests meet ttft ≤ 5000 ms (goal 90 %)",
        "p99 on a real server",
        "of capacity",
        "confidence",
    ):
        assert words in out


def test_a_goal_that_is_missed_since_requests_are_too_long_says_so(capsys: Capture) -> None:
    main([*QUICK, "--random-range-ratio", "0.9", "--max-model-len", "200", "--goodput", "ttft:5000", "--no-bands"])
    first = capsys.readouterr().out.split("latency")[0]
    assert "GOAL MISSED" in first and "of 40 were rejected." in first


def test_the_next_command_has_the_load_of_this_one(capsys: Capture) -> None:
    load = "--random-range-ratio 0.3 --random-prefix-len 100 --burstiness 0.5"
    assert main([*QUICK, *load.split(), "--goodput", "ttft:5000"]) == DONE
    ran = " ".join(capsys.readouterr().out.split())
    lengths = "--request-rate 10 --burstiness 0.5 --random-input-len 200 --random-output-len 20"
    assert (
        f"next windtunnel plan Qwen/Qwen3-8B {lengths} --random-range-ratio 0.3 --random-prefix-len 100 --target" in ran
    )


def test_sequences_of_a_prompt_come_at_the_rate_of_prompts(capsys: Capture) -> None:
    assert main(["run", "Qwen/Qwen3-8B", "--trace", "azure-conv", "--num-prompts", "20", "--no-bands", "--n", "2"]) == 0
    out = capsys.readouterr().out
    assert "azure-conv, 40 requests at 6.31/s" in out
    assert "windtunnel plan" not in out, "plan refuses n"


def test_the_next_command_has_the_hardware_of_the_users_own(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.toml"
    price = ""
    for objective in (" --objective gpus", ""):
        path.write_text(
            "[mine]\nmemory_gib = 80\nmemory_bandwidth = 3000\nflops = { bfloat16 = 900 }\npower_w = 700\n"
            'idle_power_w = 70\ngpus_per_node = 8\nlink = "nvlink"\nlink_bandwidth = 450\npcie_bandwidth = 64\n'
            f'network_bandwidth = 50\nsource = "made up"\n{price}'
        )
        hardware = ["--device", "mine", "--devices-file", str(path), "--perf", "modelled"]
        main([*QUICK, *hardware])
        said = "".join(capsys.readouterr().out.split())
        words = f"plan Qwen/Qwen3-8B --devices mine --devices-file {path}{objective} --perf modelled"
        assert words.replace(" ", "") in said
        price = 'price_per_hour = 1.0\nprice_source = "made up"\nprice_date = "2026-01-01"\n'


def test_the_next_command_has_the_goal_of_this_one(capsys: Capture) -> None:
    goal = "--goodput ttft:5000 --attainment 0.95 --slo ttft_p99=300ms e2el_p50=20000ms"
    main([*QUICK, *goal.split()])
    assert f"--target-request-rate 10 {goal} the cheapest" in " ".join(capsys.readouterr().out.split())


def test_what_few_want_is_shown_on_demand(capsys: Capture) -> None:
    outputs = []
    for command in ([*QUICK], [*QUICK, "-v"]):
        assert main(command) == DONE
        outputs.append(capsys.readouterr().out)
    quiet, whole = outputs
    assert len(quiet.splitlines()) <= 22
    assert max(map(len, quiet.splitlines())) <= 100
    for words in ("longest wait", "evidence  ", "energy  ", "roofline  ", "kernel times", "note: prefix caching"):
        assert words not in quiet
        assert words in whole
    assert "next  " in quiet


def test_the_operators_of_a_whole_run(capsys: Capture) -> None:
    found: Any = document(capsys, *QUICK, "--no-bands", "--operators")
    shares, seconds = found["operators"], found["operator_seconds"]
    assert sum(shares.values()) == pytest.approx(1.0)
    busy = sum(replica["busy_seconds"] for replica in found["replicas"])  # of one rank each
    assert sum(seconds.values()) == pytest.approx(busy, rel=1e-9)
    assert {name: part / busy for name, part in seconds.items()} == pytest.approx(shares)
    assert max(shares, key=shares.__getitem__) == "gate_up_proj"  # the largest matrix of a small model's decodes
    moved = found["operator_bytes"]
    assert moved.keys() == {name for name in shares if name != "host"}
    assert all(1e9 < moved[name] / seconds[name] < 4e12 for name in ("gate_up_proj", "down_proj", "qkv_proj"))
    assert main([*QUICK, "--no-bands", "--operators"]) == DONE
    out = capsys.readouterr().out
    assert " GB/s " in out
    assert "operator of the whole run" in out
    assert "rank-seconds" in out
    assert "down_proj" in out


def test_other_tools_spellings(capsys: Capture) -> None:
    ours = (
        "run",
        "Qwen/Qwen3-8B",
        "--num-prompts=9",
        "--tensor-parallel-size=2",
        "--random-input-len=50",
        "--random-output-len=5",
    )
    short = ("run", "Qwen/Qwen3-8B", "--num-prompts", "9", "-tp", "2", "--isl", "50", "--osl=5")
    assert document(capsys, *ours) == document(capsys, *short)


def test_seeds_give_intervals(capsys: Capture) -> None:
    found = document(capsys, *QUICK, "--seeds", "3")
    assert found["seeds"] == 3
    interval = found["interval_95"]
    assert isinstance(interval, dict)
    low, high = interval["ttft.mean"]
    assert low < high
    main([*QUICK, "--seeds", "3"])
    assert "±" in capsys.readouterr().out


def test_a_scenario_file_names_a_trace_although_a_command_is_called_so(capsys: Capture, tmp_path: Path) -> None:
    text = "model: Qwen/Qwen3-8B\nperf: roofline\ntrace: azure-code\nnum_prompts: 5\n"
    (tmp_path / "s.yaml").write_text(text, encoding="utf-8")
    assert main(["run", "--scenario", str(tmp_path / "s.yaml"), "--format", "text"]) == DONE
    assert "azure-code, 5 requests" in capsys.readouterr().out


def test_a_scenario_file_and_flags_over_it(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "model: Qwen/Qwen3-8B\nrandom_input_len: 200\nrandom_output_len: 20\nnum_prompts: 40\nrequest_rate: 10\n"
        "burstiness: 0.5\ngoodput: ttft:5000 tpot:500\nenforce_eager: false\n"
    )
    file = ("run", "--scenario", str(tmp_path / "s.yaml"))
    assert document(capsys, *file) != document(capsys, *QUICK)
    assert document(capsys, *file, "--burstiness", "1") == document(
        capsys, *QUICK, "--goodput", "ttft:5000", "tpot:500"
    )


def test_a_model_named_beside_a_file_is_not_the_main_job(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text("random_input_len: 9\nnum_prompts: 3\n")
    assert main(["run", "Qwen/Qwen3-8B", "--scenario", str(tmp_path / "load.yaml")]) == DONE
    assert "Qwen3-8B on 1 × H100 SXM" in capsys.readouterr().out
    assert main(["run", "--scenario", str(tmp_path / "load.yaml")]) == DONE
    assert "Qwen3-32B on 2 × H100 SXM, TP 2" in capsys.readouterr().out


def test_a_run_can_be_kept_and_shown_again(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "kept"
    first = document(capsys, *QUICK, "--output", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == [
        "iterations.parquet",
        "requests.parquet",
        "run.json",
        "stalls.parquet",
        "times.npz",
    ]
    assert document(capsys, "report", str(folder)) == first
    assert not set(SIMULATED_AGAIN) & set(document(capsys, "report", str(folder), "--exclude-warmup"))
    assert document(capsys, *QUICK, "--output", str(folder)) == first
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]


def test_the_page_says_how_sure_it_is(capsys: Capture, tmp_path: Path) -> None:
    low, high = document(capsys, *QUICK, "--html", str(tmp_path / "a.html"))["bands"]["ttft"]["p99"]  # type: ignore[index]
    assert f"<td>{span(low, high)}</td>" in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert main([*QUICK, "--no-bands", "--html", str(tmp_path / "b.html")]) == DONE
    assert "on a real server" not in (tmp_path / "b.html").read_text(encoding="utf-8")


def test_files_that_are_asked_for(capsys: Capture, tmp_path: Path) -> None:
    names = {"report": "a.html", "perfetto": "b.json", "save-result": "c.json", "prometheus": "d.txt"}
    flags = [word for flag, name in names.items() for word in (f"--{flag}", str(tmp_path / name))]
    assert main([*QUICK, *flags, "--output", str(tmp_path / "run")]) == DONE
    written = {name: (tmp_path / name).read_bytes() for name in names.values()}
    assert written["a.html"].lstrip().lower().startswith(b"<!doctype html>")
    assert json.loads(written["c.json"])["completed"] == 40
    assert b"vllm:num_requests_running" in written["d.txt"]
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "again.html")]) == DONE
    assert (tmp_path / "again.html").stat().st_size == pytest.approx(len(written["a.html"]), rel=0.01)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("goals", "code"),
    [
        (("--slo", "ttft_p99=100", "e2el_p50=100"), DONE),
        (("--slo", "ttft_p99=0.000001"), MISSED),
        (("--goodput", "ttft:0.001"), DONE),
        (("--goodput", "ttft:0.001", "--attainment", "0.5"), MISSED),
        (("--goodput", "ttft:100000", "--attainment", "1"), DONE),
    ],
)
def test_a_missed_goal_is_exit_1(capsys: Capture, tmp_path: Path, goals: tuple[str, ...], code: int) -> None:
    assert main([*QUICK, *goals, "--output", str(tmp_path / "run")]) == code
    assert main(["report", str(tmp_path / "run"), *goals]) == code
    capsys.readouterr()


def test_explain_adds_up(capsys: Capture) -> None:
    found = document(capsys, "explain", "Qwen/Qwen3-8B", "--batch", "decode=8@1024")
    rows = found["rows"]
    assert isinstance(rows, list)
    assert sum(row["seconds"] for row in rows) == pytest.approx(found["total_seconds"], rel=1e-12)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert main(["explain", "Qwen/Qwen3-8B"]) == DONE
    assert "gate_up_proj" in capsys.readouterr().out


def test_explain_says_what_became_of_the_prompts_of_a_load(capsys: Capture) -> None:
    """What was found, by kind, what is new and what was computed again add up to all prompts, as in run; no batch is
    explained that nobody asked for."""
    load = ("Qwen/Qwen3-8B", "--device", "l4", "--isl", "700", "--osl", "40", "--random-turns", "3", "--num-prompts",
            "90", "--random-prefix-len", "300", "--max-model-len", "8192", "--lanes", "9")  # fmt: skip
    prompts: Any = document(capsys, "explain", *load)["prompts"]
    run: Any = document(capsys, "run", *load, "--no-bands")
    assert prompts == {name: run[name] for name in prompts if name in run} | {
        "computed_per_prompt": (run["prompt_tokens"] - run["cached_tokens"]) / 90
    }
    assert min(prompts["reuse"][kind] for kind in ("history", "answers", "system")) > 0
    assert main(["explain", *load]) == DONE
    lines = capsys.readouterr().out.splitlines()
    parts = [int(line.split()[-4].replace(",", "")) for line in lines if line.startswith((" found", " computed"))]
    assert sum(parts) == prompts["prompt_tokens"]
    assert prompts["computed_again_tokens"] > 0
    assert not any("gate_up_proj" in line for line in lines)
    assert "rows" in document(capsys, "explain", *load, "--batch", "decode=8@100")


def test_what_a_cache_finds_of_sessions_side_by_side_is_without_a_server(capsys: Capture, tmp_path: Path) -> None:
    path, said = tmp_path / "load.jsonl", "as if answers took no time"
    head = json.dumps({"schema_version": 2})
    rows = [{"session": k // 2, "arrival": 0.0, "prompt_tokens": 90 + k % 2 * 20, "output_tokens": 9} for k in range(4)]
    rows[1] |= {"begins": 0}
    rows[3] |= {"begins": 2}
    path.write_text("\n".join([head, *map(json.dumps, rows)]))
    assert main(["trace", "describe", str(path), "--lanes", "2"]) == DONE
    assert said in capsys.readouterr().out
    assert main(["trace", "describe", str(path), "--lanes", "1"]) == DONE
    assert said not in capsys.readouterr().out


def test_traces_are_described_and_converted(capsys: Capture, tmp_path: Path) -> None:
    source = tmp_path / "azure.csv"
    source.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:02.0000000,10,5\n2023-11-16 18:00:01.0000000,20,6\n"
    )
    target = str(tmp_path / "own.parquet")
    assert main(["trace", "convert", str(source), target]) == WRONG
    assert "sort" in capsys.readouterr().err
    assert main(["trace", "convert", str(source), target, "--sort"]) == DONE
    assert capsys.readouterr().out == f"{target}: 2 requests\n"
    found = document(capsys, "trace", "describe", target)
    assert (found["requests"], found["total_prompt_tokens"]) == (2, 30)
    assert main(["trace", "describe", target]) == DONE
    assert "burstiness" in capsys.readouterr().out


def test_traces_without_times_need_a_rate(capsys: Capture, tmp_path: Path) -> None:
    source, target = tmp_path / "lengths.csv", tmp_path / "own.jsonl"
    source.write_text("num_prefill_tokens,num_decode_tokens\n10,5\n20,6\n")
    assert main(["trace", "describe", str(source)]) == WRONG
    assert "--request-rate" in capsys.readouterr().err
    assert document(capsys, "trace", "describe", str(source), "--request-rate", "4")["requests"] == 2
    assert main(["trace", "convert", str(source), str(target), "--request-rate", "inf"]) == DONE
    capsys.readouterr()
    assert document(capsys, "trace", "describe", str(target))["duration"] == 0.0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("models", "Qwen/Qwen3-32B"),
        ("devices", "h100_sxm"),
        ("engines", "vllm-0.32"),
        ("schedulers", "sglang-0.4.6"),
        ("routers", "round_robin"),
        ("traces", "azure-conv"),
    ],
)
def test_lists(capsys: Capture, kind: str, name: str) -> None:
    assert main(["list", kind]) == DONE
    assert name in capsys.readouterr().out
    assert main(["list", kind, "--json"]) == DONE
    rows = json.loads(capsys.readouterr().out)
    assert name in [row[kind.removesuffix("s")] for row in rows]


def test_version_and_help(capsys: Capture) -> None:
    assert main(["--version"]) == DONE
    assert capsys.readouterr().out.strip() == "0.1.0"
    assert main([]) == DONE
    assert "explain" in capsys.readouterr().out


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "windtunnel", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.1.0"


def test_an_interruption_is_exit_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["windtunnel.simulate.simulate"], "run_core", interrupt)
    assert main(list(QUICK)) == INTERRUPTED
    assert capsys.readouterr().err == "windtunnel: interrupted\n"


def test_a_closed_pipe_is_no_error() -> None:
    code = "import sys; from windtunnel.cli import main; sys.exit(main(['list', 'models']))"
    reader = subprocess.Popen((sys.executable, "-c", "pass"), stdin=subprocess.PIPE)
    reader.wait()
    assert reader.stdin is not None
    done = subprocess.run((sys.executable, "-c", code), stdout=reader.stdin, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (DONE, b"")
    reader.stdin.close()


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    code = "import sys; from windtunnel.cli import main; sys.exit(main(['list', 'models']))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run((sys.executable, "-c", code), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (WRONG, "windtunnel: standard output: No space left on device\n")


def test_a_sweep_finds_the_knee(capsys: Capture, tmp_path: Path) -> None:
    words = ("sweep", "Qwen/Qwen3-8B", "--isl", "400", "--osl", "40", "--num-prompts", "300", "--perf", "modelled")
    page = tmp_path / "sweep.html"
    assert main([*words, "--rates", "2", "8", "--report", str(page)]) == DONE
    out = capsys.readouterr().out
    assert "← knee" in out
    assert "Carries 8.00 requests/s, the highest rate that was tried" in out
    assert "Carries 8.00 requests/s, the highest rate that was tried" in page.read_text()
    assert max(map(len, out.splitlines())) <= 100
    assert main([*words, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["knee"] in [point["request_rate"] for point in found["points"]]
    assert len(found["points"]) == 9
    assert main([*words, "--rates", "2", "--goodput", "ttft:0.001ms"]) == MISSED
