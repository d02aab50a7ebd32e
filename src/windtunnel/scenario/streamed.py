"""stream(deployment, pieces): the figures of a load of any length, in memory that does not grow with it."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from pathlib import Path

from windtunnel.deployment import SLO, Deployment, limits_of, warnings
from windtunnel.deployment.footprint import footprint
from windtunnel.errors import InputError
from windtunnel.files import whole_folder
from windtunnel.metrics.gaps import lane_number
from windtunnel.metrics.streamed import StreamSummary, Totaling, Totals
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.scenario.load_flags import NUM_PROMPTS, TRACE, Load
from windtunnel.simulate.overheads import ENGINE_CLOCK, Overheads
from windtunnel.simulate.request_files import RequestFiles
from windtunnel.simulate.simulate import batch_times
from windtunnel.simulate.streamed import Streaming
from windtunnel.workload import Workload
from windtunnel.workload.builtin import in_pieces
from windtunnel.workload.synthetic import Drawn, cut


def stream(
    deployment: Deployment,
    pieces: Iterable[Workload],
    slo: SLO | Mapping[str, float] | None = None,
    seed: int = 0,
    *,
    perf: str = "auto",
    tables: Sequence[Tabulated] | None = None,
    overheads: Overheads = ENGINE_CLOCK,
    executor: Executor | None = None,
    workers: int = 1,
    output: Path | None = None,
) -> StreamSummary:
    """Simulate requests that come piece by piece, and add up what becomes of them.

    Counts, sums and means are exact, percentiles within ``metrics.digest.ERROR`` of those of ``summary``. The summary
    does not depend on ``workers``.

    Args:
        deployment: what serves: one pool without pipelines, stores, faults and autoscaling.
        pieces: workloads, each going on where the last one ends; several workers iterate over them anew.
        slo: limits for goodput, attainment and verdicts, in seconds.
        seed: of the random router.
        perf: where kernel times come from, as for ``simulate``.
        tables: the batch-time tables where they are at hand.
        overheads: host work beyond that of the tables.
        executor: where parts of the replicas are simulated, if the router looks at nothing.
        workers: how many such parts.
        output: a new folder for what became of the requests, see ``simulate.request_files``.

    Raises:
        InputError: the deployment or the load cannot be simulated in pieces, or the folder cannot be written.
    """
    if output is not None and output.exists() and (output.is_file() or any(output.iterdir())):
        raise InputError(f"output {str(output)!r}: is there already: with stream give the name of a new folder")
    limits = limits_of(slo) if isinstance(slo, Mapping) else slo
    tables = batch_times(deployment, perf) if tables is None else tables
    streaming = Streaming(deployment, tables, seed, overheads)
    count = streaming.count
    shares = [list(range(count))[i::workers] for i in range(min(workers, count))]
    with nullcontext() if output is None else whole_folder(output) as folder:
        if executor is None:
            found = [totals_of(streaming, pieces, range(count), limits, folder)]
        else:
            found = list(executor.map(_call, [(streaming, pieces, share, limits, folder) for share in shares]))
    by_part = dict(sorted((part, totals) for one in found for part, totals in one.items()))
    pool = deployment.pools[0]
    price = footprint(pool).price_per_hour
    gpus = pool.engine.world_size * pool.replicas
    return StreamSummary(
        totals=Totals.of(list(by_part.values())),
        gpus=gpus,
        lanes=pool.replicas * pool.engine.data_parallel_size,
        price=price * gpus if price > 0 else float("nan"),
        slo=limits,
        warnings=tuple(dict.fromkeys([*warnings(deployment), *(note for table in tables for note in table.notes)])),
    )


def _call(job: tuple[Streaming, Iterable[Workload], Sequence[int], SLO | None, Path | None]) -> dict[int, Totals]:
    return totals_of(*job)


def totals_of(
    streaming: Streaming,
    pieces: Iterable[Workload],
    parts: Sequence[int],
    slo: SLO | None,
    folder: Path | None = None,
) -> dict[int, Totals]:
    """What these parts come to, their requests written to ``folder``."""
    totaling = {part: Totaling(slo) for part in parts}
    files = RequestFiles(folder) if folder is not None else None
    for part, found in streaming.run(pieces, parts):
        totaling[part].add(found.run, lane_number(found.replica, found.rank), found.time, found.finish)
        if files:
            files.add(part, found.run.requests)
    if files:
        files.close()
    return {part: one.totals for part, one in totaling.items()}


def pieces_of(load: Load, seed: int) -> Iterable[Workload]:
    """The requests of the flags in pieces; those of a file, which must fit into memory. Raises InputError for loads
    that have none."""
    if load.max_concurrency or load.lanes or load.replay or load.random_turns > 1 or load.random_prefix_len:
        raise InputError("stream: does not go with sessions, closed loops and prompts that share text")
    if load.images_per_prompt:
        raise InputError(f"stream: images_per_prompt={load.images_per_prompt}: not simulated in pieces: leave one out")
    if load.n > 1:
        raise InputError(f"stream: n={load.n}: not simulated in pieces: leave one out")
    if load.is_random:
        return Drawn(load.arrivals(), load.lengths(), load.num_prompts or NUM_PROMPTS, seed, "random")
    trace = load.trace or TRACE
    changed = load.repeat > 1 or load.copies > 1 or load.max_shift or load.time_scale != 1.0
    if load.from_file or load.num_prompts is None or changed:
        return list(cut(load.workload(seed)))
    found = in_pieces(trace, load.num_prompts, seed)
    return Drawn(load.arrivals(), found.lengths, found.num_requests, seed, trace) if load.redraws else found
