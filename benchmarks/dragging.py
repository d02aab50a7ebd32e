"""How long a dragged slider of ``windtunnel ui`` waits for new figures, in headless Chromium.

``python -m benchmarks.dragging --requests 5000 --moves 60`` starts the page, moves the sliders of rate, batch, token
budget and tensor parallel size stop by stop, and measures from the event of the slider until the new figures are drawn:
those of the first requests (``small``), of the whole load (``whole``), and with the ends of their bands (``ends``).
Every move waits for the figures of the one before it. On a busy machine the times are the machine's: the seconds of CPU
of the server are printed beside them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.browser import Page, chromium

STAGES = ("small", "whole", "ends")
SLIDERS = {"request_rate": 12, "max_num_seqs": 3, "max_num_batched_tokens": 3, "tensor_parallel_size": 1}
"""Words whose sliders are moved → how many stops there and back."""
WATCH = """
window.seen = [];
document.addEventListener("input", () => { window.moved = performance.now(); }, true);
window.addEventListener("figures", (event) => {
  const {stage} = event.detail, moved = window.moved;
  requestAnimationFrame(() => setTimeout(() => window.seen.push([stage, performance.now() - moved])));
});
"""
MOVE = """new Promise((done) => {
  window.seen = [];
  const slider = document.querySelector('[data-word="%s"]');
  slider.value = Number(slider.value) + (%d);
  slider.dispatchEvent(new Event("input", {bubbles: true}));
  const ended = () => window.seen.some(([stage]) => stage === "ends");
  const look = () => ended() ? done(JSON.stringify(window.seen)) : setTimeout(look, 5);
  look();
})"""


@contextmanager
def served(requests: int) -> Iterator[tuple[str, int]]:
    """The page's address and the server's process."""
    load = ("--num-prompts", str(requests), "--request-rate", "8", "--goodput", "ttft:300", "tpot:50")
    command = (sys.executable, "-m", "windtunnel", "ui", "Qwen/Qwen3-32B", "-tp", "2", "--port", "0", *load)
    process = subprocess.Popen(
        (*command, "--max-num-seqs", "256", "--max-num-batched-tokens", "8192"), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(process: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def drag(page: Page, moves: int) -> dict[str, list[float]]:
    """Milliseconds from each move to the figures of each stage."""
    found: dict[str, list[float]] = {stage: [] for stage in STAGES}
    turns = [(word, turn) for word, stops in SLIDERS.items() for turn in (*[1] * stops, *[-1] * stops)]
    for word, turn in (turns * (1 + moves // len(turns)))[:moves]:
        for stage, milliseconds in json.loads(page.run(MOVE % (word, turn))):
            found[stage].append(milliseconds)
    return found


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--moves", type=int, default=80)
    arguments = parser.parse_args()
    with served(arguments.requests) as (address, process), chromium() as page:
        page.open(address)
        page.until("(document.documentElement?.dataset?.stage ?? '').includes('ends')")
        weight = sum(page.loaded.values())
        page.run(WATCH)
        drag(page, sum(2 * stops for stops in SLIDERS.values()))  # every stop once: tables are made and read
        before = cpu_seconds(process)
        found = drag(page, arguments.moves)
        spent = (cpu_seconds(process) - before) / arguments.moves
    print(f"{arguments.moves} moves, {arguments.requests} requests; {1000 * spent:.0f} ms of the server's CPU a move")
    for stage, times in found.items():
        if times:
            middle, most, worst = np.percentile(times, (50, 95, 100))
            print(f"{stage:5}  median {middle:4.0f} ms   p95 {most:4.0f} ms   longest {worst:4.0f} ms")
    print(f"page weight: {weight / 1e6:.2f} MB over the network, the first figures included")


if __name__ == "__main__":
    main()
