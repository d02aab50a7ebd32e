"""The unified scheduler in the compiled core equals the reference, bit for bit, with and without its jumps."""

import pytest
from equality_unified import RELAXED, Case, cases, check_equal
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED)
@given(cases(), st.booleans())
def test_core_equals_reference(case: Case, jumps: bool) -> None:
    check_equal(case, jumps)


@pytest.mark.long
@settings(max_examples=6000, deadline=None, suppress_health_check=RELAXED)
@given(cases(), st.booleans())
def test_core_equals_reference_at_length(case: Case, jumps: bool) -> None:
    check_equal(case, jumps)
