"""The load that is there, of a trace and of a server's metrics."""

import time
from io import BytesIO
from math import sqrt
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serve.endpoint import app, on_a_socket
from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.serve import observed
from windtunnel.serve.observed import between, last_window, scraped, watched
from windtunnel.workload import Both, Gamma, Lognormal, Workload, generate, save

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


METRICS = """# HELP vllm:x
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 12.5
vllm:request_prompt_tokens_bucket{engine="0",le="10.0",model_name="m"} 4.0
vllm:request_prompt_tokens_bucket{le="10.0"} 5.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="m"} 6.0
vllm:plain 1e3
other_total 7.0
"""


def test_a_scrape_adds_up_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()

    def open_(address: str, timeout: float) -> BytesIO:
        asked.append((address, timeout))
        return BytesIO(METRICS.encode())

    monkeypatch.setattr(observed, "urlopen", open_)
    for url in ("http://a", "http://a/", "http://a/metrics", "http://a/metrics/"):
        assert scraped(url) == {
            "vllm:prefix_cache_hits_total": 42.5,
            'vllm:request_prompt_tokens_bucketle="10.0"': 9.0,
            'vllm:request_prompt_tokens_bucketle="+Inf"': 6.0,
            "vllm:plain": 1000.0,
        }
    assert asked == [("http://a/metrics", 10)] * 4


def counted(count: float, edges: dict[str, float], total: float, name: str = "prompt") -> dict[str, float]:
    key = f"vllm:request_{name}_tokens"
    return {f"{key}_count": count, f"{key}_sum": total} | {
        f'{key}_bucketle="{edge}"': value for edge, value in edges.items()
    }


def test_what_grew_between_two_scrapes() -> None:
    """Of 20 prompts 5 are in 0-10, 10 in 10-20 and 5 above, at 5, 15 and 30 tokens; their sum says 16 each. Of the
    answers all are in 0-10, and their sum says 4."""
    before = counted(3.0, {"10.0": 1.0, "20.0": 2.0, "+Inf": 3.0}, 50.0) | {"vllm:prefix_cache_queries_total": 10.0}
    prompts = counted(23.0, {"+Inf": 23.0, "10.0": 6.0, "20.0": 17.0}, 50.0 + 320.0)
    after = prompts | counted(20.0, {"10.0": 20.0, "+Inf": 20.0}, 80.0, "generation")
    found = between(before, after, 8.0)
    assert (found.requests, found.seconds, found.rate, found.sharing) == (20, 8.0, 2.5, None)
    assert (found.prompt_mean, found.output_mean, found.output_sd) == (16.0, 4.0, 1.0)
    assert found.prompt_sd == pytest.approx(sqrt((5 * 11**2 + 10 * 1**2 + 5 * 14**2) / 20))
    cache = {"vllm:prefix_cache_queries_total": 410.0, "vllm:prefix_cache_hits_total": 100.0}
    assert between(before, after | cache, 8.0).sharing == 0.25


def test_a_server_is_watched_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    scrapes = iter([counted(0.0, {}, 0.0), counted(20.0, {}, 40.0) | counted(20.0, {}, 60.0, "generation")])
    times, slept = iter([100.0, 104.0]), list[float]()
    monkeypatch.setattr(observed, "scraped", lambda _: next(scrapes))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    found = watched("http://a", 3.0, slept.append)
    assert (found.seconds, found.prompt_mean, found.output_mean, slept) == (4.0, 2.0, 3.0, [3.0])


def test_the_last_window_is_open_at_its_beginning(tmp_path: Path) -> None:
    """Of arrivals at 0, 1, … 40 s the last 20 s hold 21 to 40."""
    save(
        Workload.from_columns(arrival=np.arange(41.0), prompt_tokens=np.arange(1, 42), output_tokens=2),
        tmp_path / "a.jsonl",
    )
    assert last_window(tmp_path / "a.jsonl", 20.0).prompt_tokens.tolist() == list(range(22, 42))
    with pytest.raises(InputError, match=r"19 requests in the last 19 s: widen --window"):
        last_window(tmp_path / "a.jsonl", 19.0)


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
