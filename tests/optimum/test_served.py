"""The gap of a simulated run, and what no bound covers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.metrics import summary, summary_json
from windtunnel.optimum.served import gaps
from windtunnel.scenario import Load, Scenario, Server
from windtunnel.simulate.run import REJECTED, Run
from windtunnel.simulate.simulate import simulate


@pytest.fixture(scope="module")
def run() -> Run:
    scenario = Scenario(
        Server("Qwen/Qwen3-8B"),
        load=Load(random_input_len=200, random_output_len=40, num_prompts=60, request_rate=50.0),
    )
    return simulate(scenario.deployment(), scenario.load.workload())


def test_values_are_those_of_the_run(run: Run) -> None:
    found, document = gaps(run), summary_json(summary(run))
    assert found["mean-e2el"]["value"] == pytest.approx(document["e2el"]["mean"], rel=1e-12)
    assert found["mean-ttft"]["value"] == pytest.approx(document["ttft"]["mean"], rel=1e-12)
    assert found["makespan"]["value"] == run.requests.finish.max() - run.requests.arrival.min()
    for objective in ("makespan", "mean-e2el", "mean-ttft", "mean-tpot"):
        each = found[objective]
        assert 0 < each["bound"] <= each["value"]
        assert each["gap"] == pytest.approx(1 - each["bound"] / each["value"])


def test_two_engines_may_be_twice_as_good(run: Run) -> None:
    twice = replace(run, manifest=run.manifest | {"replicas": 2 * run.manifest["replicas"]})
    assert gaps(twice)["mean-e2el"]["bound"] <= gaps(run)["mean-e2el"]["bound"]


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("workload", {"max_concurrency": 3}, "closed loop"),
        ("workload", {"sessions": 2}, "sessions"),
        ("engine", {"pipeline_parallel_size": 2}, "pipeline"),
        ("engine", {"num_speculative_tokens": 1}, "speculative"),
    ],
)
def test_what_no_bound_covers(run: Run, part: str, change: dict[str, Any], says: str) -> None:
    pool = run.manifest["pools"][0]
    engine = {"pools": [pool | {"engine": pool["engine"] | change}]}
    manifest = run.manifest | ({"workload": run.manifest["workload"] | change} if part == "workload" else engine)
    with pytest.raises(InputError, match=says):
        gaps(replace(run, manifest=manifest))


def test_unfinished_and_cached_requests_have_no_bound(run: Run) -> None:
    rejected = run.requests.status.copy()
    rejected[0] = REJECTED
    for change, says in (
        ({"status": rejected}, "did not finish"),
        ({"cached_tokens": np.full(len(rejected), 16)}, "prefix cache"),
    ):
        with pytest.raises(InputError, match=says):
            gaps(replace(run, requests=replace(run.requests, **change)))
