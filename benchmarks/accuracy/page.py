"""Pages of tables: ``python -m benchmarks.accuracy.page docs/appendix/accuracy.md`` writes a page's tables again.

A table stands between two comments: ``<!-- windtunnel validate … -->`` or ``<!-- python -m benchmarks.accuracy.… -->``,
the command that prints it, and ``<!-- end -->``. The text outside stays as it is.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.accuracy import in_one_line, kernel_report
from windtunnel.cli import main as windtunnel
from windtunnel.errors import InputError
from windtunnel.files import write_whole

BLOCK = re.compile(r"<!-- ((?:windtunnel|python -m) .*?) -->\n.*?<!-- end -->", re.DOTALL)

Command = Callable[[list[str]], int]

COMMANDS: dict[tuple[str, ...], Command] = {
    ("windtunnel",): windtunnel,
    ("python", "-m", "benchmarks.accuracy.kernel_report"): kernel_report.main,
}
"""First words of a command → what runs its other words and returns its exit code."""


def execute(words: list[str]) -> int:
    """Run a command of a page in this process. Raises InputError for one that is not in COMMANDS."""
    for first, run in COMMANDS.items():
        if tuple(words[: len(first)]) == first:
            return run(words[len(first) :])
    raise InputError(f"{shlex.join(words)}: must begin with {' or '.join(' '.join(first) for first in COMMANDS)}")


def rendered(text: str, run: Command = execute) -> str:
    """The page with every table as its command prints it now. Raises InputError for a command that fails."""

    def table(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = run(shlex.split(match[1]))
        if code != 0:
            raise InputError(f"{match[1]}: exit code {code}")
        return f"<!-- {match[1]} -->\n\n{printed.getvalue().strip()}\n\n<!-- end -->"

    return BLOCK.sub(table, text)


def write_again(paths: list[str], run: Command) -> None:
    """Write the tables of pages again. Raises InputError for a command that fails."""
    for path in map(Path, paths):
        write_whole(path, [rendered(path.read_text(encoding="utf-8"), run)])


def main(paths: list[str], run: Command = execute) -> int:
    """Write the tables of pages again; returns 2 after a wrong input, which is one line on standard error."""
    return in_one_line(lambda: write_again(paths, run))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
