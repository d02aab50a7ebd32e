"""From a server with host overheads that are known to a validated simulator: what ``proxy`` and ``calibrate`` find.

``python -m benchmarks.serving_proxy`` starts ``windtunnel serve`` with overheads planted, ``windtunnel proxy`` before
it, and sends a load through both, from 2 to 32 streams. ``windtunnel validate`` then says how far a
simulation with the planted overheads is from what the proxy measured, and ``windtunnel calibrate`` looks for them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.serving_clients import question, talk

SERVER = ["meta-llama/Llama-3.1-70B", "-tp", "4"]
PLANTED = {"serial": 10e-3, "serial_per_sequence": 300e-6}
STREAMS = 2, 4, 8, 16, 32
"""Batches of many sizes, without which nothing tells what a step costs from what a request in it does."""
WINDTUNNEL = [sys.executable, "-m", "windtunnel"]


@contextmanager
def running(*command: str) -> Iterator[int]:
    """The port at which a command listens; it is interrupted at the end, as a user would."""
    with subprocess.Popen([*WINDTUNNEL, *command, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().rpartition("127.0.0.1:")[2].partition(",")[0])
        finally:
            process.terminate()
            process.stdout.read()


def send(port: int, streams: int, requests: int, seed: int) -> None:
    """So many requests with prompts of 1000 to 3000 tokens and answers of 50 to 150, from so many streams."""
    rng = np.random.default_rng(seed)

    def ask(number: int) -> bytes | None:
        if number >= requests:
            return None
        prompt = rng.bytes(int(rng.integers(1000, 3001)) * 2).hex()
        return question(number, int(rng.integers(50, 151)), prompt)

    talk(port, streams, ask)


def said(*command: str) -> str:
    """What a command prints; what it says of its progress is not shown."""
    return subprocess.run([*WINDTUNNEL, *command], stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=80, help="from each number of streams")
    parser.add_argument("--output", type=Path, help="new folder for what was measured")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = words.output or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        planted, found = folder / "planted.yaml", folder / "found.yaml"
        planted.write_text(yaml.safe_dump({"schema_version": 1, "host": PLANTED}))
        run = str(folder / "measured")
        with (
            running("serve", *SERVER, "--calibration", str(planted)) as port,
            running("proxy", f"http://127.0.0.1:{port}", "--model", *SERVER, "--output", run) as passed,
        ):
            for seed, streams in enumerate(STREAMS):
                send(passed, streams, words.requests, seed)
        report(json.loads(said("validate", run, "--calibration", str(planted), "--json")))
        said("calibrate", run, "--output", str(found))
        print("| seconds a step | planted | found |\n|---|--:|--:|")
        for key, value in yaml.safe_load(found.read_text())["host"].items():
            print(f"| {key} | {PLANTED.get(key, 0.0):g} | {value:g} |")


def report(found: dict[str, Any]) -> None:
    """Means of what the proxy measured, and of the simulation."""
    print("| ms, mean | measured | simulated | error |\n|---|--:|--:|--:|")
    for name in ("ttft", "tpot", "e2el"):
        measured, simulated = (found[name][side]["mean"] * 1e3 for side in ("measured", "simulated"))
        print(f"| {name} | {measured:.2f} | {simulated:.2f} | {found[name]['error']['mean']:+.2%} |")


if __name__ == "__main__":
    main()
