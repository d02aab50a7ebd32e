"""Launch lines of recipes that served measured points: read, they have the settings that validation gives the points.

The lines are those of ``../shared/launch_lines``: srt-slurm's recipes, whose points are ``../shared/truth/disagg``, and
InferenceX's scripts, whose rows are those of the kernel database's ``silicon_sample.csv``.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch_lines import command
from windtunnel.deployment import Engine
from windtunnel.launch import Reading, read_line, read_source
from windtunnel.perf.database import find_systems
from windtunnel.validation.pool_points import read_pool_points
from windtunnel.validation.recipes import engine
from windtunnel.validation.served_points import Point, read_points

SHARED = Path(__file__).parents[3] / "shared"
CORPUS, POINTS = SHARED / "launch_lines" / "corpus.jsonl", SHARED / "truth" / "disagg" / "points.jsonl"
OF_POOLS = (623, 633, 637, 665, 675, 677, 759, 765, 767, 781, 787, 795, 801, 807, 823)
"""Lines whose recipe is named by a point: every one there is. Decode and prefill, SGLang and TensorRT-LLM."""
UNRECORDED = ("quantization", "enable_symm_mem", "linear_backend")
"""What lines say and the facts of the points do not."""
OF_SCRIPTS = {
    65: "2026_03_25_glm_5_h200_sxm_sglang_fp8_agg_1024x1024_c4_tp8_0_ep1_0_500",
    175: "qwen3_5_b200_sglang_bf16_agg_1024x1024_c64_cfg587",
    177: "qwen3_5_b300_sglang_bf16_agg_1024x1024_c4_cfg738",
    191: "2026_03_25_deepseek_r1_b200_sxm_trtllm_fp4_agg_8192x1024_c16_tp4_0_ep1_0_979",
    209: "2026_03_25_deepseek_r1_h200_sxm_sglang_fp8_agg_1024x1024_c64_tp8_0_ep1_0_256",
    281: "qwen3_5_b300_sglang_fp8_agg_8192x1024_c256_cfg716",
}
"""Lines whose script has not changed since it served a row, and such a row."""


def lines() -> dict[int, dict[str, Any]]:
    found = [json.loads(text) for text in CORPUS.read_text(encoding="utf-8").splitlines()]
    return {line["id"]: line for line in found}


def read(line: Mapping[str, Any], version: str) -> Reading:
    return read_line(read_source(f"# windtunnel: engine={version}\n{command(line)}")[0])


@pytest.mark.skipif(not (CORPUS.is_file() and POINTS.is_file()), reason="the measured points are not here")
def test_recipes_of_pools() -> None:
    raw = [json.loads(text) for text in POINTS.read_text(encoding="utf-8").splitlines()]
    recipes = {entry["id"]: entry["recipe_files"] or () for entry in raw if entry["flags"]}
    points, corpus = read_pool_points(POINTS), lines()
    for number in OF_POOLS:
        line = corpus[number]
        point = next(each for each in points if line["file"] in recipes.get(each.id, ()))
        reading = read(line, "sglang-0.5" if line["engine"] == "sglang" else "trtllm-1.0")
        longest = reading.settings["max_model_len"]
        served = engine(getattr(point, line["role"]), reading.settings["preset"], longest)
        own = Engine(**{name: value for name, value in reading.settings.items() if name not in UNRECORDED})
        assert asdict(own) == asdict(served), line["file"]


@pytest.mark.skipif(not CORPUS.is_file() or find_systems() is None, reason="the measured rows are not here")
def test_scripts_of_whole_servers() -> None:
    rows = {point.id: point for point in read_points() if isinstance(point, Point)}
    corpus = lines()
    for number, row in OF_SCRIPTS.items():
        served = rows[row].settings()
        own = read(corpus[number], served.pop("preset")).settings
        assert {name: own.get(name) for name in served} == served, row
