"""The engine's side, run by the engine's own Python: ``python engine_side.py ASKED.json FOUND.json``.

Serves workloads one after the other with vLLM in this process, and writes down every step: what was scheduled, when it
began and ended, and when requests were added, got their first token and ended. Imports vLLM and nothing of windtunnel.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""The default binding of threads waits for other programs; see notes on running the engines."""


class Clock:
    """Seconds that this process has computed, and those that nobody waits for: while nothing runs, it jumps to the next
    arrival. With one thread it is the wall clock of a machine of one's own, whoever else computes on this one."""

    def __init__(self) -> None:
        self.skipped = -time.process_time()

    def now(self) -> float:
        """Seconds since the clock was made."""
        return time.process_time() + self.skipped

    def jump(self, to: float) -> None:
        """Nothing happens before then."""
        self.skipped += max(to - self.now(), 0.0)


class Recorder:
    """Steps of the scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.clock = Clock()
        self.steps: list[dict[str, Any]] = []
        self.scheduler, self.schedule = scheduler, scheduler.schedule
        scheduler.schedule = self.recorded

    def recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule, and write down each request's tokens and those computed before."""
        started = self.clock.now()
        found = self.schedule(*args, **kwargs)
        tokens = dict(found.num_scheduled_tokens)
        computed = {name: self.scheduler.requests[name].num_computed_tokens - n for name, n in tokens.items()}
        self.steps.append({"start": started, "tokens": tokens, "computed": computed})
        return found


def serve(engine: Any, recorder: Recorder, rows: list[list[float]], name: str) -> dict[str, Any]:
    """Add each request (arrival, prompt, output) when it is due, and step until all have ended."""
    from vllm import SamplingParams

    recorder.steps.clear()
    clock = recorder.clock = Clock()
    added: dict[str, float] = {}
    first: dict[str, float] = {}
    end: dict[str, float] = {}
    waiting = list(enumerate(rows))
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1][0] <= clock.now():
            i, (_, prompt, output) = waiting.pop(0)
            params = SamplingParams(max_tokens=int(output), ignore_eos=True, temperature=1.0, detokenize=False)
            tokens = [(7 * i + 13 * j) % 30000 + 10 for j in range(int(prompt))]
            engine.add_request(f"{name}-{i}", {"prompt_token_ids": tokens}, params)
            added[str(i)] = clock.now()
        if not engine.has_unfinished_requests():
            clock.jump(waiting[0][1][0])
            continue
        outputs = engine.step()
        at = clock.now()
        recorder.steps[-1]["end"] = at
        for output in outputs:
            i = output.request_id.split("-")[1]
            first.setdefault(i, at)
            if output.finished:
                end[i] = at
    steps = [
        {
            "start": step["start"],
            "end": step["end"],
            "tokens": {key.split("-")[1]: n for key, n in step["tokens"].items()},
            "computed": {key.split("-")[1]: n for key, n in step["computed"].items()},
        }
        for step in recorder.steps
        if "end" in step
    ]
    return {"steps": steps, "added": added, "first": first, "end": end}


def main() -> None:
    """Serve what was asked."""
    os.environ.update(SETTINGS)
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=asked["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
        async_scheduling=False,
        **asked["limits"],
    )
    engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    core: Any = engine.engine_core
    recorder = Recorder(core.engine_core.scheduler)
    blocks = core.engine_core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    found = {name: serve(engine, recorder, rows, name.replace("-", "_")) for name, rows in asked["workloads"].items()}
    Path(sys.argv[2]).write_text(json.dumps({"num_blocks": blocks, "runs": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
