"""Other loads of plan: what --what-if and --growth ask for, each a question with an objective."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from windtunnel.errors import InputError
from windtunnel.scenario import Load

if TYPE_CHECKING:
    from windtunnel.plan.objective import Objective
    from windtunnel.plan.question import Question
    from windtunnel.workload import Workload

MORE = re.compile(r"\+(\d+(?:\.\d+)?)\s*%")
LONGER = re.compile(r"prompts\s*[*x×]\s*(\d+(?:\.\d+)?)")


class Change(NamedTuple):
    """Another load."""

    load: Load
    rate: float | None
    """Requests per second to serve."""
    longer: float = 1.0
    """Times the prompts' tokens."""


def cases_of(load: Load, wanted: Any, space: Any, question: "Question") -> "dict[str, tuple[Question, Objective]]":
    """The other loads, by the words they were given in; ``wanted`` are the flags. Raises InputError for other words."""
    from windtunnel.workload.transforms import with_longer_prompts

    if question.in_lanes and (wanted.what_if or wanted.buyer.growth):
        raise InputError("what_if and growth: are for rates: of lanes ask again with other --lanes")
    changes = {text: change_of(text, load, wanted.target_request_rate) for text in wanted.what_if}
    for factor in wanted.buyer.growth:
        if factor != 1:
            rate = factor * _rate(f"growth {factor:g}", wanted.target_request_rate)
            changes[f"× {factor:g}"] = Change(load, rate)
    found = {}
    for text, (changed, rate, longer) in changes.items():
        drawn = changed.for_trials(rate)
        workload = with_longer_prompts(drawn.workload(), longer)
        draws = tuple((seed, with_longer_prompts(one, longer)) for seed, one in draws_of(drawn, wanted))
        asked = replace(question.under(workload, question.seed), draws=draws)
        found[text] = (asked, replace(wanted, target_request_rate=rate).goal(space, asked))
    return found


def change_of(text: str, load: Load, rate: float | None) -> Change:
    """``azure-code``, ``@20``, ``azure-code@20``, ``+30%`` or ``prompts*2``, against the load and its target rate.

    Raises InputError for anything else, and for a share more of a rate that is not given.
    """
    if more := MORE.fullmatch(text.strip()):
        return Change(load, _rate(f"what_if {text!r}", rate) * (1 + float(more[1]) / 100))
    if longer := LONGER.fullmatch(text.strip()):
        return Change(load, rate, float(longer[1]))
    trace, at, rate_text = text.partition("@")
    if at and not rate_text.replace(".", "", 1).isdigit():
        raise InputError(f"what_if {text!r}: must be TRACE, @RATE, TRACE@RATE, +30% or prompts*2, e.g. azure-code@20")
    other = replace(load, trace=trace, random_input_len=None, random_output_len=None) if trace else load
    return Change(other, float(rate_text) if at else rate)


def _rate(what: str, rate: float | None) -> float:
    if rate is None:
        raise InputError(f"{what}: multiplies a rate: add --target-request-rate")
    return rate


def draws_of(load: Load, wanted: Any) -> "tuple[tuple[int, Workload], ...]":
    """Other draws of a load, which must carry a target rate as well; none where every draw is the same."""
    if not (wanted.finds_replicas(load) and load.varies):
        return ()
    return tuple((seed, load.workload(seed)) for seed in range(load.seed + 1, load.seed + wanted.seeds))
