"""Bottleneck: what limits a run and what to change, each rule with its evidence from the run's own columns."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.metrics import Steps, Usage, group_share, unroll, usage, window_of
from windtunnel.simulate.run import Run

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

NEARLY = 0.95
"""A limit counts as reached at this share of it."""


@dataclass(frozen=True)
class Finding:
    """One thing that limits a run."""

    name: str
    """``KV memory``, ``batch cap``, ``token budget``, ``preemptions``, ``prefill interference``, ``host``,
    ``communication``, ``pipeline bubbles``, ``compute``, ``memory bandwidth``, ``spare time``."""
    share: float
    """How much of the run it touches, 0 to 1."""
    evidence: str
    advice: str


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of the log whose steps compute something, with the columns that rules need."""

    steps: Steps

    @cached_property
    def active(self) -> Flags:
        """[heads] rows with a batch."""
        return self.steps.batch > 0

    @cached_property
    def seconds(self) -> Floats:
        """Time that each row takes."""
        return np.asarray(self.steps.row_seconds[self.steps.heads][self.active])

    @cached_property
    def used(self) -> Usage:
        """What the GPUs did without warm-up and drain."""
        return usage(self.steps, window_of(self.steps.run, self.steps.ends, exclude_warmup=True))

    @cached_property
    def groups(self) -> dict[str, float]:
        """Share of the step time by operator group."""
        return group_share(self.steps)

    def column(self, name: str) -> NDArray[np.int64]:
        """A column of the log."""
        return np.asarray(getattr(self.steps.run.iterations, name)[self.steps.heads][self.active])

    def of_pool(self, name: str) -> Floats:
        """A number of each row's pool, from the manifest."""
        manifest = self.steps.run.manifest
        pool = np.array([replica["pool"] for replica in manifest["replicas"]])
        values = np.array([entry.get(name) or entry["engine"].get(name) for entry in manifest["pools"]], dtype=float)
        return np.asarray(values[pool[self.column("replica")]])

    @cached_property
    def waiting(self) -> Flags:
        """Requests wait for admission."""
        return self.column("waiting") > 0

    @cached_property
    def kv_full(self) -> Flags:
        """Nearly no block is free."""
        return self.column("used_blocks") >= NEARLY * self.of_pool("kv_blocks")

    @cached_property
    def batch_full(self) -> Flags:
        """The batch is full."""
        return self.steps.batch[self.active] >= self.of_pool("max_num_seqs")

    @cached_property
    def tokens_full(self) -> Flags:
        """The token budget is nearly used up."""
        return self.steps.tokens[self.active] >= NEARLY * self.of_pool("max_num_batched_tokens")

    def share(self, which: Flags) -> float:
        """Share of the time that the given rows take."""
        total = float(self.seconds.sum())
        return float(self.seconds[which].sum()) / total if total > 0 else 0.0


Rule = Callable[[Rows], Finding | None]


def bottlenecks(run: Run, *, steps: Steps | None = None) -> tuple[Finding, ...]:
    """What limits a run, the most telling first; empty for a run without a step. ``steps`` is the unrolled log, if the
    caller has it already."""
    rows = Rows((steps or unroll(run)).unfolded)
    if len(run.iterations.steps) == 0 or not rows.active.any():
        return ()
    found = [found for rule, least in RULES.items() if (found := rule(rows)) is not None and found.share >= least]
    return tuple(sorted(found, key=lambda finding: -finding.share))


def kv_memory(rows: Rows) -> Finding:
    """Requests wait although the batch has room, because the cache is full."""
    share = rows.share(rows.waiting & rows.kv_full & ~rows.batch_full)
    return Finding(
        "KV memory",
        share,
        f"in {100 * share:.0f} % of the step time requests wait while ≥ {100 * NEARLY:.0f} % of the KV blocks are used",
        "more or larger GPUs per replica, kv_cache_dtype=fp8, a higher gpu_memory_utilization, or a shorter "
        "max_model_len",
    )


def batch_cap(rows: Rows) -> Finding:
    """Requests wait because the batch is full."""
    share = rows.share(rows.waiting & rows.batch_full)
    most = int(rows.of_pool("max_num_seqs").max())
    return Finding(
        "batch cap",
        share,
        f"in {100 * share:.0f} % of the step time requests wait while max_num_seqs={most} run",
        "a larger max_num_seqs, where the time per token leaves room",
    )


def token_budget(rows: Rows) -> Finding:
    """Prompts wait because the token budget of a step is used up."""
    share = rows.share(rows.waiting & rows.tokens_full & ~rows.batch_full)
    most = int(rows.of_pool("max_num_batched_tokens").max())
    return Finding(
        "token budget",
        share,
        f"in {100 * share:.0f} % of the step time prompts wait while steps compute "
        f"max_num_batched_tokens={most} tokens",
        "a larger max_num_batched_tokens for shorter first tokens, at the price of longer gaps between tokens",
    )


def preemptions(rows: Rows) -> Finding:
    """Requests lose their cache and compute it again."""
    requests = rows.steps.run.requests
    share = float((requests.preemptions > 0).mean())
    return Finding(
        "preemptions",
        share,
        f"{100 * share:.1f} % of the requests lost their KV cache, {int(requests.preemptions.sum()):,} times in all",
        "more KV memory, a smaller max_num_seqs, or a watermark",
    )


def prefill_interference(rows: Rows) -> Finding | None:
    """Decodes wait for the prefill chunks in their steps."""
    decodes, steps = rows.column("decodes"), np.maximum(rows.column("steps"), 1)
    mixed = (rows.steps.chunks[rows.active] > 0) & (decodes > 0)
    pure = (rows.steps.chunks[rows.active] == 0) & (decodes > 0)
    tokens = decodes * steps
    if not mixed.any() or not pure.any():
        return None
    share = float(tokens[mixed].sum() / tokens.sum())
    gaps = [float((rows.seconds[which] * decodes[which]).sum() / tokens[which].sum()) for which in (mixed, pure)]
    if gaps[0] < 1.5 * gaps[1]:
        return None
    return Finding(
        "prefill interference",
        share,
        f"{100 * share:.0f} % of the tokens come from steps that also compute prompts, which last "
        f"{gaps[0] * 1e3:.3g} ms instead of {gaps[1] * 1e3:.3g} ms",
        "a smaller max_num_batched_tokens, or separate replicas for prefill and decode",
    )


def host(rows: Rows) -> Finding:
    """The GPU waits for the host."""
    share = rows.groups.get("host", 0.0)
    return Finding(
        "host",
        share,
        f"{100 * share:.0f} % of the step time is host work during which the GPU waits",
        "asynchronous scheduling, CUDA graphs, a faster CPU, or fewer GPUs per replica",
    )


def communication(rows: Rows) -> Finding:
    """GPUs wait for each other."""
    share = rows.groups.get("communication", 0.0)
    return Finding(
        "communication",
        share,
        f"{100 * share:.0f} % of the step time is communication between GPUs",
        "fewer GPUs per replica and more replicas, or a faster link",
    )


def pipeline_bubbles(rows: Rows) -> Finding | None:
    """Stages of a pipeline idle while there are requests."""
    pools = rows.steps.run.manifest["pools"]
    stages = max(int(pool["engine"].get("pipeline_parallel_size") or 1) for pool in pools)
    if stages < 2:
        return None
    run = rows.steps.run
    lanes = np.unique(run.iterations.replica * 4096 + run.iterations.lane)
    requests = run.requests
    inside = requests.finish - requests.scheduled
    present = float(np.nansum(np.minimum(inside, np.inf)))
    span = float(np.nanmax(requests.finish) - np.nanmin(requests.scheduled))
    busy = float(rows.seconds.sum()) / (len(lanes) * span)
    share = max(0.0, min(1.0, present / span) - busy)
    return Finding(
        "pipeline bubbles",
        share,
        f"a micro-batch is under way {100 * busy:.0f} % of the time in each of {stages} places of the pipeline, "
        "although requests are there",
        "more requests at a time, or tensor instead of pipeline parallelism",
    )


def hardware(rows: Rows) -> Finding | None:
    """Whether busy GPUs are limited by arithmetic or by memory."""
    used = rows.used
    if not used.busy > 0 or np.isnan(used.mfu) or np.isnan(used.mbu):
        return None
    mfu, mbu = used.mfu / used.busy, used.mbu / used.busy
    name = "compute" if mfu > mbu else "memory bandwidth"
    advice = {
        "compute": "fewer bits (fp8 where the device has it), or more arithmetic per dollar",
        "memory bandwidth": "larger batches, fewer bits for weights and cache, or more bandwidth per dollar",
    }[name]
    evidence = f"busy GPUs reach {100 * mfu:.0f} % of their FLOP/s and {100 * mbu:.0f} % of their memory bandwidth"
    return Finding(name, max(mfu, mbu), evidence, advice)


def spare_time(rows: Rows) -> Finding:
    """GPUs idle: latencies, not throughput, are the limit."""
    share = 1.0 - rows.used.busy
    return Finding(
        "spare time",
        share,
        f"GPUs are busy {100 * rows.used.busy:.0f} % of the time",
        "a higher rate if the limits leave room; otherwise shorter steps (more GPUs per replica) or looser limits",
    )


RULES: dict[Rule, float] = {
    kv_memory: 0.05,
    batch_cap: 0.05,
    token_budget: 0.05,
    preemptions: 0.01,
    prefill_interference: 0.1,
    host: 0.1,
    communication: 0.15,
    pipeline_bubbles: 0.1,
    hardware: 0.0,
    spare_time: 0.3,
}
"""Each rule, and the least share of the run that counts."""
