"""The accuracy page: ``python -m windtunnel.validation.page docs/accuracy.md`` writes its tables anew.

A table stands between two comments: ``<!-- windtunnel validate … -->``, the command that prints it, and
``<!-- end -->``. What is outside stays as it is.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from windtunnel.errors import InputError

BLOCK = re.compile(r"<!-- windtunnel (.*?) -->\n.*?<!-- end -->", re.DOTALL)

Command = Callable[[list[str]], int]


def rendered(text: str, run: Command) -> str:
    """The page with every table as its command prints it now. Raises InputError for a command that fails."""

    def table(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = run(shlex.split(match[1]))
        if code != 0:
            raise InputError(f"windtunnel {match[1]}: exit code {code}")
        return f"<!-- windtunnel {match[1]} -->\n\n{printed.getvalue().strip()}\n\n<!-- end -->"

    return BLOCK.sub(table, text)


def main(paths: list[str], run: Command) -> int:
    """Write the tables of pages anew; returns 2 after a wrong input, which is one line on standard error."""
    try:
        for path in map(Path, paths):
            path.write_text(rendered(path.read_text(encoding="utf-8"), run), encoding="utf-8")
    except (InputError, OSError) as wrong:
        sys.stderr.write(f"{wrong}\n")
        return 2
    return 0


if __name__ == "__main__":
    from importlib import import_module

    sys.exit(main(sys.argv[1:], import_module("windtunnel.cli").main))
