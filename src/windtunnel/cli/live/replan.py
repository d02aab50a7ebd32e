"""What to change in a deployment for the load that is there, by the search of plan, and when the change pays."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Group, Parameter

from windtunnel.cli.plan.flags import FOR_RATES, Available, Axes, Values, split
from windtunnel.cli.plan.line import OF_POOLS, space_around
from windtunnel.errors import InputError
from windtunnel.scenario import Scenario
from windtunnel.scenario.scenario import words_of

if TYPE_CHECKING:
    from windtunnel.deployment import Deployment
    from windtunnel.plan.objective import LeastForRate
    from windtunnel.plan.question import Question
    from windtunnel.plan.space import Space
    from windtunnel.workload import Workload

REPLAN = Group("Another plan", sort_key=1)
SHOWN = ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "quantization")
"""Settings that a new plan may have otherwise."""


@dataclass(frozen=True, kw_only=True)
class Replan:
    """The question that a new plan answers: give what the first one was asked."""

    replan: Annotated[bool, Parameter(negative=())] = False
    """Search again for the load that is there: what to change, what it saves, and when the change pays."""
    devices: Values = ()
    """GPUs that may be taken; default: the one that serves."""
    prices: str | None = None
    """A cloud's prices of ``windtunnel list prices``, as for plan."""
    devices_file: Path | None = None
    """TOML file with your own devices, or other prices."""
    confidence: float = 0.9
    """Share of real servers on which the answer must hold, 0.05 to 0.95; 0.5: even odds."""
    startup: float = 300.0
    """Seconds that a new server takes to start, in which old and new are paid."""

    def __post_init__(self) -> None:
        """Refuse a start that ends before it begins."""
        if not 0 <= self.startup < float("inf"):
            raise InputError(f"startup={self.startup:g}: must be seconds ≥ 0")

    def check(self, scenario: Scenario) -> None:
        """Raise InputError for pools, which are not searched again."""
        if self.replan and len(scenario.deployment().pools) > 1:
            raise InputError("replan: pools are not searched again: run windtunnel plan --pools both on this load")

    def answer(self, scenario: Scenario, load: "Workload") -> "Replanned":
        """The search. Raises InputError for a load at once, and where no configuration can run."""
        from windtunnel.deployment.prices import priced
        from windtunnel.deployment.slo import ATTAINMENT
        from windtunnel.plan.objective import LeastForRate
        from windtunnel.plan.question import Question
        from windtunnel.plan.space import AND, AXES, Space, typed_values

        usual, available = words_of(Scenario()), Available(prices=self.prices)
        words = {key: value for key, value in words_of(scenario).items() if value != usual[key]}
        words |= {"model": scenario.server.model, "device": scenario.server.device}
        around = space_around(words, Axes(), available, self.devices_file, FOR_RATES)
        if self.devices:
            around = replace(around, axes={**around.axes, "device": split(self.devices)})
        fixed = {
            key: typed_values(key, [value])
            for key, value in words.items()
            if key in AXES and key not in ("replicas", *OF_POOLS)
        } | ({"store": (AND.join(stores),)} if (stores := words.get("store")) else {})
        same = available.priced(Space(around.model, fixed, around.constraints, self.devices_file, frozenset()))
        asked = Question(
            load, slo=scenario.goals.limits(), perf=scenario.server.perf, overheads=scenario.overheads(),
            seed=scenario.load.seed, confidence=self.confidence,
            attainment=scenario.goals.attainment or ATTAINMENT,
        )  # fmt: skip
        rate = load.request_rate
        goal = LeastForRate(rate, around.constraints, count_gpus=False)
        now = scenario.deployment()
        pools = tuple(replace(pool, device=priced(pool.device, self.prices)) for pool in now.pools)
        as_is, best = (_best(each, asked, goal) for each in (same, around))
        return Replanned(rate, replace(now, pools=pools), as_is, best, self.startup, self.confidence)


def _best(space: "Space", question: "Question", goal: "LeastForRate") -> "Deployment | None":
    """The cheapest deployment of a space that keeps the goals; None if none does."""
    from windtunnel.plan.search import search_widening

    answer = search_widening(space, question, goal, top=1)
    return answer.measured(answer.best)[0] if answer.best else None


class Replanned(NamedTuple):
    """What would serve the load that is there."""

    rate: float
    now: "Deployment"
    same: "Deployment | None"
    """The same servers, as many as it takes; None where no number does."""
    best: "Deployment | None"
    """The cheapest that was found; None where nothing keeps the goals."""
    startup: float
    confidence: float
    """Share of real servers on which it holds."""

    @property
    def changes(self) -> dict[str, tuple[str, str]]:
        """Setting → (as it is, as it is in the best)."""
        if self.best is None:
            return {}
        (old,), (new,) = self.now.pools, self.best.pools
        found = {"device": (old.device.name, new.device.name)}
        before, after = old.engine.spec(), new.engine.spec()
        found |= {name: (str(before[name]), str(after[name])) for name in SHOWN}
        found |= {"replicas": (str(old.replicas), str(new.replicas)), "router": (self.now.router, self.best.router)}
        if new.replicas == 1:
            del found["router"]
        return {name: pair for name, pair in found.items() if pair[0] != pair[1]}

    @property
    def saved(self) -> float:
        """USD an hour that the best costs less than the same servers; infinite where no number of those does."""
        if self.best is None:
            return 0.0
        return float("inf") if self.same is None else self.same.price_per_hour - self.best.price_per_hour

    @property
    def pays_after(self) -> float | None:
        """Hours until the start of all new servers is saved; None where it never is."""
        if self.best is None or not self.saved > 0:
            return None
        return self.best.price_per_hour * self.startup / 3600 / self.saved

    def spec(self) -> dict[str, Any]:
        """For JSON."""
        cost = [each.price_per_hour if each is not None else None for each in (self.now, self.same, self.best)]
        counts = [each.replicas if each is not None else None for each in (self.same, self.best)]
        return {
            "request_rate": self.rate,
            "changes": {name: list(pair) for name, pair in self.changes.items()},
            "price_per_hour": dict(zip(("now", "same_settings", "best"), cost, strict=True)),
            "replicas": dict(zip(("same_settings", "best"), counts, strict=True)),
            "pays_after_hours": self.pays_after,
        }

    def lines(self) -> list[str]:
        """What to do, in sentences."""
        if self.best is None:
            return [f"plan: nothing that was searched keeps the goals at {self.rate:.3g} requests/s"]
        found = [f"plan for {self.rate:.3g} requests/s, to hold on {100 * self.confidence:.0f} % of servers:"]
        found += [f"  {name}: {old} → {new}" for name, (old, new) in self.changes.items()] or ["  nothing to change"]
        cost = f"${self.best.price_per_hour:.2f}/h"
        if self.same is None:
            return [*found, f"cost: {cost}; no number of the servers as they are keeps the goals"]
        as_is = f"{self.same.replicas} servers as they are cost ${self.same.price_per_hour:.2f}/h"
        if self.pays_after is None:
            return [*found, f"cost: {cost}; {as_is}: keep their settings"]
        when = f"pays after {self.pays_after:.1f} h, with {self.startup:g} s in which old and new servers run"
        return [*found, f"cost: {cost}; {as_is}: the change {when}"]
