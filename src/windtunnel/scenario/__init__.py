"""The words of flags and files: a deployment, the load on it, its goals and the files that are written."""

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
