"""Record schedules of a real vLLM release: ``python record_vllm_v1.py FOLDER TARGET INPUT...``

FOLDER is that of vllm_v1_driver.py, named after its release; TARGET gets a trace for each NAME.in.json that is given.
The form is that of the other recordings; the summary's times are those of the steps.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from windtunnel.replay.recording import BATCH_TIME, Recording, read_recording
from windtunnel.replay.vllm_v1 import CONFIG

DRIVER = Path(__file__).parents[1] / "vllm_v1_driver.py"
MOST = 1 << 20


def spelled_out(workload: Recording, most: int = MOST) -> dict[str, Any]:
    """What the driver reads: all settings, and tokens that are not negative."""
    rows = [
        {
            "id": row.id,
            "arrival": row.arrival,
            "output_len": row.output_tokens,
            "priority": row.priority,
            "tokens": [token if token >= 0 else (1 << 31) - token for token in row.tokens],
            "answer": [token if token >= 0 else (1 << 31) - token for token in row.answer],
            "after": [workload.requests[rank].id for rank in row.after],
            "think": row.think_time,
        }
        for row in workload.requests
    ]
    return {"config": CONFIG | workload.config, "requests": rows, "most": most}


def driven(release: Path, workloads: list[dict[str, Any]], driver: Path = DRIVER) -> list[list[dict[str, Any]]]:
    """The steps that the release's scheduler makes of each workload."""
    words = (sys.executable, str(driver), str(release))
    done = subprocess.run(words, input=json.dumps(workloads), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def trace(release: str, workload: Recording, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a recording: a header, the steps, and the summary that follows from them."""
    config = CONFIG | workload.config
    header = {
        "type": "header",
        "vllm": release,
        "config": workload.config,
        "batch_time": BATCH_TIME,
        "usable_blocks": config["num_gpu_blocks"] - 1,
        "scheduler": "AsyncScheduler" if config["async_scheduling"] else "Scheduler",
        "arrival_unit": "time",
    }
    requests = {}
    for row in workload.requests:
        first = next(step["t_end"] for step in steps if row.id in step["emitted"])
        requests[row.id] = {
            "ttft": round(first - row.arrival / 1e7, 7),
            "first_token_t": first,
            "e2e_t": next(step["t_end"] for step in steps if row.id in step["finished"]),
            "preemptions": sum(row.id in step["preempted"] for step in steps),
        }
    return [
        header,
        *steps,
        {
            "type": "summary",
            "steps": len(steps),
            "makespan": steps[-1]["t_end"],
            "requests": requests,
            "final_free_blocks": steps[-1]["free_after_update"],
        },
    ]


def main(release: Path, target: Path, inputs: list[Path]) -> None:
    """Write a trace of the release for each input."""
    workloads = [read_recording(path) for path in inputs]
    found = driven(release, [spelled_out(workload) for workload in workloads])
    for path, workload, steps in zip(inputs, workloads, found, strict=True):
        lines = (json.dumps(line) + "\n" for line in trace(release.name, workload, steps))
        name = path.name.replace(".in.json", ".trace.jsonl.gz")
        (target / name).write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(word) for word in sys.argv[3:]])
