"""Models: the best deployment of each model under each load, and what choosing a model costs."""

import math
from collections.abc import Mapping
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.metrics import clean
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.several.loads import regret


@dataclass(frozen=True, eq=False)
class Models:
    """Searches of the same loads, objective and axes' words, by model and by load."""

    answers: Mapping[str, Mapping[str, SearchResult]]

    @property
    def loads(self) -> tuple[str, ...]:
        """Names of the loads."""
        return tuple(next(iter(self.answers.values())))

    def score(self, model: str, load: str) -> float:
        """The best that a model does under a load; −infinity where it keeps the limits nowhere."""
        best = self.answers[model][load].best
        return best.promise if best else -math.inf

    def best(self, load: str) -> str | None:
        """The best model under a load; of equals the first; None where none keeps the limits."""
        found = max(self.answers, key=lambda model: self.score(model, load))
        return found if self.score(found, load) > -math.inf else None

    def regret(self, model: str, load: str) -> float:
        """What is lost under a load by this model's best deployment against the best of all models; NaN where there is
        none."""
        best = self.best(load)
        return math.nan if best is None else regret(self.score(model, load), self.score(best, load))

    def to_json(self) -> dict[str, Any]:
        """For JSON: by model and load its value, what it loses, and the settings of its best deployment."""
        found: dict[str, Any] = {}
        for model, by_load in self.answers.items():
            found[model] = {}
            for load, answer in by_load.items():
                best = answer.best
                found[model][load] = {
                    "value": answer.objective.value(best.promise) if best else None,
                    "regret": self.regret(model, load),
                    "settings": dict(answer.contenders[best.index].candidate.settings) if best else None,
                    "replicas": answer.measured(best)[0].replicas if best else None,
                    "trials": answer.trials + answer.reused,
                }
        document: dict[str, Any] = clean(found)
        return document
