"""Sends: how long activations take from one stage of a pipeline to the next."""

import numpy as np

from windtunnel.deployment import Pool
from windtunnel.model.layers import Layer
from windtunnel.model.stages import stages
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
    found = []
    for rows, across in zip(activations(pool), across_nodes(pool), strict=True):
        moved = rows * 2.0 * hidden / tp * tokens
        gather = np.zeros_like(tokens)
        if tp > 1:
            kernel = Collective("all_gather", tp, rows * hidden)
            gather = predictor.times(kernel, tokens, np.zeros_like(tokens)).seconds
        bandwidth = pool.device.network_bandwidth if across else pool.device.link_bandwidth
        latency = attained.latency + (COLLECTIVE_LATENCY if across else 0.0)
        found.append(np.where(tokens > 0, moved / (bandwidth * attained.memory) + latency + gather, 0.0))
    return np.array(found)


def activations(pool: Pool) -> list[int]:
    """Rows per token that each stage but the last sends: with attention residuals the hidden state and the sum of every
    block before the next stage (vllm/models/kimi_k3/nvidia/model.py), with hyper-connections every stream."""
    firsts = [stage.layers[0][1] for stage in stages(pool.model, pool.engine.pipeline_parallel_size)[1:]]
    return [_rows(layer) for layer in firsts]


def _rows(layer: Layer) -> int:
    """Rows per token that a layer takes."""
    if layer.streams:
        return layer.streams
    return ACTIVATIONS if layer.residual_blocks is None else 1 + layer.residual_blocks


def across_nodes(pool: Pool) -> list[bool]:
    """For each stage but the last: whether any rank has to cross nodes to reach the next one."""
    engine, domain = pool.engine, pool.device.gpus_per_domain
    tp, count = engine.tensor_parallel_size, engine.pipeline_parallel_size
    found = []
    for stage in range(count - 1):
        firsts = [(rank * count + stage) * tp for rank in range(engine.data_parallel_size)]
        found.append(any(first // domain != (first + 2 * tp - 1) // domain for first in firsts))
    return found
