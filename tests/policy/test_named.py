"""Schedulers by what a user writes: presets, Python files, plug-ins, and errors that say what was meant."""

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.deployment.engine_scheduler import require_one_size
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.plan.space import Space
from windtunnel.policy import Decision, Policy
from windtunnel.policy.named import find_scheduler
from windtunnel.policy.vllm_v1 import VERSIONS
from windtunnel.scenario import Server
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Both, Gamma, Lognormal, generate

MINE = '''
from windtunnel import Decision
from windtunnel.policy import Policy
from windtunnel.policy.vllm_v1 import VERSIONS

PREFILL_FIRST = Policy(group_order="prefill_first", mixed=False)


class Patient:
    """Serves one request at a time."""

    def __init__(self, alpha=1, name="x", eager=False):
        self.alpha, self.name, self.eager = alpha, name, eager

    def schedule(self, now, waiting, running, limits):
        first = (*running, *waiting)[:1]
        return Decision({one: one.num_tokens - one.num_computed_tokens for one in first})


ready = Patient(7)
nothing = 3
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return str(path)


def test_a_preset_with_settings_of_its_own() -> None:
    assert find_scheduler("vllm-0.20:watermark=0.1") == replace(VERSIONS["vllm-0.20"], watermark=0.1)
    settings = find_scheduler("sarathi:chunk=256")
    assert isinstance(settings, Policy)
    assert settings.max_num_batched_tokens == 256


def test_a_class_in_a_file_is_made_for_each_rank(mine: str) -> None:
    make: Any = find_scheduler(f"{mine}:Patient:alpha=2.5,name=best,eager=true")
    first, second = make(), make()
    assert first is not second
    assert (first.alpha, first.name, first.eager) == (2.5, "best", True)
    copies: Any = find_scheduler(f"{mine}:ready")
    assert copies().alpha == 7
    assert copies() is not copies()


def test_settings_in_a_file(mine: str) -> None:
    settings = find_scheduler(f"{mine}:PREFILL_FIRST:watermark=0.1")
    assert settings == Policy(group_order="prefill_first", mixed=False, watermark=0.1)


def test_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("rivals", "windtunnel.policy.unified:ORCA", "windtunnel.schedulers")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point] if "schedulers" in group else [])
    assert find_scheduler("rivals") == find_scheduler("orca")
    with pytest.raises(InputError, match="did you mean 'rivals'"):
        find_scheduler("rival")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("orka", "unknown scheduler 'orka': did you mean 'orca'"),
        ("./none.py:Mine", "there is no file 'none.py'"),
        ("{mine}", "name what it defines"),
        ("{mine}:Patien", "did you mean 'Patient'"),
        ("{mine}:nothing", "is a int: must be a class or object with a method schedule"),
        ("{mine}:Patient:beta=1", "unexpected keyword argument 'beta'"),
        ("{mine}:Patient:alpha", "setting 'alpha': must be name=value"),
        ("{mine}:ready:alpha=1", "an object takes no settings"),
        ("{mine}:PREFILL_FIRST:watermrk=1", "did you mean 'watermark'"),
    ],
)
def test_what_cannot_be_found_says_why(mine: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_scheduler(text.replace("{mine}", mine))


def test_a_file_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0", encoding="utf-8")
    with pytest.raises(InputError, match="ZeroDivisionError while it was read"):
        find_scheduler(f"{tmp_path / 'bad.py'}:Mine")


def served(**engine: object) -> Deployment:
    settings = Engine(max_model_len=4096, num_gpu_blocks_override=600, **engine)  # type: ignore[arg-type]
    return Deployment((Pool(load_model("meta-llama/Llama-3.1-8B-Instruct"), device("h100"), settings),))


def test_a_run_by_a_scheduler_of_ones_own(mine: str) -> None:
    workload = generate(Gamma(2.0, 1.0), Both(Lognormal(300, 0.5, 900), Lognormal(20, 0.5, 60)), 40)
    run = simulate(served(scheduler=f"{mine}:Patient"), workload, perf="modelled", cache=False)
    requests = run.requests
    assert (requests.finish[:-1] <= requests.scheduled[1:] + 1e-9).all()

    class Same:
        def schedule(self, now: float, waiting: object, running: object, limits: object) -> Decision:  # noqa: ARG002
            first = [*running, *waiting][:1]  # type: ignore[misc]
            return Decision({one: one.num_tokens - one.num_computed_tokens for one in first})

    again = simulate(served(), workload, perf="modelled", cache=False, scheduler=Same)
    assert np.array_equal(again.requests.finish, requests.finish)


@pytest.mark.parametrize(
    "setting",
    [
        {"watermark": 0.1},
        {"enable_chunked_prefill": True},
        {"scheduling_policy": "priority"},
        {"async_scheduling": True},
    ],
)
def test_settings_of_the_engines_own_scheduler_have_no_place(setting: dict[str, object]) -> None:
    with pytest.raises(InputError, match="is a setting of the engine's own scheduler"):
        served(scheduler="sarathi", **setting)


@pytest.mark.parametrize(
    ("flags", "text", "sizes"),
    [
        ({}, "sarathi", (512, 128)),
        ({"max_num_batched_tokens": 2048}, "sarathi", (2048, 128)),
        ({"max_num_batched_tokens": 256, "max_num_seqs": 200}, "sarathi", (256, 200)),
        ({"max_num_batched_tokens": 2048}, "sarathi:chunk=1024", (1024, 128)),
        ({"max_num_seqs": 64}, "mindspore", (0, 64)),
        ({}, "mindspore", (0, 128)),
    ],
)
def test_an_argument_takes_the_place_of_a_presets_size(
    flags: dict[str, int], text: str, sizes: tuple[int, int]
) -> None:
    pool = served(scheduler=text, **flags).pools[0]
    found = find_scheduler(str(pool.engine.scheduler))
    assert isinstance(found, Policy)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == sizes
    assert replace(pool, replicas=2).engine == pool.engine


@pytest.mark.parametrize(
    ("flags", "text", "says"),
    [
        (
            {"max_num_batched_tokens": 2048},
            "sarathi:chunk=1024",
            "tokens=2048: .* says 1024: leave one",
        ),
        ({"max_num_batched_tokens": 1024}, "sarathi:chunk=1024", None),
        ({"max_num_seqs": 64}, "sarathi:max_num_seqs=32", "max_num_seqs=64: .* says 32: leave one"),
        ({"max_num_seqs": 64}, "sarathi:chunk=1024", None),
        ({"max_num_batched_tokens": 2048}, "sarathi:chunk=0", None),
        ({"max_num_batched_tokens": 2048}, "sarathi", None),
    ],
)
def test_one_size_is_not_given_twice_by_a_user(flags: dict[str, Any], text: str, says: str | None) -> None:
    """Neither wins in silence: in a run, and at a point of a plan, which would have ranked twins."""
    engine = Engine(scheduler=text, **flags)
    space = Space("Qwen/Qwen3-8B", {"device": ("h100",)})
    settings = {"device": "h100", "scheduler": text, **flags}
    if says is None:
        require_one_size(engine)
        assert space.deployment(settings).pools[0].engine.scheduler
        return
    for asked in (Server("Qwen/Qwen3-8B", engine=engine).pool, lambda: space.deployment(settings)):
        with pytest.raises(InputError, match=says):
            asked()


def test_a_scheduler_of_ones_own_decides_when_the_engines_would(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class S:\n    def schedule(self, *_): pass")
    own = f"{tmp_path / 'mine.py'}:S"
    assert served(scheduler=own).pools[0].engine.async_scheduling
    assert not served(scheduler=own, async_scheduling=False).pools[0].engine.async_scheduling
    assert not served(scheduler=own, preset="vllm-0.10").pools[0].engine.async_scheduling


def test_a_named_asynchronous_scheduler_is_asynchronous() -> None:
    assert served(scheduler="vllm-0.32").pools[0].engine.async_scheduling
    assert not served(scheduler="orca").pools[0].engine.async_scheduling
    assert served(scheduler="orca").pools[0].engine.resolved("max_num_batched_tokens") >= 4096


def test_a_named_scheduler_fills_the_stages_that_it_has() -> None:
    for words, scheduler in (
        ("pipeline_parallel_size=2: not simulated with Trtllm; use", "trtllm-1.0"),
        ("allocation='look_ahead': LightLLM, whose rule it is, runs in one stage", "lightllm"),
        ("reschedule_interval: not simulated in a pipeline", "fcfs-interval"),
        ("is for another number of stages", "vllm-0.32:pipeline_parallel_size=3"),
    ):
        with pytest.raises(InputError, match=words):
            served(scheduler=scheduler, pipeline_parallel_size=2)
    for scheduler in (
        "sarathi",
        "fastertransformer",
        "orca",
        "sglang-0.4.6",
        "vllm-0.32",
        "vllm-0.32:pipeline_parallel_size=2",
    ):
        assert served(scheduler=scheduler, pipeline_parallel_size=2).pools[0].engine.pipeline_parallel_size == 2
    pools = served(scheduler="vllm-0.32:pipeline_parallel_size=2,prefix_caching=false", pipeline_parallel_size=2).pools
    assert pools[0].engine.pipeline_parallel_size == 2


def test_a_schedulers_own_refusal_is_said_as_it_is() -> None:
    with pytest.raises(InputError, match=r"^scheduler 'get-next-batch:groups=running': groups='running': some"):
        find_scheduler("get-next-batch:groups=running")
