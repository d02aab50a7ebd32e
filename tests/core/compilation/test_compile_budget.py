"""What a first run compiles: each function, for each kind of arguments that it gets, takes time."""

import os
import subprocess
import sys
from pathlib import Path

MOST = 220
"""Functions times kinds of arguments, in a first run of vLLM's default scheduler."""
FIRST_RUN = """
import numpy as np
from numba.core import event
from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1

class Count(event.Listener):
    compiled = 0
    def on_start(self, _):
        self.compiled += 1
    def on_end(self, _):
        pass

count = Count()
event.register("numba:compile", count)
limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, num_blocks=20, block_size=16)
times = linear(1, 0, 0, 0, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=100)
one, zero = np.ones(1, dtype=np.int64), np.zeros(1)
demand = Demand(zero, one, one, zero > 0, zero > 0, -one, zero, 0)
run(Fleet((limits,), (VllmV1(prefix_caching=True),), (times,), (1,), (1,), (False,)), demand, 0, zero)
print(count.compiled)
"""


def test_a_first_run_compiles_little(tmp_path: Path) -> None:
    clean = os.environ | {"WINDTUNNEL_CACHE": str(tmp_path)}
    done = subprocess.run((sys.executable, "-c", FIRST_RUN), env=clean, capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= MOST
