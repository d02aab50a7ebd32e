"""Write docs/experiments/disaggregation.md and its charts."""

from pathlib import Path

from benchmarks.disaggregation import fits, interference, placement, queueing, saturation, splitwise, transfers
from benchmarks.page import files_of, save

EXPERIMENTS = {
    "interference": interference,
    "saturation": saturation,
    "queueing": queueing,
    "fits": fits,
    "placement": placement,
    "splitwise": splitwise,
    "transfers": transfers,
}
FOLDER = Path(__file__).parent


def files() -> dict[str, str]:
    """Name → text of everything that is written."""
    return files_of(FOLDER, EXPERIMENTS)


if __name__ == "__main__":
    save(files())
