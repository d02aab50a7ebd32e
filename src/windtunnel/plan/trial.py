"""Trial: one deployment under one rate, simulated and measured; stopped early when its limits cannot hold any more.

Nothing that happens before a time depends on requests that arrive after it. So a run of the first n requests alone is,
up to the arrival of the next one, the beginning of the whole run, and what is missed by then stays missed. A run is
lost once more measured requests than the limits allow have missed them for certain; by then a latency either has its
final value, or has already lasted longer than its limit. Only open loops qualify: there arrivals
do not depend on completions.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Deployment, Pool
from windtunnel.files import cache_folder
from windtunnel.metrics import WARMUP_SHARE, request_metrics, trimmed_window
from windtunnel.metrics.usage import share_there
from windtunnel.perf.database import Database, find_systems
from windtunnel.perf.predictor import Predictor, wanted_version
from windtunnel.perf.sources import predictor_from
from windtunnel.perf.tabulate.cache import cache_key
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.perf.user_kernels import databases
from windtunnel.plan.doubt import slowed, tightened
from windtunnel.plan.outcome import Margin, Outcome, measure, needed
from windtunnel.plan.question import Question
from windtunnel.simulate.run import REJECTED, Requests, Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload, head

KEPT_TABLES = 4
"""Pools whose tables a process keeps at hand: the trials of a candidate come one after the other."""
KEPT_OF_SIDES = 48
"""The same of prefill and decode pools."""
Tables = Sequence[Tabulated]
T = TypeVar("T")

_kept: dict[str, Tables] = {}
_of_sides: dict[str, Tabulated] = {}
_databases: dict[tuple[str, str, str, str], Database | None] = {}
_predictors: dict[str, Predictor] = {}
_sharing: dict[str, Predictor] = {}


def trial(question: Question, deployment: Deployment, rate: float, tables: Tables | None = None) -> Outcome:
    """Simulate the question's requests at this rate, and judge them; a run that is lost is stopped early.

    A question with several draws of its load is asked about each, until one is missed: the outcome is then that one's,
    and otherwise that of the draw with the least headroom.

    ``tables`` are the batch-time tables of the pools, if the caller has them already.

    Raises:
        InputError: the deployment cannot run.
    """
    tables = tables or tables_for(question, deployment)
    found: Outcome | None = None
    for draw in tightened(deployment, tables, question).each_draw():
        one = as_asked(_one_draw(draw, deployment, rate, tables), question)
        if not one.met:
            return one
        found = one if found is None or one.stretch > found.stretch else found
    assert found is not None
    return found


def _one_draw(question: Question, deployment: Deployment, rate: float, tables: Tables) -> Outcome:
    """The trial under one draw, with limits that are tightened already."""
    workload = question.at(rate)
    count = beginning(workload, question)
    if count is not None:
        begun = simulated(question, deployment, head(workload, count), tables)
        if is_lost(begun.requests, workload, question):
            return measure(begun, question, rate, stopped=True)
    return _judged(simulated(question, deployment, workload, tables), question, deployment, rate)


def _judged(run: Run, question: Question, deployment: Deployment, rate: float) -> Outcome:
    """What a whole run measured, with the GPUs that are paid."""
    return with_paid_gpus(measure(run, question, rate), run, deployment)


def with_paid_gpus(outcome: Outcome, run: Run, deployment: Deployment) -> Outcome:
    """The outcome of a run with the mean number of GPUs that an autoscaler pays for, where there is one."""
    if not deployment.scaling:
        return outcome
    each = [pool.gpus / pool.replicas for pool in deployment.pools for _ in range(pool.replicas)]
    return replace(outcome, gpus=float(share_there(run) @ each))


def whole_run(question: Question, deployment: Deployment, rate: float) -> Run:
    """The run behind a trial, never stopped early."""
    return simulated(question, deployment, question.at(rate), tables_for(question, deployment))


def whole_trial(question: Question, deployment: Deployment, rate: float) -> Outcome:
    """A trial that is not stopped early."""
    asked = tightened(deployment, tables_for(question, deployment), question)
    return as_asked(_judged(whole_run(question, deployment, rate), asked, deployment, rate), question)


def as_asked(found: Outcome, question: Question) -> Outcome:
    """The same in the limits that were asked for: what was held against tighter ones comes later by as much."""
    limits = (*(each.seconds for each in question.slo.percentiles), *question.slo.limits.values())
    said = [
        one if one.limit == limit else Margin(one.name, one.value * limit / one.limit, limit)
        for one, limit in zip(found.margins, limits, strict=False)
    ]
    return replace(found, margins=(*said, *found.margins[len(said) :]))


def simulated(question: Question, deployment: Deployment, workload: Workload, tables: Tables) -> Run:
    """The run of a workload, with the seed and overheads of a question."""
    return simulate(deployment, workload, question.seed, tables=tables, overheads=question.overheads)


def tables_for(question: Question, deployment: Deployment, pools: str | None = None) -> Tables:
    """The tables of every pool at the question's confidence; arguments as of ``tables_of``."""
    return slowed(deployment, tables_of(deployment, question.perf, pools), question)


def tables_of(deployment: Deployment, perf: str, pools: str | None = None) -> Tables:
    """The batch-time tables of every pool, the last few kept in memory.

    ``pools`` is ``deployment_key(deployment, perf)`` if the caller has it already.
    """
    key = f"{perf} {pools or deployment_key(deployment, perf)}"

    def made() -> Tables:
        return [_table_of(pool, perf) for pool in deployment.pools]

    return of_the_last(_kept, key, made)


def _table_of(pool: Pool, perf: str) -> Tabulated:
    """The tables of a pool; those of one side of pairs are kept, since it comes back with many of the other side."""

    def made() -> Tabulated:
        return tabulate(pool, perf, cache_folder(), predictor=_predictor(pool, perf))

    if pool.role == "mixed":
        return made()
    return of_the_last(_of_sides, f"{perf} {_pool_key(pool, perf)}", made, KEPT_OF_SIDES)


def tables_to_bound(question: Question, deployment: Deployment) -> Tables:
    """As ``tables_for``, for a bound and nothing else: most candidates are never simulated, and gigabytes of tables
    that nobody reads again would leave the cache no room. Pools of one engine on one device ask each kernel once."""
    folder, perf = cache_folder(), question.perf
    made = [tabulate(pool, perf, folder, predictor=_shared(pool, perf), keep=False) for pool in deployment.pools]
    return slowed(deployment, made, question)


def _shared(pool: Pool, perf: str) -> Predictor:
    """A predictor for every pool of an engine on a device; what it notes is of all of them together."""
    if perf.startswith("profile:"):
        return _predictor(pool, perf)
    key = repr((pool.device, pool.engine.backend, pool.engine.preset, wanted_version(pool), perf))
    return of_the_last(_sharing, key, lambda: predictor_from(pool, perf), 1)


def _predictor(pool: Pool, perf: str) -> Predictor:
    """The predictor of a pool, shared with others that differ in their limits alone."""
    engine = replace(pool.engine, max_num_seqs=None, max_num_batched_tokens=None)
    key = cache_key(replace(pool, engine=engine), perf, _database(pool, perf))
    return of_the_last(_predictors, key, lambda: predictor_from(pool, perf))


def of_the_last(kept: dict[str, T], key: str, make: Callable[[], T], most: int = KEPT_TABLES) -> T:
    """What is kept under a key, made where it is not; the oldest of ``most`` makes way."""
    if key not in kept:
        while len(kept) >= most:
            del kept[next(iter(kept))]
        kept[key] = make()
    return kept[key]


def trial_key(question: Question, pools: str, deployment: Deployment, rate: float) -> str:
    """Name of a trial by content: equal keys mean equal outcomes. It changes with the requests, limits, rate, model,
    device, every setting, the kernel data and the code. ``pools`` is ``deployment_key(deployment, …)``."""
    replicas = [pool.replicas for pool in deployment.pools]
    spec = deployment.spec()
    between = [spec.get(name) for name in ("link", "handover", "decode_router")]
    roles = [pool.role for pool in deployment.pools]
    elastic = repr(deployment.scaling) if deployment.scaling else None
    parts = (question.digest, pools, deployment.router, replicas, roles, between, elastic, repr(rate), code_digest())
    return sha256(json.dumps(parts).encode()).hexdigest()[:32]


def deployment_key(deployment: Deployment, perf: str) -> str:
    """The pools by content, whatever their number of replicas."""
    return sha256(" ".join(_pool_key(pool, perf) for pool in deployment.pools).encode()).hexdigest()[:32]


def candidate_key(question: Question, deployment: Deployment) -> str:
    """Name of a deployment under a question, found without looking into the kernel database."""
    parts = [deployment.spec(), repr(deployment.scaling), question.digest, code_digest()]
    contents = [repr((pool.model.layers, pool.device, _scheduler_file(pool))) for pool in deployment.pools]
    return sha256(json.dumps([*parts, contents], default=str).encode()).hexdigest()[:32]


def _pool_key(pool: Pool, perf: str) -> str:
    text = json.dumps([pool.engine.spec(), _scheduler_file(pool)], sort_keys=True, default=str)
    return sha256(f"{cache_key(pool, perf, _database(pool, perf))} {text}".encode()).hexdigest()


def _database(pool: Pool, perf: str) -> Database | None:
    """The kernel database of a pool, looked at once: a search takes it for what it was at its beginning."""
    key = (pool.device.name, pool.engine.backend, wanted_version(pool), perf)
    if key not in _databases:
        _databases[key] = predictor_from(pool, perf).database
    return _databases[key]


def _scheduler_file(pool: Pool) -> str:
    """Digest of the file of a scheduler of the user's own; nothing for others."""
    path = Path((pool.engine.scheduler or "").partition(".py:")[0] + ".py")
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@cache
def code_digest() -> str:
    """Digest of this package's code and data and of the kernel database: other code may give other results."""
    package = Path(__file__).parents[1]
    skipped = tuple(package / name for name in ("report", "ui", "cli"))
    digest = sha256(f"{find_systems()}{_database_version()}{[one.words for one in databases()]}".encode())
    for file in sorted(package.rglob("*")):
        if file.suffix in (".py", ".toml") and not any(folder in file.parents for folder in skipped):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _database_version() -> str:
    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:
        return "none"


ALLOWED = 1.5
"""A beginning has this many times the measured requests that may miss a limit: in a flood all of them do."""
LEAST = 200
"""Requests below which a beginning costs as much as it saves."""

Flags = NDArray[np.bool_]


def beginning(workload: Workload, question: Question) -> int | None:
    """How many requests to simulate first; None where that would not pay, and where completions release requests."""
    shares = [question.attainment] * bool(question.slo.limits)
    shares += [limit.percentile / 100 for limit in question.slo.percentiles if limit.metric != "itl"]
    if not shares or workload.released_by_ends:
        return None
    measured = ALLOWED * (1 - max(shares))
    count = math.ceil(len(workload) * (WARMUP_SHARE + (1 - WARMUP_SHARE) * measured))
    return count if LEAST <= count <= len(workload) // 2 else None


def is_lost(begun: Requests, workload: Workload, question: Question) -> bool:
    """Whether its first requests show that the run of the whole workload misses a limit, whatever follows."""
    now = float(workload.arrival[len(begun.arrival)])
    measured = measured_whole(workload)
    counted = measured[: len(begun.arrival)]
    total = int(measured.sum())
    return _share_lost(begun, question, now, counted, total) or any(
        int((missed(begun, limit.metric, limit.seconds, now) & counted).sum()) >= total - _rank(total, limit.percentile)
        for limit in question.slo.percentiles
        if limit.metric != "itl"
    )


def measured_whole(workload: Workload) -> Flags:
    """Which requests of an open workload the window without warm-up and drain holds."""
    trimmed = trimmed_window(workload.arrival)
    return trimmed.holds(workload.arrival) if trimmed else np.ones(len(workload), dtype=np.bool_)


def missed(begun: Requests, metric: str, limit: float, now: float) -> Flags:
    """Requests whose latency is over the limit for certain at ``now``."""
    values: NDArray[np.float64] = getattr(request_metrics(begun), metric)
    ends = {"queue": begun.scheduled, "ttft": begun.first_token}.get(metric, begun.finish)
    known: Flags = ends <= now
    if metric == "tpot":
        return known & (values > limit)
    return np.where(known, values > limit, (begun.status != REJECTED) & (now - begun.arrival > limit))


def _share_lost(begun: Requests, question: Question, now: float, counted: Flags, total: int) -> bool:
    limits = question.slo.limits
    if not limits:
        return False
    bad = begun.status == REJECTED
    for name, limit in limits.items():
        bad = bad | missed(begun, name, limit, now)
    return int((bad & counted).sum()) > total - needed(total, question.attainment)


def _rank(total: int, percentile: float) -> int:
    """Place of the value from which the percentile is interpolated upwards; it grows slower than the number of
    values, so that fewer values than ``total`` make a miss only surer."""
    return int((total - 1) * (percentile / 100))
