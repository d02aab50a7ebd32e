"""The tables of a pool, split by operator: where the time of a whole run goes."""

from functools import cache as remember
from functools import partial

from windtunnel.deployment import Pool, stage_pools
from windtunnel.perf.batch_times import BatchTimes, added
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.sources import predictor_from
from windtunnel.perf.tabulate.grid import operator_times, prefill_base
from windtunnel.perf.tabulate.micro_batches import overlap
from windtunnel.perf.tabulate.operators import asked_of, operators
from windtunnel.perf.tabulate.tables import Sums, axes


def by_operator(pool: Pool, source: str = "auto", corrections: Corrections = ALL) -> dict[str, BatchTimes]:
    """Operator → the part of the pool's tables that it takes; of a pipeline that of all stages together.

    They hold neither host work nor what the GPU waits for it. Arguments as of ``tabulate``.
    """
    times, ax = predictor_from(pool, source, corrections), axes(pool, corrections)
    sums: dict[str, list[Sums]] = {}
    for stage in stage_pools(pool):
        ask = remember(partial(operator_times, ax=ax, predictor=times))
        halves = overlap(stage, ax, ask, corrections)
        for operator in asked_of(times, operators(stage, corrections)):
            found, whole = Sums(ax), ask(operator, 1)
            for part, answer in (halves.of(operator, whole) if halves else whole).items():
                found.add(part, operator.count * answer.seconds)
            if operator.phase == "prefill":
                found.base += operator.count * float(prefill_base(operator, times).seconds[0])
            sums.setdefault(operator.name, []).append(found)
    return {name: added([each.times() for each in parts]) for name, parts in sums.items()}
