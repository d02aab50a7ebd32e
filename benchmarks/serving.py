"""A served load as its clients see it, beside a run of its record.

``python -m benchmarks.serving --streams 10 100 1000 --requests 3 --tokens 150`` starts ``windtunnel serve`` with each
number of streams in turn, sends so many requests on each, and replays what was recorded. Clients are raw sockets in
this process; the column ``echo`` is what they see of a server of raw sockets, in a process of its own, that simulates
nothing: it answers each request at once with its first word, and with a second one after the latency of the run. On a
busy machine the latencies are the machine's. Equal answers end together, so that the next requests come in waves;
``--unlike``: answers of half to one and a half times as many tokens.

``--virtual-time 100000`` sends so many requests of 20 tokens, whole, over each number of kept connections to a server
that waits for nothing, and prints what it needs for them.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.serving_clients import question, talk
from windtunnel.scenario import Scenario, Server
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import load_trace

MODEL = "Qwen/Qwen3-8B"


ECHO = """
import asyncio, random, sys
HEAD = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
WORD = b'26\\r\\ndata: {"choices": [{"text": "word"}]}\\n\\n\\r\\n'

async def answer(reader, writer):
    while await reader.readline():
        await reader.readuntil(b"ignore_eos")
        await reader.readuntil(b"}")
        writer.write(HEAD + WORD)
        await asyncio.sleep(random.uniform(*map(float, sys.argv[1:])))
        writer.write(WORD + b"0\\r\\n\\r\\n")
    writer.close()

async def serve():
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(serve())
"""


def asked(requests: int, tokens: Callable[[int], int]) -> Callable[[int], bytes | None]:
    """So many questions, for answers of so many tokens, each by its number."""
    all_ = [question(number, tokens(number)) for number in range(requests)]
    return lambda number: all_[number] if number < requests else None


def unlike(streams: int, tokens: int) -> Callable[[int], int]:
    """Lengths of answers from half to one and a half times as many tokens, of the first ones from one on, so that
    streams do not end together."""
    rng = np.random.default_rng(1)
    return lambda number: int(rng.integers(1 if number < streams else tokens // 2, 3 * tokens // 2 + 1))


async def ask_whole(port: int, numbers: Iterator[int], tokens: int) -> None:
    """Requests one after the other on a connection that stays."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in numbers:
        body = json.dumps({"prompt": f"{number} {'word' * 50}", "max_tokens": tokens, "ignore_eos": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head[:20]:
            raise RuntimeError(head.decode())
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
    writer.close()


async def ask_all(port: int, requests: int, connections: int, tokens: int) -> float:
    """Seconds for all requests."""
    numbers, begun = iter(range(requests)), time.monotonic()
    await asyncio.gather(*(ask_whole(port, numbers, tokens) for _ in range(connections)))
    return time.monotonic() - begun


def virtual(connections: int, requests: int) -> str:
    """A line of the table of a server that waits for nothing; what it used is read from Linux."""
    command = [sys.executable, "-m", "windtunnel", "serve", MODEL, "--port", "0", "--virtual-time"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline().rpartition(":")[2])
            asyncio.run(ask_all(port, 200, connections, 20))
            before, resident = used(server.pid)
            seconds = asyncio.run(ask_all(port, requests, connections, 20))
            after, grown = used(server.pid)
        finally:
            server.terminate()
    cpu = after - before
    memory = f"{resident:.0f} → {grown:.0f}"
    return f"| {connections} | {requests:,} | {requests / seconds:,.0f} | {requests / cpu:,.0f} | {memory} |"


def used(process: int) -> tuple[float, float]:
    """CPU seconds of a process, and its memory in MB."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def echoed(streams: int, requests: int, least: float, most: float) -> float:
    """The mean time to the first word that the same clients see of a server that simulates nothing, and whose answers
    last so many seconds at least and at most."""
    command = [sys.executable, "-c", ECHO, str(least), str(most)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            answers = talk(int(server.stdout.readline()), streams, asked(requests, lambda _: 2)).table()
        finally:
            server.terminate()
    return float((answers["first"] - answers["sent"]).mean())


def measured(streams: int, requests: int, tokens: int, spread: bool, folder: Path) -> str:
    """A line of the table; ``spread``: of answers of unlike lengths."""
    lengths = unlike(streams, tokens) if spread else lambda _: tokens
    record = folder / f"{streams}.jsonl"
    command = [sys.executable, "-m", "windtunnel", "serve", MODEL, "--port", "0", "--record", str(record)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline().rpartition(":")[2])
            answers = talk(port, streams, asked(streams * requests, lengths)).table()
        finally:
            server.terminate()
    rows = simulate(Scenario(Server(MODEL)).deployment(), load_trace(record)).requests
    simulated = (rows.first_token - rows.arrival).mean(), (rows.finish - rows.arrival).mean()
    seen = (answers["first"] - answers["sent"]).mean(), (answers["last"] - answers["sent"]).mean()
    pairs = [f"{mine * 1e3:.1f} | {theirs * 1e3:.1f}" for mine, theirs in zip(simulated, seen, strict=True)]
    share, e2el = 0.5 if spread else 0.0, float(simulated[1])
    echo = echoed(streams, streams * requests, (1 - share) * e2el, (1 + share) * e2el)
    tpots = [(pair[1] - pair[0]) / (rows.output_tokens.mean() - 1) * 1e3 for pair in (simulated, seen)]
    rate = answers["tokens"].sum() / (answers["last"].max() - answers["sent"].min())
    return f"| {streams} | {rate:.0f} | {pairs[0]} | {echo * 1e3:.1f} | {tpots[0]:.3f} | {tpots[1]:.3f} | {pairs[1]} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--unlike", action="store_true")
    parser.add_argument("--virtual-time", type=int, metavar="REQUESTS")
    words = parser.parse_args()
    if words.virtual_time:
        print("| connections | requests | requests/s | requests per CPU-s of the server | its memory, MB |")
        print("|--:|--:|--:|--:|--:|")
        for connections in words.streams:
            print(virtual(connections, words.virtual_time), flush=True)
        return
    print("| streams | tokens/s | TTFT, ms: run | clients | echo | TPOT: run | clients | E2EL: run | clients |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for streams in words.streams:
            print(measured(streams, words.requests, words.tokens, words.unlike, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
