"""The command line: parse, call, print.

Exit codes: 0 done; 1 a goal is missed (attainment, slo); 2 wrong input, one line on standard error; 130 interrupted.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, Group, Parameter

from windtunnel.cli.arguments import complete
from windtunnel.cli.bench import bench
from windtunnel.cli.calibrate import calibrate
from windtunnel.cli.compare import compare
from windtunnel.cli.estimate import estimate
from windtunnel.cli.explain import explain
from windtunnel.cli.help import ALL, print_short, wants_short
from windtunnel.cli.listing import listing
from windtunnel.cli.live.proxy import proxy
from windtunnel.cli.live.serve import serve
from windtunnel.cli.live.ui import ui
from windtunnel.cli.live.watch import watch
from windtunnel.cli.optimum import optimum
from windtunnel.cli.plan.command import plan
from windtunnel.cli.profile import profile
from windtunnel.cli.replay import replay
from windtunnel.cli.run import report, run
from windtunnel.cli.study import compare as compare_studies
from windtunnel.cli.study import export, list_studies, show
from windtunnel.cli.sweep import sweep
from windtunnel.cli.trace import convert, describe, import_logs
from windtunnel.cli.validate import validate
from windtunnel.errors import InputError, InputWarning
from windtunnel.scenario.words import long, word
from windtunnel.version import __version__

DONE, WRONG, INTERRUPTED = 0, 2, 130

app = App(
    name="windtunnel",
    help="Simulate LLM inference serving request by request, and test a deployment before you pay for the GPUs.",
    version=__version__,
    config=(complete,),
    default_parameter=Parameter(name_transform=word, consume_multiple=True, negative_iterable=(), negative_none=()),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
SIMULATE, DECIDE, TRUST, LIVE, DATA = (
    Group(name, sort_key=place) for place, name in enumerate(("Simulate", "Decide", "Trust", "Live", "Data"))
)
"""How the help arranges the commands."""
app.command(run, group=SIMULATE)
app.command(compare, group=SIMULATE)
app.command(sweep, group=SIMULATE)
app.command(bench, group=SIMULATE)
app.command(plan, group=DECIDE)
app.command(optimum, group=DECIDE)
study = App(name="study", group=DECIDE, help="Look at the studies of a store of windtunnel plan.")
study.command(list_studies, name="list")
study.command(show)
study.command(compare_studies, name="compare")
study.command(export)
app.command(study)
app.command(explain, group=SIMULATE)
trace = App(name="trace", group=DATA, help="Look at traces of requests, and convert them.")
trace.command(describe)
trace.command(convert)
trace.command(import_logs, name="import")
app.command(trace)
app.command(listing, name="list", group=DATA)
app.command(report, group=SIMULATE)
app.command(replay, group=TRUST)
app.command(validate, group=TRUST)
app.command(calibrate, group=TRUST)
app.command(profile, group=TRUST)
app.command(estimate, group=TRUST)
app.command(serve, group=LIVE)
app.command(proxy, group=LIVE)
app.command(watch, group=LIVE)
app.command(ui, group=LIVE)
app.register_install_completion_command(group="Commands", help="Complete commands and flags with Tab in your shell.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing that a user can mend ends in a traceback."""
    words = [long(text) for text in (sys.argv[1:] if argv is None else argv)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", InputWarning)
            warnings.showwarning = _warned()
            if wants_short(words):
                print_short(app, words[0])
                return DONE
            words = ["--help" if text == ALL else text for text in words]
            code = app(words, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return code or DONE
    except (KeyboardInterrupt, SystemExit, InputError, CycloptsError, OSError) as error:
        return _ended(error)


def _warned() -> Callable[..., None]:
    """A printer of warnings: each once, in one line."""
    said = set[str]()

    def show(message: Warning | str, *_: object) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            said.add(text)
            sys.stderr.write(f"windtunnel: warning: {text}\n")

    return show


def _ended(error: BaseException) -> int:
    """The exit code for what stopped the command, and a line that says it."""
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
    return _complain(_cause(error), WRONG)


def _drop_output() -> None:
    """What is left in the buffer cannot be written; without this Python would try again on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(text: str, code: int) -> int:
    sys.stderr.write(f"windtunnel: {' '.join(text.split())}\n")
    return code


def _cause(error: BaseException) -> str:
    """Our message, if a check of ours stopped the parser; else the parser's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InputError):
            return str(cause)
        cause = cause.__cause__
    return str(error).rstrip(".")
