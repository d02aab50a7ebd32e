"""What plan says of several models, and of several loads that one deployment must serve."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from windtunnel.cli.terminal import number, table
from windtunnel.plan.advice import percent
from windtunnel.plan.answer.recommendation import hardware
from windtunnel.plan.objective import purchase_of
from windtunnel.plan.several.loads import Common
from windtunnel.plan.several.models import Models

if TYPE_CHECKING:
    from rich.table import Table

    from windtunnel.plan.search_result import SearchResult


def models_of(searched: "Mapping[str, Mapping[str, SearchResult]]") -> Models:
    """The models that were searched, by name and load, the best under the first load first."""
    found = Models(searched)
    first = found.loads[0]
    order = sorted(searched, key=lambda model: -found.score(model, first))
    return Models({model: searched[model] for model in order})


def models_table(found: Models) -> "Table":
    """A model a row: what to deploy under the first load, its value under each, and how much worse than the best."""
    first, several = found.loads[0], len(found.loads) > 1
    unit = found.answers[next(iter(found.answers))][first].objective.unit
    rows = []
    for model, answers in found.answers.items():
        best, answer = answers[first].best, answers[first]
        bought = "nothing meets the goal"
        if best is not None:
            bought = hardware(answer.measured(best)[0], True, purchase_of(answer.objective))
        cells = []
        for load in found.loads:
            own = answers[load].best
            cells.append("–" if own is None else number(answers[load].objective.value(own.promise)))
            cells.append("–" if own is None else percent(found.regret(model, load)))
        rows.append((model, bought, *cells))
    heads = [text.format(load if several else "") for load in found.loads for text in (f"{{}} {unit}", "extra")]
    return table(("model", f"best for {first}", *map(str.strip, heads)), rows, left=2)


def loads_table(found: Common) -> "Table":
    """A load a row: what the chosen deployment does under it, and what is lost against the load's own best."""
    assert found.best is not None
    rows = []
    for name, entry in found.best.items():
        answer = found.answers[name]
        own = answer.best
        assert own is not None
        deployment, rate = answer.measured(entry)
        value, best = (number(answer.objective.value(one.promise)) for one in (entry, own))
        rows.append((name, number(rate), str(deployment.replicas), value, best, percent(found.lost(name))))
    unit = next(iter(found.answers.values())).objective.unit
    how = f"weighted mean {number(found.value)}" if found.weights else f"worst {number(found.value)}"
    return table(("load", "requests/s", "replicas", f"{unit} ({how})", "its own best", "extra"), rows)
