"""Pipelines of vLLM ≤ 0.20, whose requests keep no turns, on the core: equal to the oracle."""

import os
from dataclasses import replace
from typing import Any

import equality
import pytest
from equality import RELAXED, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.fleet.test_service import check, services

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
RULES = st.sampled_from([(False, False), (False, False), (False, True), (True, False)])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two to four stages, by the rules of vLLM ≤ 0.20, or one of them."""
    case, (waits, goes_on) = draw(equality.pipeline_cases()), draw(RULES)
    return replace(case, policy=replace(case.policy, wait_for_output=waits, decide_after_empty_step=goes_on))


@IN_PLAIN_PYTHON
def test_core_and_reference_are_equal() -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(cases())
    def compare(case: Any) -> None:
        equality.check_equal(case)

    compare()


@IN_PLAIN_PYTHON
def test_so_they_are_where_replicas_come_and_go() -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(services(cases(), equality))
    def compare(drawn: Any) -> None:
        check(drawn)

    compare()


@WITH_THE_COMPILER
def test_without_the_compiler() -> None:
    in_plain_python(8, __file__)


@WITH_THE_COMPILER
@pytest.mark.long
def test_without_the_compiler_at_length() -> None:
    in_plain_python(2000, __file__)
