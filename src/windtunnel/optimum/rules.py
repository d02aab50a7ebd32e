"""Rules: what schedulers deny themselves. What each costs is the difference of two optima, with it and without."""

import itertools
from collections.abc import Collection, Iterator

from windtunnel.errors import unknown
from windtunnel.optimum.objective import Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Schedule

RULES = {
    "chunks": "each prompt is computed in one batch",
    "evictions": "no request loses its memory",
    "pauses": "who holds memory takes part in every batch",
    "mixing": "a batch computes prompts or decodes (an evicted request computes its prompt again)",
    "overtaking": "requests begin in order of arrival, equal arrivals in order of the list",
    "choosing": "of equal prompts that one begins first which came first: their outputs are not known",
}
"""What may be forbidden, and what then holds."""
AS_BEGUN = frozenset({"chunks", "evictions", "pauses"})
"""With these forbidden, a schedule is the batch in which each request begins."""


def check_rules(forbidden: Collection[str]) -> frozenset[str]:
    """The words. Raises InputError for one that is no rule."""
    for word in forbidden:
        if word not in RULES:
            raise unknown("rule to forbid", word, RULES)
    return frozenset(forbidden)


def ends_early(objective: Objective, forbidden: Collection[str]) -> bool:
    """Whether a program may end with the last first token: what comes after does not count, and can always be served,
    as long as one request may take another's memory."""
    return objective.first_tokens_only and "evictions" not in forbidden


def batches_after_first_tokens(problem: Problem, forbidden: Collection[str]) -> int:
    """Batches in which the last tokens can be made without evictions, if they can: one request after the other in the
    order in which they would end together; all at once where none may pause."""
    left = problem.output_tokens - 1
    return int(left.max() if "pauses" in forbidden else left.sum())


def orders(problem: Problem, forbidden: Collection[str]) -> Iterator[tuple[int, int]]:
    """Pairs of requests of which the second must not begin before the first."""
    ordered = sorted(range(len(problem)), key=lambda i: (float(problem.arrival[i]), i))
    if "overtaking" in forbidden:
        yield from itertools.pairwise(ordered)
    elif "choosing" in forbidden:
        last: dict[int, int] = {}
        for i in ordered:
            prompt = int(problem.prompt_tokens[i])
            if prompt in last:
                yield last[prompt], i
            last[prompt] = i


def keeps(problem: Problem, schedule: Schedule, forbidden: Collection[str]) -> bool:
    """Whether a valid schedule does nothing that is forbidden."""
    held: dict[int, int] = {}
    to_prefill: dict[int, int] = {}
    known = problem.prompt_tokens.tolist()
    total = (problem.prompt_tokens + problem.output_tokens).tolist()
    begun: dict[int, int] = {}
    for number, batch in enumerate(schedule.batches):
        if "evictions" in forbidden and batch.evicted:
            return False
        for i in batch.evicted:
            del held[i]
        if "pauses" in forbidden and held.keys() - batch.tokens.keys():
            return False
        decodes = sum(1 for i in batch.tokens if i in held and held[i] >= to_prefill[i])
        if "mixing" in forbidden and 0 < decodes < len(batch.tokens):
            return False
        for i, tokens in batch.tokens.items():
            begun.setdefault(i, number)
            if i not in held:
                to_prefill[i] = known[i]
            held[i] = held.get(i, 0) + tokens
            if held[i] < known[i]:
                if "chunks" in forbidden:
                    return False
                continue
            known[i] += 1
            if known[i] == total[i]:
                del held[i]
    return all(begun[first] <= begun[second] for first, second in orders(problem, forbidden))
