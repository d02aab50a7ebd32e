"""The command ``windtunnel``, and ``python -m windtunnel``, also where the installed command is not on the path."""

import gc
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

            code = run()
        gc.freeze()  # at its end Python looks for garbage among all objects, and the system takes all of them anyway
        return code
    except KeyboardInterrupt:
        sys.stderr.write("windtunnel: interrupted\n")
        return INTERRUPTED


@contextmanager
def what_is_compiled_is_said() -> Iterator[None]:
    """Say on standard error what a first run compiles, for half a minute; on a terminal the line of progress does."""
    if sys.stderr.isatty():
        yield
        return
    told, said = {""}, logging.Handler()

    def tell(record: logging.LogRecord) -> None:
        if (text := record.getMessage()) not in told:  # a scheduler has several entries
            told.add(text)
            sys.stderr.write(f"windtunnel: {text}\n")

    said.emit = tell  # type: ignore[method-assign]
    log = logging.getLogger("windtunnel.core.kernels")
    log.setLevel(logging.INFO)
    log.addHandler(said)
    try:
        yield
    finally:
        log.removeHandler(said)


if __name__ == "__main__":
    sys.exit(main())
