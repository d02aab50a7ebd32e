"""Compiled functions."""

import numba

from windtunnel.core import compiled


def test_a_settled_entry_looks_at_types_again_when_its_state_is_another() -> None:
    def first(state: tuple[float, ...], factor: float) -> float:
        return state[0] * factor

    made = compiled.Settled(numba.njit(first))
    one, other = (1.0, 2.0), (3, 4, 5)
    assert [made(one, 2.0), made(one, 3.0), made(other, 2.0), made(one, 2.0)] == [2.0, 3.0, 6.0, 2.0]
