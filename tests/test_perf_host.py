import numpy as np
import pytest

from windtunnel.perf.tabulate.host import DISPATCH_ATTENTION, dispatch_floor, host_cost


@pytest.mark.parametrize("asynchronous", [True, False])
def test_host_work_grows_with_requests_and_is_nothing_without(asynchronous: bool) -> None:
    overlapped, serial = host_cost(asynchronous).tables(256)
    assert overlapped[0] == serial[0] == 0.0
    assert (np.diff(overlapped[1:]) >= 0).all()
    assert (np.diff(serial[1:]) > 0).all()


def test_asynchronous_scheduling_hides_most_of_the_host_work() -> None:
    hidden, short = host_cost(True).tables(128)
    none, long = host_cost(False).tables(128)
    assert (none == 0).all()
    assert (short[1:] < 0.3 * long[1:]).all()
    assert (hidden[1:] > long[1:]).all()


def test_tokens_that_stay_on_the_device_leave_less() -> None:
    for backend in ("sglang", "trtllm"):
        hidden, left = host_cost(True, backend=backend).tables(128)
        vllm_hidden, vllm_left = host_cost(True).tables(128)
        assert np.array_equal(hidden, vllm_hidden)
        assert (left[1:] > 0).all()
        assert (left[1:] < 0.5 * vllm_left[1:]).all()
        assert host_cost(False, backend=backend) == host_cost(False)


def test_captured_pieces_leave_only_attention_to_the_host() -> None:
    assert dispatch_floor(32, 12, captured=True, compiled=True) == 32 * DISPATCH_ATTENTION
    compiled, eager = (dispatch_floor(32, 12, captured=False, compiled=c) for c in (True, False))
    assert 32 * DISPATCH_ATTENTION < compiled < eager
