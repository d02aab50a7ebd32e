"""The command line: parse, call, print.

Exit codes: 0 done; 1 a goal is missed (attainment, slo); 2 wrong input, one line on standard error; 130 interrupted.
"""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Container, Sequence
from importlib import import_module
from typing import cast

from cyclopts import App, CycloptsError, Group, Parameter, RepeatArgumentError, UnusedCliTokensError

# Before numpy is read: threads for large matrices, of which there are none, begin with a loop in which they wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from windtunnel.cli.arguments import complete
from windtunnel.cli.help import ALL, print_short, wants_short
from windtunnel.errors import InputError, InputWarning
from windtunnel.scenario.words import long, word
from windtunnel.version import __version__

DONE, WRONG, INTERRUPTED = 0, 2, 130

COLLECTED_EVERY = 200_000
"""New objects after which garbage is collected. A command makes little of it; looking for it after every 700, Python's
default, took a tenth of a short run."""

COMMANDS: dict[str, dict[str, tuple[str | dict[str, str], str]]] = {
    "Simulate": {
        "run": ("run:run", "Simulate a deployment under a load."),
        "compare": ("compare:compare", "Compare schedulers or settings under the same requests."),
        "sweep": ("sweep:sweep", "Simulate a deployment at several request rates, and find the knee."),
        "bench": (
            "bench:bench",
            "Simulate every combination of workloads, schedulers, engines, devices and settings that a file crosses.",
        ),
        "explain": ("explain:explain", "Show what one step of one rank costs, operator by operator."),
        "report": ("run:report", "Show a run again, or write it in another form."),
    },
    "Decide": {
        "plan": ("plan.command:plan", "Find the cheapest deployment that keeps the limits, and say why."),
        "optimum": (
            "optimum:optimum",
            "Find the best schedule of a load on one engine, with a bound on how good any schedule can be.",
        ),
        "study": (
            {"list": "list_studies", "show": "show", "compare": "compare", "export": "export"},
            "Look at the studies of a store of windtunnel plan.",
        ),
    },
    "Trust": {
        "replay": (
            "replay:replay",
            "Replay a recorded workload through a scheduler, and print what it decides in each step.",
        ),
        "validate": ("validate:validate", "Compare simulations with measurements."),
        "calibrate": (
            "calibrate:calibrate",
            "Find the host and client overheads of a deployment from measured runs of it, or records of its steps.",
        ),
        "profile": (
            "operators.profile:profile",
            "Measure the operators of a model's shards on this machine, with torch.",
        ),
        "estimate": (
            "operators.estimate:estimate",
            "Train an estimator for every operator of a profile, and show the errors on points that it has not seen.",
        ),
    },
    "Live": {
        "serve": (
            "live.serve:serve",
            "Answer OpenAI clients as the deployment would: same schedulers, same batch times, made-up text.",
        ),
        "proxy": (
            "live.proxy:proxy",
            "Proxy a server, pass everything on, and record its streamed answers as a measured run.",
        ),
        "watch": (
            "live.watch:watch",
            "Compare the load of the last window with the planned one, and simulate whether the plan still holds.",
        ),
        "ui": ("live.ui:ui", "Serve a page on this machine that simulates while you drag its sliders."),
    },
    "Data": {
        "trace": (
            {"describe": "describe", "convert": "convert", "import": "import_logs"},
            "Look at traces of requests, and convert them.",
        ),
        "kernels": (
            {name: f"operators.kernels:{name}" for name in ("add", "show", "remove")},
            "Say where kernel times come from, and add a newer database to your own.",
        ),
        "list": ("listing:listing", "List the names that flags accept."),
    },
}
"""By the groups of the help: each command's module and function, or the functions of the commands inside it, and the
line that the help has for it. A module is read when its command is called."""

COMPLETION = "--install-completion"


def application(called: Container[str]) -> App:
    """The commands. Only the modules of those that are ``called`` are read; of the others the help has its line."""
    app = App(
        name="windtunnel",
        help="Simulate LLM inference serving request by request, and test a deployment before you pay for the GPUs.",
        help_format="plaintext",
        version=__version__,
        config=(complete,),
        default_parameter=Parameter(
            name_transform=word,
            consume_multiple=True,
            negative_iterable=(),
            negative_none=(),
        ),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for place, (title, commands) in enumerate(COMMANDS.items()):
        group = Group(title, sort_key=place)
        for name, (where, line) in commands.items():
            if name not in called and COMPLETION not in called:
                app.command(App(name=name, help=line, group=group))
            elif isinstance(where, str):
                app.command(_function(where), name=name, group=group, help_format="markdown")
            else:
                several = App(name=name, help=line, group=group, help_format="markdown")
                for inner, function in where.items():
                    several.command(_function(function if ":" in function else f"{name}:{function}"), name=inner)
                app.command(several)
    line = "Complete commands and flags with Tab in your shell."
    if COMPLETION in called:
        app.register_install_completion_command(name=COMPLETION, group="Commands", help=line)
    else:
        app.command(App(name=COMPLETION, help=line, group="Commands"))
    return app


def _function(where: str) -> Callable[..., int | None]:
    """A function of a command's module."""
    module, name = where.split(":")
    return cast(Callable[..., int | None], getattr(import_module(f"windtunnel.cli.{module}"), name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing that a user can mend ends in a traceback."""
    typed = sys.argv[1:] if argv is None else list(argv)
    words = [long(text) for text in typed]
    gc.set_threshold(COLLECTED_EVERY)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", InputWarning)
            warnings.showwarning = _warned()
            app = application(words)
            if wants_short(words):
                print_short(app, words[0])
                return DONE
            words = ["--help" if text == ALL else text for text in words]
            code = app(words, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return code or DONE
    except (KeyboardInterrupt, SystemExit, InputError, CycloptsError, OSError) as error:
        return _ended(error, typed)


def _warned() -> Callable[..., None]:
    """A printer of warnings: each once, in one line."""
    said = set[str]()

    def show(message: Warning | str, *_: object) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            said.add(text)
            sys.stderr.write(f"windtunnel: warning: {text}\n")

    return show


def _ended(error: BaseException, typed: Sequence[str]) -> int:
    """The exit code for what stopped the command, and a line that says it, in the words that were typed."""
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # rich exits after it
        _drop_output()
        return DONE
    if isinstance(error, KeyboardInterrupt):
        return _complain("interrupted", INTERRUPTED)
    if isinstance(error, OSError):
        _drop_output()
        return _complain(f"{error.filename or 'standard output'}: {error.strerror or error}", WRONG)
    if isinstance(error, SystemExit):
        return _complain(f"a file of yours ends the program (sys.exit({error.code})): leave that out", WRONG)
    return _complain(_cause(error, typed), WRONG)


def _drop_output() -> None:
    """What is left in the buffer cannot be written; without this Python would try again on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(text: str, code: int) -> int:
    sys.stderr.write(f"windtunnel: {' '.join(text.split())}\n")
    return code


def _cause(error: BaseException, typed: Sequence[str]) -> str:
    """Our message, if a check of ours stopped the parser; else the parser's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InputError):
            return str(cause)
        cause = cause.__cause__
    if isinstance(error, UnusedCliTokensError):
        return _left_over(error)
    if isinstance(error, RepeatArgumentError):
        flags = (text.partition("=")[0] for text in reversed(typed))
        flag = next((flag for flag in flags if long(flag) == error.token.keyword), error.token.keyword)
        return f"{flag}{f' {error.token.value}'.rstrip()}: given twice: leave one out"
    return str(error).rstrip(".")


def _left_over(error: UnusedCliTokensError) -> str:
    """What is wrong with words that belong to nothing."""
    words, given = error.unused_tokens or [], list(error.root_input_tokens or [])
    before = given[: given.index(words[0])] if words and words[0] in given else []
    flag = next((f" after {word}" for word in reversed(before) if word.startswith("--")), "")
    from windtunnel.workload.builtin import builtin_names

    if traces := [f"--trace {word}" for word in words if word in builtin_names()]:
        return f"unexpected {' '.join(words)}{flag}: a trace is given as {traces[0]}"
    return f"unexpected {' '.join(words)}{flag}: leave {'it' if len(words) == 1 else 'them'} out"
