"""What watches a server watches a simulated one: Prometheus, the queries of vLLM's board, and an autoscaler's rule."""

import json
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from serve.endpoint import app, deployment, live, on_a_socket, real_time
from windtunnel.deployment import SLO
from windtunnel.serve.client import measured
from windtunnel.serve.observed import scraped
from windtunnel.serve.place import Place
from windtunnel.workload import Workload

DEPLOY = Path(__file__).parents[2] / "deploy"
QUANTILES = (0.5, 0.9, 0.95, 0.99)
HISTOGRAMS = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
LOAD = Workload.from_columns(
    arrival=[0.05 * k for k in range(60)], prompt_tokens=[100 + k for k in range(60)], output_tokens=20
)


def board(window: str) -> list[str]:
    """The queries that vLLM's Grafana board makes, over the metrics that it shows."""
    of = '{model_name="small"}'
    found = [
        f"histogram_quantile({level}, sum by(le) (rate(vllm:{name}_bucket{of}[{window}])))"
        for name in HISTOGRAMS
        for level in QUANTILES
    ]
    found += [f"rate(vllm:{name}_sum{of}[{window}]) / rate(vllm:{name}_count{of}[{window}])" for name in HISTOGRAMS]
    found += [f"rate(vllm:{name}_tokens_total{of}[{window}])" for name in ("prompt", "generation")]
    found += [f"vllm:{name}{of}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    found += [
        f"sum by(le) (increase(vllm:request_{name}_tokens_bucket{of}[{window}]))" for name in ("prompt", "generation")
    ]
    found += [f"sum by(finished_reason) (increase(vllm:request_success_total{of}[{window}]))"]
    parts = ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "max_num_generation_tokens")
    return found + [f"rate(vllm:request_{name}_sum{of}[{window}])" for name in parts]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes this target every 0.2 s."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    settings = {
        "global": {"scrape_interval": "200ms"},
        "scrape_configs": [{"job_name": "served", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with Place(port=0).bind() as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}")
    with subprocess.Popen([binary, *flags, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def asked(url: str, query: str) -> list[float]:
    """The values that a query finds."""
    with urlopen(f"{url}/api/v1/query?{urlencode({'query': query})}", timeout=10) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    return [float(row["value"][1]) for row in found["data"]["result"]]


def until(url: str, query: str, least: float) -> None:
    """Wait until a query finds at least this."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if sum(asked(url, query)) >= least:
                return
        except OSError:
            pass
        time.sleep(0.2)
    pytest.fail(f"{query}: never {least}")


@pytest.mark.long
def test_a_real_prometheus_answers_what_the_board_asks(tmp_path: Path) -> None:
    with on_a_socket(app(clock=real_time())) as url, prometheus(tmp_path, url.removeprefix("http://")) as found:
        until(found, "up", 1)
        seen = measured(url, "small", LOAD, 0, SLO())
        until(found, "sum(vllm:request_success_total)", 60)
        for query in board("60s"):
            values = asked(found, query)
            assert values, query
            assert all(math.isfinite(value) and value >= 0 for value in values), query
        assert asked(found, "sum(vllm:generation_tokens_total)") == [1200.0]
        assert asked(found, "sum(vllm:prompt_tokens_total)") == [float(LOAD.prompt_tokens.sum())]
        assert asked(found, 'vllm:request_success_total{finished_reason="length"}') == [60.0]
        mean = asked(found, "vllm:e2e_request_latency_seconds_sum / vllm:e2e_request_latency_seconds_count")[0]
        assert mean <= seen["e2el"]["mean"]  # the client's path comes on top


def rule() -> tuple[str, float, int]:
    """Metric, target per replica and most replicas of the autoscaler that the manifests have."""
    documents = [one for path in DEPLOY.rglob("*.yaml") for one in yaml.safe_load_all(path.read_text()) if one]
    spec = next(one["spec"] for one in documents if one.get("kind") == "HorizontalPodAutoscaler")
    metric = spec["metrics"][0]["pods"]
    return metric["metric"]["name"], float(metric["target"]["averageValue"]), int(spec["maxReplicas"])


def test_an_autoscalers_rule_scales_simulated_replicas() -> None:
    """Kubernetes' rule, ceil(replicas x mean / target), sees queues of one replica and has others started."""
    name, target, most = rule()
    name = name.replace("vllm_", "vllm:", 1)
    slow = deployment(max_num_seqs=1)
    live(slow).warm_up()  # what is compiled is, before somebody waits for it
    count = int(4 * target)
    load = Workload.from_columns(prompt_tokens=[100] * count, output_tokens=10)
    clock = real_time(0.001)  # until the queue has been seen, however busy the machine is
    with ExitStack() as servers:
        replicas = [servers.enter_context(on_a_socket(app(live(slow), clock)))]
        first = threading.Thread(target=measured, args=(replicas[0], "small", load, 0, SLO()))
        first.start()
        deadline = time.monotonic() + 20
        while (waiting := scraped(replicas[0])[name]) < count - 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        wanted = min(math.ceil(len(replicas) * waiting / len(replicas) / target), most)
        clock.speed = 10.0
        assert wanted == min(4, most)
        replicas += [servers.enter_context(on_a_socket(app(live(slow), real_time()))) for _ in range(wanted - 1)]
        for url in replicas[1:]:
            few = Workload.from_columns(prompt_tokens=[100] * 2, output_tokens=3)
            assert measured(url, "small", few, 0, SLO())["requests"]["finished"] == 2
        first.join()
        assert sum(scraped(url)[name] for url in replicas) == 0
