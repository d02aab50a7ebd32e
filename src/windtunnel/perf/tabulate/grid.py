"""Grid: every operator of a pool asked at the knots of its tables, and the answers added up.

Speculative decoding is tabulated by expected acceptance: what a step costs, divided by the tokens that it yields. A
step verifies ``drafts`` + 1 tokens of each request, after a draft layer as large as one of the model's ran ``drafts``
times with its own pass through the head (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2). The
tables hold the time of a real step over ``accepted``: where a simulated request gains one token a step, its progress
is then exact in expectation, also where prefill chunks come between; where a step yields what is drawn,
``BatchTimes.of_steps`` makes whole steps of them. Attention reads the cached tokens once for all tokens of a request.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache as remember
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Pool, preset, stage_pools
from windtunnel.deployment.engine import GATHERED
from windtunnel.perf.batch_times import Floats, Integers
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.database import find_systems, own_systems, release_what_was_read
from windtunnel.perf.kernel_times import SOURCES, KernelTimes, either
from windtunnel.perf.predictor import Predictor, wanted_version
from windtunnel.perf.sources import predictor_from
from windtunnel.perf.tabulate.cache import cache_key, load, store
from windtunnel.perf.tabulate.operator import Operator
from windtunnel.perf.tabulate.tables import Axes, Splits, Tabulated, axes, in_a_pipeline, sends, total
from windtunnel.perf.user_kernels import databases

EVERY = "every"
Ask = Callable[[int], KernelTimes]
"""Times with this many tokens for each request."""


def tabulate(
    pool: Pool,
    source: str = "auto",
    cache: Path | None = None,
    corrections: Corrections = ALL,
    predictor: Predictor | None = None,
    keep: bool = True,
) -> Tabulated:
    """Batch-time tables of one data-parallel rank of a pool.

    ``source``: ``auto`` (measured where possible), ``measured`` or ``roofline``. ``cache``: folder in which tables are
    kept (``cache_folder()`` names the usual one); None: build them each time. A cache that cannot be read or written is
    named in ``notes`` and otherwise ignored. ``corrections``: what is modelled beyond the sum of kernels.
    ``predictor``: that of a pool which differs from this one in its limits alone, so that it is not asked twice.
    ``keep``: whether what is built is written to the cache.
    """
    times = predictor or predictor_from(pool, source, corrections)
    tables = [_stage(stage, source, times, cache, corrections, keep) for stage in stage_pools(pool)]
    return tables[0] if len(tables) == 1 else in_a_pipeline(tables, sends(pool, axes(pool, corrections), times))


def _stage(
    pool: Pool, source: str, times: Predictor, cache: Path | None, corrections: Corrections, keep: bool
) -> Tabulated:
    """The tables of a whole model, or of one stage."""
    if cache is None:
        return build(pool, times, corrections)
    key = cache_key(pool, source, times.read, corrections)
    found, trouble = load(cache, key, axes(pool))
    if found is not None:
        return found
    built = build(pool, times, corrections)
    if keep:
        trouble += store(cache, key, built)
    return replace(built, notes=(*built.notes, *trouble))


def build(pool: Pool, source: Predictor, corrections: Corrections = ALL) -> Tabulated:
    """Ask the predictor for every operator of the pool and lay the answers on tables.

    All kinds of kernels are imported here: tables that are kept need none of them.
    """
    from windtunnel.perf.tabulate.host import block_tables, dispatch, host_tables
    from windtunnel.perf.tabulate.micro_batches import overlap
    from windtunnel.perf.tabulate.operators import asked_of, operators

    ax = axes(pool, corrections)
    splits, provenance = Splits(ax), []
    ask = remember(partial(operator_times, ax=ax, predictor=source))
    halves = overlap(pool, ax, ask, corrections)
    for operator in asked_of(source, operators(pool, corrections)):
        kinds: set[int] = set()
        whole = ask(operator, 1)
        for part, found in (halves.of(operator, whole) if halves else whole).items():
            splits.add(operator, part, found)
            kinds |= set(np.unique(found.sources[found.seconds > 0]).tolist())
        if operator.phase == "prefill":
            splits.add_base(operator, prefill_base(operator, source))
        provenance.append(_row(operator, kinds))
    busy = _busy(pool, ax, total(splits.sources).tables)
    twice = (halves.prompts_split, halves.decodes_split) if halves else (None, None)
    launched = not source.perfect and not source.launches
    splits.add_wait("mixed_tokens", dispatch(pool, ax, busy["mixed_tokens"], True, corrections, twice[0]) * launched)
    alone = dispatch(pool, ax, busy["decode_tokens"] * ax.accepted, False, corrections, twice[1]) * launched
    splits.add_wait("decode_tokens", alone / ax.accepted)
    if not source.perfect and preset(pool.engine.preset).before_v1:
        for part in ("decode_attention", "mixed_attention"):
            splits.add_wait(part, block_tables(pool, ax, corrections))
    host = host_tables(source, pool, ax.max_num_seqs, corrections)
    if not pool.model.embeds:  # the first stage waits for the serial work, all others are told early
        host = (host[0], np.zeros_like(host[1]))
    release_what_was_read()
    return Tabulated(
        times=total(splits.sources).times(*(work / ax.accepted for work in host)),
        sources={name: sums.times() for name, sums in splits.sources.items()},
        groups={group: sums.times() for group, sums in splits.groups.items()},
        doubts={name: sums.times() for name, sums in splits.doubts.items()},
        provenance=(*_origins(source, wanted_version(pool)), *provenance),
        notes=_notes(pool, source),
    )


def operator_times(operator: Operator, parts: int, ax: Axes, predictor: Predictor) -> dict[str, KernelTimes]:
    """Seconds of one launch of an operator, by table; for one of ``parts`` equal micro-batches, which do not cut the
    chunks of prompts."""
    match operator.phase:
        case "tokens":
            tokens = np.arange(len(ax.padded))
            decodes, prompts = (replace(operator, kernel=operator.kernel.resolved(mixed)) for mixed in (False, True))
            plain = token_times(decodes, tokens, ax.padded, ax.graph_tokens, predictor, parts)
            found = per_token(
                lambda each: _each(decodes, ax, each, parts, predictor, plain), ax, ax.draft_share, operator.passes
            )
            if operator.passes == EVERY:
                plain = replace(plain, seconds=plain.seconds + (ax.drafts - 1) * plain.seconds[1])
            if ax.padded_with_prompts and prompts == decodes:
                return {"decode_tokens": found, "mixed_tokens": plain}
            eagerly = token_times(prompts, tokens, tokens, 0, predictor, parts)
            return {"decode_tokens": found, "mixed_tokens": eagerly}
        case "all_tokens":
            tokens = np.arange(ax.ranks * ax.max_num_batched_tokens + 1)
            plain = all_tokens_times(operator, tokens, ax, predictor, parts)
            small = tokens <= ax.ranks * ax.graph_tokens  # larger batches are taken for prefills
            alone = replace(operator, kernel=operator.kernel.resolved(False))
            found = per_token(lambda each: _each_of_all(alone, each, parts, predictor, plain), ax, ax.draft_share)
            return {"expert_tokens": replace(plain, seconds=np.where(small, found.seconds, plain.seconds))}
        case "sequences":
            n = np.arange(ax.max_num_seqs + 1, dtype=float)
            drafting = operator.drafting if ax.drafts and operator.drafting else operator.kernel

            def asked(each: int) -> KernelTimes:
                return predictor.along(drafting if each == 1 else operator.kernel, each * n, 0.0 * n)

            drafted = float(ax.draft_share > 0)  # a layer of the model's drafts with the model's own output head
            return {"sequences": per_draft(asked(1), ax) if operator.passes else per_token(asked, ax, drafted)}
        case "decode":
            a, b = np.meshgrid(np.arange(ax.max_num_seqs + 1), ax.context_knots, indexing="ij")
            found = per_request(decode_times(operator, a, b, predictor, parts), ax, operator.passes)
            beside = replace(operator, kernel=operator.kernel.beside_prefill()) if ax.one_call else operator
            mixed = found
            if beside != operator:
                mixed = per_request(decode_times(beside, a, b, predictor, parts), ax, operator.passes)
            return {"decode_attention": found, "mixed_attention": mixed}
        case _:
            a, b = np.meshgrid(ax.chunk_knots, ax.context_knots, indexing="ij")
            return {"prefill_attention": prefill_times(operator, a, b, predictor)}


def _busy(pool: Pool, ax: Axes, tables: dict[str, Floats]) -> dict[str, Floats]:
    """GPU seconds beside which the host launches, by tokens, experts included."""
    if ax.ranks == 1:
        return tables
    experts = tables["expert_tokens"][least_of_all(pool, ax, np.arange(len(ax.padded)))]
    return {name: tables[name] + experts for name in ("decode_tokens", "mixed_tokens")}


def least_of_all(pool: Pool, ax: Axes, tokens: Integers) -> Integers:
    """Tokens that experts see at least, by those of a rank: where every rank gets the tokens of all, the others may
    have one each; where a rank sends its own, all count as the largest."""
    captured = tokens <= ax.graph_tokens
    if pool.engine.all2all_backend == GATHERED:
        return np.where(captured, ax.ranks * ax.padded[tokens], tokens + ax.ranks - 1)
    return ax.ranks * np.where(captured, ax.padded[tokens], tokens)


def _each(operator: Operator, ax: Axes, each: int, parts: int, predictor: Predictor, plain: KernelTimes) -> KernelTimes:
    """A token-level operator where every request brings ``each`` tokens."""
    if each == 1:
        return plain
    return predictor.along(operator.kernel, each * np.ceil(ax.padded / parts), np.zeros(len(ax.padded)))


def _each_of_all(operator: Operator, each: int, parts: int, predictor: Predictor, plain: KernelTimes) -> KernelTimes:
    if each == 1:
        return plain
    tokens = each * np.ceil(np.arange(len(plain.seconds)) / parts)
    return predictor.along(operator.kernel, tokens, np.zeros_like(tokens))


def per_token(ask: Ask, ax: Axes, drafted: float, passes: str = "") -> KernelTimes:
    """Seconds per generated token of an operator that every token passes; ``drafted``: its share in one draft pass;
    ``passes``: as of an operator. The first pass of a head goes over all tokens of the step, further ones over one of
    each request (EAGLE's ``propose`` in vllm/v1/spec_decode/eagle.py)."""
    if not ax.drafts:
        return ask(1)
    verified, alone = ask(ax.drafts + 1), ask(1)
    more = ax.drafts * drafted if not passes else ax.drafts - 1 if passes == EVERY else 0
    seconds = (verified.seconds + more * alone.seconds) / ax.accepted
    return replace(verified, seconds=seconds, sources=np.maximum(verified.sources, alone.sources))


def per_draft(found: KernelTimes, ax: Axes) -> KernelTimes:
    """Seconds per generated token of what every draft asks once for all requests."""
    return replace(found, seconds=found.seconds * ax.drafts / ax.accepted)


def per_request(found: KernelTimes, ax: Axes, passes: str = "") -> KernelTimes:
    """Seconds per generated token of decode attention, which a verification asks once for all tokens of a request, and
    a head in each of its passes."""
    if not ax.drafts:
        return found
    if passes:
        return per_draft(found, ax)
    return replace(found, seconds=found.seconds * (1.0 + ax.drafts * ax.draft_share) / ax.accepted)


def token_times(
    operator: Operator, tokens: Integers, padded: Integers, graph: int, predictor: Predictor, parts: int = 1
) -> KernelTimes:
    """A token-level operator: from a graph at the padded size up to ``graph`` tokens, launched one by one above; for
    one of ``parts`` micro-batches."""
    captured = tokens <= graph
    a = np.ceil(np.where(captured, padded, tokens) / parts)
    zero = np.zeros_like(a)
    other = operator.kernel.eager()
    if other == operator.kernel:
        return predictor.along(operator.kernel, a, zero)
    one = predictor.along(operator.kernel, a[captured], zero[captured])
    two = predictor.along(other, a[~captured], zero[~captured])
    return either(captured, one, two)


def all_tokens_times(
    operator: Operator, tokens: Integers, ax: Axes, predictor: Predictor, parts: int = 1
) -> KernelTimes:
    """An operator for the tokens of all ranks; as many as decodes can bring are taken for decodes."""
    decodes, prompts = (replace(operator, kernel=operator.kernel.resolved(mixed)) for mixed in (False, True))
    found = token_times(decodes, tokens, tokens, ax.ranks * ax.graph_tokens, predictor, parts)
    if prompts == decodes:
        return found
    few = tokens <= ax.ranks * ax.max_num_seqs
    more = token_times(prompts, tokens[~few], tokens[~few], 0, predictor, parts)
    return either(few, found.at(few), more)


def decode_times(
    operator: Operator, a: NDArray[Any], b: NDArray[Any], predictor: Predictor, parts: int = 1
) -> KernelTimes:
    """Decode attention of ``a`` requests with ``b`` tokens in the cache each: the token of this step is a key too; for
    one of ``parts`` micro-batches."""
    return predictor.along(operator.kernel, np.ceil(a / parts), b.astype(float) + 1.0)


def prefill_times(operator: Operator, a: NDArray[Any], b: NDArray[Any], predictor: Predictor) -> KernelTimes:
    """Prefill attention of one chunk beyond the launch, which all chunks of a batch share: they run as one kernel."""
    found = predictor.times(operator.kernel, a.astype(float), b.astype(float))
    launch = float(prefill_base(operator, predictor).seconds[0])
    return replace(found, seconds=np.where(a > 0, np.maximum(found.seconds - launch, 0.0), 0.0))


def prefill_base(operator: Operator, predictor: Predictor) -> KernelTimes:
    """The least prefill: one token without context, all launch."""
    return predictor.times(operator.kernel, np.ones(1), np.zeros(1))


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
        return [{**predictor.origin, "reason": predictor.why_not, "calibrated_on": predictor.roofline.calibrated_on}]
    kept = {"source": "kernel database", "system": database.system, "backend": database.backend}
    first = {**kept, "version": database.version, "wanted": wanted, "version_rule": database.rule}
    return [first, *({"table": table, "file": file} for table, file in sorted(database.opened.items()))]


def _of_amd(pool: Pool) -> str:
    """What to think of times on a GPU of AMD's."""
    if preset(pool.engine.preset).before_v1:
        return f"{pool.device.name}: what vLLM 0.6.1 attained on MI300X, 3 to 50 times its roofline at large batches"
    return (
        f"{pool.device.name}: no software newer than vLLM 0.6.1 was measured on it, which took 2 to 54 times its "
        "roofline: this is what a tuned NVIDIA stack would attain at these peak rates, so take it for a bound"
    )


def own_database() -> tuple[str, ...]:
    """What to know where the user's own kernel database answers."""
    newest = databases()[:1] if find_systems() == own_systems() else []
    return tuple(
        f"kernel times are your own database's, newest {one.words}; the ranges are the installed package's"
        for one in newest
    )


def _notes(pool: Pool, predictor: Predictor) -> tuple[str, ...]:
    if predictor.perfect:
        return (
            f"perfect kernels: peak rates of {pool.device.name}, no launches and no host work; no server gets there",
        )
    if predictor.origin["source"] == "profile":
        first = f"kernel times are those of a profile of {predictor.origin['device']}; {predictor.why_not}"
        return tuple(note for note in (first, predictor.trouble) if note)
    if predictor.measured is None:
        like = predictor.roofline.calibrated_on
        how = (
            f"those measured on {like}, at its own peak rates"
            if predictor.lent
            else f"roofline as calibrated on {like}"
        )
        first = f"kernel times of {pool.device.name} are modelled: {predictor.why_not}; {how}"
        return (first, *([_of_amd(pool)] if pool.device.vendor == "AMD" else []))
    return (*own_database(), *predictor.measured.notes)
