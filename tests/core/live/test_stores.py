"""Live replicas with KV stores give what a run of the same arrivals gives, to the bit."""

import os
from dataclasses import replace

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.live.test_live import told
from core.stores.stores_cases import stored_case

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "40"))


@IN_PLAIN_PYTHON
def test_what_a_run_of_the_same_arrivals_gives() -> None:
    for seed in range(CASES):
        case = stored_case(seed)
        tiers = tuple(tuple(replace(one, write_after=0) for one in some) for some in case.fleet.tiers)
        if case.demand.hash_ids is not None:
            told(replace(case.fleet, tiers=tiers), case.demand, case.routers[0], case.uniforms, seed)


@WITH_THE_COMPILER
def test_stores_without_the_compiler() -> None:
    in_plain_python(20, __file__)
