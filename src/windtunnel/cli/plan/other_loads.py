"""Other loads of plan: what --load, --what-if and --growth ask for, each a question with an objective."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from windtunnel.errors import InputError
from windtunnel.scenario import Load

if TYPE_CHECKING:
    from windtunnel.plan.objective import Objective
    from windtunnel.plan.question import Question
    from windtunnel.workload import Workload

    Cases = dict[str, tuple[Question, Objective]]

MORE = re.compile(r"\+(\d+(?:\.\d+)?)\s*%")
LONGER = re.compile(r"prompts\s*[*x×]\s*(\d+(?:\.\d+)?)")


class Change(NamedTuple):
    """Another load."""

    load: Load
    rate: float | None
    """Requests per second to serve."""
    longer: float = 1.0
    """Times the prompts' tokens."""


def loads_of(load: Load, wanted: Any, space: Any, question: "Question") -> "Cases":
    """The loads that one deployment must serve; ``wanted`` are the flags. Raises InputError for words that are none."""
    if question.in_lanes and wanted.load:
        raise InputError("load: several loads are for rates: of lanes ask again with another trace")
    changes = {text: change_of(text, load, wanted.target_request_rate, "load") for text in wanted.load}
    if len(changes) < len(wanted.load):
        raise InputError(f"load {' '.join(wanted.load)}: one of them stands twice")
    return {text: case_of(change, wanted, space, question) for text, change in changes.items()}


def cases_of(load: Load, wanted: Any, space: Any, question: "Question") -> "Cases":
    """The other loads of which is asked what they would change. Raises InputError for words that are none."""
    if question.in_lanes and (wanted.what_if or wanted.buyer.growth):
        raise InputError("what_if and growth: are for rates: of lanes ask again with other --lanes")
    changes = {text: change_of(text, load, wanted.target_request_rate) for text in wanted.what_if}
    for factor in wanted.buyer.growth:
        if factor != 1:
            rate = factor * _rate(f"growth {factor:g}", wanted.target_request_rate)
            changes[f"× {factor:g}"] = Change(load, rate)
    return {text: case_of(change, wanted, space, question) for text, change in changes.items()}


def case_of(change: Change, wanted: Any, space: Any, question: "Question") -> "tuple[Question, Objective]":
    """What is asked about a load, and what is best under it."""
    from windtunnel.workload.transforms import with_longer_prompts

    drawn = change.load.for_trials(change.rate)
    workload = with_longer_prompts(drawn.workload(), change.longer)
    draws = tuple((seed, with_longer_prompts(one, change.longer)) for seed, one in draws_of(drawn, wanted))
    asked = replace(question.under(workload, question.seed), draws=draws)
    return asked, replace(wanted, target_request_rate=change.rate).goal(space, asked)


def change_of(text: str, load: Load, rate: float | None, flag: str = "what_if") -> Change:
    """``azure-code``, ``@20``, ``azure-code@20``, ``+30%`` or ``prompts*2``, against the load and its target rate.

    Raises InputError for anything else, and for a share more of a rate that is not given.
    """
    if more := MORE.fullmatch(text.strip()):
        return Change(load, _rate(f"{flag} {text!r}", rate) * (1 + float(more[1]) / 100))
    if longer := LONGER.fullmatch(text.strip()):
        return Change(load, rate, float(longer[1]))
    trace, at, rate_text = text.partition("@")
    if at and not rate_text.replace(".", "", 1).isdigit():
        raise InputError(f"{flag} {text!r}: must be TRACE, @RATE, TRACE@RATE, +30% or prompts*2, e.g. azure-code@20")
    other = replace(load, trace=trace, random_input_len=None, random_output_len=None) if trace else load
    return Change(other, float(rate_text) if at else rate)


def _rate(what: str, rate: float | None) -> float:
    if rate is None:
        raise InputError(f"{what}: multiplies a rate: add --target-request-rate")
    return rate


def draws_of(load: Load, wanted: Any) -> "tuple[tuple[int, Workload], ...]":
    """Other draws of a load: each must carry a target rate, and that with the fewest good tokens counts for goodput;
    none where every draw is the same."""
    if not ((wanted.finds_replicas(load) or wanted.of_goodput) and load.varies):
        return ()
    return tuple((seed, load.corpus.workload(seed)) for seed in range(load.seed + 1, load.seed + wanted.seeds))


def more_draws_of(load: Load, wanted: Any) -> "tuple[tuple[int, Workload], ...]":
    """Further draws, which the winner of a search must carry; none where one is all that is asked for, or lanes."""
    from windtunnel.plan.answer.draws import TIMES

    if load.lanes is not None or wanted.of_goodput or not draws_of(load, wanted):
        return ()
    seeds = range(load.seed + wanted.seeds, load.seed + TIMES * wanted.seeds)
    return tuple((seed, load.corpus.workload(seed)) for seed in seeds)
