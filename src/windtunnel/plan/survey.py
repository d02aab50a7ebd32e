"""Survey: the most promising candidates at a range of rates, without limits: for plots, and limits chosen later."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.plan.bound import rate_bound
from windtunnel.plan.elimination import Report, ask
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.question import Question
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Candidate
from windtunnel.plan.store import Store
from windtunnel.plan.trial import deployment_key, tables_for
from windtunnel.plan.workers import Team, Workers

MOST = 48
"""Most candidates of a survey."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Rates, as shares of what one replica could compute at best."""


@dataclass(frozen=True, eq=False)
class Surveyed:
    """One replica of a candidate at several rates."""

    index: int
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class SurveyJob:
    """Candidates, and what is known of them."""

    question: Question
    candidates: Sequence[Candidate]
    known: Mapping[str, Outcome]


@dataclass
class SurveyReport:
    """What comes back: outcomes by candidate, and the new ones by key."""

    surveyed: list[Surveyed]
    report: Report


def survey(answer: SearchResult, store: Store, team: Team, most: int = MOST) -> tuple[Surveyed, ...]:
    """One replica of each of the most promising candidates, at rates up to its bound."""
    free = replace(answer.question, slo=SLO(), draws=())
    candidates = promising(answer, most)
    workers: Workers[SurveyJob, SurveyReport] = Workers(team, run_survey)
    found: dict[int, Surveyed] = {}
    try:
        for candidate in candidates:
            pools = deployment_key(candidate.deployment, free.perf)
            workers.submit(SurveyJob(free, (candidate,), store.known(free.digest, [pools])))
        while workers.under_way:
            for _, back in workers.results(1.0):
                store.record(free.digest, back.report.asked)
                found |= {one.index: one for one in back.surveyed}
    finally:
        workers.stop()
    return tuple(found[candidate.index] for candidate in candidates)


def promising(answer: SearchResult, most: int) -> list[Candidate]:
    """Candidates by promise; the best of each device, parallelism and batch cap come before others like them.

    Of those that differ in their router alone the first counts: one replica needs no router.
    """
    entries = [entry for entry in answer.entries.values() if entry.status not in ("impossible", "refused")]
    order = sorted(entries, key=lambda entry: (-entry.promise, entry.index))
    ranked = [answer.contenders[entry.index].candidate for entry in order]
    of_pools = {one.index: repr([pool.spec() for pool in one.scaled(1).pools]) for one in ranked}
    first = {of_pools[one.index]: one.index for one in reversed(ranked)}
    candidates = [one for one in ranked if first[of_pools[one.index]] == one.index]
    seen: dict[tuple[object, ...], int] = {}
    turns = []
    for place, candidate in enumerate(candidates):
        key = tuple(
            (
                pool.device.name,
                pool.engine.tensor_parallel_size,
                pool.engine.pipeline_parallel_size,
                pool.engine.resolved("max_num_seqs"),
            )
            for pool in candidate.deployment.pools
        )
        turns.append((seen.get(key, 0), place))
        seen[key] = seen.get(key, 0) + 1
    return [candidates[place] for _, place in sorted(turns)[:most]]


def run_survey(job: SurveyJob) -> SurveyReport:
    """The trials of a job, in a worker."""
    report, surveyed = Report(), []
    for candidate in job.candidates:
        one = candidate.scaled(1)
        pools = deployment_key(one, job.question.perf)
        bound = rate_bound(one, job.question, tables_for(job.question, one, pools)).rate
        bound = job.question.most if job.question.in_lanes else bound
        levels = [job.question.level(share * bound) for share in SHARES]
        rates = sorted({job.question.rate(level) for level in levels})
        outcomes = [ask(job.question, job.known, pools, (one, rate), report) for rate in rates]
        surveyed.append(Surveyed(candidate.index, tuple(outcomes)))
    return SurveyReport(surveyed, report)
