"""Write docs/experiments/schedulers.md and its charts."""

from pathlib import Path

from benchmarks.schedulers import allocation, batching, chunking, fairness, mindspore, order, triggers
from benchmarks.schedulers.page import FOLDER, written

EXPERIMENTS = {
    "batching": batching,
    "order": order,
    "chunking": chunking,
    "allocation": allocation,
    "mindspore": mindspore,
    "triggers": triggers,
    "fairness": fairness,
}
PLACE = Path(__file__).parents[2] / "docs" / "experiments"


def files() -> dict[str, str]:
    """Name → text of everything that is written."""
    found = {name: module.findings() for name, module in EXPERIMENTS.items()}
    parts = [(FOLDER / "intro.md").read_text(encoding="utf-8")]
    parts += [written(name, findings) + "\n" for name, findings in found.items()]
    parts.append((FOLDER / "errors.md").read_text(encoding="utf-8"))
    charts = {name: svg for findings in found.values() for name, svg in findings.charts.items()}
    return {"schedulers.md": "".join(parts), **charts}


if __name__ == "__main__":
    PLACE.mkdir(parents=True, exist_ok=True)
    for file, text in files().items():
        (PLACE / file).write_text(text, encoding="utf-8")
        print(PLACE / file)
