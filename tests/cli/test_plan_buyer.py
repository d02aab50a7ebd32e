"""What a buyer asks on the command line: other loads in words, and the tables of them."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from plan.chosen import answer

from windtunnel.cli import WRONG, main
from windtunnel.cli.plan.command import Wanted
from windtunnel.cli.plan.flags import Buyer
from windtunnel.cli.plan.other_loads import cases_of, change_of
from windtunnel.cli.plan.show import _details, _other_loads
from windtunnel.cli.terminal import show
from windtunnel.errors import InputError
from windtunnel.plan.objective import LeastForRate, Purchase
from windtunnel.plan.space import Constraints
from windtunnel.plan.what_if import WhatIf
from windtunnel.scenario import Load

LOAD = Load(random_input_len=100, random_output_len=10, num_prompts=50, request_rate=1.0)


def test_another_load_in_words() -> None:
    assert change_of("+30%", LOAD, 10.0).rate == pytest.approx(13.0)
    assert change_of("prompts*2", LOAD, 10.0) == (LOAD, 10.0, 2.0)
    assert change_of("@25", LOAD, 10.0) == (LOAD, 25.0, 1.0)
    changed, rate, longer = change_of("azure-code@25", LOAD, 10.0)
    assert (changed.trace, changed.random_input_len, rate, longer) == ("azure-code", None, 25.0, 1.0)


@pytest.mark.parametrize(
    ("text", "rate", "says"),
    [
        ("@x", 1.0, "must be TRACE, @RATE, TRACE@RATE, \\+30% or prompts\\*2"),
        ("+30%", None, "what_if '\\+30%': multiplies a rate: add --target-request-rate"),
    ],
)
def test_words_that_say_no_load(text: str, rate: float | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        change_of(text, LOAD, rate)


def test_growth_multiplies_the_rate_and_longer_prompts_the_tokens() -> None:
    wanted = Wanted(target_request_rate=10.0, what_if=("prompts*2",), buyer=Buyer(growth=(1.0, 2.0)), seeds=2)
    question = answer().question
    space = cast(Any, SimpleNamespace(axes={}, constraints=Constraints()))
    found = cases_of(LOAD, wanted, space, question)
    assert list(found) == ["prompts*2", "× 2"], "growth by 1 is this load"
    (longer, same), (asked, twice) = found["prompts*2"], found["× 2"]
    assert isinstance(same, LeastForRate) and isinstance(twice, LeastForRate)
    assert (same.rate, twice.rate) == (10.0, 20.0)
    assert longer.workload.prompt_tokens.mean() == 2 * asked.workload.prompt_tokens.mean() == 200
    assert [workload.prompt_tokens.mean() for _, workload in longer.draws] == [200]
    with pytest.raises(InputError, match="growth 2: multiplies a rate"):
        cases_of(LOAD, Wanted(buyer=Buyer(growth=(2.0,))), space, question)
    with pytest.raises(InputError, match="growth=-1"):
        Buyer(growth=(-1.0,))


def test_whole_nodes_are_for_a_rate() -> None:
    with pytest.raises(InputError, match="add --target-request-rate"):
        Wanted(buyer=Buyer(spare=1)).finds_replicas(Load())
    space = cast(Any, SimpleNamespace(axes={}, constraints=Constraints()))
    goal = Wanted(target_request_rate=3.0, buyer=Buyer(whole_nodes=True, spare=1)).goal(space, answer().question)
    assert isinstance(goal, LeastForRate) and goal.purchase == Purchase(True, 1)


def test_other_loads_are_one_table_with_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Three replicas of two GPUs at 3.6 USD: 21.6 an hour, 15,768 a month."""
    first, double = (answer(objective=LeastForRate(rate, Constraints())) for rate in (7.0, 14.0))
    none = replace(double, entries={})
    answers = {"this load": first, "× 2": double, "× 9": none}
    show(*_other_loads(WhatIf(answers, {"this load": {"this load": 0.0, "× 2": 0.25}}), verbose=False))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    table = [" ".join(row) for row in rows]
    assert any(row.startswith("this load 6 × H100 SXM") for row in table)
    assert any("7.00 21.60 15,768 0 %" in row for row in table)
    assert any("14.0 21.60 15,768 25 %" in row for row in table)
    assert any(row.startswith("× 9 nothing meets the goal") for row in table)


def test_energy_is_said_with_the_details() -> None:
    """One joule a token at 100 tokens a second: 100 W, 73 kWh in 730 hours."""
    found = answer()
    band = SimpleNamespace(words=lambda: ())
    advice = SimpleNamespace(entry=found.entries[1], band=band, binding=None, findings=(), ends="", cheaper="")
    said = dict(_details(found, cast(Any, advice)))
    assert said["energy"] == "100 W of GPUs, 73.0 kWh a month, 1.00 J per output token"
    assert not math.isnan(found.entries[1].promise)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target-request-rate", "5", "--spare", "1"), "leave out whole_nodes and spare"),
        (("--objective", "energy"), "is searched for cost, gpus and goodput: add --objective cost"),
        ((), "is searched for cost, gpus and goodput: add --objective cost"),
    ],
)
def test_an_autoscaler_is_for_costs_and_goodput(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("plan", "Qwen/Qwen3-8B", "--devices", "l40s", "--isl", "100", "--osl", "20", "--num-prompts", "20")
    assert main([*asked, "--axis", "autoscale=none,policy=hpa most=4", *words]) == WRONG
    assert said in capsys.readouterr().err
