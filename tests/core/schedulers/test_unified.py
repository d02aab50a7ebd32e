"""The unified scheduler in the compiled core equals the reference, bit for bit, with and without its jumps."""

from typing import get_args

import pytest
from equality_unified import RELAXED, Case, cases, check_equal, pipeline_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.core.schedulers.unified import ORDERS, VICTIMS
from windtunnel.policy.unified import Order, Victim


@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED)
@given(cases(), st.booleans())
def test_core_equals_reference(case: Case, jumps: bool) -> None:
    check_equal(case, jumps)


@pytest.mark.long
@settings(max_examples=6000, deadline=None, suppress_health_check=RELAXED)
@given(cases(), st.booleans())
def test_core_equals_reference_at_length(case: Case, jumps: bool) -> None:
    check_equal(case, jumps)


@settings(max_examples=60, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases(), st.booleans())
def test_pipelines_equal_the_reference(case: Case, jumps: bool) -> None:
    check_equal(case, jumps)


@pytest.mark.long
@settings(max_examples=3000, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases(), st.booleans())
def test_pipelines_equal_the_reference_at_length(case: Case, jumps: bool) -> None:
    check_equal(case, jumps)


def test_every_victim_and_every_order_has_its_weights() -> None:
    assert (tuple(VICTIMS), tuple(ORDERS)) == (get_args(Victim), get_args(Order))
