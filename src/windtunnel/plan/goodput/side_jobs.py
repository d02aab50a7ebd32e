"""Side jobs: what workers find out about prefill pools at a load's own arrivals.

A prefill pool with a decode pool that takes no time makes as many first tokens in time as it ever does: the run is
the same with any decode pool that never makes it wait, and no better with one that does. So one run of a prefill
pool closes whole families of deployments; what it leaves is simulated whole.
"""

import time
from collections.abc import Sequence
from dataclasses import field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Pool
from windtunnel.perf.batch_times import BatchTimes, Times
from windtunnel.plan.disaggregation.placed import _free
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.doubt import tightened
from windtunnel.plan.goodput.classes import fastest, most_at_once, most_prompts, no_better, seat_ends
from windtunnel.plan.goodput.closed import AT_BEST, DECODE, FEWER, PREFILL, SAME, SHARED, Closing, Layout, Server
from windtunnel.plan.goodput.decode_bound import Lines, lines_under, most_tokens
from windtunnel.plan.goodput.decode_sharing import Come, Sharing, shared_tokens, sharing_of
from windtunnel.plan.goodput.points import at_most, beginning, first_of, lost_so_far
from windtunnel.plan.goodput.prefill_queue import (
    Dealt,
    computed,
    dealt,
    late_in_turn,
    lately,
    seconds_of_prompts,
    takes_in_turn,
)
from windtunnel.plan.question import Question
from windtunnel.plan.trial import Tables, of_the_last, simulated, tables_for
from windtunnel.simulate.run import FINISHED, Requests, Run
from windtunnel.workload import Workload

Floats = NDArray[np.float64]

EPSILON = 1e-6
"""Seconds by which rounding may move an instant."""
LUCK = 1.001
"""Times the good tokens of one that stands for others that those may have: requests that meet by chance."""


class Point(NamedTuple):
    """A deployment that is still open."""

    prefill: Server
    decode: Server
    layout: Layout
    tokens: float
    """Good tokens per second at most."""
    alike: tuple[int, ...] = ()
    """Other prefill servers that do the same."""
    fewer: tuple[int, ...] = ()
    """Those that do, but for fewer KV blocks."""
    rule: str = PREFILL
    """By which it has no more."""

    @property
    def weight(self) -> float:
        """Of the whole."""
        return self.layout[0] * self.prefill.weight + self.layout[1] * self.decode.weight

    @property
    def promise(self) -> float:
        """The score that it has at most."""
        return self.tokens / self.weight

    @property
    def kind(self) -> tuple[str, str, Layout]:
        """Equal for those that differ in limits alone."""
        return self.prefill.kin, self.decode.kin, self.layout

    @property
    def side(self) -> tuple[int, str, Layout]:
        """Equal for those that differ in the limits of the decode side alone."""
        return self.prefill.place, self.decode.kin, self.layout

    def closings(self, rule: str, tokens: float) -> list[Closing]:
        """It and those for which it stands, closed by a rule."""
        one = () if self.prefill.stands_for else (self.prefill.place,)
        each = ((rule, one), (SAME, self.alike), (FEWER, self.fewer))
        return [Closing(by, own, (self.decode.place,), (self.layout,), tokens) for by, own in each if own]


@dataclass(frozen=True, eq=False)
class SideJob:
    """Prefill servers that differ in ``max_num_seqs``, the largest first, with decode servers by kin."""

    question: Question
    space: PoolSpace
    prefills: Sequence[Server]
    decodes: Sequence[tuple[Sequence[Server], Sequence[Layout]]]
    """Of each kin its servers and the layouts that are open."""
    best: float
    """The score to beat."""
    only_first: bool = False
    """Ask the first of the prefill servers, and give back the others."""


@dataclass
class SideReport:
    """What is closed, and what is left."""

    closed: list[Closing] = field(default_factory=list)
    open: list[Point] = field(default_factory=list)
    later: list[SideJob] = field(default_factory=list)
    """Servers that were not asked."""
    trials: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Alone:
    """A run of a prefill side with a decode side that takes no time."""

    requests: Requests
    joined: Floats
    """When the KV of each is with its decode replica."""
    kept: NDArray[np.bool_]
    """Requests whose first token is in time."""
    most: int
    """Requests of a replica at once, at most."""
    tokens: float
    """Output tokens per second of those requests; of a run that was ended early, of all that may still be in time."""


def prefill_alone(
    question: Question,
    deployment: Deployment,
    least: float = 0.0,
    lost: Floats | None = None,
    late: Floats | None = None,
    tables: Tables | None = None,
) -> Alone:
    """The prefill side of a deployment, its decode side taking no time; ended early where no more than ``least`` tokens
    per second can come in time. ``lost``, ``late``: see ``beginning``; ``tables``: the question's, unless given."""
    workload = question.workload
    few = of_the_last(_few_kept, workload.digest, lambda: _few_tokens(workload), 1)
    tables = [
        table if pool.role == "prefill" else _free(table)
        for pool, table in zip(deployment.pools, tables or tables_for(question, deployment), strict=True)
    ]
    asked = tightened(deployment, tables, question)
    count = beginning(workload, lambda tokens, _: tokens > least, lost, late)
    if count is not None:
        begun = simulated(question, deployment, first_of(few, count), tables)
        tokens, _ = at_most(begun.requests, workload, asked, late)
        if tokens <= least:
            return _alone(begun, deployment.pools[0], tables[0].times, np.zeros(count, dtype=np.bool_), tokens)
    run = simulated(question, deployment, few, tables)
    limit, requests = asked.slo.limits.get("ttft", np.inf), run.requests
    kept = (requests.status == FINISHED) & ~(requests.first_token - requests.arrival > limit)
    tokens = float(workload.output_tokens[kept].sum()) / workload.duration
    return _alone(run, deployment.pools[0], tables[0].times, kept, tokens)


def _few_tokens(workload: Workload) -> Workload:
    """The same prompts, with answers of two tokens at most."""
    return replace(
        workload,
        output_tokens=np.minimum(workload.output_tokens, 2),
        max_tokens=np.minimum(workload.max_tokens, 2),
    )


def _alone(run: Run, pool: Pool, times: Times, kept: NDArray[np.bool_], tokens: float) -> Alone:
    requests, handed = run.requests, run.handovers
    assert handed is not None
    rows, ended = run.iterations, requests.scheduled + handed.ttft_prefill
    ends = seat_ends(ended, handed.prefill_replica, rows.start, rows.replica, times)
    most = most_at_once(requests.scheduled, ends, handed.prefill_replica)
    if takes_in_turn(pool) and not pool.stores:
        most = min(most, most_prompts(rows, np.unique(handed.prefill_replica)))
    return Alone(requests, requests.first_token - handed.ttft_join, kept, most, tokens)


def ask_side(job: SideJob) -> SideReport:
    """Close what the prefill side closes, and what decoding at its best does."""
    report, began = SideReport(), time.perf_counter()
    apart = [(group,) for group in job.decodes] if job.question.confidence is not None else [tuple(job.decodes)]
    for groups in apart:
        for first in sorted({a for _, layouts in groups for a, _ in layouts}):
            mine = [(decodes, [one for one in layouts if one[0] == first]) for decodes, layouts in groups]
            _ask_first(replace(job, decodes=[one for one in mine if one[1]]), first, report)
    report.seconds = time.perf_counter() - began
    return report


def _ask_first(job: SideJob, first: int, report: SideReport) -> None:
    """Every server of the job in ``first`` replicas, those first that may stand for others."""
    any_decode = job.decodes[0][0][0]
    late = _not_late(job, first, report)
    left = [one for one in job.prefills if one.place in late]
    most: float = np.inf
    while left:
        above = [one for one in left if one.limits[1] > most]
        if len(above) > 1 and _ask_fastest(job, first, above, report):
            left, most = [one for one in left if one not in above], np.inf
            continue
        server, *others = left
        one = job.space.deployment(server.pool, any_decode.pool, (first, 1))
        alone = _ask_alone(job, server, one, late[server.place], report, 1.0)
        own = one.pools[0], tables_for(job.question, one)[0].times
        alike: dict[str, list[Server]] = {"": [], SAME: [], FEWER: []}
        for other in others:
            table = tables_for(job.question, job.space.deployment(other.pool, any_decode.pool, (first, 1)))[0]
            alike[no_better(own, (other.pool, table.times), alone.most)].append(other)
        side = AskedSide(job, server, tuple(alike[SAME]), tuple(alike[FEWER]), {1: alone}, report)
        for decodes, layouts in job.decodes:
            side.close(decodes, layouts)
        left, most = _representative_first(alike[""], alone.most), alone.most
        if job.only_first and left:
            report.later.append(replace(job, prefills=left, only_first=False))
            return


def _ask_alone(
    job: SideJob, server: Server, deployment: Deployment, late: Floats, report: SideReport, luck: float
) -> Alone:
    """A run of the prefill side, with ``luck`` times its tokens; what it lost is kept for those like it."""
    like = f"{job.question.digest} {server.kin} {deployment.pools[0].replicas}"
    tables = tables_with(job.question, deployment, server)
    least = job.best * _lightest(job) / luck
    alone = prefill_alone(job.question, deployment, least, lost_kept.get(like), late, tables)
    report.trials += 1
    if len(alone.kept) == len(job.question.workload):
        lost_kept[like] = lost_so_far(job.question.workload, alone.kept)
    return replace(alone, tokens=luck * alone.tokens)


def _ask_fastest(job: SideJob, first: int, servers: Sequence[Server], report: SideReport) -> bool:
    """Ask one server that stands for several with more seats than are in use at once; whether it can."""
    one, *others = sorted(servers, key=lambda server: server.limits[1])
    whole = [job.space.deployment(server.pool, job.decodes[0][0][0].pool, (first, 1)) for server in (one, *others)]
    own, *theirs = [(each.pools[0], tables_for(job.question, each)[0].times) for each in whole]
    times = fastest(own, theirs)
    if times is None:
        return False
    places = tuple(server.place for server in servers)
    server = replace(one, place=-1 - min(places), stands_for=places, fastest=times)
    late = late_for_certain(job.question, whole[0], tables_with(job.question, whole[0], server))
    alone = _ask_alone(job, server, whole[0], late, report, LUCK)
    if alone.most >= one.limits[1]:
        return False
    side = AskedSide(job, server, (), tuple(servers), {1: alone}, report)
    for decodes, layouts in job.decodes:
        side.close(decodes, layouts)
    return True


def tables_with(question: Question, deployment: Deployment, prefill: Server) -> Tables:
    """The tables of a deployment of this prefill server."""
    tables = tables_for(question, deployment)
    if prefill.fastest is None:
        return tables
    return [replace(tables[0], times=prefill.fastest), *tables[1:]]


def _not_late(job: SideJob, first: int, report: SideReport) -> dict[int, Floats]:
    """What is late for certain, by servers whose prompts may come in time where they are computed at the best speed;
    the others are closed."""
    found: dict[int, Floats] = {}
    closed: dict[float, list[Server]] = {}
    workload = job.question.workload
    for server in job.prefills:
        deployment = job.space.deployment(server.pool, job.decodes[0][0][0].pool, (first, 1))
        late = late_for_certain(job.question, deployment, tables_for(job.question, deployment))
        most = float(workload.output_tokens.sum() - late[0]) / workload.duration
        if most / _lightest(job) > job.best:
            found[server.place] = late
        else:
            closed.setdefault(most, []).append(server)
    for most, servers in closed.items():
        for decodes, layouts in job.decodes:
            report.closed.append(_closing(AT_BEST, servers, decodes, layouts, most))
    return found


def late_for_certain(question: Question, deployment: Deployment, tables: Tables) -> Floats:
    """Output tokens at least of requests from each on, and 0, whose first token is late, by the prefill side."""
    pool = deployment.pools[0]
    limit = tightened(deployment, tables, question).slo.limits.get("ttft", np.inf)
    work, times = _work(question, pool, pool.replicas), question.overheads.applied(tables[0].times)
    return late_in_turn(
        deployment, question.workload, seconds_of_prompts(deployment, question.workload, work, times), limit
    )


def _work(question: Question, pool: Pool, first: int) -> Floats:
    """Tokens of each prompt that a prefill pool computes at least, kept."""
    whose = question.digest, first
    key = (*whose, lately(pool, question.workload))
    if whose not in _dealt_kept:
        _dealt_kept[whose] = dealt(question.workload, first)
    if key not in _work_kept:
        _work_kept[key] = computed(question.workload, _dealt_kept[whose], pool)
    return _work_kept[key]


def _lightest(job: SideJob) -> float:
    """Least weight of what is open."""
    return min(_weight(job.prefills[0], decodes[0], one) for decodes, layouts in job.decodes for one in layouts)


def _closing(
    rule: str, prefills: Sequence[Server], decodes: Sequence[Server], layouts: Sequence[Layout], tokens: float
) -> Closing:
    places = tuple(one.place for one in prefills), tuple(one.place for one in decodes)
    return Closing(rule, *places, tuple(layouts), tokens)


def _representative_first(servers: Sequence[Server], most: int) -> list[Server]:
    """The servers, that first whose limit is the smallest above the ``most`` requests that a replica has had at once:
    it leaves most memory to KV, so it may stand for the others above."""
    above = [one for one in servers if one.limits[1] > most]
    return [*above[-1:], *(one for one in servers if one not in above[-1:])]


def _weight(prefill: Server, decode: Server, layout: Layout) -> float:
    return layout[0] * prefill.weight + layout[1] * decode.weight


@dataclass(frozen=True, eq=False)
class AskedSide:
    """A prefill side that was asked, and those that it stands for."""

    job: SideJob
    server: Server
    same: tuple[Server, ...]
    fewer: tuple[Server, ...]
    runs: dict[int, Alone]
    """By decode replicas, which take no time: it matters who goes to which of them."""
    report: SideReport

    def close(self, decodes: Sequence[Server], layouts: Sequence[Layout]) -> None:
        """What its runs say about one kin of decode servers."""
        alone = self.runs[1]
        lost = [one for one in layouts if alone.tokens / _weight(self.server, decodes[0], one) <= self.job.best]
        self._closed(PREFILL, decodes, lost, alone.tokens)
        left = [layout for layout in layouts if layout not in lost]
        most = decoded(self.job, alone, self.server, decodes, left) if left else {}
        for layout in left:
            weight = _weight(self.server, decodes[0], layout)
            for seats in sorted({one.limits[1] for one in decodes}):
                alike = [one for one in decodes if one.limits[1] == seats]
                tokens = max(min(alone.tokens, most[one.place, layout]) for one in alike)
                if tokens / weight <= self.job.best:
                    self._closed(DECODE, alike, [layout], tokens)
                    continue
                shared = min(tokens, self.shared(alike, layout))
                if shared / weight <= self.job.best:
                    self._closed(SHARED, alike, [layout], shared)
                    continue
                same, fewer = (tuple(one.place for one in servers) for servers in (self.same, self.fewer))
                rule = SHARED if shared < tokens else DECODE if tokens < alone.tokens else PREFILL
                self.report.open += [Point(self.server, one, layout, shared, same, fewer, rule) for one in alike]

    def _closed(self, rule: str, decodes: Sequence[Server], layouts: Sequence[Layout], tokens: float) -> None:
        own = () if self.server.stands_for else (self.server, *self.same)
        for by, prefills in ((rule, own), (FEWER, self.fewer)):
            if prefills and layouts:
                self.report.closed.append(_closing(by, prefills, decodes, layouts, tokens))

    def shared(self, decodes: Sequence[Server], layout: Layout) -> float:
        """Good tokens per second where decode servers with as many seats share their steps among all that comes; no
        bound where it is not known who goes to which replica, or where prompts that are not there yet hold seats."""
        job, question = self.job, self.job.question
        if job.space.handover.reservation != "memory" or job.space.handover.gate != "after_prefill":
            return np.inf
        deployment = job.space.deployment(self.server.pool, decodes[0].pool, layout)
        limits = tightened(deployment, tables_for(question, deployment), question).slo.limits
        router = deployment.decode_router or deployment.router
        sharing = _sharing(job, self.server, decodes)
        if sharing is None or not {"ttft", "tpot"} <= set(limits) or (layout[1] > 1 and router != "round_robin"):
            return np.inf
        if layout[1] not in self.runs:
            self.runs[layout[1]] = prefill_alone(
                question, deployment, tables=tables_with(question, deployment, self.server)
            )
            self.report.trials += 1
        alone, workload = self.runs[layout[1]], question.workload
        steps = (workload.output_tokens - 1).astype(np.float64)
        come = Come(
            replica=alone.requests.replica,
            join=alone.joined,
            prompt=workload.prompt_tokens.astype(np.float64),
            steps=steps,
            end_by=workload.arrival + limits["ttft"] + limits["tpot"] * steps + EPSILON,
            tokens=np.where(alone.kept, workload.output_tokens, 0).astype(np.float64),
        )
        return shared_tokens(come, sharing) / workload.duration


def decoded(
    job: SideJob, alone: Alone, prefill: Server, decodes: Sequence[Server], layouts: Sequence[Layout]
) -> dict[tuple[int, Layout], float]:
    """Good tokens per second that each decode side can make at most of what comes in time.

    Where a side can take all of it, one with a higher limit, or more replicas, is not looked at: it is not closed.
    """
    question = job.question
    found = {(decode.place, layout): alone.tokens for decode in decodes for layout in layouts}
    deployment = job.space.deployment(prefill.pool, decodes[0].pool, layouts[0])
    limits = tightened(deployment, tables_for(question, deployment), question).slo.limits
    if not {"ttft", "tpot"} <= set(limits):
        return found
    workload, kept = question.workload, alone.kept
    steps = (workload.output_tokens[kept] - 1).astype(np.float64)
    prompt = workload.prompt_tokens[kept].astype(np.float64)
    begin = alone.requests.first_token[kept]
    end = workload.arrival[kept] + limits["ttft"] + limits["tpot"] * steps
    known: dict[tuple[bytes, int], float] = {}
    enough: list[tuple[int, int]] = []
    for layout in sorted(layouts, key=lambda layout: layout[1]):
        for decode in sorted(decodes, key=lambda one: one.limits[1]):
            if any(layout[1] >= replicas and decode.limits[1] >= cap for replicas, cap in enough):
                continue
            lines = _lines(job, prefill, decode)
            key = (lines.content, layout[1]) if lines is not None else (b"", 0)
            if lines is not None and key not in known:
                work = lines.seconds(steps, prompt, limits["tpot"])
                tokens = len(steps) + most_tokens(begin, end, work, steps, layout[1])
                known[key] = tokens / workload.duration
            if lines is None or known[key] >= alone.tokens:
                enough.append((layout[1], decode.limits[1]))
            else:
                found[decode.place, layout] = known[key]
    return found


def _lines(job: SideJob, prefill: Server, decode: Server) -> Lines | None:
    """Lines under the step times of a decode server, kept; None of a pipeline."""
    question = job.question
    key = _key(question, prefill, decode)
    if key not in _kept:
        deployment = job.space.deployment(prefill.pool, decode.pool, (1, 1))
        times, engine = question.overheads.applied(tables_for(question, deployment)[1].times), decode.pool.engine
        _kept[key] = lines_under(times, engine.data_parallel_size) if isinstance(times, BatchTimes) else None
    return _kept[key]


def _sharing(job: SideJob, prefill: Server, decodes: Sequence[Server]) -> Sharing | None:
    """What lies under the steps of decode servers with as many seats, kept; None where that is not known."""
    question, key = job.question, _key(job.question, prefill, decodes[0])
    if key not in _shared_kept:
        made = []
        for one in decodes:
            deployment = job.space.deployment(prefill.pool, one.pool, (1, 1))
            made.append((question.overheads.applied(tables_for(question, deployment)[1].times), one.pool))
        plain = [(times, pool) for times, pool in made if isinstance(times, BatchTimes)]
        reserved, workload = job.space.handover.reserved_decode_tokens, question.workload
        longest = int((workload.prompt_tokens + workload.output_tokens).max())
        _shared_kept[key] = sharing_of(plain, reserved, longest) if len(plain) == len(made) else None
    return _shared_kept[key]


def _key(question: Question, prefill: Server, decode: Server) -> str:
    doubted = prefill.kin if question.confidence is not None else ""
    return f"{question.digest} {doubted} {decode.kin} {decode.limits}"


_dealt_kept: dict[tuple[str, int], Dealt] = {}
_few_kept: dict[str, Workload] = {}
_work_kept: dict[tuple[str, int, int], Floats] = {}
_kept: dict[str, Lines | None] = {}
_shared_kept: dict[str, Sharing | None] = {}
lost_kept: dict[str, Floats] = {}
"""What runs lost so far, by what they have in common."""
