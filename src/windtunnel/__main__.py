"""``python -m windtunnel``: the command line, also where the installed command is not on the path."""

import sys

from windtunnel.cli import main

if __name__ == "__main__":
    sys.exit(main())
