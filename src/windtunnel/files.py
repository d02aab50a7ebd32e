"""Files: written whole or not at all, and read without guessing what a careless one means."""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, get_args, get_origin

from windtunnel.errors import InputError, unknown, words_of

PLACE = "WINDTUNNEL_CACHE"
"""Environment variable: another folder than ``~/.cache/windtunnel``."""
OWN_STREAMS = (1, 2)
"""Standard output and error: the user may name them as files, ``/dev/stdout``."""


def cache_folder() -> Path:
    """Where tables and compiled code are kept: ``$WINDTUNNEL_CACHE``, else ``windtunnel`` in the user's cache
    folder."""
    if os.environ.get(PLACE):
        return Path(os.environ[PLACE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windtunnel"


def data_folder() -> Path:
    """Where the user's own data are kept: ``windtunnel`` in the user's data folder."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "windtunnel"


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Write text, as ``whole_file`` does. Raises InputError if it cannot be written; nothing is left behind then."""
    with whole_file(path) as file:
        file.writelines(part.encode() for part in parts)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under ``path`` when everything has been written.

    What a link points at is replaced, not the link; a pipe or a device is written to, and stays what it is.

    Raises:
        InputError: the place cannot be written, or the disk is full; nothing is left behind.
    """
    path = Path(path)
    try:
        with _stream(path) if _is_stream(path) else _beside(_plain(path)) as file:
            yield file
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{str(path)!r}: cannot be written ({reason}): choose another place") from error


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which appears under ``path`` when everything has been written; nothing may stand there
    by then but an empty folder.

    Raises:
        InputError: the place cannot be written, or the disk is full; nothing is left behind.
    """
    path = Path(os.path.realpath(path))
    said, scratch = "choose another", None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        said = "nothing was saved"
        yield scratch
        scratch.chmod(0o755)
        scratch.rename(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"output {str(path)!r}: cannot be written ({reason}): {said}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _plain(path: Path) -> Path:
    """Where the file stands, or will: behind all links. Raises OSError where they lead in a circle."""
    place = Path(os.path.realpath(path))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return place


@contextmanager
def _beside(path: Path) -> Iterator[BinaryIO]:
    """A temporary file next to ``path``, renamed into its place at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _stream(path: Path) -> Iterator[BinaryIO]:
    """What stands there, to write to; our own stream goes on where it is."""
    sys.stdout.flush()
    own = next((stream for stream in OWN_STREAMS if _is_open_as(path, stream)), None)
    with path.open("ab", buffering=0) if own is None else os.fdopen(os.dup(own), "wb") as file:
        yield file


def _is_stream(path: Path) -> bool:
    """Whether something other than a plain file stands there, or one that this process already writes to."""
    return path.exists() and (not path.is_file() or any(_is_open_as(path, stream) for stream in OWN_STREAMS))


def _is_open_as(path: Path, stream: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(stream))
    except OSError:
        return False


OURS = b"windtunnel"
"""In every page and result that we write."""
LOOKED_AT = 1 << 16
"""Bytes at the beginning and at the end in which that is looked for."""


def require_writable(name: str, path: Path, *, in_new_folder: bool = False, ours: bool = False) -> None:
    """Raise InputError unless a file of this path can be written; before hours are spent on what goes in.

    Args:
        name: what the user calls it.
        path: where it will be.
        in_new_folder: its folder is made with it.
        ours: what is there already is replaced only if we have written it: it holds OURS.
    """
    if path.is_dir():
        raise InputError(f"{name} {str(path)!r}: is a folder: give the name of a file")
    if path.exists() and not path.is_file():
        mode = path.stat().st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)) or not os.access(path, os.W_OK):
            raise InputError(f"{name} {str(path)!r}: is no file that can be written: choose another place")
        return
    try:
        place = _plain(path)
    except OSError as error:
        raise InputError(f"{name} {str(path)!r}: cannot be written ({error.strerror}): choose another place") from error
    if not in_new_folder and not place.parent.exists():
        folder = str(place.parent)
        raise InputError(f"{name} {str(path)!r}: there is no folder {folder!r}: make it (mkdir -p), or choose another")
    if ours and path.is_file() and not _is_ours(path):
        raise InputError(f"{name} {str(path)!r}: is there, and windtunnel did not write it: choose another name")
    require_folder(name, path, place.parent)


def _is_ours(path: Path) -> bool:
    """Whether we have written a file, or nobody has written anything in it."""
    with path.open("rb") as file:
        begin = file.read(LOOKED_AT)
        file.seek(max(path.stat().st_size - LOOKED_AT, 0))
        return not begin or OURS in begin or OURS in file.read()


def require_folder(name: str, path: Path, folder: Path) -> None:
    """Raise InputError unless a file can be made in the folder, or in the nearest one above it that exists."""
    folder = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{name} {str(path)!r}: cannot be written ({error.strerror}): choose another place") from error


def read_text(path: Path) -> str:
    """The text of a file. Raises InputError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError("cannot be read: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds. Raises ValueError where it is none, OSError where it cannot be read.

    Python's parser takes 30 ms for the tables that every run reads, so what it finds is kept in the cache.
    """
    content = path.read_bytes()
    kept, digest = cache_folder() / "parsed" / f"{path.stem}.json", hashlib.sha256(content).hexdigest()
    with suppress(OSError, ValueError, LookupError, TypeError):  # none, half a file, or another one
        made_of, found = json.loads(kept.read_bytes())
        if made_of == digest:
            return dict(found)
    import tomllib

    found = tomllib.loads(content.decode())
    with suppress(InputError, TypeError):  # no place for it; dates are no JSON
        write_whole(kept, [json.dumps([digest, found])])
    return found


def parse_json(text: str | bytes) -> Any:
    """A JSON document. Raises InputError for what is none, for a key that stands twice, and for endless nesting."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except InputError:
        raise
    except RecursionError as error:
        raise InputError("not JSON: nested too deep") from error
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise InputError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice: leave one out")
    return found


def parse_yaml(text: str) -> Any:
    """A YAML document. Raises InputError for what is none, and for a key that stands twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses what ``yaml.safe_load`` takes in silence: the last of several equal keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _once([(str(key.value), None) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except RecursionError as error:
        raise InputError("not YAML: nested too deep") from error
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {' '.join(str(error).split())}") from error


def parse_yaml_documents(text: str) -> list[Any]:
    """The documents of a YAML text, divided by lines of ``---``. Raises InputError as ``parse_yaml``."""
    return [parse_yaml(part) for part in re.split(r"^---.*$", text, flags=re.M) if part.strip()]


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises InputError as ``read_text`` and ``parse_yaml``."""
    return parse_yaml(read_text(Path(path)))


def typed(kind: Any, value: Any) -> Any:
    """A value that a file or flag gives, of this type. Raises InputError for another one, and for a truth (in YAML also
    ``yes`` or ``on``) in place of a number."""
    from pydantic import TypeAdapter, ValidationError

    parts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(one, bool) for one in parts) and not _may_be(bool, kind):
        raise InputError("must not be true or false: YAML reads yes and on as true; quote a word")
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise InputError(str(error.errors()[0]["msg"]).lower()) from error


def _may_be(wanted: type, hint: Any) -> bool:
    return hint is wanted or any(_may_be(wanted, part) for part in get_args(hint))


def typed_words(words: Mapping[str, Any], types: Mapping[str, Any], origin: str = "") -> dict[str, Any]:
    """The values by key, each of the key's type; a list may be one text, its values separated by spaces.

    Raises InputError, which names the origin, for an unknown word, or one that is no choice (with the nearest),
    wherever it stands, or a wrong value.
    """
    given = {text.replace("-", "_"): value for text, value in words.items()}
    for key in given:  # all of them before the first value
        if key not in types:
            raise InputError(f"{origin}{unknown('key', key, types)}")
    for key, value in given.items():
        choices = words_of(types[key])
        if isinstance(value, str) and choices and value not in choices:
            raise InputError(f"{origin}{unknown(key, value, [one for one in choices if one is not None])}")
    found = {}
    for key, value in given.items():
        parts = value.split() if isinstance(value, str) and _is_list(types[key]) else value
        try:
            found[key] = typed(types[key], parts)
        except InputError as error:
            raise InputError(f"{origin}{key}={value!r}: {error}") from error
    return found


def _is_list(hint: Any) -> bool:
    """Whether a type is a tuple, or may be one: its values can be written in one line, separated by spaces."""
    return get_origin(hint) is tuple or any(_is_list(part) for part in get_args(hint))
