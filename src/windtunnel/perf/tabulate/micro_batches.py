"""Micro-batches: two halves of a step in turn, one of which computes while the tokens of the other are exchanged.

DeepSeek-V3 (arXiv 2412.19437, section 3.4) splits prompts and decodes so, vLLM with ``--enable-dbo``
(docs/design/dbo.md, v1/worker/ubatch_utils.py), SGLang with ``--enable-two-batch-overlap``
(batch_overlap/operations_strategy.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool
from windtunnel.deployment.engine import AUTO, HIGH_THROUGHPUT
from windtunnel.deployment.resolve import split_from
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.kernel_times import KernelTimes
from windtunnel.perf.kinds.exchange import SMS, Exchange
from windtunnel.perf.tabulate.operator import Operator
from windtunnel.perf.tabulate.operators import expert_layer_operators, operators
from windtunnel.perf.tabulate.tables import Axes

AFTER_CORE = (
    "o_proj",
    "quantize_attention",
    "output_gate",
    "gated_norm",
    "attention_all_reduce",
    "router",
    "expert_choice",
    "latent_down_proj",
)

BUSY = 30e-6
"""Seconds of every exchange in which low-latency kernels hold the multiprocessors themselves, to send and to receive:
0.06 ms for the dispatches of both halves of a layer (LMSYS, large-scale EP, 5 May 2025); 17 µs each in DeepSeek's
profile of a decode (deepseek-ai/profile-data). The rest is in flight."""

TOKEN_TABLES = ("decode_tokens", "mixed_tokens")

Ask = Callable[[Operator, int], Mapping[str, KernelTimes]]
"""Seconds of one launch of an operator by table, for one of this many micro-batches."""

BEFORE, CORE, AFTER = "before", "core", "after"
"""Attention in three: up to its kernel, the kernel, and from there to the choice of experts."""
EXPERTS, SHARED, DISPATCH, COMBINE = "experts", "shared", "dispatch", "combine"

Parts = Mapping[str, Floats]


@dataclass(frozen=True)
class Slot:
    """A stretch of a layer: what is computed for one half, and beside it exchanged for the other."""

    computed: tuple[str, ...]
    exchanged: str | None = None


ALTERNATING = (
    Slot((BEFORE, CORE, AFTER), DISPATCH),
    Slot((EXPERTS,), DISPATCH),
    Slot((EXPERTS, SHARED), COMBINE),
    Slot((SHARED, BEFORE, CORE, AFTER), COMBINE),
)
"""A layer of both halves in vLLM, and of prompts in SGLang and DeepSeek's own engine."""

FIVE_STAGES = 2 * (Slot((BEFORE, SHARED), DISPATCH), Slot((EXPERTS,)), Slot((CORE, AFTER), COMBINE))
"""A layer of both halves of decodes in SGLang and DeepSeek's own engine, where attention is longer than experts."""


@dataclass(frozen=True, eq=False)
class Overlap:
    """What splitting does to the tables of each operator."""

    factors: Mapping[tuple[Operator, str], Floats]
    """Seconds that a split step takes, over those of a whole one."""
    hidden: Mapping[tuple[Operator, str], Floats]
    """Seconds beside the other half, over those of a whole step."""
    added: Mapping[Operator, Mapping[str, KernelTimes]]
    """What halves take beyond a table that is not split, by the table of tokens that holds it."""
    shares: Mapping[Operator, float]
    """Share of an operator's launches that is in layers which are split."""
    decodes_split: NDArray[np.bool_]
    """[T + 1] whether a batch of decodes is split."""
    prompts_split: NDArray[np.bool_]
    """[T + 1] whether a batch with prompts is."""

    def of(self, operator: Operator, whole: Mapping[str, KernelTimes]) -> dict[str, KernelTimes]:
        """The answers of an operator where batches are split as these are."""
        found = dict(whole) | dict(self.added.get(operator, {}))
        for table, answered in whole.items():
            if (operator, table) in self.factors:
                found[table] = replace(answered, seconds=answered.seconds * self.factors[operator, table])
        return found


def overlap(pool: Pool, ax: Axes, ask: Ask, corrections: Corrections = ALL) -> Overlap | None:
    """The overlap of a pool's steps, or None where they are not split."""
    if not (pool.engine.enable_dbo and corrections.micro_batch_overlap):
        return None
    of_all, in_layers = operators(pool, corrections), expert_layer_operators(pool, corrections)
    counts = {replace(op, count=1): op.count for op in in_layers}
    shares = {op: counts.get(replace(op, count=1), 0) / op.count for op in of_all}
    return Halves(pool, ax, of_all, shares, ask).overlap()


@dataclass(eq=False)
class Halves:
    """One pool's operators at half the tokens, put together to an overlap."""

    pool: Pool
    ax: Axes
    operators: Sequence[Operator]
    shares: Mapping[Operator, float]
    """Share of an operator's launches that is in layers with experts; only these layers are split."""
    ask: Ask
    factors: dict[tuple[Operator, str], Floats] = field(default_factory=dict)
    hidden: dict[tuple[Operator, str], Floats] = field(default_factory=dict)

    def overlap(self) -> Overlap:
        """The factors of every table."""
        tokens = np.arange(len(self.ax.padded))
        decode_from, prompts_from = split_from(self.pool.engine)
        splits = tokens * (self.ax.drafts + 1) >= decode_from, tokens >= prompts_from
        for table, split in zip(TOKEN_TABLES, splits, strict=True):
            self._tokens(table, split)
        added = {
            op: {
                table: self._less_efficient(op, table == "mixed_tokens", split)
                for table, split in zip(TOKEN_TABLES, splits, strict=True)
            }
            for op in self._of("all_tokens")
        }
        self._decode_attention(splits[0])
        for table in ("mixed_attention", "prefill_attention"):
            self._attention_with_prompts(table, splits[1])
        return Overlap(self.factors, self.hidden, added, self.shares, *splits)

    def _of(self, phase: str) -> list[Operator]:
        return [op for op in self.operators if op.phase == phase]

    def seconds(self, operator: Operator, table: str, parts: int) -> Floats:
        """Of one launch, whole or for one half."""
        return self.ask(operator, parts)[table].seconds

    def slower(self, operator: Operator, prompts: bool) -> float:
        """How much longer an operator takes without the multiprocessors that high-throughput kernels hold for the whole
        step: vLLM's VLLM_DBO_COMM_SMS (ubatch_utils.py: SMControlContextManager)."""
        backend, all_of_them = self.pool.engine.all2all_backend, self.pool.device.multiprocessors
        held = backend == HIGH_THROUGHPUT or (backend == AUTO and prompts)
        limited = held and operator.group in ("gemm", "attention", "experts") and all_of_them > SMS
        return all_of_them / (all_of_them - SMS) if limited else 1.0

    def parts(self, table: str) -> dict[str, Floats]:
        """Seconds of one half in all layers with experts, by place, over the tokens of the whole batch; exchanges apart
        from what they keep busy."""
        found = {place: np.zeros(len(self.ax.padded)) for place in (BEFORE, AFTER, EXPERTS, SHARED, DISPATCH, COMBINE)}
        for op in self._of("tokens"):
            per_launch = self.seconds(op, table, 2) * self.slower(op, table == "mixed_tokens")
            if isinstance(op.kernel, Exchange):
                per_launch = per_launch - self.busy(op, table, per_launch)
            found[_place(op)] += op.count * self.shares[op] * per_launch
        for op in self._of("all_tokens"):
            half = self._of_equal_ranks(op, 2).seconds * self.slower(op, table == "mixed_tokens")
            found[EXPERTS] += op.count * self.shares[op] * half
        return found | {CORE: np.zeros(1)}

    def schedule(self, table: str) -> Sequence[Slot]:
        """How the halves take turns."""
        of_decodes = table.startswith("decode")
        return FIVE_STAGES if of_decodes and self.pool.engine.backend == "sglang" else ALTERNATING

    def busy(self, operator: Operator, table: str, per_launch: Floats) -> Floats:
        """What an exchange keeps of the multiprocessors' own time."""
        kernel, accepted = operator.kernel.resolved(table == "mixed_tokens"), self.ax.accepted
        posted = isinstance(kernel, Exchange) and kernel.mode == "low_latency"
        return np.minimum(per_launch, BUSY / accepted) if posted else np.zeros_like(per_launch)

    def _of_equal_ranks(self, operator: Operator, parts: int) -> KernelTimes:
        """Experts by the tokens of one rank, all ranks having as many."""
        tokens = np.arange(len(self.ax.padded))
        padded = np.where(tokens <= self.ax.graph_tokens, self.ax.padded, tokens)
        return self.ask(operator, parts)["expert_tokens"].at(self.ax.ranks * padded)

    def _less_efficient(self, operator: Operator, prompts: bool, split: NDArray[np.bool_]) -> KernelTimes:
        """What both halves of experts take beyond the whole, which the table of all ranks' tokens holds."""
        whole, half = (self._of_equal_ranks(operator, parts) for parts in (1, 2))
        more = 2.0 * half.seconds * self.slower(operator, prompts) - whole.seconds
        return replace(half, seconds=np.where(split, np.maximum(more, 0.0), 0.0))

    def _tokens(self, table: str, split: NDArray[np.bool_]) -> None:
        parts = self.parts(table)
        exchanges = {op: 2.0 * self.seconds(op, table, 2) for op in self.operators if isinstance(op.kernel, Exchange)}
        busy = sum(op.count * 2.0 * self.busy(op, table, both / 2.0) for op, both in exchanges.items())
        computed = 2.0 * sum(parts[place] for place in (BEFORE, AFTER, SHARED, EXPERTS))
        waited = np.maximum(lasting(self.schedule(table), parts) + busy - computed, 0.0)
        spent = sum(op.count * both for op, both in exchanges.items())
        seen = np.minimum(np.divide(waited, spent, out=np.ones_like(spent), where=spent > 0), 1.0)
        for op in self._of("tokens"):
            share, whole = self.shares[op], self.seconds(op, table, 1)
            both = 2.0 * self.seconds(op, table, 2) * self.slower(op, table == "mixed_tokens")
            taken = both * seen if op in exchanges else both
            self._keep(op, table, split, (1.0 - share) * whole + share * taken, whole, share * (both - taken))

    def _decode_attention(self, split: NDArray[np.bool_]) -> None:
        table, ops = "decode_attention", self._of("decode")
        rows = slice(0, self.ax.max_num_seqs + 1)
        parts = {name: value[rows, None] for name, value in self.parts("decode_tokens").items()}
        both = {op: 2.0 * self.seconds(op, table, 2) * self.slower(op, False) for op in ops}
        core = sum((op.count * self.shares[op] * both[op] for op in ops), np.zeros(1)) / 2.0
        schedule = self.schedule(table)
        longer = np.maximum(lasting(schedule, parts | {CORE: core}) - lasting(schedule, parts), 0.0)
        seen = np.minimum(np.divide(longer, 2.0 * core, out=np.ones_like(core), where=core > 0), 1.0)
        for op in ops:
            share, whole = self.shares[op], self.seconds(op, table, 1)
            taken = (1.0 - share) * whole + share * both[op] * seen
            self._keep(op, table, split[rows, None], taken, whole, share * both[op] * (1.0 - seen))

    def _attention_with_prompts(self, table: str, split: NDArray[np.bool_]) -> None:
        """A chunk is cut in two that take as long together; it hides what its share of the batch has room for."""
        sizes = np.arange(self.ax.max_num_seqs + 1) if table == "mixed_attention" else self.ax.chunk_knots
        sizes = np.minimum(sizes, len(split) - 1)
        ops = self._of("decode" if table == "mixed_attention" else "prefill")
        slower = {op: self.slower(op, True) for op in ops}
        core = (
            sum((op.count * self.shares[op] * slower[op] * self.seconds(op, table, 1) for op in ops), np.zeros(1)) / 2.0
        )
        found = rooms(self.schedule(table), self.parts("mixed_tokens"))
        hidden = sum(np.minimum(core, shared_out(np.where(split, room, 0.0))[sizes, None]) for room in found)
        unseen = np.divide(hidden, 2.0 * core, out=np.zeros_like(core), where=core > 0)
        for op in ops:
            share, whole = self.shares[op], self.seconds(op, table, 1)
            both = share * slower[op] * whole
            taken = (1.0 - share) * whole + both * (1.0 - unseen)
            self._keep(op, table, split[sizes, None], taken, whole, both * unseen)

    def _keep(
        self, op: Operator, table: str, split: NDArray[np.bool_], taken: Floats, whole: Floats, hidden: Floats
    ) -> None:
        some = split & (whole > 0)
        self.factors[op, table] = np.divide(taken, whole, out=np.ones_like(whole), where=some)
        self.hidden[op, table] = np.divide(hidden, whole, out=np.zeros_like(whole), where=some)


def _place(operator: Operator) -> str:
    if isinstance(operator.kernel, Exchange):
        return operator.kernel.phase
    if operator.name.startswith("shared_"):
        return SHARED
    return AFTER if operator.name in AFTER_CORE else BEFORE


def lasting(schedule: Sequence[Slot], parts: Parts) -> Floats:
    """Seconds of a schedule: in every slot the longer of what is computed and what is exchanged."""
    total: Floats = np.zeros(1)
    for slot in schedule:
        computed = sum((parts[name] for name in slot.computed), np.zeros(1))
        total = total + (computed if slot.exchanged is None else np.maximum(computed, parts[slot.exchanged]))
    return total


def rooms(schedule: Sequence[Slot], parts: Parts) -> list[Floats]:
    """Seconds for which the exchange outlasts everything but the attention kernel, in each slot that has the kernel."""
    found = []
    for slot in schedule:
        if CORE in slot.computed and slot.exchanged is not None:
            others = sum((parts[name] for name in slot.computed if name != CORE), np.zeros(1))
            found.append(np.maximum(parts[slot.exchanged] - others, 0.0))
    return found


def shared_out(room: Floats) -> Floats:
    """The room that a chunk of each size has for sure: its share, by tokens, in that batch around it where the share is
    least; so that the chunks of no batch hide more together than the batch has room for."""
    tokens = np.maximum(np.arange(len(room)), 1)
    return tokens * np.minimum.accumulate((room / tokens)[::-1])[::-1]
