"""Trial: one deployment under one rate, simulated and measured."""

import json
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from windtunnel.deployment import Deployment, Pool
from windtunnel.perf.database import Database, find_systems
from windtunnel.perf.predictor import predictor, wanted_version
from windtunnel.perf.tabulate.cache import cache_folder, cache_key
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.plan.early_stop import beginning, is_lost
from windtunnel.plan.outcome import Outcome, measure
from windtunnel.plan.question import Question
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload, head

KEPT_TABLES = 4
"""Pools whose tables a process keeps at hand: the trials of a candidate come one after the other."""
Tables = Sequence[Tabulated]

_kept: dict[str, Tables] = {}
_databases: dict[tuple[str, str, str, str], Database | None] = {}


def trial(question: Question, deployment: Deployment, rate: float, tables: Tables | None = None) -> Outcome:
    """Simulate the question's requests at this rate, and judge them; a run that is lost is stopped early.

    ``tables`` are the batch-time tables of the pools, if the caller has them already.

    Raises:
        InputError: the deployment cannot run.
    """
    tables = tables or tables_of(deployment, question.perf)
    workload = question.at(rate)
    count = beginning(workload, question)
    if count is not None:
        begun = _simulate(question, deployment, head(workload, count), tables)
        if is_lost(begun.requests, workload, question):
            return measure(begun, question, rate, stopped=True)
    return measure(_simulate(question, deployment, workload, tables), question, rate)


def whole_run(question: Question, deployment: Deployment, rate: float) -> Run:
    """The run behind a trial, never stopped early."""
    return _simulate(question, deployment, question.at(rate), tables_of(deployment, question.perf))


def _simulate(question: Question, deployment: Deployment, workload: Workload, tables: Tables) -> Run:
    return simulate(deployment, workload, question.seed, tables=tables, overheads=question.overheads)


def tables_of(deployment: Deployment, perf: str, pools: str | None = None) -> Tables:
    """The batch-time tables of every pool, the last few kept in memory.

    ``pools`` is ``deployment_key(deployment, perf)`` if the caller has it already.
    """
    key = f"{perf} {pools or deployment_key(deployment, perf)}"
    if key not in _kept:
        while len(_kept) >= KEPT_TABLES:
            del _kept[next(iter(_kept))]
        _kept[key] = [tabulate(pool, perf, cache_folder()) for pool in deployment.pools]
    return _kept[key]


def trial_key(question: Question, pools: str, deployment: Deployment, rate: float) -> str:
    """Name of a trial by content: equal keys mean equal outcomes. It changes with the requests, limits, rate, model,
    device, every setting, the kernel data and the code. ``pools`` is ``deployment_key(deployment, …)``."""
    replicas = [pool.replicas for pool in deployment.pools]
    parts = (question.digest, pools, deployment.router, replicas, repr(rate), code_digest())
    return sha256(json.dumps(parts).encode()).hexdigest()[:32]


def deployment_key(deployment: Deployment, perf: str) -> str:
    """The pools by content, whatever their number of replicas."""
    return sha256(" ".join(_pool_key(pool, perf) for pool in deployment.pools).encode()).hexdigest()[:32]


def candidate_key(question: Question, deployment: Deployment) -> str:
    """Name of a deployment under a question, found without looking into the kernel database."""
    parts = [deployment.spec(), question.digest, code_digest()]
    contents = [repr((pool.model.layers, pool.device, _scheduler_file(pool))) for pool in deployment.pools]
    return sha256(json.dumps([*parts, contents], default=str).encode()).hexdigest()[:32]


def _pool_key(pool: Pool, perf: str) -> str:
    text = json.dumps([pool.engine.spec(), _scheduler_file(pool)], sort_keys=True, default=str)
    return sha256(f"{cache_key(pool, perf, _database(pool, perf))} {text}".encode()).hexdigest()


def _database(pool: Pool, perf: str) -> Database | None:
    """The kernel database of a pool, looked at once: a search takes it for what it was at its beginning."""
    key = (pool.device.name, pool.engine.backend, wanted_version(pool), perf)
    if key not in _databases:
        _databases[key] = predictor(pool, perf).database
    return _databases[key]


def _scheduler_file(pool: Pool) -> str:
    """Digest of the file of a scheduler of the user's own; nothing for others."""
    path = Path((pool.engine.scheduler or "").partition(".py:")[0] + ".py")
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@cache
def code_digest() -> str:
    """Digest of this package's code and data and of the kernel database: other code may give other results."""
    package = Path(__file__).parents[1]
    skipped = (package / "report", package / "cli")
    digest = sha256(str(find_systems()).encode() + _database_version().encode())
    for file in sorted(package.rglob("*")):
        if file.suffix in (".py", ".toml") and not any(folder in file.parents for folder in skipped):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _database_version() -> str:
    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:
        return "none"
