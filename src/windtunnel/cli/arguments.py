"""Arguments: how the command line's words become values."""

import json
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import App, Group, Parameter, config
from cyclopts.argument import ArgumentCollection

from windtunnel.errors import InputError
from windtunnel.scenario import main_job_unless_model, read_scenario

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "--isl": "--random-input-len",
    "--osl": "--random-output-len",
}
"""Other tools' spellings of our flags."""
WHOLE = re.compile(r"[+-]?\d+")
OUTPUT = Group("Output", sort_key=9)
Json = Annotated[bool, Parameter(name="--json", negative=(), group=OUTPUT)]


def long(text: str) -> str:
    """The word with our spelling of its flag."""
    name, equals, value = text.partition("=")
    return SHORT.get(name, name) + equals + value


def complete(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Before values are converted: refuse fractions of whole numbers, and fill in what the scenario file says."""
    for argument in arguments:
        for token in argument.tokens:
            if _is_whole(argument.hint) and not WHOLE.fullmatch(token.value):
                raise InputError(f"{token.keyword}={token.value}: must be a whole number")
    given = {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}
    source = given.get("--scenario")
    values = {} if source is None else read_scenario(Path(source))
    if "--model" not in given and any(argument.name == "--model" and argument.hint is str for argument in arguments):
        values = main_job_unless_model(values)
    config.Dict(values, source=source or "default", use_commands_as_keys=False)(app, commands, arguments)


def _is_whole(hint: Any) -> bool:
    """Whether a type is int, or holds it: int | None, tuple[int, ...]."""
    return hint is int or any(_is_whole(part) for part in get_args(hint))


def show_json(document: Any) -> None:
    """Print a document, and nothing else, on standard output."""
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False) + "\n")


def progress(text: str) -> AbstractContextManager[None]:
    """Say on a terminal what takes its time."""
    if not sys.stderr.isatty():
        return nullcontext()
    from windtunnel.cli.terminal import status

    return status(text)
