"""Routing: which replica gets a request, by name for the command line and by number for the core."""

from windtunnel.errors import unknown

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
