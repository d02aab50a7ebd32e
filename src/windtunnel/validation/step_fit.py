"""Step fit: by how much operators and host work of one server differ from the tables, from records of its steps.

Factors on the times of matrix products and all else that decodes run, of their attention, and of steps with prompts,
and host seconds of a step and of each request in it, are those that make the squares of log(simulated ÷ measured)
least, each step weighted down as it lies beyond two standard deviations (Huber). What the steps do not tell apart stays
near the tables: a normal prior on every number (PRIOR).
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool
from windtunnel.errors import InputError
from windtunnel.files import cache_folder
from windtunnel.metrics.evidence import server_key
from windtunnel.perf.batch_times import BatchTimes, whole
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.simulate.overheads import Agreement, HostOverhead, KernelFactors, Overheads
from windtunnel.validation.step_records import StepRecord

Floats = NDArray[np.float64]

KERNELS = ("products", "attention", "prompts")
HOST = ("serial", "serial_per_sequence", "overlapped", "overlapped_per_sequence")
PRIOR = np.array([0.5, 0.5, 0.5, 5e-3, 1e-4, 5e-3, 1e-4])
"""Standard deviations before any step was seen: of the logs of the factors, and of the host's seconds."""

FEWEST = 40
BLOCKS, HELD_OUT = 20, 4
"""The records are cut into 20 stretches, and every fourth of them decides nothing."""

ROUNDS = 40
LEAST_SPREAD = 2e-3
"""Of the logs: no server repeats a step more exactly."""


@dataclass(frozen=True)
class Errors:
    """Of steps that decided nothing: medians of |simulated ÷ measured − 1|, and the error of their sum."""

    steps: int
    median: float
    total: float


@dataclass(frozen=True)
class StepFit:
    """The corrections, and how well they hold for steps that decided nothing."""

    overheads: Overheads
    fitted: int
    before: dict[str, Errors]
    """``all``, ``decodes`` (without prompts) and ``prompts`` → errors by the tables alone."""
    after: dict[str, Errors]

    @property
    def helps(self) -> bool:
        """Whether held-out steps are nearer with the corrections."""
        return self.after["all"].median < self.before["all"].median

    def document(self) -> dict[str, Any]:
        """The calibration file."""
        held = {
            kind: {
                "steps": self.before[kind].steps,
                "median_before": round(self.before[kind].median, 4),
                "median_after": round(self.after[kind].median, 4),
                "total_before": round(self.before[kind].total, 4),
                "total_after": round(self.after[kind].total, 4),
            }
            for kind in self.before
        }
        spec = self.overheads.spec()
        return {"schema_version": 1, **spec, "fitted_steps": self.fitted, "errors_of_held_out_steps": held}


@dataclass(frozen=True)
class _Steps:
    """Steps as the tables see them: seconds of each part, requests, host seconds, and what was measured."""

    gpu: Floats
    """[n, 3] by KERNELS."""
    requests: Floats
    serial: Floats
    overlapped: Floats
    measured: Floats
    prompts: NDArray[np.bool_]
    least: Floats
    """Below which no number may fall: host work takes no less than no time."""

    def part(self, these: NDArray[np.bool_]) -> "_Steps":
        """Some of the steps."""
        return replace(
            self, **{one.name: getattr(self, one.name)[these] for one in fields(self) if one.name != "least"}
        )

    def off(self, values: Floats) -> Floats:
        """log(simulated ÷ measured) of every step."""
        gpu = self.gpu @ np.exp(values[:3])
        serial, per_serial, overlapped, per_overlapped = values[3:]
        beside = self.overlapped + overlapped + per_overlapped * self.requests
        alone = self.serial + serial + per_serial * self.requests
        found: Floats = np.log((np.maximum(gpu, beside) + np.maximum(alone, 0.0)) / self.measured)
        return found


def fit_steps(pool: Pool, records: Sequence[StepRecord], perf: str = "auto") -> StepFit:
    """Corrections from the steps of one rank of a pool. Raises InputError for steps that its tables do not cover, for
    few steps, and for pools whose steps are not those of one rank."""
    if len(records) < FEWEST:
        raise InputError(f"{len(records)} steps: must be at least {FEWEST}: record a longer stretch")
    for wrong, what in (
        (pool.engine.pipeline_parallel_size > 1, "pipeline_parallel_size > 1: a step passes several stages"),
        (pool.lockstep, "data-parallel ranks in lockstep: a step is that of all of them"),
        (pool.engine.num_speculative_tokens > 0, "speculative decoding: steps yield differing numbers of tokens"),
    ):
        if wrong:
            raise InputError(f"steps of {what}; use calibrate RUN")
    steps = _as_tables_see(whole(tabulate(pool, perf, cache_folder()).times), records)
    held = np.arange(len(records)) * BLOCKS // len(records) % HELD_OUT == HELD_OUT - 1
    values = _least_squares(steps.part(~held))
    unseen = steps.part(held)
    off = unseen.off(values)
    agreement = Agreement(server_key(pool.spec()), round(-float(np.median(off)), 4))
    return StepFit(
        overheads=_overheads(values, agreement),
        fitted=int((~held).sum()),
        before=_errors(unseen, unseen.off(np.zeros(len(PRIOR)))),
        after=_errors(unseen, off),
    )


def _overheads(values: Floats, agreement: Agreement) -> Overheads:
    kernels = dict(zip(KERNELS, map(float, np.round(np.exp(values[:3]), 4)), strict=True))
    host = dict(zip(HOST, map(float, np.round(values[3:], 8)), strict=True))
    return Overheads(HostOverhead(**host), None, KernelFactors(**kernels), agreement)


def _as_tables_see(times: BatchTimes, records: Sequence[StepRecord]) -> _Steps:
    def alone(*names: str) -> BatchTimes:
        every = ("decode_tokens", "mixed_tokens", "sequences", "decode_attention", "mixed_attention")
        zeros = {name: 0.0 * getattr(times, name) for name in (*every, "prefill_attention") if name not in names}
        return replace(times, **zeros, prefill_base=times.prefill_base if "prefill_attention" in names else 0.0)

    parts = (
        alone("decode_tokens", "sequences"),
        alone("decode_attention", "mixed_attention"),
        alone("mixed_tokens", "prefill_attention"),
    )
    for one in records:
        _require_covered(times, one)
    asked = [(one.batch.decodes, one.batch.kv_tokens, list(one.batch.chunks)) for one in records]
    requests = np.array([one.batch.sequences for one in records])
    return _Steps(
        gpu=np.array([[part.rank(*batch) for part in parts] for batch in asked]),
        requests=requests.astype(float),
        serial=times.host_serial[requests],
        overlapped=times.host_overlapped[requests],
        measured=np.array([one.seconds for one in records]),
        prompts=np.array([bool(one.batch.chunks) for one in records]),
        least=np.array([*[-np.inf] * 3, *_least(times.host_serial), *_least(times.host_overlapped)]),
    )


def _least(host: Floats) -> tuple[float, float]:
    """Seconds of a step and of each request below which host work would take less than no time."""
    rises = np.diff(host[1:])
    slope = max(float(rises.min(initial=np.inf)) if len(rises) else 0.0, 0.0)
    return -max(float(host[1]) - slope, 0.0), -slope


def _require_covered(times: BatchTimes, one: StepRecord) -> None:
    longest = int(times.context_knots[-1])
    batch = one.batch
    contexts = [context + tokens for tokens, context in batch.chunks]
    if batch.decodes:
        contexts.append(batch.kv_tokens // batch.decodes)
    for name, value, limit in (
        ("max_num_seqs", batch.sequences, times.max_num_seqs),
        ("max_num_batched_tokens", batch.tokens, times.max_num_batched_tokens),
        ("max_model_len", max(contexts), longest),
    ):
        if value > limit:
            raise InputError(f"{one.where}: {value} is beyond {name}={limit}: correct {name} in run.json")


def _least_squares(steps: _Steps) -> Floats:
    """Gauss-Newton steps, halved until they help, within the bounds."""
    values = np.maximum(np.zeros(len(PRIOR)), steps.least)
    spread = 1.0
    for _ in range(ROUNDS):
        off = steps.off(values)
        spread = max(1.4826 * float(np.median(np.abs(off))), LEAST_SPREAD)
        weight = 1.0 / np.maximum(np.abs(off) / (2.0 * spread), 1.0)
        slopes = np.stack([_slope(steps, values, number) for number in range(len(values))], axis=1)
        rows = np.sqrt(weight)[:, None] * slopes / spread
        wanted = np.concatenate([-np.sqrt(weight) * off / spread, -values / PRIOR])
        move = np.linalg.lstsq(np.concatenate([rows, np.diag(1.0 / PRIOR)]), wanted, rcond=None)[0]
        found = _halved(steps, values, move, weight / spread**2)
        if np.abs((found - values) / PRIOR).max() < 1e-7:
            break
        values = found
    return values


def _slope(steps: _Steps, values: Floats, number: int) -> Floats:
    moved = values.copy()
    moved[number] += 1e-4 * PRIOR[number]
    found: Floats = (steps.off(moved) - steps.off(values)) / (moved[number] - values[number])
    return found


def _halved(steps: _Steps, values: Floats, move: Floats, weight: Floats) -> Floats:
    def cost(at: Floats) -> float:
        return float((weight * steps.off(at) ** 2).sum() + ((at / PRIOR) ** 2).sum())

    before = cost(values)
    for k in range(12):
        found = np.maximum(values + move * 0.5**k, steps.least)
        if cost(found) <= before:
            return found
    return values


def _errors(steps: _Steps, off: Floats) -> dict[str, Errors]:
    def of(these: NDArray[np.bool_]) -> Errors:
        simulated = np.exp(off[these]) * steps.measured[these]
        median = float(np.median(np.abs(np.expm1(off[these]))))
        return Errors(int(these.sum()), median, float(simulated.sum() / steps.measured[these].sum() - 1.0))

    kinds = {"all": np.ones_like(steps.prompts), "decodes": ~steps.prompts, "prompts": steps.prompts}
    return {kind: of(these) for kind, these in kinds.items() if these.any()}
