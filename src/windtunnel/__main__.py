"""The command ``windtunnel``, and ``python -m windtunnel``, also where the installed command is not on the path."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


def main() -> int:
    """Run the command line; Ctrl-C ends it in one line also while its modules are read."""
    try:
        with what_is_compiled_is_said():
            from windtunnel.cli import main as run

            return run()
    except KeyboardInterrupt:
        sys.stderr.write("windtunnel: interrupted\n")
        return INTERRUPTED


@contextmanager
def what_is_compiled_is_said() -> Iterator[None]:
    """Say on standard error what a first run compiles, for half a minute; on a terminal the line of progress does."""
    if sys.stderr.isatty():
        yield
        return
    said = logging.Handler()
    said.addFilter(lambda record: bool(record.getMessage()))
    said.emit = lambda record: sys.stderr.write(f"windtunnel: {record.getMessage()}\n")  # type: ignore[method-assign,assignment]
    log = logging.getLogger("windtunnel.core.kernels")
    log.setLevel(logging.INFO)
    log.addHandler(said)
    try:
        yield
    finally:
        log.removeHandler(said)


if __name__ == "__main__":
    sys.exit(main())
