"""Objectives refuse what makes no sense."""

import pytest

from windtunnel.errors import InputError
from windtunnel.plan.objective import LeastForRate
from windtunnel.plan.space import Constraints


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="target_request_rate=0"):
        LeastForRate(0.0, Constraints())
