"""Export: a schedule as a file that a vLLM server follows, see ``vllm_plugin``."""

import json

from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import SCHEMA_VERSION, Schedule


def exported(problem: Problem, schedule: Schedule) -> str:
    """The schedule and the requests that it is for, in order of arrival; batches name them by their place in it."""
    order = sorted(range(len(problem)), key=lambda i: (float(problem.arrival[i]), i))
    place = {i: number for number, i in enumerate(order)}
    document = {
        "schema_version": SCHEMA_VERSION,
        "prompt_tokens": problem.prompt_tokens[order].tolist(),
        "output_tokens": problem.output_tokens[order].tolist(),
        "arrival": problem.arrival[order].tolist(),
        "batches": [
            {
                "tokens": {str(place[i]): tokens for i, tokens in batch.tokens.items()},
                "evicted": [place[i] for i in batch.evicted],
            }
            for batch in schedule.batches
        ],
    }
    return json.dumps(document) + "\n"
