"""Compose and units: every server of a node has GPUs and ports of its own, by scripts that a shell takes."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from report.manifests.fleets import apart, mixed, nodes
from windtunnel.report.launch_files import launch_files
from windtunnel.report.manifests.compose import compose
from windtunnel.report.manifests.systemd import systemd


def test_full_nodes_and_the_last_one_have_files_of_their_own() -> None:
    fleet = mixed(6)
    found = compose(fleet.spec(), nodes(fleet))
    assert set(found) == {"node.compose.yaml", "node-last.compose.yaml", "front.compose.yaml", "nginx.conf"}
    services = yaml.safe_load(found["node.compose.yaml"])["services"]
    reserved = [each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for each in services.values()]
    assert reserved == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert [each["healthcheck"]["test"][-1] for each in services.values()] == [
        f"http://127.0.0.1:{8000 + slot}/health" for slot in range(4)
    ]
    assert list(yaml.safe_load(found["node-last.compose.yaml"])["services"]) == ["node-0", "node-1"]
    assert found["nginx.conf"] == launch_files(fleet.spec(), [8])["nginx.conf"]


def test_a_dollar_reaches_the_shell() -> None:
    fleet = apart()
    services = yaml.safe_load(compose(fleet.spec(), nodes(fleet))["prefill.compose.yaml"])["services"]
    (text,) = services["prefill-1"]["command"]
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=$$(hostname -i) VLLM_NIXL_SIDE_CHANNEL_PORT=5604" in text
    assert text.rstrip().endswith("--port 8001")


@pytest.mark.parametrize("slot", [0, 3])
def test_a_unit_starts_the_server_of_its_place(tmp_path: Path, slot: int) -> None:
    fleet = mixed(6)
    found = systemd(fleet.spec(), nodes(fleet))
    assert set(found) == {"server.sh", "server@.service", "nginx.conf", "front.service"}
    (tmp_path / "server.sh").write_text(found["server.sh"])
    (tmp_path / "vllm").write_text('#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES $*"\n')
    (tmp_path / "vllm").chmod(0o755)
    words = ("bash", str(tmp_path / "server.sh"), str(slot))
    told = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(words, env=told, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{2 * slot},{2 * slot + 1} serve meta-llama/Llama-3.1-8B")
    assert done.stdout.endswith(f"--port {8000 + slot}\n")
    unit = found["server@.service"]
    assert "systemctl enable --now server@{0..3}" in unit
    assert "http://127.0.0.1:800%i/health" in unit
