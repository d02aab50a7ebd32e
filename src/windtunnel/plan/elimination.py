"""Elimination: whether candidates beat the best known so far, with as few simulations as possible. Runs in workers."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from itertools import groupby
from typing import Literal, NamedTuple

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Pool
from windtunnel.deployment.engine_scheduler import engine_scheduler, named_settings
from windtunnel.errors import InputError
from windtunnel.plan.bound import Bound, rate_bounds
from windtunnel.plan.capacity import climb, highest
from windtunnel.plan.goodput.objective import GoodputClimb
from windtunnel.plan.goodput.points import OFFERED, SIMULATED, STOPPED, Closed, good_run, try_counts
from windtunnel.plan.objective import Climb, Objective
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.question import Question
from windtunnel.plan.space import Candidate
from windtunnel.plan.trial import deployment_key, tables_for, tables_to_bound, trial, trial_key
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import head

LARGEST_JOB = 64
"""Most candidates of one job."""
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "replicas", "router", "decode_router", "autoscale", "decode")
"""Last words of the axes that do not change how long a batch takes; the last one's are the ratios of two pools."""

Status = Literal["exact", "beaten", "bounded", "impossible", "refused"]


class Standing(NamedTuple):
    """A candidate's score and its place in the space: of equal scores the first place wins."""

    score: float
    place: int

    def beats(self, other: "Standing | None") -> bool:
        """Whether this is the better one."""
        return other is None or (self.score, -self.place) > (other.score, -other.place)


@dataclass(frozen=True)
class Entry:
    """What the search knows about one candidate."""

    index: int
    status: Status
    """``exact``: its highest step is known (None: no step holds). ``beaten``: it failed where the best hold.
    ``bounded``: its bound is not good enough. ``impossible``: no request alone keeps the limits.
    ``refused``: it cannot run."""
    promise: float
    """Upper bound of its score, the score itself if ``exact``; −infinity where no step holds."""
    step: int | None = None
    """The highest step that holds."""
    held: Outcome | None = None
    missed: Outcome | None = None
    """The trial at the lowest step that fails, as far as known."""
    stretch: float = math.nan
    """For ``impossible``: the factor by which the limits must be loosened at least."""
    reason: str = ""
    """For ``refused``."""
    closed: tuple[Closed, ...] = ()
    """Of a goodput: why numbers of replicas are not better. More than these are ``offered``; fewer than one that misses
    the least share of good requests miss it too."""

    @property
    def standing(self) -> Standing:
        """Its standing among the others."""
        return Standing(self.promise, self.index)


@dataclass(frozen=True)
class Contender:
    """A candidate with its bound."""

    candidate: Candidate
    bound: Bound


@dataclass(frozen=True)
class Job:
    """What is sent to a worker: candidates, the standing to beat, and the trials of them already known."""

    question: Question
    objective: Objective
    contenders: Sequence[Contender]
    standard: Standing | None
    """What a candidate must beat to be tried further; None: nothing yet."""
    known: Mapping[str, Outcome]


class Asked(NamedTuple):
    """One new simulation."""

    pools: str
    replicas: int
    outcome: Outcome
    cpu_seconds: float


@dataclass
class Report:
    """What comes back from a worker."""

    entries: list[Entry] = field(default_factory=list)
    asked: dict[str, Asked] = field(default_factory=dict)
    """New trials, by key."""
    reused: int = 0
    """Trials that were known already."""
    seconds: float = 0.0


def eliminate(job: Job) -> Report:
    """Try every candidate of a job against the same standard."""
    report = Report()
    with _stopwatch(report):
        for contender in job.contenders:
            try:
                entry = _ask_candidate(contender, job, report)
            except InputError as error:
                entry = Entry(contender.candidate.index, "refused", -math.inf, reason=str(error))
            report.entries.append(entry)
    return report


def best_of(standings: Sequence[Standing], top: int) -> tuple[Standing, ...]:
    """The best few, best first."""
    return tuple(sorted(set(standings), key=lambda standing: (-standing.score, standing.place))[:top])


def threshold(standards: Sequence[Standing], top: int) -> Standing | None:
    """What must be beaten to be among the best ``top``; None while there are fewer."""
    return standards[top - 1] if len(standards) >= top else None


def start_of(steps: Climb, index: int, standard: Standing | None) -> int | None:
    """The lowest step whose promise beats the standard; None if not even the highest does."""
    if standard is None:
        return steps.low
    return _lowest(steps, index, standard)


def _lowest(steps: Climb, index: int, standard: Standing) -> int | None:
    low, high = steps.low, steps.high + 1
    while low < high:
        middle = (low + high) // 2
        if Standing(steps.promise(middle), index).beats(standard):
            high = middle
        else:
            low = middle + 1
    return low if low <= steps.high else None


def _ask_candidate(contender: Contender, job: Job, report: Report) -> Entry:
    """Try the lowest step that beats the standard; if it holds, climb from there. Without a standard, bisect."""
    candidate = contender.candidate
    steps = job.objective.climb(candidate, contender.bound, job.question)
    if steps is None:
        return impossible(contender, job.objective)
    start = start_of(steps, candidate.index, job.standard)
    if start is None:
        return Entry(candidate.index, "bounded", steps.promise(steps.high))
    pools = deployment_key(candidate.deployment, job.question.perf)
    if isinstance(steps, GoodputClimb):
        return _ask_replicas(steps, job, pools, report)
    tried: dict[int, Outcome] = {}

    def holds(step: int) -> bool:
        if step not in tried:
            tried[step] = ask(job.question, job.known, pools, steps.trial(step), report)
        return tried[step].met

    if start > steps.low:
        step = climb(holds, start, steps.high)
        if step is None:
            return Entry(candidate.index, "beaten", steps.promise(start - 1), missed=tried[start])
    else:
        find = climb if job.question.in_lanes else highest
        step = find(holds, steps.low, steps.high) if holds(steps.low) else None
    if step is None:
        return Entry(candidate.index, "exact", -math.inf, missed=tried[steps.low])
    score = steps.score(step, tried[step])
    return Entry(candidate.index, "exact", score, step, tried[step], tried.get(step + 1))


def _ask_replicas(steps: GoodputClimb, job: Job, pools: str, report: Report) -> Entry:
    """Try every number of replicas that may beat the standard and those tried before; see ``plan.goodput``."""
    index, closed = steps.candidate.index, dict[int, Closed]()
    best: tuple[float, int, Outcome] | None = None

    def wins(score: float, count: int) -> bool:
        own = best is None or (score, -count) > (best[0], -best[1])
        return score > -math.inf and own and Standing(score, index).beats(job.standard)

    def asked(count: int) -> bool:
        if wins(steps.promise(-count), count):
            return True
        closed[count] = Closed(count, OFFERED, steps.promise(-count))
        return False

    def fails(count: int) -> bool:
        nonlocal best
        outcome = _ask_good(steps, count, lambda score: wins(score, count), job, pools, report)
        score = steps.score(-count, outcome)
        if not outcome.stopped and wins(score, count):
            if best is not None:
                closed[best[1]] = Closed(best[1], SIMULATED, best[0])
            best = score, count, outcome
        else:
            closed[count] = Closed(count, STOPPED if outcome.stopped else SIMULATED, score)
        return score == -math.inf

    try_counts(-steps.high, -steps.low, steps.likely, asked, fails)
    why = tuple(closed[count] for count in sorted(closed))
    if best is not None:
        return Entry(index, "exact", best[0], -best[1], best[2], closed=why)
    most = max(one.score for one in why)
    if job.standard is None or most == -math.inf:
        return Entry(index, "exact", -math.inf, closed=why)
    return Entry(index, "beaten", most, closed=why)


def impossible(contender: Contender, objective: Objective) -> Entry:
    """The entry of a candidate that its bound rules out, or what is available."""
    if contender.bound.rate > 0:
        reason = objective.shortage(contender.candidate, contender.bound)
        return Entry(contender.candidate.index, "refused", -math.inf, reason=reason)
    return Entry(contender.candidate.index, "impossible", -math.inf, stretch=contender.bound.stretch)


def ask(
    question: Question, known: Mapping[str, Outcome], pools: str, what: tuple[Deployment, float], report: Report
) -> Outcome:
    """The outcome of a trial: known, or simulated and added to the report."""
    deployment, rate = what
    key = trial_key(question, pools, deployment, rate)
    if key in report.asked:
        return report.asked[key].outcome
    if key in known:
        report.reused += 1
        return known[key]
    began = time.process_time()
    outcome = trial(question, deployment, rate, tables_for(question, deployment, pools))
    report.asked[key] = Asked(pools, deployment.replicas, outcome, time.process_time() - began)
    return outcome


def _ask_good(
    steps: GoodputClimb, count: int, wins: Callable[[float], bool], job: Job, pools: str, report: Report
) -> Outcome:
    """The outcome of some replicas at the arrivals of the load: known, or simulated as far as it may still win."""
    question, (deployment, rate) = job.question, steps.trial(-count)
    key = trial_key(question, pools, deployment, rate)
    whole, counted, begun = f"{key}-good", f"{key}-counted", f"{key}-lost"
    for name in (whole, counted, begun):
        asked = report.asked.get(name)
        if asked is not None and (name == whole or not wins(steps.score(-count, asked.outcome))):
            return asked.outcome
    for name in (whole, counted, begun):
        if name in job.known and (name == whole or not wins(steps.score(-count, job.known[name]))):
            report.reused += 1
            return job.known[name]

    def beats(good_rate: float, share: float) -> bool:
        return share >= question.attainment and wins(good_rate / (count * steps.weight))

    began = time.process_time()
    outcome = good_run(question, deployment, rate, tables_for(question, deployment, pools), beats)
    key = begun if outcome.stopped else whole if outcome.latencies else counted
    report.asked[key] = Asked(pools, deployment.replicas, outcome, time.process_time() - began)
    return outcome


@dataclass(frozen=True)
class BoundJob:
    """Candidates whose bounds are wanted under each of these questions, which share their batch times."""

    questions: Sequence[Question]
    candidates: Sequence[Candidate]


def bound_jobs(questions: Sequence[Question], candidates: Sequence[Candidate], workers: int) -> list[BoundJob]:
    """The jobs of all candidates. Those that differ in their limits alone come together, the largest first: so the
    tables of one are beginnings of those of the one before."""

    def kin(one: Candidate) -> list[tuple[str, str]]:
        return [(axis, str(value)) for axis, value in one.settings.items() if axis.split()[-1] not in LIMITS]

    def limits(one: Candidate) -> list[tuple[int, int]]:
        engines = [pool.engine for pool in one.deployment.pools]
        return [(-each.resolved("max_num_batched_tokens"), -each.resolved("max_num_seqs")) for each in engines]

    size = min(LARGEST_JOB, max(1, len(candidates) // (2 * workers)))
    jobs = []
    for _, alike in groupby(sorted(candidates, key=lambda one: (kin(one), limits(one), one.index)), kin):
        few = tuple(alike)
        jobs += [BoundJob(questions, few[start : start + size]) for start in range(0, len(few), size)]
    return jobs


@dataclass
class BoundReport:
    """By index of the candidate: a bound for each question or why it cannot run, and the content key of its pools."""

    bounds: dict[int, tuple[Bound, ...]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    pools: dict[int, str] = field(default_factory=dict)


def find_bounds(job: BoundJob) -> BoundReport:
    """The bounds of every candidate of a job, its tables read once for all questions."""
    report, perf = BoundReport(), job.questions[0].perf
    found: dict[tuple[object, ...], tuple[Bound, ...]] = {}
    for candidate in job.candidates:
        deployment = candidate.deployment
        try:
            pools = deployment_key(deployment, perf)
            same = (pools, *((pool.role, pool.replicas) for pool in deployment.pools))  # whatever the router
            if same not in found:
                tables = tables_to_bound(job.questions[0], deployment)
                found[same] = rate_bounds(deployment, job.questions, tables)
            report.bounds[candidate.index], report.pools[candidate.index] = found[same], pools
        except InputError as error:
            report.refused[candidate.index] = str(error)
    return report


@dataclass(frozen=True)
class WarmUp:
    """A candidate simulated only so that its kernels are compiled and cached.

    Compiling takes longer than most searches. Without warm-up every worker would compile what all of them need.
    """

    question: Question
    candidate: Candidate


def warm_ups(question: Question, candidates: Iterable[Candidate]) -> list[WarmUp]:
    """One for each kind of scheduler among the candidates."""
    kinds: dict[str, Candidate] = {}
    for candidate in candidates:
        kinds.setdefault(" ".join(_kind(pool) for pool in candidate.deployment.pools), candidate)
    return [WarmUp(question, candidate) for candidate in kinds.values()]


def _kind(pool: Pool) -> str:
    """What decides which kernels run: the scheduler, and whether it has a prefix cache and stages."""
    settings = named_settings(pool.engine.scheduler) if pool.engine.scheduler else engine_scheduler(pool.engine)
    if settings is None:
        return "the user's"
    return f"{type(settings).__name__} {settings.prefix_caching} {pool.engine.pipeline_parallel_size}"


def warm_up(job: WarmUp) -> None:
    """Simulate the first requests of the load; candidates that cannot run are reported later."""
    try:
        few = head(job.question.workload, WARM_UP_REQUESTS)
        simulate(job.candidate.deployment, few, perf=job.question.perf, overheads=job.question.overheads)
    except InputError:
        pass


AnyJob = WarmUp | BoundJob | Job
AnyReport = BoundReport | Report | None


@contextmanager
def _stopwatch(report: Report) -> Iterator[None]:
    began = time.perf_counter()
    yield
    report.seconds = time.perf_counter() - began


def work(job: AnyJob) -> AnyReport:
    """What a worker does with a job."""
    if isinstance(job, WarmUp):
        warm_up(job)
        return None
    return eliminate(job) if isinstance(job, Job) else find_bounds(job)


WARM_UP_REQUESTS = 8
