"""InferMax's grids from the command line: every combination of I, O, W, M, C and R_max under the schedulers named.

``python -m benchmarks.infermax.grid --prompt 16 256 --output 64 --memory 8000 32000 --scheduler vllm ours-known``
prints a line for each cell and scheduler, with --json a list of objects.
"""

import sys
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

from cyclopts import App, Parameter

from benchmarks.infermax.machine import GRID, Case, measured
from benchmarks.page import cell
from windtunnel.cli.arguments import show_json
from windtunnel.cli.terminal import show, table
from windtunnel.errors import InputError
from windtunnel.policy.named import scheduler as named
from windtunnel.policy.settings import Settings

Numbers = Annotated[tuple[int, ...], Parameter(consume_multiple=True)]
Words = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]
MEASURES = ("makespan", "e2el", "ttft", "tpot", "throughput", "evictions")
PLAIN = Case()


def grid(
    *,
    prompt: Numbers = (PLAIN.prompt,),
    output: Numbers = (PLAIN.output,),
    requests: Numbers = (PLAIN.requests,),
    memory: Numbers = (PLAIN.memory,),
    tokens: Numbers = (PLAIN.tokens,),
    places: Numbers = (PLAIN.places,),
    spread: float = PLAIN.spread,
    scheduler: Words = ("vllm", "sarathi-hybrid-chunked-newest-fcfs"),
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Simulate every combination on InferMax's machine: the batch times of OPT-13B, requests all at once.

    Parameters
    ----------
    prompt
        I, tokens of a prompt.
    output
        O, tokens of an output.
    requests
        W, how many.
    memory
        M, tokens that the KV cache holds.
    tokens
        C, tokens of a batch.
    places
        R_max, requests of a batch.
    spread
        Lengths are uniform within this share.
    scheduler
        Presets of windtunnel run --scheduler, or names of InferMax's variants such as vllm-look_ahead-fcfs.
    as_json
        Print objects instead of a table.
    """
    axes = {"prompt": prompt, "output": output, "requests": requests}
    axes |= {"memory": memory, "tokens": tokens, "places": places}
    schedulers = {name: policy(name) for name in scheduler}
    rows: list[dict[str, Any]] = [
        {**numbers, "scheduler": name} | {measure: getattr(found, measure) for measure in MEASURES}
        for numbers in cells(axes)
        for name, found in results(schedulers, Case(**numbers, spread=spread))
    ]
    if as_json:
        show_json(rows)
        return 0
    texts = [[cell(value) for value in row.values()] for row in rows]
    show("s, output tokens/s, evictions a request", table(tuple(rows[0]), texts))
    return 0


def cells(axes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, int]]:
    """Every combination.

    Raises InputError for one that holds no request.
    """
    for name, values in axes.items():
        if not values or min(values) < 1:
            raise InputError(f"{name}={' '.join(map(str, values))}: give numbers ≥ 1")
    for values in product(*axes.values()):
        cell = dict(zip(axes, values, strict=True))
        if cell["prompt"] + cell["output"] - 1 > cell["memory"]:
            raise InputError(
                f"memory={cell['memory']}: {cell['prompt']} + {cell['output']} tokens of a request never fit: give more"
            )
        yield cell


def results(schedulers: dict[str, Settings], case: Case) -> Iterator[tuple[str, Any]]:
    """What each scheduler does with a cell."""
    workload = case.workload()
    for name, settings in schedulers.items():
        yield name, measured(settings, case, workload)


def policy(name: str) -> Settings:
    """A variant of InferMax's grid, or a preset. Raises InputError for an unknown one."""
    return GRID[name] if name in GRID else named(name)


def main() -> int:
    """Run, and say in one line what is wrong."""
    app = App(name="python -m benchmarks.infermax.grid", help_format="plaintext")
    app.default(grid)
    try:
        return int(app(result_action="return_value") or 0)
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
