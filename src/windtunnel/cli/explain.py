"""explain: what one batch costs, operator by operator."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, PASTING, Json, Pasting, show_json
from windtunnel.errors import InputError
from windtunnel.files import require_writable, write_whole
from windtunnel.scenario import DEPLOYMENT, POOLS, Pools, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from windtunnel.deployment import Pool
    from windtunnel.perf.explain import Batch


def explain(
    server: Annotated[Server, Parameter(name="*")] = Server(),  # noqa: B008 - frozen
    *,
    pools: Annotated[Pools, Parameter(name="*", group=POOLS)] = Pools(),  # noqa: B008 - frozen
    pasting: Annotated[Pasting, Parameter(name="*", group=DEPLOYMENT)] = PASTING,  # noqa: ARG001 - read while parsing
    batch: str | None = None,
    plot: Annotated[Literal["roofline"] | None, Parameter(group=OUTPUT)] = None,
    output: Annotated[Path, Parameter(group=OUTPUT)] = Path("roofline.html"),
    as_json: Json = False,
) -> None:
    """Show what one step of one rank costs, operator by operator.

    Parameters
    ----------
    batch
        decode=32@4096 is 32 decodes with 4096 tokens in the cache each, prefill=2x1024@8192 two chunks of 1024 tokens
        of prompts of which 8192 tokens are computed; a comma adds them up. A prefill pool computes its chunks alone, a
        decode pool its decodes. [decode=32@4096,prefill=1x2048, less where the engine takes less]
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
    served = [_without_drafts(pool) for pool in deployment.pools]
    parts = [(pool, part) for pool in served for part in _part(given or usual_batch(pool.engine), pool.role)]
    if plot is not None:
        require_writable("output", output)
        if len(parts) > 1:
            raise InputError(f"plot {plot!r}: shows one pool: leave out the decodes or the chunks of the batch")
    rows = [(pool, str(part), operators(pool, part, server.perf)) for pool, part in parts]
    if as_json:
        from windtunnel.metrics import clean

        steps = [{"batch": part, "pool": pool.spec(), **asdict(found)} for pool, part, found in rows]
        show_json(clean({"schema_version": 1, **(steps[0] if len(deployment.pools) == 1 else {"pools": steps})}))
    else:
        from windtunnel.cli.terminal import show_operators

        for row in rows:
            show_operators(*row)
    if plot is not None:
        from windtunnel.report.roofline import roofline_page

        write_whole(output, [roofline_page(*rows[0])])


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
