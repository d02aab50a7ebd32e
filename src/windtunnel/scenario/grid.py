"""grid(model, **words) → a data frame: every combination of some words of a run, simulated once, for notebooks."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

from windtunnel.errors import InputError
from windtunnel.metrics import summary, summary_json
from windtunnel.scenario.scenario import Scenario, vary, with_words
from windtunnel.scenario.simulate import simulate
from windtunnel.simulate.run import data_frame


@partial(with_words, axes=True)
def grid(model: str, **words: Any) -> Any:
    """Simulate every combination of the words that have a list; a pandas DataFrame with a row for each.

    >>> found = grid("Qwen/Qwen3-8B", tensor_parallel_size=[1, 2], request_rate=[4, 8], num_prompts=200)
    >>> len(found)
    4

    Args:
        model: its name, or a config.json.
        words: words of ``windtunnel run`` with underscores for dashes; a list or range is an axis, anything else
            holds for all.

    Returns:
        Columns for the axes, then every number of ``run --json`` by its dotted name (``ttft.p99``), in seconds.

    Raises:
        InputError: no axis, an unknown word, a combination that cannot run, or pandas is not installed.
    """
    data_frame({})  # without pandas it ends here, not after the simulations
    axes = {name: list(value) for name, value in words.items() if isinstance(value, list | tuple | range)}
    if not axes:
        raise InputError("grid: no axis: give a list for at least one word, e.g. tensor_parallel_size=[1, 2]")
    fixed = {name: value for name, value in words.items() if name not in axes}
    rows = []
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        scenario = vary(Scenario(), {"model": model, **fixed, **chosen})
        document = summary_json(summary(simulate(scenario), scenario.goals.limits()))
        rows.append(chosen | _numbers(document))
    names = dict.fromkeys(name for row in rows for name in row)
    return data_frame({name: [row.get(name) for row in rows] for name in names})


def _numbers(document: Mapping[str, Any], before: str = "") -> dict[str, float | None]:
    """Every number of a document, by its dotted name."""
    found: dict[str, float | None] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{before}{name}.")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            found[f"{before}{name}"] = value
    return found
