"""watch: another plan for the load that is there, and whom it tells. And serve, with replicas that come and go."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from serve.endpoint import client
from serve.test_front import DEFAULT_METRICS

from windtunnel.cli import main
from windtunnel.cli.live.replan import Replanned
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.workload import Both, Fixed, Poisson, generate, save

DEPLOY = Path(__file__).parents[2] / "deploy"
PLAN = ["Qwen/Qwen3-8B", "--perf", "roofline", "--max-num-seqs", "4", "--random-input-len", "1000"]
PLAN += ["--random-output-len", "50", "--num-prompts", "200", "--request-rate", "4", "--goodput", "ttft:400", "tpot:20"]


@pytest.fixture
def today(tmp_path: Path) -> str:
    """Ten times the planned rate, with shorter prompts."""
    save(generate(Poisson(40.0), Both(Fixed(500), Fixed(50)), 200, seed=1), tmp_path / "today.jsonl")
    return str(tmp_path / "today.jsonl")


@contextmanager
def listening() -> Iterator[tuple[str, list[Any]]]:
    """An Alertmanager that only remembers what it is told."""
    heard: list[Any] = []

    class Manager(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            """Nothing on the screen."""

    server = HTTPServer(("127.0.0.1", 0), Manager)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heard
    finally:
        server.shutdown()
        server.server_close()


def test_another_plan_says_what_to_change_and_when_it_pays(today: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["watch", today, *PLAN, "--window", "60", "--replan", "--confidence", "0.5", "--json"]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)["plan"]
    assert "max_num_seqs" in found["changes"]
    price = found["price_per_hour"]
    assert price["best"] < price["same_settings"]
    wanted = price["best"] * 300 / 3600 / (price["same_settings"] - price["best"])
    assert found["pays_after_hours"] == pytest.approx(wanted)


def test_the_sentences() -> None:
    def servers(replicas: int, seqs: int) -> Deployment:
        pool = Pool(load_model("Qwen/Qwen3-8B"), device("h100"), Engine(max_num_seqs=seqs), replicas)
        return Deployment((pool,), "round_robin")

    now, same, best = servers(2, 16), servers(9, 16), servers(4, 256)
    lines = Replanned(40.0, now, same, best, 360.0, 0.9).lines()
    assert lines[0] == "plan for 40 requests/s, to hold on 90 % of servers:"
    assert lines[1] == "  max_num_seqs: 16 → 256"
    assert lines[2] == "  replicas: 2 → 4"
    hours = best.price_per_hour * 0.1 / (same.price_per_hour - best.price_per_hour)
    assert f"pays after {hours:.1f} h, with 360 s in which old and new servers run" in lines[3]
    assert "keep their settings" in Replanned(40.0, now, same, same, 360.0, 0.9).lines()[-1]
    assert "no number of the servers as they are" in Replanned(40.0, now, None, best, 360.0, 0.9).lines()[-1]
    assert Replanned(40.0, now, None, None, 360.0, 0.9).lines() == [
        "plan: nothing that was searched keeps the goals at 40 requests/s"
    ]


def test_alertmanager_and_prometheus_are_told(today: str, tmp_path: Path) -> None:
    file = tmp_path / "watch.prom"
    with listening() as (url, heard):
        assert main(["watch", today, *PLAN, "--window", "60", "--alertmanager", url, "--metrics", str(file)]) == 1
        assert main(["watch", today, *PLAN[:-3], "--window", "60", "--alertmanager", url, "--replicas", "8"]) == 0
    (path, (broken,)), (_, (holds,)) = heard
    assert path == "/api/v2/alerts"
    assert broken["labels"] == holds["labels"], "or it would be another alert, that never ends"
    assert "endsAt" in holds
    assert "endsAt" not in broken
    assert "replicas would meet the goals" in broken["annotations"]["description"]
    text = file.read_text()
    assert 'windtunnel:plan_holds{model_name="Qwen/Qwen3-8B"} 0\n' in text
    assert 'windtunnel:simulated_ttft_seconds{model_name="Qwen/Qwen3-8B",quantile="0.99"}' in text


def test_the_board_and_the_rules_ask_for_what_is_written(today: str, tmp_path: Path) -> None:
    """By names: ours as watch writes them, vLLM's as the test of its server lists them."""
    file = tmp_path / "watch.prom"
    main(["watch", today, *PLAN, "--window", "60", "--metrics", str(file)])
    exported = set(re.findall(r"^# TYPE (\S+)", file.read_text(), re.M)) | {f"vllm:{name}" for name in DEFAULT_METRICS}
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [rule["expr"] for rule in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]]
    for name in {name for text in asked for name in re.findall(r"(?:vllm|windtunnel):\w+", text)}:
        assert re.sub("_(bucket|total)$", "", name) in exported
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--alertmanager", "http://127.0.0.1:9"], "takes no alerts"),
        (["--replan", "--startup", "-1"], "startup=-1"),
        (["--replan", "--prefill", "", "--decode", ""], "pools are not searched again"),
    ],
)
def test_bad_input_is_one_line(today: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", today, *PLAN, "--window", "60", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


SCALED = ["serve", "Qwen/Qwen3-0.6B", "--perf", "roofline", "--max-num-seqs", "2", "--port", "0", "--virtual-time"]


@pytest.mark.parametrize("clients", [2, 20])
def test_served_replicas_come_when_they_are_needed(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients have a seat each of the one replica that is up; of twenty the others wait, and two more come."""
    served: list[Any] = []
    monkeypatch.setattr("windtunnel.serve.server.listen", lambda *given: served.append(given))
    scale = "least=1 most=3 interval=0.2 startup=0.1 queue_up=0.01 queue_down=0.001"
    assert main([*SCALED, "--autoscale", scale]) == 0
    ((app, _, line, _),) = served
    assert line.startswith("Qwen/Qwen3-0.6B on http://127.0.0.1:")

    async def talk() -> tuple[list[int], list[float]]:
        async def one(number: int) -> list[int]:
            body = {"prompt": f"{number} " * 100, "max_tokens": 200}
            return [(await found.post("/v1/completions", json=body)).status_code for _ in range(3)]

        async with client(app) as found:
            codes = await asyncio.gather(*map(one, range(clients)))
            text = (await found.get("/metrics")).text
        ended = re.findall(r'^vllm:request_success_total.engine="(\d)",finished_reason="length".* (\S+)$', text, re.M)
        return [code for several in codes for code in several], [float(count) for _, count in sorted(ended)]

    codes, ended = asyncio.run(talk())
    assert codes == [200] * 3 * clients and sum(ended) == 3 * clients
    assert len(ended) == 3 and [count > 0 for count in ended] == [True, clients > 2, clients > 2]
