"""Grid: every operator of a pool asked at the knots of its tables, and the answers added up."""

from dataclasses import replace
from functools import cache as remember
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Pool, preset, stage_pools
from windtunnel.deployment.engine import GATHERED
from windtunnel.model import MLA, LinearAttention, MoE, StateSpace
from windtunnel.model.layers import Layer
from windtunnel.perf.answer import MODELLED, SOURCES, Answer, answer, either
from windtunnel.perf.axes import Axes, axes
from windtunnel.perf.bands import HOST, family_errors
from windtunnel.perf.batch_times import Floats, Integers
from windtunnel.perf.cache import cache_key, load, store
from windtunnel.perf.causes import ALL, Causes
from windtunnel.perf.eager import eager_floor
from windtunnel.perf.exchange import resolved
from windtunnel.perf.fusion import GROUPS, Operator
from windtunnel.perf.host import NO_HOST, dispatch_floor, host_cost
from windtunnel.perf.kernels import Attention, Kernel
from windtunnel.perf.micro_batches import overlap
from windtunnel.perf.operators import operators
from windtunnel.perf.predictor import Predictor, eager, predictor, wanted_version
from windtunnel.perf.sends import sends
from windtunnel.perf.speculation import per_request, per_token
from windtunnel.perf.tables import DOUBTS, Sums, Tabulated, in_a_pipeline, total


def tabulate(pool: Pool, source: str = "auto", cache: Path | None = None, causes: Causes = ALL) -> Tabulated:
    """Batch-time tables of one data-parallel rank of a pool.

    ``source``: ``auto`` (measured where possible), ``measured`` or ``roofline``. ``cache``: folder in which tables are
    kept (``cache_folder()`` names the usual one); None: build them anew. A cache that cannot be read or written is said
    in ``notes`` and otherwise ignored. ``causes``: what is modelled beyond the sum of kernels.
    """
    times = predictor(pool, source, causes)
    tables = [_stage(stage, source, times, cache, causes) for stage in stage_pools(pool)]
    return tables[0] if len(tables) == 1 else in_a_pipeline(tables, sends(pool, axes(pool, causes), times))


def _stage(pool: Pool, source: str, times: Predictor, cache: Path | None, causes: Causes) -> Tabulated:
    """The tables of a whole model, or of one stage."""
    if cache is None:
        return build(pool, times, causes)
    key = cache_key(pool, source, times.database, causes)
    found, trouble = load(cache, key, axes(pool))
    if found is not None:
        return found
    built = build(pool, times, causes)
    trouble += store(cache, key, built)
    return replace(built, notes=(*built.notes, *trouble))


def build(pool: Pool, source: Predictor, causes: Causes = ALL) -> Tabulated:
    """Ask the predictor for every operator of the pool and lay the answers on tables."""
    ax = axes(pool, causes)
    by_source = {name: Sums(ax) for name in SOURCES}
    by_group = {group: Sums(ax) for group in GROUPS}
    doubts = {name: Sums(ax) for name in DOUBTS}
    provenance = []
    ask = remember(partial(answers, ax=ax, predictor=source))
    halves = overlap(pool, ax, ask, causes)
    for operator in operators(pool, causes):
        kinds: set[int] = set()
        whole = ask(operator, 1)
        for part, found in (halves.of(operator, whole) if halves else whole).items():
            for code, name in enumerate(SOURCES):
                if (found.sources == code).any():
                    by_source[name].add(part, operator.count * found.part(code))
            by_group[operator.group].add(part, operator.count * found.seconds)
            doubts["error"].add(part, operator.count * found.seconds * found.error)
            if found.extrapolated.any():
                doubts["beyond"].add(part, operator.count * np.where(found.extrapolated, found.seconds, 0.0))
            kinds |= set(np.unique(found.sources[found.seconds > 0]).tolist())
        if operator.phase == "prefill":
            base = prefill_base(operator, source)
            by_source[SOURCES[int(base.sources[0])]].base += operator.count * float(base.seconds[0])
            by_group[operator.group].base += operator.count * float(base.seconds[0])
            doubts["error"].base += operator.count * float(base.seconds[0] * base.error[0])
        provenance.append(_row(operator, kinds))
    busy = _busy(pool, ax, total(by_source).tables)
    twice = (halves.prompts_split, halves.decodes_split) if halves else (None, None)
    launch = dispatch(pool, ax, busy["mixed_tokens"], causes, twice[0]) * (not source.perfect)
    unsure = family_errors(HOST).modelled
    by_source["modelled"].add("mixed_tokens", launch)
    by_group["other"].add("mixed_tokens", launch)
    doubts["error"].add("mixed_tokens", unsure * launch)
    if ax.graph_tokens < ax.max_num_batched_tokens:
        alone = dispatch(pool, ax, busy["decode_tokens"], causes, twice[1]) * (not source.perfect)
        eager_decode = np.where(np.arange(len(ax.padded)) > ax.graph_tokens, alone, 0.0)
        by_source["modelled"].add("decode_tokens", eager_decode)
        by_group["other"].add("decode_tokens", eager_decode)
        doubts["error"].add("decode_tokens", unsure * eager_decode)
    cost = (
        NO_HOST
        if source.perfect
        else host_cost(bool(pool.engine.async_scheduling), pool.lockstep, causes, pool.engine.backend)
    )
    host = cost.tables(ax.max_num_seqs)
    if not pool.model.embeds:  # the first stage waits for the serial work, all others are told early
        host = (host[0], np.zeros_like(host[1]))
    return Tabulated(
        times=total(by_source).times(*(work / ax.accepted for work in host)),
        sources={name: sums.times() for name, sums in by_source.items()},
        groups={group: sums.times() for group, sums in by_group.items()},
        doubts={name: sums.times() for name, sums in doubts.items()},
        provenance=(*_origins(source, wanted_version(pool)), *provenance),
        notes=_notes(pool, source),
    )


def answers(operator: Operator, parts: int, ax: Axes, predictor: Predictor) -> dict[str, Answer]:
    """Seconds of one launch of an operator, by table; for one of ``parts`` equal micro-batches, which do not cut the
    chunks of prompts."""
    match operator.phase:
        case "tokens":
            tokens = np.arange(len(ax.padded))
            decodes, prompts = (replace(operator, kernel=resolved(operator.kernel, mixed)) for mixed in (False, True))
            plain = token_answer(decodes, tokens, ax.padded, ax.graph_tokens, predictor, parts)
            found = per_token(lambda each: _each(decodes, ax, each, parts, predictor, plain), ax, ax.draft_share)
            if ax.mixed_graph_tokens == ax.graph_tokens and prompts == decodes:
                return {"decode_tokens": found, "mixed_tokens": plain}
            eagerly = token_answer(prompts, tokens, tokens, 0, predictor, parts)
            return {"decode_tokens": found, "mixed_tokens": eagerly}
        case "all_tokens":
            tokens = np.arange(ax.ranks * ax.max_num_batched_tokens + 1)
            plain = all_tokens_answer(operator, tokens, ax, predictor, parts)
            small = tokens <= ax.ranks * ax.graph_tokens  # larger batches are taken for prefills
            alone = replace(operator, kernel=resolved(operator.kernel, False))
            found = per_token(lambda each: _each_of_all(alone, each, parts, predictor, plain), ax, ax.draft_share)
            return {"expert_tokens": replace(plain, seconds=np.where(small, found.seconds, plain.seconds))}
        case "sequences":
            n = np.arange(ax.max_num_seqs + 1, dtype=float)
            return {"sequences": per_token(lambda each: predictor.times(operator.kernel, each * n, 0.0 * n), ax, 1.0)}
        case "decode":
            a, b = np.meshgrid(np.arange(ax.max_num_seqs + 1), ax.context_knots, indexing="ij")
            found = per_request(decode_answer(operator, a, b, predictor, parts), ax)
            beside = replace(operator, kernel=beside_prefill(operator.kernel)) if ax.one_call else operator
            mixed = found if beside == operator else per_request(decode_answer(beside, a, b, predictor, parts), ax)
            return {"decode_attention": found, "mixed_attention": mixed}
        case _:
            a, b = np.meshgrid(ax.chunk_knots, ax.context_knots, indexing="ij")
            return {"prefill_attention": prefill_answer(operator, a, b, predictor)}


def _busy(pool: Pool, ax: Axes, tables: dict[str, Floats]) -> dict[str, Floats]:
    """GPU seconds beside which the host launches, by tokens: those of experts count where they are a rank's own."""
    if pool.engine.all2all_backend == GATHERED:
        return tables
    tokens = np.arange(len(ax.padded))
    experts = tables["expert_tokens"][ax.ranks * np.where(tokens <= ax.graph_tokens, ax.padded, tokens)]
    return {name: tables[name] + experts for name in ("decode_tokens", "mixed_tokens")}


def _is_large(layer: Layer) -> bool:
    """Latent and linear attention, state space; the measured modules of sparse attention hold their launches."""
    attention = layer.attention
    if isinstance(attention, MLA):
        return not attention.index_top_k
    return isinstance(attention, LinearAttention | StateSpace)


def _each(operator: Operator, ax: Axes, each: int, parts: int, predictor: Predictor, plain: Answer) -> Answer:
    """A token-level operator where every request brings ``each`` tokens."""
    if each == 1:
        return plain
    return predictor.times(operator.kernel, each * np.ceil(ax.padded / parts), np.zeros(len(ax.padded)))


def _each_of_all(operator: Operator, each: int, parts: int, predictor: Predictor, plain: Answer) -> Answer:
    if each == 1:
        return plain
    tokens = each * np.ceil(np.arange(len(plain.seconds)) / parts)
    return predictor.times(operator.kernel, tokens, np.zeros_like(tokens))


def token_answer(
    operator: Operator, tokens: Integers, padded: Integers, graph: int, predictor: Predictor, parts: int = 1
) -> Answer:
    """A token-level operator: from a graph at the padded size up to ``graph`` tokens, launched one by one above; for
    one of ``parts`` micro-batches."""
    captured = tokens <= graph
    a = np.ceil(np.where(captured, padded, tokens) / parts)
    zero = np.zeros_like(a)
    other = eager(operator.kernel)
    if other == operator.kernel:
        return predictor.times(operator.kernel, a, zero)
    one = predictor.times(operator.kernel, a[captured], zero[captured])
    two = predictor.times(other, a[~captured], zero[~captured])
    return either(captured, one, two)


def all_tokens_answer(operator: Operator, tokens: Integers, ax: Axes, predictor: Predictor, parts: int = 1) -> Answer:
    """An operator for the tokens of all ranks; as many as decodes can bring are taken for decodes."""
    decodes, prompts = (replace(operator, kernel=resolved(operator.kernel, mixed)) for mixed in (False, True))
    found = token_answer(decodes, tokens, tokens, ax.ranks * ax.graph_tokens, predictor, parts)
    if prompts == decodes:
        return found
    few = tokens <= ax.ranks * ax.max_num_seqs
    more = token_answer(prompts, tokens[~few], tokens[~few], 0, predictor, parts)
    return either(few, found.where(few), more)


def decode_answer(operator: Operator, a: NDArray[Any], b: NDArray[Any], predictor: Predictor, parts: int = 1) -> Answer:
    """Decode attention of ``a`` requests with ``b`` tokens in the cache each: the token of this step is a key too; for
    one of ``parts`` micro-batches."""
    return predictor.times(operator.kernel, np.ceil(a / parts), b.astype(float) + 1.0)


def beside_prefill(kernel: Kernel) -> Kernel:
    """Decode attention in a call that also serves prefill chunks."""
    return replace(kernel, tiled=True) if isinstance(kernel, Attention) else kernel


def prefill_answer(operator: Operator, a: NDArray[Any], b: NDArray[Any], predictor: Predictor) -> Answer:
    """Prefill attention of one chunk beyond the launch, which all chunks of a batch share: they run as one kernel."""
    found = predictor.times(operator.kernel, a.astype(float), b.astype(float))
    launch = float(prefill_base(operator, predictor).seconds[0])
    return replace(found, seconds=np.where(a > 0, np.maximum(found.seconds - launch, 0.0), 0.0))


def prefill_base(operator: Operator, predictor: Predictor) -> Answer:
    """The least prefill: one token without context, all launch."""
    return predictor.times(operator.kernel, np.ones(1), np.zeros(1))


def dispatch(pool: Pool, ax: Axes, gpu: Floats, causes: Causes = ALL, twice: NDArray[np.bool_] | None = None) -> Floats:
    """Seconds that the GPU waits for the host to launch what no graph holds, by tokens, where its work is shorter than
    that; ``twice``: batches of two micro-batches."""
    if not causes.launch_gaps:
        return np.zeros_like(gpu)
    layers = max(1, sum(count for count, layer in pool.model.layers if layer.attention))
    launched = sum(op.count for op in operators(pool, causes) if op.phase in ("tokens", "all_tokens")) / layers
    compiled = not pool.engine.enforce_eager and preset(pool.engine.preset).graphs_prefill
    modules = sum(count * (isinstance(layer.mlp, MoE) + _is_large(layer)) for count, layer in pool.model.layers)
    floors = [dispatch_floor(layers, launched, captured, compiled, modules / layers) for captured in (True, False)]
    if not preset(pool.engine.preset).graphs_prefill:
        floors[1] = eager_floor(pool)
    tokens = np.arange(len(ax.padded))
    floor = np.where(tokens <= ax.mixed_graph_tokens, floors[0], floors[1])
    waits = np.maximum((floor if twice is None else floor * (1 + twice)) - gpu, 0.0)
    waits[0] = 0.0
    return answer(waits, MODELLED).seconds


def _row(operator: Operator, kinds: set[int]) -> dict[str, Any]:
    return {
        "operator": operator.name,
        "group": operator.group,
        "phase": operator.phase,
        "count": operator.count,
        "kernel": str(operator.kernel),
        "sources": [SOURCES[kind] for kind in sorted(kinds)],
    }


def _origins(predictor: Predictor, wanted: str) -> list[dict[str, Any]]:
    database = predictor.database
    if database is None:
        return [{"source": "roofline", "reason": predictor.why_not, "calibrated_on": predictor.roofline.calibrated_on}]
    kept = {"source": "kernel database", "system": database.system, "backend": database.backend}
    first = {**kept, "version": database.version, "wanted": wanted, "version_rule": database.rule}
    return [first, *({"table": table, "file": file} for table, file in sorted(database.opened.items()))]


def _notes(pool: Pool, predictor: Predictor) -> tuple[str, ...]:
    if predictor.perfect:
        return (
            f"perfect kernels: peak rates of {pool.device.name}, no launches and no host work; no server gets there",
        )
    if predictor.measured is None:
        like = predictor.roofline.calibrated_on
        return (
            f"kernel times of {pool.device.name} are modelled: {predictor.why_not}; roofline as calibrated on {like}",
        )
    tables = predictor.measured
    mixers = (tables.sparse, tables.block_sparse, tables.compressed, tables.convolutions, tables.kimi_delta)
    rest = (tables.gemms, tables.experts, *mixers, tables.wide_experts, tables.exchanges)
    return tuple(note for table in rest for note in table.notes)
