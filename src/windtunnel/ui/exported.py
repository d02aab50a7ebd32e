"""Exported: a configuration of the page as a command line, as a scenario file, and as the lines that start servers."""

import shlex
from typing import Any

from windtunnel.report.serve_line import serve_line
from windtunnel.scenario import Scenario
from windtunnel.scenario.pools import ROLES
from windtunnel.ui.asked import words_given

REPEATED = (*ROLES, "store", "fail")
"""Flags that are given once for each of their values."""


def exported(scenario: Scenario) -> dict[str, Any]:
    """``command`` and ``yaml``, which both make ``windtunnel run`` give the figures of the page, and ``serve``: the
    lines that start a replica of each pool. Raises InputError for a deployment that cannot run."""
    deployment = scenario.deployment().spec()
    lines = [
        {"name": pool["name"], "line": serve_line(pool, deployment.get("handover"))} for pool in deployment["pools"]
    ]
    return {"command": command(scenario), "yaml": scenario_file(scenario), "serve": lines}


def command(scenario: Scenario) -> str:
    """The command line of ``windtunnel run``."""
    given = words_given(scenario)
    parts = ["windtunnel", "run", str(given.pop("model"))]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list) and name in REPEATED:
            parts += [part for each in value for part in (f"--{flag}", str(each))]
        elif isinstance(value, list):
            parts += [f"--{flag}", *map(str, value)]
        else:
            parts += [f"--{flag}", str(value)]
    return shlex.join(parts)


def scenario_file(scenario: Scenario) -> str:
    """The YAML file that ``windtunnel run --scenario`` reads."""
    import yaml

    return yaml.safe_dump(words_given(scenario), sort_keys=False, allow_unicode=True)
