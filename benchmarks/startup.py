"""What the whole command costs, beside another checkout: ``python -m benchmarks.startup --against PATH [--repeats 5]``.

Prints a Markdown table: the Azure conversation trace with caches warm, ten times the trace with its peak memory, and
the first run on a machine, whose caches are empty. The two checkouts take turns, because machines swing; compare
ratios. CPU seconds are user + system, of one core; the least of several runs, and the ratio of the medians.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

COMMAND = """
import json, resource, sys
from windtunnel.cli import main
code = main()
used = resource.getrusage(resource.RUSAGE_SELF)
sys.stderr.write(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""
RUN = ["run", "Qwen/Qwen3-32B", "--device", "h100", "-tp", "2", "--json", "--trace"]


def once(checkout: Path, cache: Path, arguments: list[str]) -> tuple[float, float]:
    """CPU seconds and peak MB of one process that runs the command of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "WINDTUNNEL_CACHE": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled to bytecode
    environment["PYTHONPYCACHEPREFIX"] = str(cache / "bytecode")
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    code, seconds, peak = json.loads(done.stderr.splitlines()[-1])
    if code != 0:
        raise SystemExit(f"{checkout}: windtunnel ended with {code}: {done.stderr}")
    return seconds, peak


def measure(
    checkouts: list[Path], caches: list[Path], arguments: list[str], repeats: int
) -> tuple[list[list[float]], list[float]]:
    """For each checkout the CPU seconds of every repeat, and the largest peak in MB; the checkouts take turns."""
    seconds: list[list[float]] = [[] for _ in checkouts]
    peaks = [0.0 for _ in checkouts]
    for _ in range(repeats):
        for i, (checkout, cache) in enumerate(zip(checkouts, caches, strict=True)):
            used, peak = once(checkout, cache, arguments)
            seconds[i].append(used)
            peaks[i] = max(peaks[i], peak)
    return seconds, peaks


def show(name: str, seconds: list[list[float]], peaks: list[float]) -> None:
    """One row: CPU seconds and MB of each checkout, and the ratio to the other."""
    cells = [f"{min(each):.2f} | {peak:.0f}" for each, peak in zip(seconds, peaks, strict=True)]
    ratio = f"{median(seconds[0]) / median(seconds[1]):.2f}" if len(seconds) > 1 else "-"
    print(f"| {name} | {' | '.join(cells)} | {ratio} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, whose figures follow and divide")
    parser.add_argument("--trace", default="azure-conv", help="a name or a file")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    here = Path(__file__).parents[1]
    checkouts = [here] if options.against is None else [here, options.against.absolute()]
    once_each, more = [*RUN, options.trace], [*RUN, options.trace, "--repeat", "10"]
    header = " | CPU s, other | MB, other" if options.against else ""
    print(f"| `windtunnel run` | CPU s | MB{header} | ratio |\n|---|{'---:|' * (2 * len(checkouts) + 1)}")
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder) / str(i) for i in range(len(checkouts))]
        show("first run on a machine", *measure(checkouts, caches, once_each, 1))
        show("caches warm", *measure(checkouts, caches, once_each, options.repeats))
        show("ten times the trace, warm", *measure(checkouts, caches, more, max(1, options.repeats // 2)))


if __name__ == "__main__":
    main()
