"""The words of flags and files: a deployment, the load on it, its goals and the files that are written.

The names below are imported when they are first used: the help of the command line needs ``words`` alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.scenario.load_flags import Load
    from windtunnel.scenario.pools import Pools
    from windtunnel.scenario.scenario import (
        DEPLOYMENT,
        GOALS,
        POOLS,
        WORKLOAD,
        Goals,
        Scenario,
        load_scenario,
        main_job_unless_model,
        read_scenario,
        vary,
        words_of,
    )
    from windtunnel.scenario.server import ENGINE, MAIN_JOB, Server
    from windtunnel.scenario.words import parse_words, read_words, word

_HOME = {
    "Load": "load_flags",
    "Pools": "pools",
    **dict.fromkeys(("DEPLOYMENT", "GOALS", "POOLS", "WORKLOAD", "Goals", "Scenario"), "scenario"),
    **dict.fromkeys(("load_scenario", "main_job_unless_model", "read_scenario", "vary", "words_of"), "scenario"),
    **dict.fromkeys(("ENGINE", "MAIN_JOB", "Server"), "server"),
    **dict.fromkeys(("parse_words", "read_words", "word"), "words"),
}

__all__ = [
    "DEPLOYMENT",
    "ENGINE",
    "GOALS",
    "MAIN_JOB",
    "POOLS",
    "WORKLOAD",
    "Goals",
    "Load",
    "Pools",
    "Scenario",
    "Server",
    "load_scenario",
    "main_job_unless_model",
    "parse_words",
    "read_scenario",
    "read_words",
    "vary",
    "word",
    "words_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
