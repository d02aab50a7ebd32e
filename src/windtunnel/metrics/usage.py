"""Usage: what replicas did with their time, cache, FLOPs, watts and money; where the batch time came from, and how
uncertain it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment.footprint import Footprint
from windtunnel.metrics.handed import parts_in_order
from windtunnel.metrics.steps import Steps, blocks_in_use, held_between, in_flight, parts_of, sums
from windtunnel.metrics.window import Window
from windtunnel.perf.kernel_errors import HOST, family_errors
from windtunnel.simulate.run import Run

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NAN = float("nan")


@dataclass(frozen=True, eq=False)
class ReplicaUsage:
    """One entry per replica. Means are over the window's time; ranks of a replica are averaged, requests summed."""

    pool: Integers
    busy_seconds: Floats
    """Time in which a step ran, or an idle rank ran along in lockstep; of stages in a pipeline the mean."""
    idle_seconds: Floats
    iterations: Floats
    """Steps of all ranks that computed something."""
    batch_size: Floats
    """Requests per iteration, mean over iterations."""
    batch_size_time: Floats
    """Requests per iteration, weighted by the duration of the iteration."""
    tokens_per_iteration: Floats
    prefill_tokens: Floats
    decode_tokens: Floats
    running: Floats
    """Requests in the steps in flight, mean over time."""
    waiting: Floats
    """Requests that have arrived and not ended, and are in no step: queued, evicted or paused; mean over time."""
    kv: Floats
    """Share of the KV blocks in use, mean over time."""
    kv_peak: Floats
    preemptions: Integers
    mfu: Floats
    """Model FLOPs / peak FLOPs of the GPUs over the window; NaN without a footprint."""
    bubbles: Floats
    """Share of the stages' time that is idle while a step is in flight; 0 without a pipeline."""
    mbu: Floats
    """Bytes of weights and cache / memory bandwidth over the window; NaN without a footprint."""


@dataclass(frozen=True)
class Usage:
    """The whole deployment: every GPU counts the same. Utilisations are shares over the window, idle time included."""

    busy: float
    kv: float
    mfu: float
    mbu: float
    bubbles: float
    """Share of the stages' time that is idle while a step is in flight; 0 without a pipeline."""
    idle_seconds: float
    """Time in which no step ran, mean over the GPUs."""
    batch_size: float
    """Requests per step, mean over the steps that computed something."""
    phases: Mapping[str, float]
    """Share of the steps' time: prefill alone, decode alone, mixed. NaN without steps."""
    gpus: int
    gpu_hours: float
    energy_wh: float
    """GPUs only: idle power all the time, the rest up to full power while busy."""
    cost_usd: float
    replicas: ReplicaUsage


def usage(steps: Steps, window: Window) -> Usage:
    """Usage of every replica and of the deployment within the window."""
    run = steps.run
    replicas, pools = run.manifest["replicas"], run.manifest["pools"]
    prints = [read_footprint(pool) for pool in pools]
    totals = step_sums(steps, window, prints)
    table = _replica_usage(steps, window, prints, totals)
    gpus = np.array([pools[replica["pool"]].get("gpus_per_replica", 1) for replica in replicas], dtype=np.float64)
    hours = window.seconds / 3600
    there = gpus * share_there(run)
    busy = table.busy_seconds / window.seconds if window.seconds > 0 else np.zeros(len(replicas))

    def mean(values: Floats) -> float:
        return float(values @ gpus / there.sum())

    return Usage(
        busy=mean(busy),
        kv=mean(table.kv),
        mfu=mean(table.mfu),
        mbu=mean(table.mbu),
        bubbles=mean(table.bubbles),
        idle_seconds=mean(table.idle_seconds),
        batch_size=_batch_size(table),
        phases=_phases(totals),
        gpus=int(gpus.sum()),
        gpu_hours=float(there.sum()) * hours,
        energy_wh=float(power(table.pool, busy, prints) @ there) * hours,
        cost_usd=cost_usd(run, window),
        replicas=table,
    )


def share_there(run: Run) -> Floats:
    """Of each replica: the share of the run for which it is paid; 1 unless an autoscaler stops it."""
    lives = run.manifest.get("lives")
    if not lives or not lives["seconds"] > 0:
        return np.ones(len(run.manifest["replicas"]))
    return np.array(lives["paid_s"]) / float(lives["seconds"])


def cost_usd(run: Run, window: Window) -> float:
    """USD of the window, as ``usage`` has it."""
    replicas, pools = run.manifest["replicas"], run.manifest["pools"]
    gpus = np.array([pools[replica["pool"]].get("gpus_per_replica", 1) for replica in replicas], dtype=np.float64)
    pool = np.array([replica["pool"] for replica in replicas], dtype=np.int64)
    per_hour = price(pool, [read_footprint(each) for each in pools]) @ (gpus * share_there(run))
    return float(per_hour) * (window.seconds / 3600)


def _batch_size(table: ReplicaUsage) -> float:
    """Requests per step of all replicas."""
    counts = table.iterations
    return float(np.nansum(table.batch_size * counts) / counts.sum()) if counts.sum() > 0 else NAN


def _phases(totals: Mapping[str, Floats]) -> dict[str, float]:
    """Share of the steps' time by what they compute."""
    parts = {name: float(totals[f"{name}_seconds"].sum()) for name in PHASES}
    total = sum(parts.values())
    return {name: part / total if total > 0 else NAN for name, part in parts.items()}


def read_footprint(pool: dict[str, Any]) -> Footprint | None:
    """The footprint that the manifest of a run holds for a pool, if any."""
    stored = pool.get("footprint")
    if not stored:
        return None
    attention = tuple((int(window), float(flops), float(size)) for window, flops, size in stored["attention"])
    return Footprint(**{**stored, "attention": attention})


def power(pool: Integers, busy: Floats, prints: list[Footprint | None]) -> Floats:
    """Mean watts of one GPU of each replica: idle + (full − idle) · busy share (Fan, Weber, Barroso, ISCA 2007)."""
    idle = np.array([constants.idle_power_w if constants else NAN for constants in prints])[pool]
    full = np.array([constants.power_w if constants else NAN for constants in prints])[pool]
    watts: Floats = idle + (full - idle) * busy
    return watts


def price(pool: Integers, prints: list[Footprint | None]) -> Floats:
    """USD per GPU and hour of each replica; a price of 0 means unknown."""
    return np.array(
        [constants.price_per_hour if constants and constants.price_per_hour > 0 else NAN for constants in prints]
    )[pool]


def step_sums(steps: Steps, window: Window, prints: list[Footprint | None]) -> dict[str, Floats]:
    """[replicas] sums over the steps inside the window (``core.log.SUMS``), seconds in which a GPU computes, and in
    which a step is in flight."""
    from windtunnel.core.log import CONSTANTS, SUMS, add_up
    from windtunnel.core.records import attributes

    run, (low, high) = steps.run, (window.start, window.end) if window.trimmed else (-np.inf, np.inf)
    pools, replicas, log = run.manifest["pools"], run.manifest["replicas"], run.iterations
    pool = np.array([replica["pool"] for replica in replicas], dtype=np.int64)
    sizes = np.array([[each["block_size"], each["kv_blocks"]] for each in pools], dtype=np.int64)
    layout = np.column_stack([pool, steps.decode_width, sizes[pool]])
    kinds = max((len(each.attention) for each in prints if each), default=0)
    constants, attention = np.zeros((len(pools), len(CONSTANTS))), np.zeros((len(pools), kinds, 3))
    for i, each in enumerate(prints):
        if each:
            constants[i] = [getattr(each, name) for name in CONSTANTS]
            attention[i, : len(each.attention)] = np.reshape(each.attention, (-1, 3))
    found = np.zeros((len(replicas), len(SUMS)))
    given = _inside(steps, window) if run.piped else None
    first, end, begins = np.zeros(0, dtype=np.int32), np.zeros(0), np.zeros(0, dtype=np.bool_)
    if not run.piped:
        first, end, begins = steps.grouped.first, steps.grouped.end, steps.grouped.begins
    rows = attributes(log.rows)
    add_up(rows, log.gains, first, end, begins, given, low, high, layout, constants, attention, found)
    totals = dict(zip(SUMS, found.T, strict=True))
    totals["computing"] = totals["under_way"] = totals["seconds"]
    if given is not None:
        present = in_flight(steps, blocks_in_use(steps))
        flying = present.inside(window)
        of_replicas = (log.replica[steps.heads], present.replica, present.replica)
        values = given[steps.heads, 3], present.blocks * flying, flying
        for name, owner, each in zip(("computing", "held", "under_way"), of_replicas, values, strict=True):
            totals[name] = sums(owner, each, len(pool))
    return totals


def _inside(steps: Steps, window: Window) -> Floats:
    """[rows, 5] of pipelines, where an edge of the window cuts rows in proportion: steps inside, their seconds, Σ of
    the tokens gained in the row before, seconds in which a GPU computes them, most blocks."""
    log, seconds = steps.run.iterations, steps.row_seconds
    share: float | Floats = 1.0
    if window.trimmed:
        inside = np.minimum(log.start + seconds, window.end) - np.maximum(log.start, window.start)
        share = np.clip(inside / np.where(seconds > 0, seconds, 1.0), 0.0, 1.0)
    count = log.steps * share
    columns = (count, seconds * share, count * (log.steps - 1) / 2, steps.row_busy * share, log.used_blocks)
    return np.column_stack(columns).astype(np.float64, copy=False)


def _replica_usage(
    steps: Steps, window: Window, prints: list[Footprint | None], totals: Mapping[str, Floats]
) -> ReplicaUsage:
    run = steps.run
    replicas, pools = run.manifest["replicas"], run.manifest["pools"]
    pool = np.array([replica["pool"] for replica in replicas], dtype=np.int64)
    lanes = np.array([replica["lanes"] for replica in replicas], dtype=np.float64)
    piped = np.array([replica.get("stages", 1) > 1 for replica in replicas], dtype=np.bool_)
    length = window.seconds if window.seconds > 0 else NAN
    mfu, mbu = _efficiency(totals, prints, pool, lanes * length)
    busy = np.minimum(totals["computing"] / lanes, window.seconds)
    iterations, under_way = totals["iterations"], totals["under_way"]
    capacity = np.array([entry["kv_blocks"] for entry in pools], dtype=np.float64)[pool]
    blocks, held = capacity * lanes, held_between(steps, capacity)
    used = totals["held"] + sums(held.replica, held.blocks * held.inside(window), len(pool))
    requests, served = run.requests, run.requests.replica >= 0
    preemptions = sums(requests.replica[served], requests.preemptions[served], len(replicas))
    with np.errstate(invalid="ignore", divide="ignore"):
        return ReplicaUsage(
            pool=pool,
            busy_seconds=busy,
            idle_seconds=np.maximum(window.seconds - busy, 0.0),
            iterations=iterations,
            batch_size=totals["batches"] / iterations,
            batch_size_time=totals["in_steps"] / totals["worked"],
            tokens_per_iteration=totals["tokens"] / iterations,
            prefill_tokens=totals["prefill"],
            decode_tokens=totals["decode"] * steps.tokens_of_decode,
            running=totals["in_steps"] / length,
            waiting=np.maximum(_present(steps, window) - totals["in_steps"], 0.0) / length,
            kv=used / (blocks * length),
            kv_peak=totals["peak"] * lanes / blocks,
            preemptions=preemptions.astype(np.int64),
            bubbles=np.where(piped & (under_way > 0), 1.0 - totals["computing"] / under_way, 0.0),
            mfu=mfu,
            mbu=mbu,
        )


def _present(steps: Steps, window: Window) -> Floats:
    """[replicas] Σ over requests of their time at each replica inside the window: from their arrival to their end, or
    at the prefill replica until the prompt is computed and at the decode replica from then on."""
    run = steps.run
    requests, apart = run.requests, run.handovers
    if apart is None:
        return _stays(steps, window, requests.replica, requests.arrival, requests.finish)
    computed = parts_in_order(run)["prefill"][1]
    first = _stays(steps, window, apart.prefill_replica, requests.arrival, computed)
    return first + _stays(steps, window, requests.replica, computed, requests.finish)


def _stays(steps: Steps, window: Window, replica: Integers, begin: Floats, end: Floats) -> Floats:
    """[replicas] Σ of the time between two events inside the window; a missing end is the window's."""
    here = (replica >= 0) & ~np.isnan(begin)
    until = np.where(np.isnan(end[here]), window.end, end[here])
    inside = np.minimum(until, window.end) - np.maximum(begin[here], window.start)
    return sums(replica[here], np.maximum(inside, 0.0), len(steps.run.manifest["replicas"]))


def _efficiency(
    totals: Mapping[str, Floats], prints: list[Footprint | None], pool: Integers, lane_seconds: Floats
) -> tuple[Floats, Floats]:
    """[replicas] MFU and MBU over the given lane-seconds."""
    mfu, mbu = np.full(len(pool), NAN), np.full(len(pool), NAN)
    for index, constants in enumerate(prints):
        if constants is not None:
            mine = pool == index
            mfu[mine] = totals["flops"][mine] / (lane_seconds[mine] * constants.peak_flops * constants.gpus_per_rank)
            mbu[mine] = totals["moved"][mine] / (lane_seconds[mine] * constants.memory_bandwidth)
    return mfu, mbu


PHASES = ("prefill", "decode", "mixed")
SOURCES = ("measured", "interpolated", "modelled")


def time_share(steps: Steps) -> dict[str, float]:
    """Share of the simulated step time by source: measured, interpolated, modelled; NaN where it is unknown."""
    found = {name: seconds for (kind, name), seconds in steps.judged.items() if kind == "source"}
    found = _with_rest(steps, steps.run.sources, dict.fromkeys(SOURCES, 0.0) | found, "modelled")
    return dict.fromkeys(SOURCES, NAN) | _shares(found)


def group_share(steps: Steps) -> dict[str, float]:
    """Share of the simulated step time by operator group, and "host" for the time in which the GPU waits for it."""
    return _shares(group_seconds(steps))


def group_seconds(steps: Steps) -> dict[str, float]:
    """Seconds of the same, all ranks and stages of all replicas together; of a pool's GPUs each has a rank's."""
    return _with_rest(steps, steps.run.groups, _parts(steps), "host")


def group_bytes(steps: Steps) -> dict[str, float]:
    """Bytes of the run's parts where their tables hold bytes (``perf.tabulate.by_operator``), of all ranks together; of
    ranks in lockstep each counts as much as the busiest."""
    return _parts(steps) if steps.busy_seconds > 0 else {}


def _shares(found: Mapping[str, float]) -> dict[str, float]:
    """The parts over their sum."""
    everything = sum(found.values())
    return {name: seconds / everything for name, seconds in found.items()}


def _with_rest(steps: Steps, parts: Sequence[Any], found: dict[str, float], rest: str) -> dict[str, float]:
    """What each part takes by itself, and the ``rest``; nothing where parts are not known, or without steps.

    Host work that overlaps the GPU is left out of the parts, since it costs nothing while the GPU is slower; where
    it is not, the time that no part explains goes to ``rest``. The stages of a pipeline count one after the other.
    """
    total = steps.busy_seconds
    if not parts or total <= 0:
        return {}
    return found | {rest: found.get(rest, 0.0) + max(total - sum(found.values()), 0.0)}


def _parts(steps: Steps) -> dict[str, float]:
    """Σ over the log of each group."""
    tables = parts_of(steps.run.times, steps.run.groups)
    some = [name for name, of_pools in tables.items() if not all(table.takes_no_time for table in of_pools)]
    summed = steps.run.seconds([tables[name] for name in some])
    return dict.fromkeys(tables, 0.0) | dict(zip(some, summed, strict=True))


@dataclass(frozen=True)
class Uncertainty:
    """Over all steps of a run; NaN if its tables do not give errors."""

    error: float
    """Relative error of the step time (standard deviation of its log), as if all kernels erred the same way."""
    beyond: float
    """Share of the step time in kernels whose times are beyond the data, or on a device that has none."""
    host: float
    """The part of ``error`` that is host work's."""

    @property
    def kernels(self) -> float:
        """The part of ``error`` that is the kernels'."""
        return self.error - self.host


def uncertainty(steps: Steps) -> Uncertainty:
    """The errors of all kernels and of the host work, weighted by their time in the run.

    Kernels of a family err together, since they come from one table, and families are not told apart here: errors add
    up. What cancels out in a measured server is left to the served level (``metrics.evidence``).
    """
    total = steps.busy_seconds
    if ("doubt", "time") not in steps.judged or total <= 0:
        return Uncertainty(NAN, NAN, NAN)
    kernels, error, beyond = (steps.judged["doubt", name] for name in ("time", "error", "beyond"))
    host = family_errors(HOST).modelled * (total - kernels)
    host = max(host, 0.0)
    return Uncertainty((error + host) / total, beyond / total, host / total)
