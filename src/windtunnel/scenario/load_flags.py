"""Load: which requests a run is asked to serve, by the names of the flags."""

from dataclasses import dataclass, replace
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from windtunnel.errors import InputError, unknown

if TYPE_CHECKING:
    from windtunnel.workload import Arrivals, Workload

TRACE = "azure-conv"
"""What is replayed when nothing is said."""
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 1000, 1024, 128
"""Random requests by default: as many and as long as those of `vllm bench serve`."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests: a trace replayed, or lengths and arrivals drawn at random as `vllm bench serve` draws them."""

    trace: str | None = None
    """A name of ``windtunnel list traces`` or a file. Without one and without random lengths: azure-conv."""
    request_rate: float | None = None
    """Requests per second, newly drawn; inf: all at once. Without it a trace keeps its times, others arrive at once."""
    burstiness: float = 1.0
    """Shape of the gaps between newly drawn requests: 1 is Poisson, smaller is burstier."""
    max_concurrency: int | None = None
    """Closed loop: the next request is sent when fewer than so many are in flight."""
    num_prompts: int | None = None
    """The first so many requests of a trace (without it: all), or so many random ones (without it: 1000)."""
    random_input_len: int | None = None
    """Prompt tokens of random requests; 1024 if only the output's are given. Also ``--isl``."""
    random_output_len: int | None = None
    """Output tokens of random requests; 128 if only the prompt's are given. Also ``--osl``."""
    random_range_ratio: float = 0.0
    """Random lengths are uniform within this share of the length, up and down."""
    time_scale: float = 1.0
    """Multiplies the times of a trace: 0.5 doubles its rate."""
    repeat: int = 1
    """Play the trace so many times in a row."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """Draw arrivals at a rate that grows from the first request to the last."""
    ramp_up_start_rps: float | None = None
    """Requests per second at the first request of a ramp."""
    ramp_up_end_rps: float | None = None
    """Requests per second at the last request of a ramp."""
    seed: int = 0
    """Every random stream depends on it and on nothing else."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        for name in ("num_prompts", "max_concurrency", "random_input_len", "random_output_len", "repeat"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value}: must be ≥ 1")
        if self.seed < 0:
            raise InputError(f"seed={self.seed}: must be ≥ 0")
        self._check_source()
        self._check_times()

    def _check_source(self) -> None:
        if self.is_random and self.trace is not None:
            raise InputError(
                f"trace={self.trace!r}: has lengths of its own: leave out random_input_len and random_output_len"
            )
        if self.is_random and (self.time_scale != 1.0 or self.repeat != 1):
            raise InputError(
                "time_scale and repeat are for traces: use request_rate and num_prompts with random lengths"
            )
        if self.random_range_ratio != 0.0 and not self.is_random:
            raise InputError(
                f"random_range_ratio={self.random_range_ratio:g}: needs random_input_len or random_output_len"
            )

    def _check_times(self) -> None:
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if ramp != (None, None, None):
            if None in ramp:
                raise InputError("a ramp needs ramp_up_strategy, ramp_up_start_rps and ramp_up_end_rps together")
            if self.request_rate is not None:
                raise InputError(f"request_rate={self.request_rate:g}: the ramp sets the rate: leave out one of them")
        if self.redraws and self.time_scale != 1.0:
            raise InputError(
                f"time_scale={self.time_scale:g}: newly drawn arrivals have no times to scale: leave out one of them"
            )
        if self.burstiness != 1.0 and not self.redraws:
            raise InputError(f"burstiness={self.burstiness:g}: shapes arrivals that are drawn: add request_rate")

    @property
    def is_random(self) -> bool:
        """Whether lengths are drawn at random."""
        return self.random_input_len is not None or self.random_output_len is not None

    @property
    def redraws(self) -> bool:
        """Whether the arrivals of a trace are replaced by drawn ones."""
        return self.request_rate is not None or self.ramp_up_strategy is not None

    def arrivals(self) -> "Arrivals":
        """The process that draws arrivals."""
        from windtunnel.workload import AllAtOnce, Gamma, Ramp

        if self.ramp_up_strategy and self.ramp_up_start_rps is not None and self.ramp_up_end_rps is not None:
            return Ramp(self.ramp_up_start_rps, self.ramp_up_end_rps, self.ramp_up_strategy, self.burstiness)
        if self.request_rate is None or (isinf(self.request_rate) and self.request_rate > 0):
            return AllAtOnce()
        return Gamma(self.request_rate, self.burstiness)

    def workload(self, seed: int | None = None) -> "Workload":
        """The requests under this seed (or the load's own). Raises InputError for what cannot be read or drawn."""
        seed = self.seed if seed is None else seed
        return self._random(seed) if self.is_random else self._trace(seed)

    def _random(self, seed: int) -> "Workload":
        from windtunnel.workload import Both, RangeRatio, generate

        prompt = RangeRatio(self.random_input_len or INPUT_LEN, self.random_range_ratio)
        output = RangeRatio(self.random_output_len or OUTPUT_LEN, self.random_range_ratio)
        return generate(
            self.arrivals(),
            Both(prompt, output),
            self.num_prompts or NUM_PROMPTS,
            seed,
            max_concurrency=self.max_concurrency or 0,
            name="random",
        )

    def _trace(self, seed: int) -> "Workload":
        from windtunnel.workload import repeat, scale_time, with_concurrency

        found = self._read(self.trace or TRACE, seed)
        if self.repeat > 1:
            found = repeat(found, self.repeat)
        if self.time_scale != 1.0:
            found = scale_time(found, self.time_scale)
        if self.redraws:
            found = self._redraw(found, seed)
        return with_concurrency(found, self.max_concurrency) if self.max_concurrency else found

    def _read(self, trace: str, seed: int) -> "Workload":
        from windtunnel.workload import AllAtOnce, builtin, builtin_names, head, load_trace

        if trace in builtin_names():
            return builtin(trace, seed=seed, num_requests=self.num_prompts)
        if "/" not in trace and "." not in trace and not Path(trace).exists():
            raise unknown("trace", trace, builtin_names())
        found = load_trace(trace, arrivals=AllAtOnce() if self.redraws else None)
        if self.num_prompts is None:
            return found
        if self.num_prompts > len(found):
            raise InputError(f"num_prompts={self.num_prompts}: {trace} has {len(found)} requests: use repeat for more")
        return head(found, self.num_prompts)

    def _redraw(self, trace: "Workload", seed: int) -> "Workload":
        import numpy as np

        from windtunnel.workload.synthetic import stream

        arrival = trace.arrival.copy()
        released = ~np.isnan(arrival)
        arrival[released] = self.arrivals().times(int(released.sum()), stream(seed, "arrivals"))
        return replace(trace, arrival=arrival)
