"""Words: what flags, files and Python say about a field, ``tensor_parallel_size=2``, as values of the field's type."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from windtunnel.errors import InputError
from windtunnel.files import read_yaml

WORDS = {"preset": "engine", "pools_file": "pools"}
"""Fields whose flag and file key are another word than their name in Python."""
SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "--isl": "--random-input-len",
    "--osl": "--random-output-len",
}
"""Other tools' spellings of our flags."""


def word(field: str) -> str:
    """The flag of a field, without the dashes in front."""
    return WORDS.get(field, field).replace("_", "-")


def long(text: str) -> str:
    """The word with our spelling of its flag."""
    name, equals, value = text.partition("=")
    return SHORT.get(name, name) + equals + value


def leaves(kind: type) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and type of every plain field of a dataclass, and of those in it."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from (((entry.name, *inner), leaf) for inner, leaf in leaves(hint))
        else:
            yield (entry.name,), hint


def read_words(path: Path, name: str) -> dict[str, Any]:
    """A YAML file of `word: value`. Raises InputError, which begins with the name, for anything else."""
    try:
        document = read_yaml(path)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if not isinstance(document, dict):
        raise InputError(f"{name}: must be lines of `word: value`, with the words of the flags")
    return {str(key): value for key, value in document.items()}


def parse_words(text: str, name: str) -> dict[str, str]:
    """``word=value`` or ``--word value`` one behind the other, or ``--word`` and ``--no-word`` for switches.

    Raises InputError, which begins with the name, for anything else.
    """
    try:
        tokens = [long(token) for token in shlex.split(text)]
    except ValueError as error:
        raise InputError(f"{name} {text!r}: {str(error).lower()}") from error
    found: dict[str, list[str]] = {}
    flag = False
    for token in tokens:
        word, equals, value = token.partition("=")
        if word.startswith("--") or (equals and not flag):
            flag = not equals
            key = word.removeprefix("--").replace("-", "_")
            if key in found:
                raise InputError(f"{name} {text!r}: {key}: given twice: leave one out")
            found[key] = [value] if equals else []
        elif found:
            found[key].append(token)
        else:
            raise InputError(f"{name} {text!r}: {token!r}: must be word=value or --word value")
    switches = {key.removeprefix("no_"): str(not key.startswith("no_")).lower() for key in found if not found[key]}
    return {key: " ".join(values) for key, values in found.items() if values} | switches


def written(words: Mapping[str, Any]) -> str:
    """Words in one line, as ``parse_words`` reads them."""
    texts = {
        key: " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for key, value in words.items()
    }
    return " ".join(f"{key}={shlex.quote(text) if ' ' in text else text}" for key, text in texts.items())
