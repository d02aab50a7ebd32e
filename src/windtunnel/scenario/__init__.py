"""The words of flags and files: a deployment, the load on it, its goals and the files that are written."""

from windtunnel.scenario.load_flags import Load
from windtunnel.scenario.scenario import (
    DEPLOYMENT,
    ENGINE,
    GOALS,
    MAIN_JOB,
    WORKLOAD,
    Goals,
    Scenario,
    Server,
    load_scenario,
    main_job_unless_model,
    read_scenario,
    read_words,
    vary,
    word,
    words_of,
)

__all__ = [
    "DEPLOYMENT",
    "ENGINE",
    "GOALS",
    "MAIN_JOB",
    "WORKLOAD",
    "Goals",
    "Load",
    "Scenario",
    "Server",
    "load_scenario",
    "main_job_unless_model",
    "read_scenario",
    "read_words",
    "vary",
    "word",
    "words_of",
]
