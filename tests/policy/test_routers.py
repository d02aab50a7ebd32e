import pytest

from windtunnel.core import router
from windtunnel.errors import InputError
from windtunnel.policy.named import ROUTERS, router_number


def test_numbers_are_those_of_the_core() -> None:
    assert [router_number(name) for name in ROUTERS] == [
        router.ROUND_ROBIN,
        router.RANDOM,
        router.LEAST_OUTSTANDING,
        router.VLLM_DP,
    ]


def test_an_unknown_router_names_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown router 'least_outstandin': did you mean 'least_outstanding'"):
        router_number("least_outstandin")
