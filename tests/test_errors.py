"""Error messages lead from what was typed to what was meant."""

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError, nearest, unknown

NAMES = ("round_robin", "random", "least_outstanding")


def test_a_slip_names_what_was_meant() -> None:
    assert str(unknown("router", "round_robbin", NAMES)) == "unknown router 'round_robbin': did you mean 'round_robin'?"


def test_something_else_names_what_there_is() -> None:
    assert str(unknown("router", "zzz", NAMES)).endswith("known: least_outstanding, random, round_robin")


def test_a_long_list_is_cut() -> None:
    assert str(unknown("model", "#", [f"m{number:02}" for number in range(99)])).endswith("m11, …")


def test_case_does_not_matter() -> None:
    assert nearest("Round_Robin", NAMES) == "round_robin"


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=9), max_size=5))
def test_the_nearest_is_one_of_the_choices(name: str, choices: list[str]) -> None:
    assert nearest(name, choices) in {None, *choices}


def test_an_input_error_is_a_value_error() -> None:
    assert issubclass(InputError, ValueError)
