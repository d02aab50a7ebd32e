"""Routing: which replica gets a request, by name for the command line and by number for the core."""

from collections.abc import Callable

from windtunnel.errors import InputError, unknown
from windtunnel.policy.named import python_object

ROUTERS = {
    "round_robin": "replicas in turn",
    "random": "a replica drawn at random, from a stream of its own",
    "least_outstanding": "the replica with the fewest requests queued and running, the first of equals",
    "vllm_dp": "the replica with the lowest 4 · waiting + running, as vLLM balances ranks: counted every 0.1 s",
}
"""Name → what it does. Ranks inside a replica are always balanced by vLLM's own rule, ``vllm_dp``."""


ROUTE_SCORE = len(ROUTERS)
"""The number of the router that asks a function of the user's."""


def router_number(name: str) -> int:
    """The number of a router in the compiled core.

    Raises:
        InputError: no router has this name.
    """
    if name not in ROUTERS:
        raise unknown("router", name, ROUTERS)
    return list(ROUTERS).index(name)


def find_router(name: str) -> tuple[int, Callable[..., float] | None]:
    """The number of a router in the core, and the user's function that it asks: ``./mine.py:score``, or None.

    Raises:
        InputError: there is no such router, file or function.
    """
    path, _, rest = name.partition(":")
    if not path.endswith(".py"):
        return router_number(name), None
    score = python_object(name, rest)
    if not callable(score):
        raise InputError(f"router {name!r}: must be a function of (replica, outstanding, prompt_tokens, arrival)")
    return ROUTE_SCORE, score
