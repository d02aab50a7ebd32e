"""bench(matrix, folder) → rows: every case of a matrix simulated once, several at a time; what is kept is not again."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from math import nan
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO, Deployment
from windtunnel.deployment.memory import kv_blocks
from windtunnel.deployment.slo import ATTAINMENT
from windtunnel.errors import InputError, UnknownName
from windtunnel.files import require_folder, write_whole
from windtunnel.metrics import clean, paired_spread, summary, summary_json
from windtunnel.plan.capacity import LONGEST, capacity
from windtunnel.plan.question import Question
from windtunnel.plan.trial import code_digest, deployment_key, tables_of, trial_key
from windtunnel.plan.workers import Team, Workers
from windtunnel.report.bench import Row
from windtunnel.scenario.compare import require_names
from windtunnel.scenario.matrix import Case, Matrix
from windtunnel.scenario.scenario import Scenario
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload, repeat

CASES = "cases"
"""Folder of what is kept, a file a simulation."""
SCHEMA_VERSION = 1
TOLERANCE = 0.02
"""Relative resolution of capacities."""
PATIENCE = 0.5
"""Seconds after which is looked whether to go on."""

Document = dict[str, Any]
Measured = Callable[[Workload, int, SLO], Document]
"""What a server does under a load and seed, by these limits."""


@dataclass(frozen=True)
class Job:
    """One simulation."""

    key: str
    """Digest of everything that its result depends on."""
    scenario: Scenario
    seed: int
    exclude_warmup: bool
    capacity: bool = False
    """At the highest rate at which its goals are kept."""

    def question(self, workload: Workload) -> Question:
        """The load and its goals."""
        scenario = self.scenario
        share = scenario.goals.attainment
        return Question(
            workload,
            slo=scenario.goals.limits(),
            attainment=ATTAINMENT if share is None else share,
            tolerance=TOLERANCE,
            perf=scenario.server.perf,
            overheads=scenario.overheads(),
            seed=self.seed,
        )


def bench(
    matrix: Matrix, folder: Path, team: Team, measured: Measured | None = None, told: Callable[[str], None] = print
) -> list[Row]:
    """Simulate every case under every seed, or read what is kept of it in the folder.

    Each result is kept when it is there, under a key of everything that it depends on (load, deployment, goals, kernel
    data, code), so that a bench that was ended goes on, and one whose file has changed simulates what is new.

    Args:
        measured: sends a load to the server at the endpoint; None: there is none.
        told: gets a line of progress now and then.

    Raises:
        InputError: a name that there is not, a folder of something else, or no case can run.
    """
    require_bench_folder(folder)
    jobs, refusals = _jobs(matrix)
    if not any(jobs.values()):
        names, reason = next(iter(refusals.items()))
        raise InputError(f"no case can run; {' '.join(names)}: {reason}")
    done = _simulated(dict.fromkeys(job for each in jobs.values() for job in each), folder, team, told)
    rows = _measured(matrix, jobs, folder, measured, told) if measured else []
    by_load = {row.names: row for row in rows}
    for case in matrix.cases:
        documents = [done[job.key] for job in jobs[case.names]]
        refusal = refusals.get(case.names) or next((one["refused"] for one in documents if "refused" in one), "")
        rows.append(_row(case, documents, refusal, by_load.get(matrix.load_names(case))))
    return rows


def require_bench_folder(folder: Path) -> None:
    """Raise InputError unless a bench can be kept there: nothing or an older bench stands in its place."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output {str(folder)!r}: is a file: give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CASES).is_dir():
        raise InputError(f"output {str(folder)!r}: holds something that is not a bench: choose another folder")
    require_folder("output", folder, folder)


def _jobs(matrix: Matrix) -> tuple[dict[tuple[str, ...], list[Job]], dict[tuple[str, ...], str]]:
    """The simulations of every case by its names, and why some cannot be."""
    jobs: dict[tuple[str, ...], list[Job]] = {}
    refusals: dict[tuple[str, ...], str] = {}
    loads: dict[tuple[Any, int], Workload] = {}
    for case in matrix.cases:
        jobs[case.names] = []
        try:
            if case.scenario is None:
                raise InputError(case.refusal)
            jobs[case.names] = list(_jobs_of(case.scenario, matrix, loads))
        except UnknownName as error:
            raise InputError(f"{' '.join(case.names)}: {error}") from error
        except InputError as error:
            refusals[case.names] = str(error)
    return jobs, refusals


def _jobs_of(scenario: Scenario, matrix: Matrix, loads: dict[tuple[Any, int], Workload]) -> Iterator[Job]:
    if matrix.endpoint is not None:  # whose answers the client cannot send back as tokens
        scenario = replace(scenario, load=replace(scenario.load, answers="recorded"))
    deployment = scenario.deployment()
    require_names(deployment)
    for pool in deployment.pools:
        kv_blocks(pool)
    pools = deployment_key(deployment, scenario.server.perf)
    for seed in range(scenario.load.seed, scenario.load.seed + matrix.seeds):
        drawn = (scenario.load, seed)
        if drawn not in loads:
            loads[drawn] = scenario.load.workload(seed)
        job = Job("", scenario, seed, matrix.exclude_warmup, matrix.capacity)
        yield replace(job, key=_key(job, deployment, pools, loads[drawn]))


def _key(job: Job, deployment: Deployment, pools: str, workload: Workload) -> str:
    trial = trial_key(job.question(workload), pools, deployment, nan)
    router = Path(deployment.router.partition(".py:")[0] + ".py")
    beyond = (
        repr((deployment.scaling, deployment.faults, [(pool.stores, pool.device) for pool in deployment.pools])),
        sha256(router.read_bytes()).hexdigest() if router.is_file() else "",
        job.exclude_warmup,
        job.capacity,
        SCHEMA_VERSION,
    )
    return sha256(json.dumps([trial, *beyond]).encode()).hexdigest()[:32]


def simulated(job: Job) -> Document:
    """What comes of a job; where it cannot be simulated, why."""
    scenario, begun = job.scenario, time.process_time()
    try:
        deployment, workload = scenario.deployment(), scenario.load.workload(job.seed)
        tables = tables_of(deployment, scenario.server.perf)
        carried: Document = {}
        if job.capacity:
            rate, workload = at_capacity(job, deployment, workload)
            if rate == 0:
                return {"capacity": 0.0, "capacity_per_dollar": 0.0, "meets_slo": False, "attainment": 0.0}
            price = deployment.price_per_hour
            carried = {"capacity": rate, "capacity_per_dollar": rate / price if price else nan}
        run = simulate(deployment, workload, job.seed, tables=tables, overheads=scenario.overheads())
        result = summary(run, scenario.goals.limits(), exclude_warmup=job.exclude_warmup)
    except InputError as error:
        return {"refused": str(error)}
    own = {
        "gpus": sum(pool.replicas * pool.engine.world_size for pool in deployment.pools),
        "cost_per_million_output_tokens": result.per_million_output_tokens(result.usage.cost_usd),
        "meets_slo": result.meets_slo,
        "cpu_seconds": time.process_time() - begun,
    }
    found: Document = summary_json(result) | clean(own | carried)
    return found


def at_capacity(job: Job, deployment: Deployment, workload: Workload) -> tuple[float, Workload]:
    """The highest rate at which the goals are kept, and the load at it, repeated where it is too short to fill the
    deployment. 0: the goals are kept at no rate."""
    times = 1
    while True:
        asked = job.question(repeat(workload, times))
        found = capacity(deployment, asked)
        if found.held is None:
            return 0.0, workload
        if not found.at_bound or 4 * times * len(workload) > LONGEST:
            return found.held.rate, asked.at(found.held.rate)
        times *= 4


def _simulated(jobs: Mapping[Job, None], folder: Path, team: Team, told: Callable[[str], None]) -> dict[str, Document]:
    """What came of every job, by key."""
    found = {job.key: kept for job in jobs if (kept := _kept(folder, job.key)) is not None}
    left = list({job.key: job for job in jobs if job.key not in found}.values())
    total, known = len(left), len(found)
    if not left:
        return found
    told(f"{total} simulations" + (f"; {known} are kept" if known else ""))
    workers: Workers[Job, Document] = Workers(team, simulated)
    left.reverse()
    try:
        while left or workers.under_way:
            while left and workers.room:
                workers.submit(left.pop())
            for job, document in workers.results(PATIENCE):
                found[job.key] = document
                if "refused" not in document:
                    _keep(folder, job.key, document)
                told(f"{len(found) - known} of {total} simulations")
    finally:
        workers.stop()
    return found


def _keep(folder: Path, key: str, document: Document) -> None:
    write_whole(folder / CASES / f"{key}.json", [json.dumps(document, allow_nan=False) + "\n"])


def _kept(folder: Path, key: str) -> Document | None:
    """What is kept under a key; None for nothing, and for a file that was damaged."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / CASES / f"{key}.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None
    return None


def _measured(
    matrix: Matrix,
    jobs: Mapping[tuple[str, ...], list[Job]],
    folder: Path,
    measured: Measured,
    told: Callable[[str], None],
) -> list[Row]:
    """What the server at the endpoint did under each load; kept as well, under the load and the endpoint."""
    found: dict[tuple[str, ...], Row] = {}
    for case in matrix.cases:
        names = matrix.load_names(case)
        if names in found or not jobs[case.names]:
            continue
        documents = []
        for job in jobs[case.names]:
            workload = job.scenario.load.workload(job.seed)
            limits = job.scenario.goals.limits()
            text = json.dumps([matrix.endpoint, matrix.endpoint_model, workload.digest, job.seed, repr(limits)])
            key = "live-" + sha256(f"{text} {matrix.exclude_warmup} {code_digest()}".encode()).hexdigest()[:32]
            document = _kept(folder, key)
            if document is None:
                told(f"{' '.join(names) or 'the load'}: {len(workload):,} requests to {matrix.endpoint}")
                document = measured(workload, job.seed, limits)
                _keep(folder, key, document)
            documents.append(document)
        found[names] = Row(names, live=True, documents=tuple(documents))
    return list(found.values())


def _row(case: Case, documents: list[Document], refusal: str, live: Row | None) -> Row:
    if refusal or case.scenario is None:
        return Row(case.names, case.words, refusal=refusal)
    share = case.scenario.goals.attainment
    met = all(one["meets_slo"] and (share is None or (one["attainment"] or 0.0) >= share) for one in documents)
    row = Row(case.names, case.words, documents=tuple(documents), meets_goals=met)
    if live is None:
        return row
    shared = [name for name in live.documents[0] if name in documents[0]]
    own, base = ([{name: one[name] for name in shared} for one in each] for each in (documents, live.documents))
    return replace(row, against=paired_spread(own, base))
