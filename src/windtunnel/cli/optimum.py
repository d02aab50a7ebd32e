"""optimum: the best schedule of a load on one engine, with what is proven of it."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from windtunnel.cli.arguments import OUTPUT, Json, show_json
from windtunnel.errors import InputError
from windtunnel.files import require_writable, write_whole
from windtunnel.scenario import Scenario

if TYPE_CHECKING:
    from windtunnel.optimum.certificate import Certificate
    from windtunnel.optimum.objective import Objective
    from windtunnel.optimum.problem import Problem
    from windtunnel.optimum.programs.solver import Progress

DONE, INTERRUPTED = 0, 130
OPTIMUM = Group("Optimum", sort_key=-1)
COEFFICIENTS = 5
"""Of a linear cost, at most."""


def optimum(
    scenario: Annotated[Scenario, Parameter(name="*")] = Scenario(),  # noqa: B008 - frozen
    *,
    objective: Annotated[str, Parameter(group=OPTIMUM)] = "makespan",
    slack: Annotated[float, Parameter(group=OPTIMUM)] = 0.0,
    program: Annotated[str, Parameter(group=OPTIMUM)] = "flow",
    seconds: Annotated[float, Parameter(group=OPTIMUM)] = 60.0,
    max_num_prefill_tokens: Annotated[int, Parameter(group=OPTIMUM, show_default=False)] = 0,
    forbid: Annotated[tuple[str, ...], Parameter(group=OPTIMUM, show_default=False)] = (),
    rule_prices: Annotated[bool, Parameter(negative=(), group=OPTIMUM)] = False,
    coefficients: Annotated[tuple[float, ...], Parameter(group=OPTIMUM, show_default=False)] = (),
    export: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    as_json: Json = False,
) -> int:
    """Find the best schedule of a load on one engine, with a bound on how good any schedule can be.

    Lengths and arrivals are known beforehand, as no scheduler knows them. The bound is tight for a dozen requests, and
    for the makespan of thousands; for mean latencies a gap of 5 to 15 % stays where all come at once, and of 35 to
    80 % where they come near capacity. Exit codes: 0 done, 2 wrong input, 130 interrupted, with what was proven by
    then.

    Parameters
    ----------
    objective
        What is to be small: makespan, mean-e2el, mean-ttft or mean-tpot, a weighted sum, ``makespan+0.5*mean-ttft``, or
        goodput, the share of requests that miss a limit of --goodput. Several with commas: the first counts most.
    slack
        Share by which the objectives before the last one may be worse than their best found value.
    program
        flow: schedules that compute each prompt in one batch; start: without evictions and pauses as well; literal: any
        schedule, for three or four requests; none: search and bounds alone, for any number of requests.
    seconds
        Time limit of each objective; 0: the best of many simulated schedulers, and the bound by formula.
    max_num_prefill_tokens
        Tokens of prompts in a batch (InferMax's P), at most --max-num-batched-tokens; 0: as many.
    forbid
        What the schedule may not do: chunks, evictions, pauses, mixing, overtaking, choosing; see docs/optimum.md.
    rule_prices
        Say for each rule that is not forbidden yet what forbidding it costs.
    coefficients
        A linear batch time instead of the engine's tables, in s: of a batch, a token, a token of KV that a decode
        reads, a pair of prompt tokens, a request; the last ones may be left out.
    export
        File for the schedule, which a vLLM server can follow; see docs/optimum.md.
    as_json
        Print one JSON document with the schedule instead of the table.
    """
    from windtunnel.optimum.objective import in_order

    if export is not None:
        require_writable("export", export)
    if not 0 <= slack < 1:
        raise InputError(f"slack={slack:g}: must be a share, ≥ 0 and < 1")
    objectives = in_order(objective, scenario.goals.limits())
    problem = replace(_problem(scenario, coefficients), max_num_prefill_tokens=max_num_prefill_tokens)
    how = {"program": program, "seconds": seconds, "forbid": forbid, "progress": _watch()}
    if rule_prices:
        return _prices(problem, objectives, how, as_json)
    return _certificates(problem, objectives, how | {"slack": slack}, export, as_json)


def _certificates(
    problem: "Problem", objectives: "tuple[Objective, ...]", how: dict[str, Any], export: Path | None, as_json: bool
) -> int:
    """Find the best schedule, and show or write it."""
    from windtunnel.optimum.certificate import certify_in_order
    from windtunnel.optimum.export import exported

    found = certify_in_order(problem, objectives, **how)
    if export is not None:
        write_whole(export, [exported(problem, found[-1].schedule)])
    if as_json:
        before = [{name: one.to_json()[name] for name in ("objective", "value", "bound", "gap")} for one in found[:-1]]
        show_json(found[-1].to_json() | ({"before": before} if before else {}))
    else:
        _show(found, problem)
    return INTERRUPTED if any("interrupted" in note for one in found for note in one.notes) else DONE


def _prices(problem: "Problem", objectives: "tuple[Objective, ...]", how: dict[str, Any], as_json: bool) -> int:
    """Forbid one rule after the other, and show what each costs."""
    from windtunnel.cli.terminal import number, share, show, table
    from windtunnel.optimum.certificate import prices
    from windtunnel.optimum.rules import RULES

    if len(objectives) > 1:
        raise InputError("rule_prices: of one objective: leave out the comma")
    (objective,) = objectives
    implied = {"flow": {"chunks"}, "start": {"chunks", "evictions", "pauses"}}.get(how["program"], set())
    found = prices(problem, objective, RULES.keys() - implied - set(how["forbid"]), **how)
    free = found[""]
    if as_json:
        show_json({word: one.to_json() for word, one in found.items()})
        return DONE
    rows = [
        (
            word or "nothing more",
            number(one.value, 6),
            number(one.bound, 6),
            one.proof,
            share(one.value / free.value - 1),
        )
        for word, one in found.items()
    ]
    show(f"{objective} of {len(problem):,} requests", table(("forbidden", "value", "bound", "proof", "price"), rows))
    return DONE


def _problem(scenario: Scenario, coefficients: tuple[float, ...]) -> "Problem":
    """The load within the limits of the deployment's engine, under its batch times or the given ones."""
    from windtunnel.deployment import engine_scheduler
    from windtunnel.deployment.memory import kv_blocks
    from windtunnel.optimum.cost import Cost
    from windtunnel.optimum.problem import Problem
    from windtunnel.perf.batch_times import BatchTimes
    from windtunnel.simulate.simulate import batch_times, limits

    deployment = scenario.deployment()
    (pool,) = deployment.pools
    engine = pool.engine
    if pool.replicas > 1 or engine.data_parallel_size > 1 or engine.pipeline_parallel_size > 1:
        raise InputError("optimum is of one engine: use one replica, data_parallel_size=1, pipeline_parallel_size=1")
    if engine.num_speculative_tokens:
        raise InputError("optimum: no program knows speculative decoding: leave out num_speculative_tokens")
    if coefficients and not 2 <= len(coefficients) <= COEFFICIENTS:
        raise InputError(f"coefficients: give 2 to {COEFFICIENTS} numbers, e.g. 0.02 1e-4 1e-6")
    within = limits(pool, kv_blocks(pool), engine_scheduler(engine))
    workload = scenario.load.workload()
    if coefficients:
        return Problem.from_workload(workload, within, Cost(*coefficients))
    times = batch_times(deployment, scenario.server.perf)[0].times
    assert isinstance(times, BatchTimes)
    return Problem.from_workload(workload, within, times)


def _watch() -> "Progress | None":
    """What says every better schedule or bound, on a terminal."""
    return _progress if sys.stderr.isatty() else None


def _progress(seconds: float, value: float, bound: float) -> None:
    from windtunnel.optimum.certificate import gap

    low, high = sorted((value, bound))  # of goodput the bound is above
    left = f"{100 * gap(high, low):.1f} %"
    sys.stderr.write(f"{seconds:6.1f} s: a schedule of {value:.6g}, bound {bound:.6g}, gap {left}\n")


def _show(certificates: "list[Certificate]", problem: "Problem") -> None:
    """The certificates in a few lines, without the schedule."""
    from windtunnel.cli.terminal import facts_grid, number, share, show, wrapped

    *before, found = certificates
    limits, unit = problem.limits, _unit(found)
    evictions = sum(len(batch.evicted) for batch in found.schedule.batches)
    proofs = {
        "optimal": "optimal",
        "program": "the program's bound when it ended",
        "relaxation": "bound by linear relaxation",
        "formula": "bound by formula",
    }
    facts = [(f"first {one.objective}", f"{number(one.value, 6)}, bound {number(one.bound, 6)}") for one in before]
    facts += [
        (str(found.objective), f"{number(found.value, 6)}{unit}, by {found.found_by}"),
        ("bound", f"{number(found.bound, 6)}{unit} for {found.kind}; by formula {number(found.formula, 6)}{unit}"),
        ("gap", f"{share(found.gap)}: {proofs[found.proof]}"),
        ("schedule", f"{len(found.schedule.batches):,} batches, {evictions:,} evictions"),
        (
            "limits",
            f"{limits.num_blocks:,} blocks of {limits.block_size} tokens, {limits.max_num_batched_tokens:,} tokens and "
            f"{limits.max_num_seqs:,} requests in a batch",
        ),
        (
            "linear cost",
            f"{number(found.linear, 6)}{unit} for it: {share(1 - found.linear / found.value)} less",
        ),
    ]
    notes = (f"note: {note}" for note in found.notes)
    show(wrapped(_verdict(found, len(problem))), facts_grid(facts), *notes)


def _unit(found: "Certificate") -> str:
    return "" if found.objective.goodput else " s"


def _verdict(found: "Certificate", requests: int) -> str:
    """How good the schedule is, and how far from the best that there can be."""
    from windtunnel.cli.terminal import number, share
    from windtunnel.optimum.certificate import ANY

    among = "" if found.kind == ANY else f" among {found.kind}"
    value = f"{number(found.value)}{_unit(found)}"
    best = f"The best schedule found for {requests:,} requests has a {found.objective} of {value}"
    if found.proof == "optimal":
        return f"{best}: the best possible{among}."
    limit = f"{'above' if found.objective.goodput else 'below'} {number(found.bound)}{_unit(found)}"
    return f"{best}, within {share(found.gap)} of the best possible{among}: none is {limit}."
