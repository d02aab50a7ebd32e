"""The chart of docs/accuracy.md from the table of its appendix: ``python -m benchmarks.accuracy.chart``."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "appendix"
ROWS = {
    "all": "all", "vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "h100_sxm": "H100", "h200_sxm": "H200",
    "b200_sxm": "B200", "b300_sxm": "B300",
}  # fmt: skip
"""Rows of the table that are drawn → their labels."""
WIDTH, STEP, LEFT, SCALE = 640, 34, 120, 24.0
"""Pixels: of the chart, of a row, of the labels, and for one per cent."""
COLOURS = {"time per token": "#2a78d6", "time to first token": "#e08a2c"}


def medians(text: str) -> dict[str, tuple[float, float]]:
    """Row of the served points → median errors in per cent: time per token, time to first token."""
    served = text[text.index("silicon_sample.csv --mode agg") :]
    found = {}
    for line in served.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[0] in ROWS and cells[0] not in found and re.fullmatch(r"[\d.]+ %", cells[6]):
            found[cells[0]] = float(cells[6][:-2]), float(cells[3][:-2])
    return found


def chart(found: dict[str, tuple[float, float]]) -> str:
    """The chart as SVG: two bars for each row."""
    parts, top = [], 40
    for place, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 190 * place}" y="8" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 190 * place + 18}" y="18">{name}, median error</text>')
    for row, errors in found.items():
        parts.append(f'<text x="{LEFT - 8}" y="{top + 18}" text-anchor="end">{ROWS[row]}</text>')
        for place, (error, colour) in enumerate(zip(errors, COLOURS.values(), strict=True)):
            y, long = top + 14 * place, SCALE * error
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{long:.0f}" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + long + 6:.0f}" y="{y + 10}">{error:g} %</text>')
        top += STEP
    style = "<style>text{font:12px sans-serif;fill:#666}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}">{style}{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    table = (DOCS / "accuracy.md").read_text(encoding="utf-8")
    (DOCS / "accuracy.svg").write_text(chart(medians(table)), encoding="utf-8")
