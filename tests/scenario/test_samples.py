"""Several sequences for each prompt: groups where the scheduler forks, requests of their own elsewhere."""

from dataclasses import replace

import numpy as np
import pytest
from core.conftest import IN_PLAIN_PYTHON

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.metrics.summary import summary
from windtunnel.model import load_model
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.scenario.load_flags import Load
from windtunnel.scenario.streamed import pieces_of
from windtunnel.simulate.bounds import capacity
from windtunnel.simulate.run import FINISHED, REJECTED, Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload, save, with_concurrency
from windtunnel.workload.prompts import with_samples


def served(workload: Workload, scheduler: str = "vllm-0.6-v0", blocks: int = 2000, replicas: int = 1) -> Run:
    engine = Engine(preset="vllm-0.6", scheduler=scheduler, max_model_len=4096, num_gpu_blocks_override=blocks)
    pool = Pool(load_model("Qwen/Qwen3-8B"), device("a100"), engine, replicas=replicas)
    return simulate(Deployment((pool,)), workload, perf="roofline")


def prompts(tokens: int, count: int = 1, output: int = 3) -> Workload:
    return Workload.from_columns(arrival=np.zeros(count), prompt_tokens=np.full(count, tokens), output_tokens=output)


@IN_PLAIN_PYTHON
def test_a_prompt_is_computed_once_for_all_of_its_sequences() -> None:
    run = served(with_samples(prompts(100, 2), 4))
    assert (len(run.requests.id), run.iterations.chunk_tokens.sum()) == (8, 200)
    assert run.iterations.decodes.max() == 8
    assert served(with_samples(prompts(100, 2), 4), "vllm-0.8-v0").iterations.chunk_tokens.sum() == 800
    (note,) = (note for note in run.manifest["warnings"] if "sequences" in note)
    assert note.startswith("8 sequences of 2 prompts, a row each: as up to vLLM 0.6.3")


@IN_PLAIN_PYTHON
def test_groups_that_are_swapped_are_counted() -> None:
    run = served(with_samples(prompts(64, 2, 60), 4), blocks=40)
    found = summary(run)
    assert found.swapped["sequences"] == found.preemptions > 0
    assert found.swapped["seconds"] > 0
    assert not summary(served(prompts(64, 8, 60), blocks=40)).swapped


@IN_PLAIN_PYTHON
def test_a_group_that_does_not_fit_is_rejected_as_a_whole() -> None:
    run = served(with_samples(prompts(64, 1, 100), 4), blocks=30)
    assert set(run.requests.status.tolist()) == {REJECTED}
    assert set(served(prompts(64, 4, 100), blocks=30).requests.status.tolist()) == {FINISHED}


def test_rates_and_capacity_are_of_prompts() -> None:
    alone = Workload.from_columns(arrival=np.arange(40) / 20.0, prompt_tokens=np.full(40, 500), output_tokens=200)
    three, loose = with_samples(alone, 3), replace(with_samples(alone, 3), sample_of=None)
    assert (three.request_rate, loose.request_rate) == pytest.approx((20.0, 119 / 1.95))
    engine = Engine(preset="vllm-0.8", max_model_len=4096)
    deployment = Deployment((Pool(load_model("Qwen/Qwen3-8B"), device("a100"), engine),))
    tables = [tabulate(deployment.pools[0], "roofline")]
    found, rows = (capacity(deployment, load, 0, tables) for load in (three, loose))
    assert found is not None and rows is not None
    assert 3 * found == pytest.approx(rows)


@IN_PLAIN_PYTHON
def test_a_group_stays_on_one_replica() -> None:
    run = served(with_samples(prompts(64, 4), 3), replicas=2)
    assert run.requests.replica.tolist() == [0, 0, 0, 1, 1, 1] * 2
    with pytest.raises(InputError, match="n: the sequences of a request would go to different replicas"):
        served(with_samples(prompts(64, 4), 3), "vllm-0.8-v0", replicas=2)


def test_rows_of_sequences() -> None:
    found = Load(random_input_len=100, random_output_len=5, num_prompts=3, n=2).workload()
    assert found.sample_of is not None
    assert (len(found), found.sample_of.tolist()) == (6, [0, 0, 2, 2, 4, 4])
    assert found.begins is not None
    assert found.begins[0].tolist() == [-1, 0, -1, 2, -1, 4]
    assert found.digest != prompts(100, 6).digest
    some = found.take(np.array([2, 3, 4, 5]))
    assert some.sample_of is not None
    assert some.sample_of.tolist() == [0, 0, 2, 2]


def test_where_several_sequences_are_refused() -> None:
    with pytest.raises(InputError, match="n=2: plan does not search"):
        Load(n=2).for_trials(1.0)
    with pytest.raises(InputError, match="n=0: must be ≥ 1"):
        Load(n=0)
    with pytest.raises(InputError, match="stream: n=2: not simulated in pieces"):
        pieces_of(Load(n=2), 0)
    with pytest.raises(InputError, match="do not go with sessions, lanes and closed loops"):
        with_samples(with_concurrency(prompts(100, 3), 2), 2)
    with pytest.raises(InputError, match="no file has sequences of one request"):
        save(with_samples(prompts(100), 2), "unwritten.jsonl")
