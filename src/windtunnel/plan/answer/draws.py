"""Draws: whether a winner carries its rate in more random draws of the load than the search asked, and how closely.

Near a limit the draw decides. A search asks a few draws of every candidate; its winner is then asked more of them.
Where it misses one, the search is made again with all of them, and the answer names both deployments.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from windtunnel.metrics.comparison import student_t
from windtunnel.plan.answer.recommendation import Riskier, hardware, price
from windtunnel.plan.capacity import Draws
from windtunnel.plan.objective import LeastForRate, purchase_of
from windtunnel.plan.search import Stop, Watch, search
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.store import Store
from windtunnel.plan.trial import tables_for, trial
from windtunnel.plan.workers import Team
from windtunnel.workload import Workload

if TYPE_CHECKING:
    from windtunnel.plan.advice import Advice

TIMES = 4
"""Draws that a winner must carry, for each that the search asks."""
ANOTHER = 0.9
"""Probability with which another draw should carry the rate; below it the answer says that it is close."""
LEAST = 3
"""Draws from which that is judged."""


def missed_draws(answer: SearchResult, more: Sequence[tuple[int, Workload]]) -> int:
    """How many of these further draws of the load, seed and requests, the winner does not carry."""
    if answer.best is None or answer.undecided or not isinstance(answer.objective, LeastForRate):
        return 0
    deployment, rate = answer.measured(answer.best)
    tables = tables_for(answer.question, deployment)
    asked = (answer.question.under(workload, seed) for seed, workload in more)
    return sum(not trial(question, deployment, rate, tables).met for question in asked)


def searched_again(
    answer: SearchResult,
    more: Sequence[tuple[int, Workload]],
    *,
    store: Store | None = None,
    team: Team | None = None,
    watch: Watch | None = None,
    stop: Stop | None = None,
) -> SearchResult:
    """The best of the same candidates that carry these draws as well; their bounds hold there too."""
    question = replace(answer.question, draws=(*answer.question.draws, *more))
    return search(
        answer.enumeration, question, answer.objective,
        top=answer.top, store=store, team=team, watch=watch, stop=stop, bounds=answer,
    )  # fmt: skip


def too_close(former: SearchResult, missed: int, draws: int) -> str | None:
    """The winner of a search that misses some of its load's draws, in a sentence; None if it misses none."""
    if not missed or former.best is None:
        return None
    deployment, _ = former.measured(former.best)
    purchase = purchase_of(former.objective)
    cost = price(deployment, purchase)
    bought = f"{hardware(deployment, True, purchase)}{f' for {cost}' if cost else ''}"
    return f"Cheaper but close: {bought} carries it in only {draws - missed} of {draws} random draws of the load."


def closeness(
    answer: SearchResult, advice: "Advice | None", narrow: str | None, risky: Riskier | None
) -> Iterator[str]:
    """What leaves open whether the winner carries another draw of the load: what was said of a ``narrow`` winner before
    it, unless that is named as the riskier one; or, of the most that it carries, that the load is too short."""
    if narrow:
        if risky is None or hardware(risky.deployment, True, purchase_of(answer.objective)) not in narrow:
            yield narrow
    elif advice is not None and advice.too_few:
        yield advice.too_few
    elif (
        advice is not None and isinstance(answer.objective, LeastForRate) and (said := close(advice.rate, advice.draws))
    ):
        yield said


def close(rate: float, draws: Draws | None) -> str | None:
    """That another draw of the load may be missed, where the capacities under those asked leave that open: the rate is
    above the lower end of Student's prediction interval for one more."""
    if draws is None or len(draws.rates) < LEAST:
        return None
    spread = stdev(draws.rates) * math.sqrt(1 + 1 / len(draws.rates))
    if fmean(draws.rates) - student_t(ANOTHER, len(draws.rates) - 1) * spread >= rate:
        return None
    return f"Close: it carries {draws.words}: another draw may fall below {rate:.4g}."
