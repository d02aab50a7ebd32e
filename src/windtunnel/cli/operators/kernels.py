"""kernels: the user's own kernel database, made of the installed package's and newer ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from windtunnel.cli.arguments import Json, show_json

if TYPE_CHECKING:
    from windtunnel.perf.user_kernels import Kernels


def add(source: Annotated[Path, Parameter(name="WHEEL|FOLDER")], /, *, as_json: Json = False) -> None:
    """Merge a newer kernel database into your own, which then answers instead of the installed package's.

    Nothing is downloaded. Of a table that several databases hold, the newest one's counts.

    Parameters
    ----------
    source
        A wheel with kernel tables (pip download aisimulate --pre --no-deps), a package's folder, or its systems folder.
    as_json
        Print one JSON document instead of the table.
    """
    from windtunnel.perf.user_kernels import add as merged

    _show(merged(source), as_json)


def show(*, as_json: Json = False) -> None:
    """Show where kernel times come from: the databases, newest first, with their licences and dates.

    Parameters
    ----------
    as_json
        Print one JSON document instead of the table.
    """
    from windtunnel.perf.user_kernels import databases, packaged

    _show(databases() or packaged(), as_json)


def remove(*, as_json: Json = False) -> None:
    """Remove your own kernel database: the installed package's answers again.

    Parameters
    ----------
    as_json
        Print what is left as one JSON document instead of the table.
    """
    from windtunnel.perf.user_kernels import packaged
    from windtunnel.perf.user_kernels import remove as forget

    forget()
    _show(packaged(), as_json)


def _show(found: "list[Kernels]", as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        show_json([asdict(one) for one in found])
        return
    from windtunnel.cli.terminal import show as say
    from windtunnel.cli.terminal import show_rows

    if found:
        show_rows([asdict(one) for one in found])
    else:
        say("no kernel database: kernel times are modelled")
