"""Write docs/experiments/schedulers.md and its charts."""

from pathlib import Path

from benchmarks.page import files_of, save
from benchmarks.schedulers import allocation, batching, chunking, fairness, mindspore, order, triggers

EXPERIMENTS = {
    "batching": batching,
    "order": order,
    "chunking": chunking,
    "allocation": allocation,
    "mindspore": mindspore,
    "triggers": triggers,
    "fairness": fairness,
}
FOLDER = Path(__file__).parent


def files() -> dict[str, str]:
    """Name → text of everything that is written."""
    return files_of(FOLDER, EXPERIMENTS, (FOLDER / "errors.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    save(files())
