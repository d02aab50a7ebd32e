"""The documents of twenty unlike runs, to be compared before and after a change that must not move any figure.

``python -m benchmarks.unchanged.documents write before.json`` on one commit, ``… write after.json`` on another, then
``… compare before.json after.json``: figures that differ by more than 1e-9 of themselves are printed.
``NUMBA_DISABLE_JIT=1`` is quicker here than compiling ten schedulers.
"""

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windtunnel.cli import main

LLAMA = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--device", "h100_sxm", "--max-model-len", "4096")
EXPERTS = ("--model", "Qwen/Qwen3-30B-A3B", "--device", "h100_sxm", "-dp", "2", "--enable-expert-parallel")
LOAD = ("--random-input-len", "700", "--random-output-len", "60", "--random-range-ratio", "0.8", "--num-prompts", "60")
APART = ("--prefill", "replicas=2", "--decode", "replicas=1")
TIGHT = ("--num-gpu-blocks-override", "300")
RUNS: dict[str, tuple[str, ...]] = {
    "vllm": (*LLAMA, "--request-rate", "20"),
    "synchronous": (*LLAMA, "--no-async-scheduling", "--request-rate", "20"),
    "warm-up left out": (*LLAMA, "--request-rate", "20", "--exclude-warmup"),
    "bands": (*LLAMA, "--request-rate", "20", "--bands", "rate", "--goodput", "ttft:300", "tpot:20"),
    "preemptions": (*LLAMA, *TIGHT, "--request-rate", "40"),
    "replicas": (*LLAMA, "--replicas", "3", "--request-rate", "40", "--router", "least_outstanding"),
    "ranks": (*LLAMA, "-dp", "2", "--request-rate", "20"),
    "lockstep": (*EXPERTS, "--request-rate", "10"),
    "pipeline": (*LLAMA, "-pp", "2", "--request-rate", "20"),
    "closed loop": (*LLAMA, "--max-concurrency", "6"),
    "sessions": (*LLAMA, "--random-turns", "4", "--think-time", "0.5", "--request-rate", "5"),
    "shared beginnings": (*LLAMA, "--random-prefix-len", "512", "--random-num-prefixes", "3", "--request-rate", "20"),
    "sglang": (*LLAMA, "--engine", "sglang-0.5", "--request-rate", "20"),
    "sglang in lockstep": (*EXPERTS, "--engine", "sglang-0.5", "--request-rate", "6"),
    "sarathi": (*LLAMA, "--scheduler", "sarathi", "--request-rate", "20"),
    "vllm v0": (*LLAMA, "--scheduler", "vllm-0.8-v0", *TIGHT, "--request-rate", "20"),
    "pools": (*LLAMA, *APART, "--request-rate", "20"),
    "pools over a slow link": (*LLAMA, *APART, "--link", "bandwidth=2e9 latency=0.001", "--request-rate", "10"),
    "store": (*LLAMA, *TIGHT, "--random-turns", "3", "--store", "tier=host capacity=200e9", "--request-rate", "10"),
    "failures": (*LLAMA, "--replicas", "2", "--fail", "replica=0 at=1 down=1", "--request-rate", "20"),
}


def documents() -> dict[str, Any]:
    """What ``windtunnel run --json`` says of each."""
    found = {}
    for name, words in RUNS.items():
        bands = () if "--bands" in words else ("--no-bands",)
        page = io.StringIO()
        with contextlib.redirect_stdout(page):
            code = main(["run", *LOAD, *words, *bands, "--json"])
        assert code in (0, 1), name
        found[name] = json.loads(page.getvalue())
        sys.stderr.write(f"{name}\n")
    return found


def differences(one: Any, other: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(Where, value, value) of what is not the same, figures within 1e-9."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            yield from differences(one.get(key), other.get(key), f"{at}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{at}[{place}]")
    elif isinstance(one, float) and isinstance(other, float):
        if not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12):
            yield at, one, other
    elif one != other:
        yield at, one, other


def run(words: list[str]) -> int:
    """Write or compare; the exit code says whether anything differs."""
    if words[0] == "write":
        Path(words[1]).write_text(json.dumps(documents(), indent=1), encoding="utf-8")
        return 0
    one, other = (json.loads(Path(path).read_text(encoding="utf-8")) for path in words[1:3])
    found = list(differences(one, other))
    for line in found:
        sys.stdout.write(f"{line[0]}: {line[1]!r} {line[2]!r}\n")
    sys.stdout.write(f"{len(found)} figures of {len(one)} runs differ\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
