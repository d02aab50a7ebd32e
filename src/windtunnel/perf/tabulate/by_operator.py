"""The tables of a pool, split by operator: where the time of a whole run goes."""

from functools import cache as remember
from functools import partial

import numpy as np

from windtunnel.deployment import Pool, stage_pools
from windtunnel.perf.batch_times import BatchTimes, Floats, added
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import MODELLED, KernelTimes, from_source
from windtunnel.perf.predictor import Predictor
from windtunnel.perf.sources import predictor_from
from windtunnel.perf.tabulate.grid import operator_times, prefill_base
from windtunnel.perf.tabulate.micro_batches import overlap
from windtunnel.perf.tabulate.operators import asked_of, operators
from windtunnel.perf.tabulate.tables import Sums, axes


class _Moved(Predictor):
    """Bytes in the place of seconds."""

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> KernelTimes:
        """What a kernel moves at each point; nothing where ``a`` is zero."""
        a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
        return from_source(np.where(a > 0, kernel.bytes_moved(np.where(a > 0, a, 1.0), b), 0.0), MODELLED)


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


def bytes_by_operator(pool: Pool, corrections: Corrections = ALL) -> dict[str, BatchTimes]:
    """Operator → tables of the bytes that a GPU moves for it, weights and activations through its memory or messages
    over links, in place of seconds; of all stages together."""
    ax, found = axes(pool, corrections), dict[str, list[Sums]]()
    bound = predictor_from(pool, "roofline", corrections)
    moved = _Moved(bound.roofline, None, bound.why_not)
    for stage in stage_pools(pool):
        for operator in operators(stage, corrections):
            sums = Sums(ax)
            for part, answer in operator_times(operator, 1, ax, moved).items():
                sums.add(part, operator.count * answer.seconds)
            if operator.phase == "prefill":
                sums.base += operator.count * float(prefill_base(operator, moved).seconds[0])
            found.setdefault(operator.name, []).append(sums)
    return {name: added([each.times() for each in parts]) for name, parts in found.items()}
