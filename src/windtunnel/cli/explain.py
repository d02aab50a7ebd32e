"""explain: what one batch costs, operator by operator."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, show_json
from windtunnel.scenario import Server
from windtunnel.scenario.output_files import check_folder


def explain(
    server: Annotated[Server, Parameter(name="*")] = Server(),  # noqa: B008 - frozen
    *,
    batch: str = "decode=32@4096,prefill=1x2048",
    plot: Annotated[Literal["roofline"] | None, Parameter(group=OUTPUT)] = None,
    output: Annotated[Path, Parameter(group=OUTPUT)] = Path("roofline.html"),
    as_json: Json = False,
) -> None:
    """Show what one step of one rank costs, operator by operator.

    Parameters
    ----------
    batch
        decode=32@4096 is 32 decodes with 4096 tokens in the cache each, prefill=2x1024@8192 two chunks of 1024 tokens
        of prompts of which 8192 tokens are computed; a comma adds them up.
    plot
        roofline: write a page that shows each operator under the device's roofline.
    output
        The file of the plot.
    as_json
        Print one JSON document instead of the table.
    """
    from windtunnel.perf.explain import explain as operators
    from windtunnel.perf.explain import parse_batch

    asked, pool = parse_batch(batch), server.pool()
    if plot is not None:
        check_folder("output", output, output.parent)
    found = operators(pool, asked, server.perf)
    if plot is not None:
        from windtunnel.report.roofline import write_roofline

        write_roofline(output, pool, str(asked), found)
    if as_json:
        from windtunnel.metrics import clean

        show_json(clean({"schema_version": 1, "batch": str(asked), "pool": pool.spec(), **asdict(found)}))
    else:
        from windtunnel.cli.terminal import show_operators

        show_operators(pool, str(asked), found)
