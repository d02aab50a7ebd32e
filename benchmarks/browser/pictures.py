"""Pictures of the pages for the documentation: ``python -m benchmarks.browser.pictures [NAME…]`` writes docs/pictures.

Each is the top of a page that a command of the documentation makes, in a window of 1280 × 900. Needs chromium.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.browser import Page, chromium

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 900
PORT = 8471
GOAL = "--goodput ttft:300 tpot:50"
MODEL = "Qwen/Qwen3-8B"
COMMANDS = {
    "run": f"run Qwen/Qwen3-32B -tp 2 {GOAL}",
    "compare": f"compare {MODEL} --trace azure-code --num-prompts 2000 --request-rate 12 --goodput ttft:200 "
    "--with max_num_seqs=32 --with enable_chunked_prefill=false --seeds 3",
    "sweep": f"sweep {MODEL} --isl 1000 --osl 100 --num-prompts 2000 {GOAL}",
    "plan": f"plan {MODEL} --devices h100 l40s --tensor-parallel-size 1 2 --max-num-seqs 64 256 "
    f"--max-num-batched-tokens 2048 --target-request-rate 40 --num-prompts 2000 {GOAL}",
    "bench": "bench bench.yaml",
}
"""Page → the command that makes it with --report, in a folder with the bench.yaml of docs/bench.md."""
UI = f"ui Qwen/Qwen3-32B -tp 2 --request-rate 8 --num-prompts 5000 {GOAL} --port {PORT}"
SETTLED = 3.0
"""Seconds that a page has to draw itself, after it has loaded."""


def take(browser: Page, address: str, name: str) -> None:
    """A picture of an address."""
    browser.open(address, WIDTH, HEIGHT)
    browser.until("document.readyState === 'complete'")
    time.sleep(SETTLED)
    browser.picture(PICTURES / f"{name}.png")
    print(f"{name}.png {(PICTURES / f'{name}.png').stat().st_size / 1e3:.0f} kB")


def main(names: list[str]) -> None:
    """Make the pictures of these pages, or of all."""
    PICTURES.mkdir(exist_ok=True)
    windtunnel = [sys.executable, "-m", "windtunnel"]
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        cases = (PICTURES.parent / "bench.md").read_text().partition("```yaml\n")[2].partition("```")[0]
        (Path(folder) / "bench.yaml").write_text(cases)
        for name in [name for name in COMMANDS if name in (names or COMMANDS)]:
            page = Path(folder) / name / f"{name}.html"
            report = [] if name == "bench" else ["--report", str(page)]  # a bench makes its folder and page
            if report:
                page.parent.mkdir()
            words = [*windtunnel, *COMMANDS[name].split(), *report]
            subprocess.run(words, stdout=subprocess.DEVNULL, check=False, cwd=folder)
            take(browser, page.as_uri(), name)
        if "ui" in (names or ["ui"]):
            server = subprocess.Popen([*windtunnel, *UI.split()], stdout=subprocess.DEVNULL)
            try:
                _answers(f"http://127.0.0.1:{PORT}/")
                take(browser, f"http://127.0.0.1:{PORT}/", "ui")
            finally:
                server.terminate()
                server.wait()


def _answers(address: str, patience: float = 120.0) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            urlopen(address).read()
            return
        except URLError:
            time.sleep(0.5)
    raise TimeoutError(f"{address} does not answer")


if __name__ == "__main__":
    main(sys.argv[1:])
