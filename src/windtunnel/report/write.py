"""Writing a report file: all of it or nothing."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from windtunnel.errors import InputError


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Write text parts to a temporary file next to ``path``, then rename it into place.

    Raises:
        InputError: the folder cannot be written, or the disk is full; nothing is left behind.
    """
    path = Path(path)
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        scratch = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(parts)
        scratch.chmod(0o644)
        scratch.replace(path)
    except OSError as error:
        if scratch is not None:
            scratch.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise InputError(f"{str(path)!r}: cannot be written ({reason}): choose another place") from error
