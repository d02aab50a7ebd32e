"""A scheduler that looks for new requests every n decode steps: later first tokens, and nothing else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import HANDOVERS, Deployment, Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.simulate.looks import seen_late
from windtunnel.simulate.run import FINISHED, Requests


def requests(arrival: list[float], first: list[float], finish: list[float], tokens: int = 11) -> Requests:
    n = len(arrival)
    whole = {name: np.zeros(n, dtype=np.int64) for name in ("pool", "replica", "lane", "preemptions", "cached_tokens")}
    return Requests(
        id=np.arange(n),
        arrival=np.array(arrival),
        prompt_tokens=np.full(n, 10),
        output_tokens=np.full(n, tokens),
        max_tokens=np.full(n, tokens),
        status=np.full(n, FINISHED),
        scheduled=np.array(arrival),
        first_token=np.array(first),
        finish=np.array(finish),
        **whole,
    )


def deployment(**engine: Any) -> Deployment:
    return Deployment((Pool(load_model("Qwen/Qwen3-8B"), device("h100"), Engine(preset="sglang-0.5", **engine)),))


SERVED = requests([0.0, 0.5, 5.0], [0.1, 0.6, 5.1], [1.1, 1.6, 6.1])
"""A second request comes while the first is served, a third when nobody is; 0.1 s for each token."""


def test_who_meets_others_waits_half_an_interval_of_steps() -> None:
    late = seen_late(SERVED, deployment(scheduler_recv_interval=11)).first_token - SERVED.first_token
    assert late == pytest.approx([0.0, 0.5 * 10 * 0.1, 0.0])


def test_a_step_with_drafts_is_as_many_times_as_long() -> None:
    drafts = deployment(scheduler_recv_interval=11, num_speculative_tokens=1, acceptance_length=2.0)
    assert (seen_late(SERVED, drafts).finish - SERVED.finish)[1] == pytest.approx(1.0)


def test_the_usual_look_in_every_step_changes_nothing() -> None:
    assert seen_late(SERVED, deployment()) is SERVED
    one = replace(SERVED, output_tokens=np.ones(3, dtype=np.int64))
    assert seen_late(one, deployment(scheduler_recv_interval=11)) is one


def test_kv_waits_for_a_look_of_the_decode_server_and_prompts_do_not() -> None:
    """SGLang looks at what has arrived in every n-th step of its decode loop; an idle one runs through its loop."""
    pools = [
        Pool(load_model("Qwen/Qwen3-8B"), device("h100"), Engine(preset="sglang-0.5"), role=role, name=role)
        for role in ("prefill", "decode")
    ]
    usual = HANDOVERS["sglang-0.5-bootstrap"]
    apart = Deployment(tuple(pools), handover=replace(usual, polling_interval=9))
    served = replace(SERVED, pool=np.ones(3, dtype=np.int64))
    found = seen_late(served, apart)
    assert found.first_token - served.first_token == pytest.approx([0.0, 0.5 * 8 * 0.1, 0.0])
    assert found.finish - served.finish == pytest.approx([0.0, 0.4, 0.0])
    assert found.scheduled.tolist() == served.scheduled.tolist()
    assert seen_late(served, Deployment(tuple(pools), handover=usual)) is served
    with pytest.raises(InputError, match="polling_interval=0"):
        replace(usual, polling_interval=0)
