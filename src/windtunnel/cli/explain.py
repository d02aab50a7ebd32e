"""explain: what one batch costs, operator by operator."""

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from windtunnel.cli.arguments import Json, show_json
from windtunnel.scenario import Server


def explain(
    server: Annotated[Server, Parameter(name="*")] = Server(),  # noqa: B008 - frozen
    *,
    batch: str = "decode=32@4096,prefill=1x2048",
    as_json: Json = False,
) -> None:
    """Show what one step of one rank costs, operator by operator.

    Parameters
    ----------
    batch
        decode=32@4096 is 32 decodes with 4096 tokens in the cache each, prefill=2x1024@8192 two chunks of 1024 tokens
        of prompts of which 8192 tokens are computed; a comma adds them up.
    as_json
        Print one JSON document instead of the table.
    """
    from windtunnel.perf.batch import parse_batch
    from windtunnel.perf.explain import explain as operators

    asked, pool = parse_batch(batch), server.pool()
    found = operators(pool, asked, server.perf)
    if as_json:
        show_json({"schema_version": 1, "batch": str(asked), "pool": pool.spec(), **asdict(found)})
    else:
        from windtunnel.terminal import show_operators

        show_operators(pool, str(asked), found)
