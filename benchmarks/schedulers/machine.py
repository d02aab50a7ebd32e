"""The machine of the experiments: one engine whose batches take a time that is linear in what they hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from windtunnel import Deployment, Engine, Pool, Run, Summary, Workload, device, generate, load_model, simulate, summary
from windtunnel.metrics import Steps, unroll
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.policy import scheduler
from windtunnel.workload import AllAtOnce, Both, Gamma, Lognormal

BLOCK = 16

Costs = Callable[[int, int, int], BatchTimes]
"""(tokens of a step, requests of a step, longest request) → batch times."""


def opt_13b(tokens: int, requests: int, longest: int) -> BatchTimes:
    """OPT-13B on one A100-80G, as DistServe fitted it (OSDI 2024, released simulator): in milliseconds

    18.10 + 0.1019·tokens + 7.12e-6·Σ prompt² for steps with prefills, 19.93 + 0.0385·requests + 6.27e-4·tokens in the
    cache for decodes. A decode in a step with prefills costs as much as a token of a prompt.
    """
    times = linear(
        18.10e-3,
        0.1019e-3,
        6.27e-7,
        7.12e-9,
        max_num_batched_tokens=tokens,
        max_num_seqs=requests,
        max_model_len=longest,
    )
    return replace(times, decode_tokens=19.93e-3 + 0.0385e-3 * np.arange(tokens + 1, dtype=np.float64))


def conversations(rate: float, requests: int = 1000, prompt: int = 600, output: int = 150) -> Workload:
    """Lognormal prompts and outputs with these means; Poisson arrivals, or all at once for an infinite rate."""
    lengths = Both(Lognormal(prompt, 0.8, 1500), Lognormal(output, 0.8, 500))
    arrivals = Gamma(rate, 1.0) if np.isfinite(rate) else AllAtOnce()
    return generate(arrivals, lengths, requests, seed=1)


@dataclass(frozen=True)
class Machine:
    """What every scheduler of an experiment gets."""

    costs: Costs = opt_13b
    model: str = "facebook/opt-13b"
    """Decides nothing but whether the cache fits a GPU: times are those of ``costs``."""
    kv_tokens: int = 66_144
    """Tokens that the KV cache holds (OPT-13B on 80 GB: DistServe)."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 2048

    def serve(self, text: str, workload: Workload) -> "Served":
        """Simulate requests under a scheduler, a preset with its settings as text."""
        engine = Engine(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_gpu_blocks_override=self.kv_tokens // BLOCK + 1,
            block_size=BLOCK,
            enable_prefix_caching=False,
        )
        deployment = Deployment((Pool(load_model(self.model), device("a100"), engine),))
        times = self.costs(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len)
        tables = Tabulated(times, {"modelled": times}, {"other": times}, ())
        return Served(simulate(deployment, workload, tables=[tables], policies=[scheduler(text)]))


@dataclass(frozen=True, eq=False)
class Served:
    """One simulation and what the experiments read from it."""

    run: Run

    @cached_property
    def steps(self) -> Steps:
        """Every step."""
        return unroll(self.run)

    @cached_property
    def summary(self) -> Summary:
        """The whole run."""
        return summary(self.run, steps=self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens."""
        return self.summary.output_throughput

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return self.summary.window.seconds

    @property
    def batch(self) -> float:
        """Mean number of requests that decode, over the steps in which any does."""
        decodes = self.steps.decodes[self.steps.decodes > 0]
        return float(decodes.mean()) if len(decodes) else 0.0

    def percentile(self, latency: str, percent: float) -> float:
        """Of ttft, tpot, itl or e2el, in seconds."""
        return self.summary.latencies[latency].percentile(percent)

    def mean(self, latency: str) -> float:
        """Of ttft, tpot, itl or e2el, in seconds."""
        return self.summary.latencies[latency].mean
