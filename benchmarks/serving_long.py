"""A load that a served model bears for minutes: whether its clock keeps up, and whether its memory grows.

``python -m benchmarks.serving_long --streams 1000 --minutes 10 --replicas 4 --rate 50`` keeps so many streams under
way, each asking anew when it is answered. ``--rate``: tokens a second of each, at which a speed of the clock holds them
that a simulation of the load finds; without it the clock is the wall's. By minute it says

- how late tokens were handed out: written to the last connection of their step, by the simulated clock against the
  wall's (``windtunnel:token_lateness_seconds``; between the edges of its buckets values are taken to lie evenly);
- how late they were read, by clients in a process of their own, which is as busy: what lies between the moment at which
  a replay of the record has a token and that at which a client read it, for the first and the last one of each answer.
  Both clocks are the machine's, and the server's start is what makes the promptest request arrive when it was sent;
- the server's share of a CPU and its memory.

All are milliseconds of the wall's clock.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving import MODEL, unlike, used
from benchmarks.serving_clients import question, talk
from windtunnel.deployment import Deployment
from windtunnel.scenario import Scenario, Server
from windtunnel.simulate.run import Requests
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload, load_trace


def for_minutes(minutes: float, streams: int, tokens: int) -> Callable[[int], bytes | None]:
    """What is asked: answers of unlike lengths."""
    lengths, end = unlike(streams, tokens), time.monotonic() + 60 * minutes

    def ask(number: int) -> bytes | None:
        if time.monotonic() > end:
            return None
        return question(number, lengths(number))

    return ask


@dataclass(frozen=True)
class Sample:
    """A server at a moment."""

    time: float
    cpu: float
    """Seconds."""
    memory: float
    """MB."""
    tokens: float
    edges: NDArray[np.float64]
    """Simulated seconds of lateness."""
    counts: NDArray[np.float64]
    """Tokens that were not later."""


def sampled(process: int, port: int) -> Sample:
    """What a server has used, and what its metrics say."""
    now, (cpu, memory) = time.monotonic(), used(process)
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
    tokens = sum(float(value) for name, _, value in lines if name.startswith("vllm:generation_tokens_total"))
    late = [(name.split('"')[1], value) for name, _, value in lines if "token_lateness_seconds_bucket" in name]
    edges, counts = np.array(late, dtype=np.float64).T
    return Sample(now, cpu, memory, tokens, edges, counts)


def watched(process: int, port: int, found: list[Sample], stop: threading.Event) -> None:
    """Sample a server every minute, and at the end."""
    found.append(sampled(process, port))
    while not stop.wait(60.0):
        found.append(sampled(process, port))
    found.append(sampled(process, port))


def speed_for(rate: float, streams: int, tokens: int, deployment: Deployment) -> float:
    """How fast the clock must go for streams to get so many tokens a second: by a simulation of a closed loop, whose
    prompts begin alike, as those of ``question`` do."""
    rng = np.random.default_rng(1)
    outputs = rng.integers(tokens // 2, 3 * tokens // 2 + 1, 4 * streams)
    load = Workload.from_columns(
        prompt_tokens=230,
        output_tokens=outputs,
        hash_ids=[range(14)] * len(outputs),
        hash_block_size=16,
        max_concurrency=streams,
    )
    rows = simulate(deployment, load).requests
    end = np.sort(rows.finish)[-streams]  # after it, fewer are under way
    within = np.clip((end - rows.arrival) / (rows.finish - rows.arrival), 0.0, 1.0)
    return float(rate * streams * end / (rows.output_tokens * within).sum())


def main() -> None:
    """Print a line for each minute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rate", type=float)
    words = parser.parse_args()
    deployment = Scenario(Server(MODEL), replicas=words.replicas, router="least_outstanding").deployment()
    speed = speed_for(words.rate, words.streams, words.tokens, deployment) if words.rate else 1.0
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "load.jsonl"
        command = [sys.executable, "-m", "windtunnel", "serve", MODEL, "--port", "0", "--record", str(record)]
        command += ["--replicas", str(words.replicas), "--router", "least_outstanding", "--speed", repr(speed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                port = int(server.stdout.readline().rpartition(":")[2])
                samples, stop = list[Sample](), threading.Event()
                watcher = threading.Thread(target=watched, args=(server.pid, port, samples, stop))
                watcher.start()
                try:
                    answers = talk(port, words.streams, for_minutes(words.minutes, words.streams, words.tokens))
                finally:
                    stop.set()
                    watcher.join()
            finally:
                server.terminate()
        report(answers.table(), samples, simulate(deployment, load_trace(record)).requests, speed)


def report(seen: NDArray[np.void], samples: list[Sample], run: Requests, speed: float) -> None:
    """By minute: tokens a second, how late they were handed out and read, the server's share of a CPU and memory."""
    seen = np.sort(seen, order="key")
    mine = np.searchsorted(run.arrival, seen["key"])
    assert np.array_equal(run.arrival[mine], seen["key"])
    start = (seen["sent"] - seen["key"] / speed).max()
    times = np.concatenate([seen["first"], seen["last"]])
    due = np.concatenate([run.first_token[mine], run.finish[mine]]) / speed
    late = (times - start - due) * 1e3
    print(f"clock at {speed:.4f} of the wall's")
    print("| minute | tokens/s | handed out late, ms: median | 99 % | in 5 ms | read late: median | 99 % | CPU | MB |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for k, (before, after) in enumerate(pairwise(samples)):
        read = late[(times >= before.time) & (times < after.time)]
        print(f"| {k + 1} | {row(before, after, speed, read)} |")
    first, last = samples[0], samples[max(-2, 1 - len(samples))]  # less the time in which the last streams end
    print(f"| all | {row(first, last, speed, late)} |")
    print(f"{(last.cpu - first.cpu) / (last.tokens - first.tokens) * 1e6:.1f} µs of CPU a token, {len(seen)} answers")


def row(before: Sample, after: Sample, speed: float, read: NDArray[np.float64]) -> str:
    """Cells of the table, of what lies between two samples."""
    seconds, counts = after.time - before.time, after.counts - before.counts
    edges = np.concatenate([[0.0], np.minimum(after.edges, 2 * after.edges[-2])]) / speed * 1e3
    shares = np.concatenate([[0.0], counts]) / counts[-1]
    median, most = np.interp((0.5, 0.99), shares, edges)
    handed = f"{median:.2f} | {most:.2f} | {np.interp(5.0, edges, shares):.2%}"
    found = " | ".join(f"{value:.2f}" for value in np.quantile(read, (0.5, 0.99))) if len(read) else " | "
    busy = (after.cpu - before.cpu) / seconds
    return f"{(after.tokens - before.tokens) / seconds:.0f} | {handed} | {found} | {busy:.2f} | {after.memory:.0f}"


if __name__ == "__main__":
    main()
