"""Tables of a pool: the points at which they are asked, their sums by source and kind of operator, and those of the
stages of a pipeline."""

from dataclasses import field, replace
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Engine, Pool, capture_sizes, preset
from windtunnel.deployment.engine import DECODES_ALONE
from windtunnel.deployment.spread_prompts import spreads_decodes
from windtunnel.model.layers import Layer
from windtunnel.model.spec import stages
from windtunnel.perf.batch_times import CONTEXT_STEP, BatchTimes, Floats, Integers, StageTimes, added
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.kernel_errors import HOST, family_errors
from windtunnel.perf.kernel_times import SOURCES, KernelTimes
from windtunnel.perf.kinds.attention import flash_attention_2
from windtunnel.perf.kinds.collective import CROSSING, Collective
from windtunnel.perf.predictor import Predictor
from windtunnel.perf.tabulate.operator import GROUPS, Operator

KNOTS_PER_OCTAVE = 16
"""Knots between a value and its double: linear interpolation between them is within 0.1 % of a parabola."""

PARTS = (
    *("decode_tokens", "mixed_tokens", "sequences"),
    *("decode_attention", "mixed_attention", "prefill_attention", "expert_tokens"),
)
"""The tables of BatchTimes that hold GPU seconds, and so the tables that are split by source and by group."""

DOUBTS = ("error", "beyond")

ACTIVATIONS = 2
"""Rows per token: hidden state and residual (IntermediateTensors of vLLM's models)."""


@dataclass(frozen=True, eq=False)
class Axes:
    """Axes of the tables of one pool."""

    padded: Integers
    """[T + 1] tokens after padding to the captured graph."""
    graph_tokens: int
    """Largest captured graph, 0 without."""
    mixed_graph_tokens: int
    """Of batches with prefill chunks: 0 where an engine captures decodes only; another one where prompts have graphs of
    their own, in pieces."""
    one_call: bool
    """One attention kernel serves decodes and chunks of a batch together (FlashAttention 2)."""
    max_num_seqs: int
    context_knots: Integers
    chunk_knots: Integers
    ranks: int
    """Ranks in lockstep, 1 otherwise."""
    equal_tokens: int = 0
    """Largest batch of a rank to which the others are padded."""
    drafts: int = 0
    """Tokens that a draft proposes in a step."""
    accepted: float = 1.0
    """Mean tokens that a step yields: the tables hold the time per token."""
    draft_share: float = 0.0
    """A draft layer's share of the model's layers."""

    @property
    def padded_with_prompts(self) -> int:
        """Largest batch with prompts that runs from a graph of the sizes in ``padded``."""
        return self.mixed_graph_tokens if self.mixed_graph_tokens == self.graph_tokens else 0

    @property
    def max_num_batched_tokens(self) -> int:
        """Largest batch in tokens."""
        return len(self.padded) - 1


def axes(pool: Pool, corrections: Corrections = ALL) -> Axes:
    """The axes for a pool's limits and captured graphs."""
    engine = pool.engine
    tokens = np.arange(engine.resolved("max_num_batched_tokens") + 1)
    copies = engine.prefill_context_parallel_size if spreads_decodes(engine) else 1  # each runs a graph of its own size
    sizes = np.array([copies * size for size in capture_sizes(engine, pool.device)], dtype=np.int64)
    sizes = sizes[sizes < len(tokens)]
    largest = int(sizes[-1]) if len(sizes) else 0
    padded = tokens.copy()
    if largest:
        padded[: largest + 1] = sizes[np.searchsorted(sizes, tokens[: largest + 1])]
        padded[0] = 0
    return Axes(
        padded=padded,
        graph_tokens=largest,
        mixed_graph_tokens=engine.prompt_graph_tokens or (largest if _graphs_prompts(engine) else 0),
        one_call=corrections.mixed_attention and flash_attention_2(pool.engine.backend, pool.device),
        max_num_seqs=min(engine.resolved("max_num_seqs"), engine.resolved("max_num_batched_tokens")),
        context_knots=octave_knots(engine.resolved("max_model_len"), CONTEXT_STEP),
        chunk_knots=octave_knots(engine.resolved("max_num_batched_tokens"), 1),
        ranks=engine.data_parallel_size if pool.lockstep else 1,
        equal_tokens=len(tokens) - 1 if largest and _pads_ranks(engine) else largest,
        drafts=engine.num_speculative_tokens,
        accepted=engine.acceptance_length or 1.0,
        draft_share=draft_share(pool),
    )


def draft_share(pool: Pool) -> float:
    """A draft layer's share of the model's layers; 0 where a head of its own drafts, which has its own operators."""
    if pool.engine.speculative_model:
        return 0.0
    return len(pool.model.draft_layers) / pool.model.num_layers


def _pads_ranks(engine: Engine) -> bool:
    """Whether ranks are padded beyond the graphs; with drafts not looked at."""
    return preset(engine.preset).pads_ranks and not engine.num_speculative_tokens


def _graphs_prompts(engine: Engine) -> bool:
    """Whether batches with prompts run from graphs, as far as those reach."""
    if engine.cudagraph_mode is None:
        return preset(engine.preset).graphs_prefill
    return engine.cudagraph_mode != DECODES_ALONE


def octave_knots(last: int, step: int) -> Integers:
    """Multiples of ``step`` from 0 to at least ``last``: all of the first, then KNOTS_PER_OCTAVE in every doubling."""
    end = max(1, -(-last // step))
    knots, spacing, at = [], 1, 0
    while at < end:
        knots.append(at)
        if at >= 2 * KNOTS_PER_OCTAVE * spacing:
            spacing *= 2
        at += spacing
    return np.array([*knots, end], dtype=np.int64) * step


@dataclass(frozen=True, eq=False)
class Tabulated:
    """Tables of a pool and where they come from."""

    times: BatchTimes
    """Of a pipeline: a batch in all its stages one after the other."""
    sources: dict[str, BatchTimes]
    """``measured``, ``interpolated``, ``modelled``: tables of the same shape with the seconds from each source; their
    sum is ``times``. They hold no host work: ``sources[name].rank(…)`` is the GPU time of a batch from that source."""
    groups: dict[str, BatchTimes]
    """The tables split by ``gemm``, ``attention``, ``experts``, ``communication``, ``other``."""
    provenance: tuple[dict[str, Any], ...]
    """One row per operator: name, group, phase, count, kernel, kind of source, table file."""
    notes: tuple[str, ...] = ()
    """What a reader of results should know about the kernel times."""
    pipeline: StageTimes | None = None
    """The stages, where there are several."""
    doubts: dict[str, BatchTimes] = field(default_factory=dict)
    """``error``: seconds times their relative error, those of all kernels added up. ``beyond``: seconds of kernels that
    were asked beyond the data, or on a device that has none. Neither holds host work.
    Empty where unknown."""

    def of_steps(self, drafts: int, accepted: float, ranks: int, share: float) -> "Tabulated":
        """See ``BatchTimes.of_steps``."""

        def each(found: dict[str, BatchTimes]) -> dict[str, BatchTimes]:
            return {name: table.of_steps(drafts, accepted, ranks, share) for name, table in found.items()}

        return replace(
            self,
            times=self.times.of_steps(drafts, accepted, ranks, share),
            sources=each(self.sources),
            groups=each(self.groups),
            doubts=each(self.doubts),
        )

    def scaled(self, factor: float) -> "Tabulated":
        """All times multiplied by a factor; their shares stay as they are."""
        pipeline = self.pipeline.scaled(factor) if self.pipeline else None
        return replace(self, times=self.times.scaled(factor), pipeline=pipeline)


@dataclass(eq=False)
class Sums:
    """Running sums of one split of the tables."""

    axes: Axes
    tables: dict[str, Floats] = field(default_factory=dict)
    base: float = 0.0

    def add(self, part: str, seconds: Floats) -> None:
        """Add seconds to a table."""
        if part in self.tables:
            self.tables[part] += seconds
        else:
            self.tables[part] = np.array(seconds, dtype=float)

    def times(self, overlapped: Floats | None = None, serial: Floats | None = None) -> BatchTimes:
        """The sums as tables; without host work they are a share of a batch."""
        ax = self.axes
        none = np.zeros(ax.max_num_seqs + 1)
        shapes = part_shapes(ax)
        tables: dict[str, Any] = {part: self.tables.get(part, np.zeros(shapes[part])) for part in PARTS}
        return BatchTimes(
            **tables,
            host_overlapped=none if overlapped is None else overlapped,
            host_serial=none if serial is None else serial,
            context_knots=ax.context_knots,
            chunk_knots=ax.chunk_knots,
            prefill_base=self.base,
            padded=ax.padded,
            graph_tokens=ax.equal_tokens,
        )


@dataclass(eq=False)
class Splits:
    """The sums of a pool's tables by source, by kind of operator, and of their doubts."""

    axes: Axes
    sources: dict[str, Sums] = field(init=False)
    groups: dict[str, Sums] = field(init=False)
    doubts: dict[str, Sums] = field(init=False)

    def __post_init__(self) -> None:
        self.sources, self.groups, self.doubts = (
            {name: Sums(self.axes) for name in names} for names in (SOURCES, GROUPS, DOUBTS)
        )

    def add(self, operator: Operator, part: str, found: KernelTimes) -> None:
        """Add all launches of an operator to a table."""
        for code, name in enumerate(SOURCES):
            if (found.sources == code).any():
                self.sources[name].add(part, operator.count * found.part(code))
        self.groups[operator.group].add(part, operator.count * found.seconds)
        self.doubts["error"].add(part, operator.count * found.seconds * found.error)
        if found.extrapolated.any():
            self.doubts["beyond"].add(part, operator.count * np.where(found.extrapolated, found.seconds, 0.0))

    def add_base(self, operator: Operator, found: KernelTimes) -> None:
        """Add what the prompts of a batch take together."""
        self.sources[SOURCES[int(found.sources[0])]].base += operator.count * float(found.seconds[0])
        self.groups[operator.group].base += operator.count * float(found.seconds[0])
        self.doubts["error"].base += operator.count * float(found.seconds[0] * found.error[0])

    def add_wait(self, part: str, seconds: Floats) -> None:
        """Add what the GPU waits for the host."""
        self.sources["modelled"].add(part, seconds)
        self.groups["other"].add(part, seconds)
        self.doubts["error"].add(part, family_errors(HOST).modelled * seconds)


def in_a_pipeline(of_stages: list[Tabulated], passing: Floats) -> Tabulated:
    """The tables of all stages as one."""
    first = of_stages[0]
    staged = StageTimes(tuple(stage.times for stage in of_stages), passing)
    rows = tuple(
        row if "operator" not in row else {"stage": i, **row}
        for i, stage in enumerate(of_stages)
        for row in stage.provenance
        if i == 0 or "operator" in row
    )
    return Tabulated(
        times=staged.together,
        sources={name: added([stage.sources[name] for stage in of_stages]) for name in first.sources},
        groups={name: added([stage.groups[name] for stage in of_stages]) for name in first.groups},
        provenance=rows,
        notes=tuple(dict.fromkeys(note for stage in of_stages for note in stage.notes)),
        pipeline=staged,
        doubts={name: added([stage.doubts[name] for stage in of_stages]) for name in first.doubts},
    )


def part_shapes(ax: Axes) -> dict[str, tuple[int, ...]]:
    """Shapes of the tables in PARTS."""
    tokens, sequences, contexts = len(ax.padded), ax.max_num_seqs + 1, len(ax.context_knots)
    return {
        "decode_tokens": (tokens,),
        "mixed_tokens": (tokens,),
        "sequences": (sequences,),
        "decode_attention": (sequences, contexts),
        "mixed_attention": (sequences, contexts),
        "prefill_attention": (len(ax.chunk_knots), contexts),
        "expert_tokens": (ax.ranks * ax.max_num_batched_tokens + 1 if ax.ranks > 1 else 1,),
    }


def total(sources: dict[str, Sums]) -> Sums:
    """The tables of all sources together, added in the order of SOURCES, so that equal shares give equal bits."""
    ax = sources[SOURCES[0]].axes
    found = Sums(ax, {part: np.zeros(shape) for part, shape in part_shapes(ax).items()})
    for name in SOURCES:
        for part, seconds in sources[name].tables.items():
            found.add(part, seconds)
        found.base += sources[name].base
    return found


def sends(pool: Pool, ax: Axes, predictor: Predictor) -> Floats:
    """[stages − 1, T + 1] seconds for the activations of T tokens, padded as the batch is.

    Each GPU of a stage sends its share to its neighbour in the next stage, and the receivers gather the shares
    (send_tensor_dict with all_gather_group, vllm/distributed/parallel_state.py). A point-to-point transfer attains what
    gathers attain on the link; across nodes it takes the network and its latency.
    """
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    attained = predictor.roofline.efficiencies["gather"]
    tokens = ax.padded.astype(float)
    found = []
    for rows, across in zip(activations(pool), across_nodes(pool), strict=True):
        moved = rows * 2.0 * hidden / tp * tokens
        gather = np.zeros_like(tokens)
        if tp > 1:
            kernel = Collective("all_gather", tp, rows * hidden)
            gather = predictor.times(kernel, tokens, np.zeros_like(tokens)).seconds
        bandwidth = pool.device.network_bandwidth if across else pool.device.link_bandwidth
        latency = attained.latency + (CROSSING if across else 0.0)
        sent = predictor.send_seconds(moved, across)
        sent = moved / (bandwidth * attained.memory) + latency if sent is None else sent
        found.append(np.where(tokens > 0, sent + gather, 0.0))
    return np.array(found)


def activations(pool: Pool) -> list[int]:
    """Rows per token that each stage but the last sends: with attention residuals the hidden state and the sum of every
    block before the next stage (vllm/models/kimi_k3/nvidia/model.py), with hyper-connections every stream, with
    alternating updates every state."""
    count, own = pool.engine.pipeline_parallel_size, pool.engine.pipeline_layers
    firsts = [stage.layers[0][1] for stage in stages(pool.model, count, own)[1:]]
    return [_rows(layer) for layer in firsts]


def _rows(layer: Layer) -> int:
    """Rows per token that a layer takes."""
    if layer.streams or layer.predictions:
        return layer.streams or layer.predictions
    return ACTIVATIONS if layer.residual_blocks is None else 1 + layer.residual_blocks


def across_nodes(pool: Pool) -> list[bool]:
    """For each stage but the last: whether any rank has to cross nodes to reach the next one."""
    engine, domain = pool.engine, pool.device.gpus_per_domain
    tp, count = engine.tensor_parallel_size, engine.pipeline_parallel_size
    found = []
    for stage in range(count - 1):
        firsts = [(rank * count + stage) * tp for rank in range(engine.data_parallel_size)]
        found.append(any(first // domain != (first + 2 * tp - 1) // domain for first in firsts))
    return found
