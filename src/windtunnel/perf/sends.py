"""Sends: how long activations take from one stage of a pipeline to the next."""

import numpy as np

from windtunnel.deployment import Pool
from windtunnel.perf.axes import Axes
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernels import Collective
from windtunnel.perf.predictor import Predictor
from windtunnel.perf.roofline import COLLECTIVE_LATENCY

ACTIVATIONS = 2
"""Rows per token: hidden state and residual (IntermediateTensors of vLLM's models)."""


def sends(pool: Pool, ax: Axes, predictor: Predictor) -> Floats:
    """[stages − 1, T + 1] seconds for the activations of T tokens, padded as the batch is.

    Each GPU of a stage sends its share to its neighbour in the next stage, and the receivers gather the shares
    (send_tensor_dict with all_gather_group, vllm/distributed/parallel_state.py). A point-to-point transfer attains what
    gathers attain on the link; across nodes it takes the network and its latency.
    """
    tp, hidden = pool.engine.tensor_parallel_size, pool.model.hidden_size
    attained = predictor.roofline.efficiencies["gather"]
    tokens = ax.padded.astype(float)
    moved = ACTIVATIONS * 2.0 * hidden / tp * tokens
    gather = np.zeros_like(tokens)
    if tp > 1:
        kernel = Collective("all_gather", tp, ACTIVATIONS * hidden)
        gather = predictor.times(kernel, tokens, np.zeros_like(tokens)).seconds
    rows = []
    for across in across_nodes(pool):
        bandwidth = pool.device.network_bandwidth if across else pool.device.link_bandwidth
        latency = attained.latency + (COLLECTIVE_LATENCY if across else 0.0)
        rows.append(np.where(tokens > 0, moved / (bandwidth * attained.memory) + latency + gather, 0.0))
    return np.array(rows)


def across_nodes(pool: Pool) -> list[bool]:
    """For each stage but the last: whether any rank has to cross nodes to reach the next one."""
    engine, domain = pool.engine, pool.device.gpus_per_domain
    tp, stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
    found = []
    for stage in range(stages - 1):
        firsts = [(rank * stages + stage) * tp for rank in range(engine.data_parallel_size)]
        found.append(any(first // domain != (first + 2 * tp - 1) // domain for first in firsts))
    return found
