"""Accuracy of windtunnel itself: kernels held out of the database, error files derived from them, pages of tables.

Commands: ``python -m benchmarks.accuracy.<name>`` with kernel_report, kernel_errors, served_errors or page.
"""

import sys
from collections.abc import Callable

from windtunnel.errors import InputError


def in_one_line(command: Callable[[], object]) -> int:
    """Run a command: 0, or 2 after a wrong input, which is one line on standard error."""
    try:
        command()
    except (InputError, OSError) as wrong:
        sys.stderr.write(f"{wrong}\n")
        return 2
    return 0
