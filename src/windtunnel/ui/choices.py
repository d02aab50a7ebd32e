"""Choices: the names that the page offers, and where its sliders stop."""

from collections.abc import Mapping
from typing import Any

STOPS = {
    "tensor_parallel_size": (1, 2, 4, 8, 16),
    "max_num_seqs": (8, 16, 32, 64, 128, 256, 512, 1024),
    "max_num_batched_tokens": (512, 1024, 2048, 4096, 8192, 16384, 32768),
    "replicas": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    "num_prompts": (200, 500, 1000, 2000, 5000, 10000, 20000, 50000),
}
"""Powers of two and what lies between, so that the tables of neighbours can be made before they are asked for."""
FORESEEN = ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens")
"""Sliders whose every stop has its own batch-time tables."""


USUAL = {"tensor_parallel_size": 1}
"""What holds where the word is not given, of sliders that stand at a stop then."""


def choices() -> dict[str, Any]:
    """Names by the word that takes them, stops by the word, devices with their price and memory, and what is
    usual: what holds where a word is not given (``num_prompts``: of random requests)."""
    from windtunnel.deployment import PRESETS as ENGINES
    from windtunnel.hardware import GIB, load_devices
    from windtunnel.model import model_names
    from windtunnel.policy import PRESETS as SCHEDULERS
    from windtunnel.policy.named import ROUTERS
    from windtunnel.scenario import Scenario
    from windtunnel.scenario.load_flags import NUM_PROMPTS, TRACE
    from windtunnel.workload.builtin import builtin_names, fit_of

    usual = Scenario()
    return {
        "model": model_names(),
        "device": [
            {"name": each.name, "gib": each.memory_bytes / GIB, "price": each.price_per_hour or None}
            for each in load_devices().values()
        ],
        "engine": list(ENGINES),
        "scheduler": list(SCHEDULERS),
        "router": dict(ROUTERS),
        "trace": [
            {"name": name, "requests": fit_of(name)["num_requests"], "rate": fit_of(name)["request_rate"]}
            for name in builtin_names()
        ],
        "stops": STOPS,
        "usual": {
            "device": usual.server.gpu().name,
            "engine": usual.server.engine.preset,
            "router": usual.router,
            "trace": TRACE,
            "num_prompts": NUM_PROMPTS,
        },
    }


def neighbours(words: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The words one and two stops further along each slider that has its own tables, the nearest first; a slider
    whose word is not given stands before its first stop."""
    found: list[dict[str, Any]] = []
    for step in (1, -1, 2, -2):
        for name in FORESEEN:
            stops = STOPS[name]
            given = str(words.get(name, USUAL.get(name)))
            place = next((place for place, stop in enumerate(stops) if str(stop) == given), -1) + step
            if 0 <= place < len(stops):
                found.append({**words, name: stops[place]})
    return found
