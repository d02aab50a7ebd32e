"""Usage: what replicas did with their time, cache, FLOPs, watts and money; where the batch time came from, and how
uncertain it is."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment.footprint import Footprint
from windtunnel.metrics.handed import parts_in_order
from windtunnel.metrics.steps import Inside, Steps, blocks_in_use, held_between, in_flight, sums, work
from windtunnel.metrics.window import Window
from windtunnel.perf.batch_times import BatchTimes, whole
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
    totals = _totals(steps, window, prints)
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
    total = float(totals["phases"].sum())
    return {
        name: float(part) / total if total > 0 else NAN for name, part in zip(PHASES, totals["phases"], strict=True)
    }


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


def _totals(steps: Steps, window: Window, prints: list[Footprint | None]) -> dict[str, Floats]:
    """Sums over the steps of each replica, most of a replica's blocks, and seconds of each phase; piece by piece, since
    a day has millions of rows."""
    pool = np.array([replica["pool"] for replica in steps.run.manifest["replicas"]], dtype=np.int64)
    found: dict[str, Floats] = {}
    for piece in steps.pieces():
        sums_of = _sums(piece, window, pool, prints)
        for name, values in sums_of.items():
            combine = np.maximum if name == "peak" else np.add
            found[name] = combine(found[name], values) if name in found else values
    return found


def _sums(steps: Steps, window: Window, pool: Integers, prints: list[Footprint | None]) -> dict[str, Floats]:
    """Those of one piece of the log."""
    log, heads, inside = steps.run.iterations, steps.heads, steps.inside(window)
    owner, number = log.replica[heads], len(pool)
    count = inside.steps * (steps.batch > 0)
    worked = inside.seconds * (steps.batch > 0)
    decodes = log.decodes[heads] > 0
    kinds = ((steps.chunks > 0) & ~decodes, (steps.chunks == 0) & decodes, (steps.chunks > 0) & decodes)
    peak = np.zeros(number)
    np.maximum.at(peak, owner, inside.peak)
    used, under_way = _held(steps, pool, window, inside)
    rows = {
        "computing": steps.row_busy[heads] * inside.share if steps.run.piped else inside.seconds,
        "iterations": count,
        "worked": worked,
        "batches": count * steps.batch,
        "in_steps": inside.seconds * steps.batch,
        "tokens": count * steps.tokens,
        "prefill": count * steps.chunk_tokens,
        "decode": count * log.decodes[heads],
    }
    return {
        **{name: sums(owner, values, number) for name, values in rows.items()},
        **_work_done(steps, prints, pool, inside),
        "peak": peak,
        "used": used,
        "under_way": under_way,
        "phases": np.array([float(worked[kind].sum()) for kind in kinds]),
    }


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
    used = totals["used"] + sums(held.replica, held.blocks * held.inside(window), len(pool))
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


def _held(steps: Steps, pool: Integers, window: Window, inside: Inside) -> tuple[Floats, Floats]:
    """[replicas] block-seconds in use, and seconds in which a step is in flight, of all ranks."""
    if not steps.run.piped:
        owner = steps.run.iterations.replica[steps.heads]
        return sums(owner, inside.held, len(pool)), sums(owner, inside.seconds, len(pool))
    present = in_flight(steps, blocks_in_use(steps))
    flying = present.inside(window)
    return sums(present.replica, present.blocks * flying, len(pool)), sums(present.replica, flying, len(pool))


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


def _work_done(steps: Steps, prints: list[Footprint | None], pool: Integers, inside: Inside) -> dict[str, Floats]:
    """[replicas] FLOPs, and bytes moved, of the steps; 0 without a footprint."""
    owner = steps.run.iterations.replica[steps.heads]
    flops, moved = np.zeros(len(pool)), np.zeros(len(pool))
    for index, constants in enumerate(prints):
        if constants is not None:
            mine = pool == index
            done, read = work(steps, constants, inside)
            flops[mine] = sums(owner, done, len(pool))[mine]
            moved[mine] = sums(owner, read, len(pool))[mine]
    return {"flops": flops, "moved": moved}


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
    return dict.fromkeys(SOURCES, NAN) | _shares(_seconds(steps, steps.run.sources, "modelled", SOURCES))


def group_share(steps: Steps) -> dict[str, float]:
    """Share of the simulated step time by operator group, and "host" for the time in which the GPU waits for it."""
    return _shares(group_seconds(steps))


def group_seconds(steps: Steps) -> dict[str, float]:
    """Seconds of the same, all ranks and stages of all replicas together; of a pool's GPUs each has a rank's."""
    return _seconds(steps, steps.run.groups, "host", ())


def group_bytes(steps: Steps) -> dict[str, float]:
    """Bytes of the run's parts where their tables hold bytes (``perf.tabulate.by_operator``), of all ranks together; of
    ranks in lockstep each counts as much as the busiest."""
    return _parts(steps, steps.run.groups) if steps.busy_seconds > 0 else {}


def _shares(found: Mapping[str, float]) -> dict[str, float]:
    """The parts over their sum."""
    everything = sum(found.values())
    return {name: seconds / everything for name, seconds in found.items()}


def _seconds(
    steps: Steps, parts: tuple[dict[str, BatchTimes], ...], rest: str, names: tuple[str, ...]
) -> dict[str, float]:
    """Σ over the log of each part's own step time.

    Host work that overlaps the GPU is left out of the parts, since it costs nothing while the GPU is slower; where
    it is not, the time that no part explains goes to ``rest``. The stages of a pipeline count one after the other.
    """
    total = steps.busy_seconds
    if not parts or total <= 0:
        return {}
    found = dict.fromkeys(names, 0.0) | _parts(steps, parts)
    found[rest] = found.get(rest, 0.0) + max(total - sum(found.values()), 0.0)
    return found


def _parts(steps: Steps, parts: tuple[dict[str, BatchTimes], ...]) -> dict[str, float]:
    """Σ over the log of each part."""
    whole_tables = [whole(table) for table in steps.run.times]
    tables = {
        name: tuple(_part(by_name, name, table) for by_name, table in zip(parts, whole_tables, strict=True))
        for name in dict.fromkeys(name for by_name in parts for name in by_name)
    }
    some = [name for name, of_pools in tables.items() if not all(table.takes_no_time for table in of_pools)]
    summed = steps.run.seconds([tables[name] for name in some])
    return dict.fromkeys(tables, 0.0) | dict(zip(some, summed, strict=True))


def _part(parts: Mapping[str, BatchTimes], name: str, times: BatchTimes) -> BatchTimes:
    """The named part of one pool, without overlapped host work; all zero where the pool has no such part."""
    return replace(parts[name], host_overlapped=0.0 * times.host_overlapped) if name in parts else times.scaled(0.0)


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
    if not steps.run.doubts or not all(steps.run.doubts) or total <= 0:
        return Uncertainty(NAN, NAN, NAN)
    doubts = [tuple(part[name] for part in steps.run.doubts) for name in ("error", "beyond")]
    tables = [tuple(whole(table) for table in steps.run.times), *doubts]
    kernels, error, beyond = steps.run.seconds([_silent(of_pools) for of_pools in tables])
    host = family_errors(HOST).modelled * (total - kernels)
    host = max(host, 0.0)
    return Uncertainty((error + host) / total, beyond / total, host / total)


def _silent(tables: tuple[BatchTimes, ...]) -> tuple[BatchTimes, ...]:
    """These tables without host work."""
    return tuple(
        replace(table, host_overlapped=np.zeros_like(table.host_serial), host_serial=np.zeros_like(table.host_serial))
        for table in tables
    )
