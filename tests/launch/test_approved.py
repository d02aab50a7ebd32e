"""What every flag that is read sets, with each of some values, as it was read and approved.

``python -m tests.launch.test_approved`` writes it again; read the difference before you commit it.
"""

from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.launch import Reading, read_line, read_source
from windtunnel.launch.table import ENGINES, table

FOLDER = Path(__file__).parent / "approved"
STARTS = {
    "vllm": (
        "vllm serve Qwen/Qwen3-8B -tp 4",
        "vllm serve Qwen/Qwen3-30B-A3B -tp 2 -dp 4 --enable-expert-parallel",
    ),
    "sglang": (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 4 --max-running-requests 100",
        "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp 8 --dp 4 --enable-dp-attention --ep 8 "
        "--chunked-prefill-size 8192 --moe-a2a-backend deepep",
    ),
    "trtllm": (
        "trtllm-serve Qwen/Qwen3-8B --tp_size 4 --max_batch_size 300",
        "trtllm-serve Qwen/Qwen3-30B-A3B --tp_size 8 --ep_size 8 --enable_attention_dp true",
    ),
}
VALUES = "", "2", "0.4", "5000", "fp8"
"""A switch, and values of all kinds: what a flag does not take is refused in a line."""


def read(text: str) -> Reading:
    (line,) = read_source(text)
    return read_line(line)


BESIDES = "role", "replicas", "router", "handover", "stores", "facts", "overrides"


def said(reading: Reading) -> dict[str, Any]:
    """All that a line sets."""
    rest = {name: getattr(reading, name) for name in BESIDES}
    return {**reading.settings, **rest, **{f"note on {name}": note for name, note in reading.notes.items()}}


def outcome(text: str, plain: dict[str, Any]) -> str:
    """What a line sets that the plain one does not, and what of it is not simulated; or its error."""
    try:
        reading = read(text)
    except InputError as refusal:
        return f"refused: {refusal}"
    sets = said(reading)
    found = {name: value for name, value in sets.items() if plain.get(name) != value}
    gone = [f"no {name}" for name in plain if name not in sets]
    told = [f"{state}: {word.flag}: {word.note}" for state in ("ignored", "not_simulated")
            for word in getattr(reading, state)]  # fmt: skip
    return "; ".join([*(f"{name}={value!r}" for name, value in found.items()), *gone, *told]) or "nothing"


def written(engine: str) -> str:
    """A line for each flag and value."""
    lines = []
    for start in STARTS[engine]:
        plain = said(read(start))
        lines.append(f"{start}: {plain}")
        for flag in table(engine).used:
            before = ""
            for value in VALUES:
                found = outcome(f"{start} --{flag} {value}", plain)
                if found != before:
                    lines.append(f"  --{flag} {value}".rstrip() + f": {found}")
                before = found
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("engine", ENGINES)
def test_flags_set_what_was_approved(engine: str) -> None:
    assert written(engine) == (FOLDER / f"{engine}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    for each in ENGINES:
        (FOLDER / f"{each}.txt").write_text(written(each), encoding="utf-8")
