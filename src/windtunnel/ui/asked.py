"""Asked: the words that the page sends, as a scenario that may be simulated for it; and a scenario as such words."""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from windtunnel.deployment import Deployment
from windtunnel.errors import InputError, unknown
from windtunnel.scenario import Scenario, vary, words_of

Words = Mapping[str, Any]

MOST_REQUESTS, MOST_TOKENS, MOST_REPLICAS = 1_000_000, 10_000_000, 4096
"""The largest loads and fleets of a page; ``windtunnel run`` takes more."""
FILES = ("model", "trace", "calibration", "devices_file", "pools", "perf")
"""Words that may name a file or a folder."""
LARGEST = {
    "num_prompts": MOST_REQUESTS,
    "max_concurrency": MOST_REQUESTS,
    "repeat": 1000,
    "random_input_len": MOST_TOKENS,
    "random_output_len": MOST_TOKENS,
    "random_prefix_len": MOST_TOKENS,
    "random_num_prefixes": MOST_REQUESTS,
    "random_turns": MOST_REQUESTS,
    "images_per_prompt": 1000,
    "image_tokens": MOST_TOKENS,
    "replicas": MOST_REPLICAS,
}


def scenario_of(words: Words, trusted: Words | None = None, stored: Collection[tuple[str, str]] = ()) -> Scenario:
    """The scenario of these words.

    Args:
        words: what the page sends.
        trusted: words of the command line, whose files may be read and whose files of Python may be run.
        stored: names and values of file words in the studies that the command line named.

    Raises InputError, in one line, for what ``windtunnel run`` would refuse, for what is too large for a page, and for
    files that the command line did not name.
    """
    refuse_code(words, trusted or {})
    refuse_files(words, trusted or {}, stored)
    refuse_devices(words)
    try:
        scenario = vary(Scenario(), words)
    except (OverflowError, RecursionError) as error:
        raise InputError(f"{json.dumps(dict(words))[:200]}: a number is too large ({error})") from error
    for name, value in words_of(scenario).items():
        if name in LARGEST and value is not None and value > LARGEST[name]:
            raise InputError(f"{name}={value}: the page simulates at most {LARGEST[name]:,}: use windtunnel run")
    return scenario


def check_size(deployment: Deployment) -> None:
    """Raise InputError for a fleet that is too large for a page."""
    if deployment.replicas > MOST_REPLICAS:
        raise InputError(
            f"{deployment.replicas:,} replicas: the page simulates at most {MOST_REPLICAS:,}: use windtunnel run"
        )


def refuse_code(words: Words, trusted: Words) -> None:
    """Raise InputError for a Python file that the command line did not name: a link must not run code."""
    for name, value in words.items():
        texts = value if isinstance(value, list | tuple) else [value]
        for text in texts:
            if isinstance(text, Mapping):
                refuse_code(text, trusted)
            elif ".py" in str(text) and trusted.get(name) != value:
                raise InputError(f"{name}={text}: a page runs no code: start it with windtunnel ui --scheduler FILE")


def refuse_files(words: Words, trusted: Words, stored: Collection[tuple[str, str]] = ()) -> None:
    """Raise InputError for a file that the command line did not name: who opens the page must not learn of any other,
    not even whether it exists."""
    from windtunnel.model import model_names
    from windtunnel.workload.builtin import builtin_names

    names: dict[str, Callable[[], Sequence[str]]] = {"model": model_names, "trace": builtin_names}
    for name, value in file_words(words):
        known = names[name]() if name in names else ()
        named = name == "perf" and not value.startswith("profile:")
        if named or value in known or str(trusted.get(name)) == value or (name, value) in stored:
            continue
        flag = f"windtunnel ui --{name.replace('_', '-')} FILE" if name != "model" else "windtunnel ui FOLDER"
        close = f"{unknown(name, value, known)}; files" if known else f"{name}={value[:80]!r}: files"
        raise InputError(f"{close} are read only where the command line names them: {flag}")


def file_words(words: Any) -> Iterator[tuple[str, str]]:
    """Every word that may name a file, with its value: those of pools, written ``word=value``, among them."""
    for name, value in words.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Mapping):
                yield from file_words(one)
            elif name in FILES and one is not None:
                yield name, str(one)
            else:
                pairs = (part.partition("=") for part in str(one).split())
                yield from ((key, text) for key, _, text in pairs if key in FILES and text)


def refuse_devices(words: Words) -> None:
    """Raise InputError for what is neither file nor folder: reading it might never end."""
    for name in FILES:
        path = str(words.get(name, "")).removeprefix("profile:")
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112, PTH113 - false for what is no name
            raise InputError(f"{name}={path!r}: is neither a file nor a folder")


def words_given(scenario: Scenario) -> dict[str, Any]:
    """The words of a scenario that are not the defaults, and its model, as JSON has them."""
    usual = words_of(Scenario())
    found = {name: value for name, value in words_of(scenario).items() if value != usual[name] or name == "model"}
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def read_words(document: Any) -> dict[str, Any]:
    """The words of a request's body: an object of text, numbers, truth values and lists of them.

    Raises InputError for anything else.
    """
    words = document.get("words") if isinstance(document, dict) else None
    if not isinstance(words, dict):
        raise InputError('the body must be an object with "words": {"model": …}')
    for name, value in words.items():
        parts = value if isinstance(value, list) else [value]
        if not all(part is None or isinstance(part, str | int | float | bool) for part in parts):
            raise InputError(f"{name[:80]}: must be text, a number, true, false or a list of these")
        if any(isinstance(part, int) and abs(part) > 2**53 for part in parts):
            raise InputError(f"{name[:80]}: the number is too large")
    return {name: value for name, value in words.items() if value is not None}
