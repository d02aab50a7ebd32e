"""Arguments: how the command line's words become values."""

import json
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from cyclopts import App, Group, Parameter, config
from cyclopts.argument import ArgumentCollection

from windtunnel.cli.tables import FORM, FORMS
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.scenario.pasted import Pasted

NAMED = frozenset(("serve", "proxy"))
"""Commands whose model must be named: no job of ours stands in for it."""
WHOLE = re.compile(r"[+-]?\d+")
OUTPUT = Group("Output", sort_key=9)
Json = Annotated[bool, Parameter(name="--json", negative=(), group=OUTPUT)]
Verbose = Annotated[bool, Parameter(name=["--verbose", "-v"], negative=(), group=OUTPUT)]


@dataclass(frozen=True, kw_only=True)
class Screen:
    """How results are printed."""

    format: Literal["text", "md", "csv", "brief"] = "text"
    """Text for a terminal, Markdown for a pull request (md), the tables as CSV, or a few lines for a chat (brief)."""


@dataclass(frozen=True, kw_only=True)
class Pasting:
    """Launch lines of real servers."""

    lines: Annotated[tuple[str, ...], Parameter(name="--from", consume_multiple=False, show_default=False)] = ()
    """A launch line of vLLM, SGLang or TensorRT-LLM, or the script, compose file or manifest that holds it; repeatable,
    "prefill: …" and "decode: …" in front name sides. Other flags win over it."""


PASTING, SCREEN = Pasting(), Screen()
Printed = Annotated[Screen, Parameter(name="*", group=OUTPUT)]


def complete(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Before values are converted: refuse fractions of whole numbers, and fill in what the scenario file says."""
    from windtunnel.scenario import main_job_unless_model, read_scenario

    for argument in arguments:
        for token in argument.tokens:
            if token.implicit_value == () and not token.value:
                raise InputError(f"{argument.name}: needs at least one value")
            if _may_hold(int, argument.hint) and not WHOLE.fullmatch(token.value):
                raise InputError(f"{token.keyword}={token.value}: must be a whole number")
    given = {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}
    form = given.get("--format", "text")
    FORM.set(form if form in FORMS else "text")
    source = given.get("--scenario")
    values = {} if source is None else read_scenario(Path(source))
    values |= _pasted(commands, arguments, given)
    asks = any(argument.name == "--model" and argument.hint is str for argument in arguments)
    if asks and "--model" not in given and not NAMED.intersection(commands):
        values = main_job_unless_model(values)
    for command in reversed(commands):  # else cyclopts leaves out the words that are commands as well, as trace is
        values = {command: values}
    config.Dict(values, source=source or "default", use_commands_as_keys=True)(app, commands, arguments)
    _require_other_files(arguments)


def _pasted(commands: tuple[str, ...], arguments: ArgumentCollection, given: dict[str, str]) -> dict[str, Any]:
    """What launch lines say, for the words that this command has; what is not simulated is said on standard error.

    Raises InputError for lines that cannot be read, or with ``--strict`` where something of them is not simulated.
    """
    texts = [token.value for argument in arguments if argument.name == "--from" for token in argument.tokens]
    if not texts:
        return {}
    from windtunnel.scenario.pasted import alternatives, read_pasted
    from windtunnel.scenario.scenario import check_words

    side_by_side = alternatives(texts, given.get("--model")) if "compare" in commands else []
    every = side_by_side or [read_pasted(texts, given.get("--model"))]
    if "--store" in given:
        every = [each.with_stores() for each in every]
    pasted = every[0]
    if "--strict" in given:
        for each in every:
            each.require_all()
    known = {argument.name for argument in arguments if "plan" not in commands}  # which varies what the lines say
    words = {key: value for key, value in pasted.words.items() if f"--{key.replace('_', '-')}" in known}
    sides = [role for role in ("prefill", "decode", "mixed") if role in pasted.words and role not in words]
    if known and sides:
        raise InputError(f"from: {sides[0]}: {' '.join(commands)} takes one server: give the line of one")
    if "--dry-run" not in given:
        for remark in dict.fromkeys(remark for each in every for remark in each.remarks()):
            if remark.startswith("device:") and {"--device", "--devices"} & given.keys():
                continue
            sys.stderr.write(f"windtunnel: {remark}\n")
    own = {} if "serve" not in commands else _endpoint(pasted)
    return check_words(words, "from: ") | own


def _endpoint(pasted: "Pasted") -> dict[str, Any]:
    """Where the server of a line listens and what its model is called, so that clients find the simulated one there."""
    found = {word.flag.lstrip("-").replace("-", "_"): word.value for word in pasted.ignored}
    return {
        name: value
        for name, value in found.items()
        if (name == "port" and isinstance(value, int)) or (name == "served_model_name" and isinstance(value, str))
    }


def _require_other_files(arguments: ArgumentCollection) -> None:
    """Raise InputError for a file that would be written over an input of the same command, or over another output."""
    given = [(argument, token.value) for argument in arguments for token in argument.tokens]
    for argument, text in given:
        groups = cast(tuple[Group, ...], argument.parameter.group or ())
        if OUTPUT not in groups or not _may_hold(Path, argument.hint):
            continue
        for other, other_text in given:
            if other is not argument and _is_same_file(text, other_text):
                raise InputError(f"{argument.name} {text!r}: is the file of {other.name} as well: choose another name")


def _is_same_file(text: str, other: str) -> bool:
    """Whether both are names of one file, there or to be written; devices and pipes take what comes."""
    if not text or not other or (Path(text).exists() and not Path(text).is_file()):
        return False
    return os.path.realpath(text) == os.path.realpath(other)


def _may_hold(kind: type, hint: Any) -> bool:
    """Whether a type is this one, or holds it: int | None, tuple[int, ...]."""
    return hint is kind or any(_may_hold(kind, part) for part in get_args(hint))


def show_json(document: Any) -> None:
    """Print a document, and nothing else, on standard output."""
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False) + "\n")


def progress(text: str) -> AbstractContextManager[None]:
    """Say on a terminal what takes its time."""
    if not sys.stderr.isatty():
        return nullcontext()
    from windtunnel.cli.terminal import status

    return status(text)
