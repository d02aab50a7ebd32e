"""replay: a recorded workload through the scheduler of a named engine version."""

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT
from windtunnel.errors import unknown
from windtunnel.files import require_writable

Replay = Callable[..., Iterator[dict[str, Any]]]

SCHEDULERS = {
    "vllm-0.33": "windtunnel.replay.vllm_v1",
    "vllm-0.32": "windtunnel.replay.vllm_v1",
    "vllm-0.24": "windtunnel.replay.vllm_v1",
    "vllm-0.20": "windtunnel.replay.vllm_v1",
    "vllm-0.16": "windtunnel.replay.vllm_v1",
    "vllm-0.12": "windtunnel.replay.vllm_v1",
    "vllm-0.10": "windtunnel.replay.vllm_v1",
    "vllm-0.8-v0": "windtunnel.replay.vllm_v0",
    "sglang-0.5.23": "windtunnel.replay.sglang",
    "sglang-0.5": "windtunnel.replay.sglang",
    "sglang-0.4.6": "windtunnel.replay.sglang",
    "trtllm-1.0": "windtunnel.replay.trtllm",
}
"""Name of a scheduler → the module whose ``replay`` runs it."""


def replay(
    recording: Annotated[Path, Parameter(name="FILE")],
    /,
    *,
    scheduler: str,
    output: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
) -> None:
    """Replay a recorded workload through a scheduler, and print what it decides in each step.

    One JSON object a line: a header, the steps, a summary, in the words of the recorder.

    Parameters
    ----------
    recording
        NAME.in.json with config, requests and, if its defaults do not hold, batch_time.
    scheduler
        vllm-0.33, vllm-0.32, vllm-0.24, vllm-0.20, vllm-0.16, vllm-0.12, vllm-0.10, vllm-0.8-v0, sglang-0.5.23
        (also as sglang-0.5), sglang-0.4.6 or trtllm-1.0.
    output
        File to write instead of standard output.
    """
    from windtunnel.replay.recording import read_recording

    if scheduler not in SCHEDULERS:
        raise unknown("scheduler", scheduler, SCHEDULERS)
    if output is not None:
        require_writable("output", output)
    run: Replay = import_module(SCHEDULERS[scheduler]).replay
    lines = (json.dumps(record, allow_nan=False) + "\n" for record in run(read_recording(recording), scheduler))
    if output is None:
        sys.stdout.writelines(lines)
    else:
        from windtunnel.files import write_whole

        write_whole(output, list(lines))
