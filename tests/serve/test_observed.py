"""The load that is there, of a trace and of a server's metrics."""

from pathlib import Path

import httpx
import numpy as np
import pytest

from serve.endpoint import app, on_a_socket
from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.serve.observed import between, last_window, scraped
from windtunnel.workload import Both, Gamma, Lognormal, generate, save

SERVER = ["Qwen/Qwen3-8B", "--perf", "roofline"]
SIDES = ("--prefill", "", "--decode", "")


def test_the_last_window_of_a_trace(tmp_path: Path) -> None:
    load = generate(Gamma(2.0), Both(Lognormal(300, 0.5), Lognormal(100, 0.5)), 400, 1)
    save(load, tmp_path / "load.jsonl")
    found = last_window(tmp_path / "load.jsonl", 50.0)
    assert found.arrival[-1] == load.arrival[-1] and found.arrival[0] > load.arrival[-1] - 50.0
    with pytest.raises(InputError, match="--window"):
        last_window(tmp_path / "load.jsonl", 1.0)


def test_what_a_server_counts() -> None:
    with on_a_socket(app()) as url, httpx.Client() as client:
        before = scraped(url)
        for i in range(25):
            client.post(f"{url}/v1/completions", json={"prompt": "word" * (100 + i), "max_tokens": 10 + i % 5})
        found = between(before, scraped(f"{url}/metrics"), 5.0)
    assert (found.requests, found.rate) == (25, 5.0)
    assert found.prompt_mean == np.mean(np.arange(100, 125)) and found.output_mean == 12.0
    assert 0 < found.output_sd < 10


def test_too_few_requests_are_counted() -> None:
    with pytest.raises(InputError, match=r"^0 requests ended in 5 s: widen --window"):
        between({}, {}, 5.0)
    with pytest.raises(InputError, match=r"^19 requests ended"):
        between({}, {"vllm:request_prompt_tokens_count": 19.0}, 5.0)


def test_a_url_without_metrics() -> None:
    with pytest.raises(InputError, match="is a server there"):
        scraped("http://127.0.0.1:9")
    with on_a_socket(app()) as url, pytest.raises(InputError, match="no metrics"):
        scraped(f"{url}/v1")


def test_a_plan_that_no_longer_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SERVER, "--random-input-len", "500", "--random-output-len", "100", "--num-prompts", "2000"]
    goals = ["--request-rate", "4", "--goodput", "ttft:300", "tpot:12", "--attainment", "0.95"]
    for rate, code in ((4.0, 0), (150.0, 1)):
        load = generate(Gamma(rate), Both(Lognormal(500, 0.1), Lognormal(100, 0.1)), 2000, 1)
        save(load, tmp_path / "load.jsonl")
        assert main(["watch", str(tmp_path / "load.jsonl"), *flags, *goals, "--window", "1000"]) == code
        said = capsys.readouterr().out
        assert ("PLAN HOLDS" in said) == (code == 0)
        assert ("drift: rate" in said and "replicas would meet the goals" in said) == (code == 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["watch", "nowhere.jsonl", *SERVER], "nowhere.jsonl"),
        (["watch", "http://127.0.0.1:9", *SERVER, "--window", "1"], "is a server there"),
        (["watch", "load.jsonl", *SERVER, "--window", "0"], "window=0"),
        (["watch", "load.jsonl", *SERVER, "--every", "-1"], "every=-1"),
        (["serve"], "no model"),
        (["serve", "Qwen/Qwen3-8B", "--speed", "0"], "speed=0"),
        (["serve", "Qwen/Qwen3-8B", "--tokenizer", "nowhere.json"], "nowhere.json"),
        (["serve", "Qwen/Qwen3-8B", "--bytes-per-token", "0"], "bytes_per_token=0"),
        (["serve", "Qwen/Qwen3-8B", "--port", "99999"], "port=99999"),
        (["serve", "Qwen/Qwen3-8B", "--port", "0", *SIDES, "--store", "tier=host capacity=2e11"], "mixed pools"),
        (["serve", "Qwen/Qwen3-8B", "--port", "0", "--autoscale", "policy=foresight rps=5"], "what is to come"),
        (["serve", "deepseek-ai/DeepSeek-R1", "--port", "0"], "needs"),
        (["serve", "Qwen/Nothing", "--port", "0"], "Qwen/Nothing"),
        (["proxy", "http://localhost:8000", "--output", "run"], "no model"),
        (["proxy", "localhost", "--model", "Qwen/Qwen3-8B", "--output", "run", "--port", "0"], "URL"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
