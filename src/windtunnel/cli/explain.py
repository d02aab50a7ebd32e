"""explain: what one batch costs, operator by operator, and what the prompts of a load consist of."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, PASTING, Json, Pasting, progress, show_json
from windtunnel.errors import InputError
from windtunnel.files import require_writable, write_whole
from windtunnel.scenario import DEPLOYMENT, POOLS, WORKLOAD, Load, Pools, Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from windtunnel.deployment import Deployment, Pool
    from windtunnel.metrics import Summary
    from windtunnel.perf.explain import Batch, Explanation


def explain(
    server: Annotated[Server, Parameter(name="*")] = Server(),  # noqa: B008 - frozen
    *,
    pools: Annotated[Pools, Parameter(name="*", group=POOLS)] = Pools(),  # noqa: B008 - frozen
    load: Annotated[Load, Parameter(name="*", group=WORKLOAD)] = Load(),  # noqa: B008 - frozen
    pasting: Annotated[Pasting, Parameter(name="*", group=DEPLOYMENT)] = PASTING,  # noqa: ARG001 - read while parsing
    batch: str | None = None,
    plot: Annotated[Literal["roofline"] | None, Parameter(group=OUTPUT)] = None,
    output: Annotated[Path, Parameter(group=OUTPUT)] = Path("roofline.html"),
    as_json: Json = False,
) -> None:
    """Show what one step of one rank costs, operator by operator.

    With a load: what became of its prompts' tokens on the deployment. Found in the cache, and of what; computed; or
    computed again, and why.

    Parameters
    ----------
    batch
        decode=32@4096 is 32 decodes with 4096 tokens in the cache each, prefill=2x1024@8192 two chunks of 1024 tokens
        of prompts of which 8192 tokens are computed; a comma adds them up. A prefill pool computes its chunks alone, a
        decode pool its decodes. [decode=32@4096,prefill=1x2048, less where the engine takes less; with a load: none]
    plot
        roofline: write a page that shows each operator under the device's roofline.
    output
        The file of the plot.
    as_json
        Print one JSON document instead of the table.
    """
    from windtunnel.perf.explain import explain as operators
    from windtunnel.perf.explain import parse_batch, usual_batch

    given, deployment = None if batch is None else parse_batch(batch), pools.deployment(server, 1, "round_robin")
    found = None if load == Load() else _served(deployment, server, load)
    asked = batch is not None or plot is not None or found is None
    served = [_without_drafts(pool) for pool in deployment.pools] if asked else []
    parts = [(pool, part) for pool in served for part in _part(given or usual_batch(pool.engine), pool.role)]
    if plot is not None:
        require_writable("output", output)
        if len(parts) > 1:
            raise InputError(f"plot {plot!r}: shows one pool: leave out the decodes or the chunks of the batch")
    rows = [(pool, str(part), operators(pool, part, server.perf)) for pool, part in parts]
    if as_json:
        _print_json(found, rows, len(deployment.pools) == 1)
    else:
        from windtunnel.cli.run_screen import show_prompts
        from windtunnel.cli.terminal import show_operators

        if found is not None:
            show_prompts(*found)
        for row in rows:
            show_operators(*row)
    if plot is not None:
        from windtunnel.report.roofline import roofline_page

        write_whole(output, [roofline_page(*rows[0])])


def _served(deployment: "Deployment", server: Server, load: Load) -> "tuple[Mapping[str, Any], Summary]":
    """The manifest and the figures of a run of the load."""
    from windtunnel.cli.run import require_some_fit
    from windtunnel.metrics import summary
    from windtunnel.simulate.simulate import simulate

    with progress("simulating"):
        done = simulate(deployment, load.workload(), load.seed, perf=server.perf)
        require_some_fit(done)
        whole = {name: value for name, value in done.manifest.items() if name != "window"}  # as what was found counts
        return done.manifest, summary(replace(done, manifest=whole))


def _print_json(found: "tuple[Any, Summary] | None", rows: "list[tuple[Pool, str, Explanation]]", alone: bool) -> None:
    """What became of a load's prompts, by the names of ``run --json``, and the operators; ``alone``: of one pool."""
    from windtunnel.metrics import clean, summary_json

    document: dict[str, Any] = {"schema_version": 1}
    if found is not None:
        names = ("prompt_tokens", "cached_tokens", "reuse", "computed_again_tokens", "why_again", "stores")
        known = summary_json(found[1])
        document["prompts"] = {name: known[name] for name in names if name in known}
        document["prompts"]["computed_per_prompt"] = found[1].computed_per_prompt
    steps = [{"batch": part, "pool": pool.spec(), **asdict(each)} for pool, part, each in rows]
    if steps:
        document |= steps[0] if alone else {"pools": steps}
    show_json(clean(document))


def _without_drafts(pool: "Pool") -> "Pool":
    """The pool whose decodes have one token each; says so where that is not what it does."""
    if not pool.engine.num_speculative_tokens:
        return pool
    sys.stderr.write("windtunnel: explained without drafts: a step computes one token of each decode\n")
    plain = replace(pool.engine, num_speculative_tokens=0, acceptance_length=None, speculative_model=None)
    return replace(pool, engine=plain)


def _part(batch: "Batch", role: str) -> "Iterator[Batch]":
    """What of a batch a pool of this role computes, if anything."""
    if role == "mixed":
        yield batch
    elif role == "prefill" and batch.chunks:
        yield replace(batch, decodes=0, kv_tokens=0)
    elif role == "decode" and batch.decodes:
        yield replace(batch, chunks=())
