"""Load: which requests a run is asked to serve, by the names of the flags."""

from collections.abc import Collection
from dataclasses import replace
from math import ceil, isfinite, isinf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown

if TYPE_CHECKING:
    from windtunnel.workload import Arrivals, Both, Workload
    from windtunnel.workload.agents.agentx import Rules
    from windtunnel.workload.lengths import OneLength

TRACE = "azure-conv"
"""What is replayed when nothing is said."""
OF_RANDOM = ("random_range_ratio", "random_lengths", "random_prefix_len", "random_num_prefixes", "random_turns")
"""Words that only random lengths read."""
DISTRIBUTIONS = ("uniform", "lognormal", "zipf")
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 1000, 1024, 128
"""Random requests by default: as many and as long as those of `vllm bench serve`."""

FASTEST = 100_000
"""Requests per second that are no slip of the pen."""
PROMPTS_OF_TRIAL, SECONDS_OF_TRIAL = 2000, 120
"""Requests of a trial by default: this many, and for a target rate those that arrive in this many seconds."""


MOST_SEEDS = 10_000
"""Repetitions that are no slip of the pen."""


def require_seeds(seeds: int) -> None:
    """Raise InputError for a number of repetitions that makes no sense."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise InputError(f"seeds={seeds}: must be ≥ 1 and ≤ {MOST_SEEDS:,}")


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests: a trace replayed, or lengths and arrivals drawn at random as `vllm bench serve` draws them."""

    trace: str | None = None
    """A name of ``windtunnel list traces``, a file, or a folder of agents' sessions. Without one and without random
    lengths: azure-conv."""
    columns: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """Which columns of a CSV file or keys of JSON lines hold what: ``arrival=start_time,prompt_tokens=in,…``;
    ``arrival_ms`` for milliseconds. Others are left out."""
    replay: str | None = None
    """How a trace of agents' sessions is replayed in lanes: ``agentx`` as InferenceX does, ``agentx-mvp``,
    ``agentx-aiperf`` or ``agentx-aisimulate``, other published versions. Only its window counts."""
    benchmark_duration: float | None = None
    """Seconds of that window: 3600 or 1800 by the version."""
    answers: Literal["live", "recorded"] | None = None
    """What later prompts of a session hold: what the server answered, so that it finds its own answers in the cache
    (the default), or answers that were recorded, as AgentX replays them."""
    request_rate: float | None = None
    """Requests per second, newly drawn; inf: all at once. Without it a trace keeps its times, others arrive at once."""
    burstiness: float = 1.0
    """Shape of the gaps between newly drawn requests: 1 is Poisson, smaller is burstier."""
    max_concurrency: int | None = None
    """Closed loop: the next request is sent when fewer are in flight."""
    lanes: int | None = None
    """Sessions in play: the next one starts when fewer have requests to come. Agents' sessions, which all
    start at once: max_concurrency, unless it is said."""
    num_prompts: int | None = None
    """Number of requests: the first of a trace (default: all), or random ones (default: 1000)."""
    random_input_len: int | None = None
    """Prompt tokens of random requests; 1024 if only the output's are given. Also ``--isl``."""
    random_output_len: int | None = None
    """Output tokens of random requests; 128 if only the prompt's are given. Also ``--osl``."""
    random_range_ratio: float = 0.0
    """Random lengths are uniform within this share of the length, up and down."""
    random_lengths: str = "uniform"
    """How random lengths are spread: uniform (see random_range_ratio), ``lognormal:SIGMA`` around the length, or
    ``zipf:THETA`` from 1 to the length, short ones more often."""
    random_prefix_len: int = 0
    """Tokens at the beginning of every random prompt, before its own, that prompts share."""
    random_num_prefixes: int = 1
    """Different such beginnings, each used equally often."""
    random_turns: int = 1
    """Turns of a session: each prompt repeats the conversation so far, and num_prompts counts turns."""
    think_time: float = 10.0
    """Mean seconds between an answer and the session's next turn."""
    prefix_hit_rate: float | None = None
    """Of a load that does not say what its prompts share: the share of prompt tokens that a prefix cache with endless
    memory finds. Assumed: all begin with one text."""
    shared_prefix: int | None = None
    """Or: tokens with which every prompt begins, such as a system prompt."""
    images_per_prompt: int = 0
    """Images or videos before each prompt, all different, whose tokens are added to it. vLLM's limits on what its
    encoder computes in a step and keeps are simulated, and its time where config.json has its sizes (Qwen-VL, Pixtral);
    that of a video is too long, as if its frames attended to each other."""
    image_tokens: int = 0
    """Tokens that the model makes of an image or video."""
    n: int = 1
    """Sequences that are generated for each prompt, as OpenAI's n, each a row as long as its request. Up to vLLM
    0.6.3 (vllm-0.6-v0) they share the prompt's blocks; elsewhere each is a request."""
    max_think_time: float | None = None
    """Longest seconds between an answer and the session's next turn: longer ones of a trace are cut."""
    max_request_tokens: int | None = None
    """Longest request, prompt and output together: longer ones are cut, both in proportion. With replay, sessions that
    have one are left out, as AIPerf's --max-context-length does."""
    predict_outputs: str | None = None
    """What schedulers that decide by lengths are told of outputs: oracle, noisy:SIGMA, classes:SIZE[:WRONG], others, or
    a function of yours (FILE.py:NAME). It becomes the declared limit, at least the real output, and prompt plus
    prediction the priority."""
    time_scale: float = 1.0
    """Multiplies the times of a trace: 0.5 doubles its rate."""
    repeat: int = 1
    """Play the trace this many times in a row."""
    copies: int = 1
    """Play the trace this many times at once, as users with the same habits would; copies share no text."""
    max_shift: float = 0.0
    """Most seconds by which each session of each copy, or lone request, is moved, earlier or later."""
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
        for name in ("num_prompts", "max_concurrency", "lanes", "random_input_len", "random_output_len", "repeat",
                     "copies", "n"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value}: must be ≥ 1")
        if self.seed < 0:
            raise InputError(f"seed={self.seed}: must be ≥ 0")
        if self.prefix_hit_rate is not None and self.shared_prefix is not None:
            raise InputError("prefix_hit_rate and shared_prefix: both say what prompts share: leave one out")
        if min(self.images_per_prompt, self.image_tokens) < 0 or (self.images_per_prompt > 0) != (
            self.image_tokens > 0
        ):
            raise InputError(
                f"images_per_prompt={self.images_per_prompt}, image_tokens={self.image_tokens}: both are ≥ 1, or left "
                "out"
            )
        self._check_source()
        self._check_times()
        self._check_driver()

    def _check_source(self) -> None:
        if self.columns and self.trace is None:
            raise InputError("columns: name those of a file: add trace")
        if self.columns and not self.from_file:
            raise InputError(f"columns: name those of a file, and {self.trace!r} is built in: leave them out")
        if self.is_random and self.trace is not None:
            raise InputError(
                f"trace={self.trace!r}: has its own lengths: leave out random_input_len and random_output_len"
            )
        if self.is_random and (self.time_scale != 1.0 or self.repeat != 1 or self.copies != 1 or self.max_shift):
            raise InputError(
                "time_scale, repeat and copies are for traces: use request_rate and num_prompts with random lengths"
            )
        if not (isfinite(self.max_shift) and self.max_shift >= 0):
            raise InputError(f"max_shift={self.max_shift:g}: must be finite seconds ≥ 0")
        self._distribution()
        for name in OF_RANDOM:
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default and not self.is_random:
                raise InputError(f"{name}={value}: needs random_input_len or random_output_len")
        for name, least in (("random_prefix_len", 0), ("random_num_prefixes", 1), ("random_turns", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ {least}")
        if self.random_num_prefixes > 1 and (self.random_turns > 1 or not self.random_prefix_len):
            raise InputError(
                f"random_num_prefixes={self.random_num_prefixes}: needs random_prefix_len, and no sessions"
            )
        if self.think_time != type(self).think_time and self.random_turns == 1:
            raise InputError(f"think_time={self.think_time:g}: is between the turns of sessions: add random_turns")
        if self.is_random:
            self._lengths(INPUT_LEN)

    def _check_driver(self) -> None:
        if self.replay is None:
            if self.benchmark_duration is not None:
                raise InputError(f"benchmark_duration={self.benchmark_duration:g}: is of AgentX: add replay=agentx")
            return
        from windtunnel.workload.agents.agentx import rules_of

        rules_of(self.replay)
        if not self.from_file:
            lacks = f"trace={self.trace} has none: give" if self.trace else "add trace,"
            raise InputError(f"replay={self.replay}: replays recorded sessions: {lacks} a folder of them")
        wrong = {"ramp_up_strategy": None, "request_rate": None, "time_scale": 1.0, "repeat": 1, "copies": 1}
        for name, default in wrong.items():
            if getattr(self, name) != default:
                raise InputError(f"{name}: replay={self.replay} has its own order and times: leave it out")

    def _check_times(self) -> None:
        if self.request_rate is not None and not self.request_rate > 0:
            raise InputError(f"request_rate={self.request_rate:g}: must be requests per second > 0; inf: all at once")
        for name in ("ramp_up_start_rps", "ramp_up_end_rps"):
            rate = getattr(self, name)
            if rate is not None and not (isfinite(rate) and rate > 0):
                raise InputError(f"{name}={rate:g}: must be finite requests per second > 0")
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
    def source(self) -> str:
        """What the requests come from, for titles."""
        return self.trace or ("random" if self.is_random else TRACE)

    def giving_way(self, words: Collection[str]) -> "Load":
        """The load without its own source of requests, where other words name another one: a trace for random lengths,
        or the other way round."""
        if "trace" in words:
            random = ("random_input_len", "random_output_len", *OF_RANDOM)
            return replace(self, columns=(), **{name: getattr(Load, name) for name in random})
        if self.trace is not None and {"random_input_len", "random_output_len"} & set(words):
            return replace(self, trace=None, columns=())
        return self

    @property
    def redraws(self) -> bool:
        """Whether the arrivals of a trace are replaced by drawn ones."""
        return self.request_rate is not None or self.ramp_up_strategy is not None

    @property
    def from_file(self) -> bool:
        """Whether the requests are those of a recorded trace."""
        from windtunnel.workload import builtin_names

        return self.trace is not None and self.trace not in builtin_names()

    @property
    def varies(self) -> bool:
        """Whether another seed gives other requests."""
        return self.redraws or not self.from_file or self.max_shift > 0 or self.replay is not None

    def for_trials(self, rate: float | None) -> "Load":
        """The load with as many requests as a trial at this rate needs, and with arrivals where it has none.

        Raises InputError for a rate beyond FASTEST.
        """
        rate = rate or 0.0
        if self.n > 1:
            raise InputError(f"n={self.n}: plan does not search for loads of several sequences: run and compare do")
        if not rate < FASTEST:
            raise InputError(
                f"target_request_rate={rate:g}: must be < {FASTEST:,} requests/s, what is simulated at a time"
            )
        prompts = self.num_prompts
        if prompts is None and not self.from_file:
            prompts = max(PROMPTS_OF_TRIAL, ceil(SECONDS_OF_TRIAL * rate))
        random_at_once = self.is_random and not self.redraws and self.max_concurrency is None and self.lanes is None
        return replace(self, num_prompts=prompts, request_rate=1.0 if random_at_once else self.request_rate)

    def arrivals(self) -> "Arrivals":
        """The process that draws arrivals."""
        from windtunnel.workload import AllAtOnce, Gamma, Ramp

        if self.ramp_up_strategy and self.ramp_up_start_rps is not None and self.ramp_up_end_rps is not None:
            return Ramp(self.ramp_up_start_rps, self.ramp_up_end_rps, self.ramp_up_strategy, self.burstiness)
        if self.request_rate is None or (isinf(self.request_rate) and self.request_rate > 0):
            return AllAtOnce()
        return Gamma(self.request_rate, self.burstiness, exact_duration=True)

    def workload(self, seed: int | None = None) -> "Workload":
        """The requests under this seed (or the load's own). Raises InputError for what cannot be read or drawn."""
        seed = self.seed if seed is None else seed
        from windtunnel.workload import cut_to, with_lanes, with_recorded_answers, with_think_time_at_most
        from windtunnel.workload.prompts import with_images, with_samples

        found = self._random(seed) if self.is_random else self._trace(seed)
        if self.answers_told == "recorded":
            found = with_recorded_answers(found)
        if self.max_request_tokens is not None and self.replay is None:
            found = cut_to(found, self.max_request_tokens)
        found = self._assumed(found)
        if self.images_per_prompt:
            found = with_images(found, self.images_per_prompt, self.image_tokens)
        if self.predict_outputs is not None:
            found = self._predicted(found, seed)
        if self.max_think_time is not None:
            found = with_think_time_at_most(found, self.max_think_time)
        lanes = self.lanes
        if lanes is None and found.after is not None and not found.duration and self.from_file:
            lanes = self.max_concurrency
        if self.replay is not None:
            found = self._driven(found, lanes or self.max_concurrency, seed)
        elif lanes is not None:
            found = with_lanes(found, lanes)
        if self.n > 1:
            found = with_samples(found, self.n)
        if self.request_rate is None:
            return found
        return replace(found, asked_rate=self.request_rate, burstiness=self.burstiness)

    @property
    def answers_told(self) -> Literal["live", "recorded"]:
        """What later prompts hold."""
        return self.answers or ("live" if self.replay is None else "recorded")

    def _driven(self, corpus: "Workload", lanes: int | None, seed: int) -> "Workload":
        from windtunnel.workload.agents.agentx import agentx

        if lanes is None:
            raise InputError(f"replay={self.replay}: keeps a number of sessions in play: add lanes")
        rules = self.rules
        assert rules is not None
        return agentx(corpus, rules, lanes, seed)

    @property
    def rules(self) -> "Rules | None":
        """Of AgentX; None: the load is replayed as it is."""
        from windtunnel.workload.agents.agentx import rules_of

        if self.replay is None:
            return None
        return rules_of(self.replay, self.benchmark_duration, self.max_request_tokens)

    @property
    def corpus(self) -> "Load":
        """The sessions that are replayed, as a load."""
        return replace(self, replay=None, benchmark_duration=None, max_request_tokens=None, answers=self.answers_told)

    @property
    def assumes(self) -> bool:
        """Whether what prompts share is an assumption."""
        return self.prefix_hit_rate is not None or self.shared_prefix is not None

    def with_nothing_assumed(self) -> "Load":
        """The same load, where prompts share nothing that it does not say."""
        return replace(self, prefix_hit_rate=None, shared_prefix=None)

    def _assumed(self, found: "Workload") -> "Workload":
        """The load with what its prompts are assumed to share."""
        from windtunnel.workload.prompts import with_hit_rate, with_shared_prefix

        if self.prefix_hit_rate is not None:
            return with_hit_rate(found, self.prefix_hit_rate)
        return found if self.shared_prefix is None else with_shared_prefix(found, self.shared_prefix)

    def _predicted(self, found: "Workload", seed: int) -> "Workload":
        """With predictions; a limit is never below the real output."""
        import numpy as np

        from windtunnel.policy.predictions import predictor
        from windtunnel.workload.synthetic import stream

        assert self.predict_outputs is not None
        prompt, output = found.prompt_tokens, found.output_tokens
        lengths = predictor(self.predict_outputs)(prompt, output, stream(seed, "predictions"))
        return replace(found, priority=prompt + lengths, max_tokens=np.maximum(lengths, output))

    def _random(self, seed: int) -> "Workload":
        from windtunnel.workload import generate, prefix_repetition, sessions

        lengths = self.lengths()
        count, limit, prefix = self.num_prompts or NUM_PROMPTS, self.max_concurrency or 0, self.random_prefix_len
        if self.random_turns > 1:
            number, turns, wait = -(-count // self.random_turns), self.random_turns, self.think_time
            return sessions(
                self.arrivals(), lengths, number, seed,
                turns=turns, think_time=wait, system_tokens=prefix, max_concurrency=limit,
            )  # fmt: skip
        if prefix:
            kinds = self.random_num_prefixes
            return prefix_repetition(
                self.arrivals(), lengths, count, seed, num_prefixes=kinds, prefix_tokens=prefix, max_concurrency=limit
            )
        return generate(self.arrivals(), lengths, count, seed, max_concurrency=limit, name="random")

    def lengths(self) -> "Both":
        """How random lengths are drawn."""
        from windtunnel.workload import Both

        asked = self.random_input_len or INPUT_LEN, self.random_output_len or OUTPUT_LEN
        return Both(*map(self._lengths, asked))

    def _distribution(self) -> tuple[str, str, str]:
        """The name of the lengths' distribution, a colon and its parameter. Raises InputError for an unknown name."""
        name, colon, text = self.random_lengths.partition(":")
        if name not in DISTRIBUTIONS:
            raise InputError(f"random_lengths: {unknown('distribution', name, DISTRIBUTIONS)}")
        return name, colon, text

    def _lengths(self, length: int) -> "OneLength":
        """How random lengths are spread around this one. Raises InputError for a word that is no distribution."""
        from windtunnel.workload import Lognormal, RangeRatio, Zipf

        name, colon, text = self._distribution()
        if name == "uniform" and not colon:
            return RangeRatio(length, self.random_range_ratio)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if name == "uniform" or value < 0:
            raise InputError(f"random_lengths={self.random_lengths!r}: must be uniform, lognormal:SIGMA or zipf:THETA")
        if self.random_range_ratio:
            raise InputError(f"random_range_ratio={self.random_range_ratio:g}: is of uniform lengths, not of {name}")
        return Lognormal(length, value) if name == "lognormal" else Zipf(value, 1, length)

    def _trace(self, seed: int) -> "Workload":
        from windtunnel.workload import copies, repeat, scale_time, with_concurrency

        found = self._read(self.trace or TRACE, seed)
        if self.copies > 1 or self.max_shift:
            found = copies(found, self.copies, self.max_shift, seed)
        if self.repeat > 1:
            found = repeat(found, self.repeat)
        if self.time_scale != 1.0:
            found = scale_time(found, self.time_scale)
        if self.redraws:
            found = self._redraw(found, seed)
        return with_concurrency(found, self.max_concurrency) if self.max_concurrency else found

    def _read(self, trace: str, seed: int) -> "Workload":
        from windtunnel.workload import AllAtOnce, builtin, builtin_names, head

        if trace in builtin_names():
            return builtin(trace, seed=seed, num_requests=self.num_prompts)
        if "/" not in trace and "." not in trace and not Path(trace).exists():
            raise unknown("trace", trace, builtin_names())
        from windtunnel.workload import load_trace  # with all formats of traces

        drawn = AllAtOnce() if self.redraws else None
        found = load_trace(trace, arrivals=drawn, columns=self.names_of_columns(), answers=self.answers_told)
        if self.num_prompts is None:
            return found
        if self.num_prompts > len(found):
            raise InputError(f"num_prompts={self.num_prompts}: {trace} has {len(found)} requests: use repeat for more")
        return head(found, self.num_prompts)

    def names_of_columns(self) -> dict[str, str]:
        """Our name of a column → the file's. Raises InputError for words that are no such pairs."""
        found = {}
        for pair in (pair for word in self.columns for pair in word.split(",") if pair):
            ours, equals, theirs = pair.partition("=")
            if not equals or not theirs or ours in found:
                raise InputError(f"columns {pair!r}: must be OURS=THEIRS, each once, e.g. arrival=start_time")
            found[ours] = theirs
        return found

    def _redraw(self, trace: "Workload", seed: int) -> "Workload":
        import numpy as np

        from windtunnel.workload.builtin import NO_TIMES
        from windtunnel.workload.synthetic import stream

        arrival = trace.arrival.copy()
        released = ~np.isnan(arrival)
        arrival[released] = self.arrivals().times(int(released.sum()), stream(seed, "arrivals"))
        return replace(trace, arrival=arrival, notes=tuple(note for note in trace.notes if note != NO_TIMES))
