"""A load that a served model bears for minutes: whether its clock keeps up, and whether its memory grows.

``python -m benchmarks.serving_long --streams 1000 --minutes 10 --replicas 4`` keeps so many streams under way, each
asking anew when it is answered, and replays the record. A token is late by what lies between the moment at which the
replay has it and that at which a client read it; the first and the last token of every answer are looked at. Both
clocks are the machine's, and the server's start is what makes the promptest request arrive when it was sent.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving import MODEL, used
from benchmarks.serving_clients import question, talk
from windtunnel.scenario import Scenario, Server
from windtunnel.simulate.run import Requests
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import load_trace


def for_minutes(minutes: float, streams: int, tokens: int) -> Callable[[int], bytes | None]:
    """What is asked: answers of half to one and a half times as many tokens, the first ones shorter, so that streams
    do not end together."""
    rng, end = np.random.default_rng(1), time.monotonic() + 60 * minutes

    def ask(number: int) -> bytes | None:
        if time.monotonic() > end:
            return None
        least = 1 if number < streams else tokens // 2
        return question(number, int(rng.integers(least, 3 * tokens // 2 + 1)))

    return ask


def watched(process: int, found: list[tuple[float, float, float]], stop: threading.Event) -> None:
    """Note the time, CPU seconds and MB of a process every few seconds."""
    while True:
        found.append((time.monotonic(), *used(process)))
        if stop.wait(5.0):
            return


def main() -> None:
    """Print a line for each minute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--replicas", type=int, default=4)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "load.jsonl"
        command = [sys.executable, "-m", "windtunnel", "serve", MODEL, "--port", "0", "--record", str(record)]
        command += ["--replicas", str(words.replicas), "--router", "least_outstanding"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                port = int(server.stdout.readline().rpartition(":")[2])
                samples, stop = list[tuple[float, float, float]](), threading.Event()
                watcher = threading.Thread(target=watched, args=(server.pid, samples, stop))
                watcher.start()
                try:
                    answers = talk(port, words.streams, for_minutes(words.minutes, words.streams, words.tokens))
                finally:
                    stop.set()
                    watcher.join()
            finally:
                server.terminate()
        deployment = Scenario(Server(MODEL), replicas=words.replicas, router="least_outstanding").deployment()
        report(answers.table(), np.array(samples), simulate(deployment, load_trace(record)).requests)


def report(seen: NDArray[np.void], samples: NDArray[np.float64], run: Requests) -> None:
    """By minute: tokens a second, how late they were, the server's share of a CPU and its memory."""
    seen = np.sort(seen, order="key")
    mine = np.searchsorted(run.arrival, seen["key"])
    assert np.array_equal(run.arrival[mine], seen["key"])
    first, finish, tokens = run.first_token[mine], run.finish[mine], run.output_tokens[mine]
    start, begun = (seen["sent"] - seen["key"]).max(), seen["sent"].min()
    times = np.concatenate([seen["first"], seen["last"]])
    late = (times - start - np.concatenate([first, finish])) * 1e3
    print("| minute | tokens/s | late, ms: median | 95 % | 99 % | most | server: CPU | MB |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for k in range(int((times.max() - begun) // 60) + 1):
        within = (times - begun) // 60 == k
        made = tokens[(seen["last"] - begun) // 60 == k].sum() / min(60.0, times.max() - begun - 60 * k)
        taken = samples[(samples[:, 0] - begun) // 60 == k]
        busy = np.diff(taken[[0, -1], 1])[0] / max(np.diff(taken[[0, -1], 0])[0], 1e-9) if len(taken) else np.nan
        memory = samples[samples[:, 0] < begun + 60 * (k + 1)][-1, 2]
        print(f"| {k + 1} | {made:.0f} | {quantiles(late[within])} | {busy:.2f} | {memory:.0f} |")
    rate = 1.0 / np.mean((finish - first)[tokens > 1] / (tokens[tokens > 1] - 1))
    print(f"all: {quantiles(late)}; {rate:.1f} tokens/s a stream in the run, {len(seen)} answers")


def quantiles(values: NDArray[np.float64]) -> str:
    """Cells of the table."""
    return " | ".join(f"{value:.2f}" for value in np.quantile(values, (0.5, 0.95, 0.99, 1.0)))


if __name__ == "__main__":
    main()
