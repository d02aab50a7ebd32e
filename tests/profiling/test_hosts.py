"""Hosts that measure collectives together: two launches of one command, which meet on this machine."""

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from profiling.test_measure import CONFIG, SMALL
from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.profiling.collectives import Hosts


def test_what_hosts_must_say() -> None:
    for words, message in (
        ((0,), "nnodes=0: must be ≥ 1"),
        ((2, 2, "here"), "node_rank=2: must be from 0 to 1 with nnodes=2"),
        ((2,), "nnodes=2: add --master-addr"),
    ):
        with pytest.raises(InputError, match=message):
            Hosts(*words)
    with pytest.raises(InputError, match="tensor_parallel_size=3: must be a multiple of nnodes=2, or 1"):
        Hosts(2, 0, "here").require_whole((1, 3))
    assert Hosts(2, 1, "here", 7).meeting(3, "place") == "tcp://here:10"
    assert Hosts().meeting(3, "place") == "file://place/meet"


@pytest.mark.long
def test_two_hosts_write_one_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of two processes, one on each host, and sends from one host to the other."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(CONFIG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = ["profile", "config.json", "--output", "mine", "--name", "here", "--threads", "1", *SMALL, "-tp", "2"]
    command += ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    other = subprocess.Popen([sys.executable, "-m", "windtunnel", *command, "--node-rank", "1"], env=dict(os.environ))
    assert main(command) == 0
    assert other.wait(timeout=300) == 0
    rows = {
        name: list(csv.DictReader((tmp_path / "mine/network/here" / f"{name}.csv").read_text().splitlines()))
        for name in ("all_reduce", "send_recv")
    }
    assert {row["devices_per_node"] for found in rows.values() for row in found} == {"1"}
    assert {row["num_workers"] for row in rows["all_reduce"]} == {"2"}
    assert "gpus_per_node = 1" in (tmp_path / "mine" / "device.toml").read_text()
