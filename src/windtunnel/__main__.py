"""The command ``windtunnel``, and ``python -m windtunnel``, also where the installed command is not on the path."""

import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command line; Ctrl-C ends it in one line also while its modules are read."""
    try:
        from windtunnel.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("windtunnel: interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
