"""Replicas that come, go and fail: rules of an autoscaler, and faults, as data."""

from collections.abc import Mapping
from math import ceil, inf
from typing import Literal, NamedTuple, Protocol, get_type_hints

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_words, unknown
from windtunnel.files import typed_words
from windtunnel.policy.look import Look


class Rule(Protocol):
    """How many replicas there should be."""

    def wanted(self, look: Look) -> int:
        """Before the bounds of ``Autoscale`` are applied."""


@dataclass(frozen=True)
class Thresholds:
    """One more or one less, as Dynamo's planner does by load (1.6.1, components/planner, "easy" thresholds: one more
    when a queue or KV memory is fuller than ``…_up``, one less when both are emptier than ``…_down``)."""

    queue_up: float = 1.0
    queue_down: float = 0.1
    kv_up: float = 0.4
    kv_down: float = 0.1

    def __post_init__(self) -> None:
        for name in ("queue", "kv"):
            down, up = getattr(self, f"{name}_down"), getattr(self, f"{name}_up")
            if not 0 <= down < up:
                raise InputError(f"autoscale: {name}_down={down}, {name}_up={up}: must be 0 ≤ down < up")

    def wanted(self, look: Look) -> int:
        """See Rule."""
        if look.queued > self.queue_up or look.kv > self.kv_up:
            return look.replicas + 1
        return look.replicas - (look.queued < self.queue_down and look.kv < self.kv_down)


@dataclass(frozen=True)
class Planner:
    """One more or one less, as Dynamo's planner does by load where it has no limits to keep (1.6.1, components/planner,
    "easy" decisions): a prefill pool goes by the prompts that wait, any other by KV memory, and a mixed one counts
    prompts that wait as memory. One more if any replica is over ``up``, one less if all are below ``down``."""

    target: Literal["throughput", "latency"] = "throughput"
    """Which of the planner's thresholds hold where none is given."""
    up: float | None = None
    """None: the planner's. By max_model_len in a prefill pool, a share of the blocks in others."""
    down: float | None = None

    def __post_init__(self) -> None:
        require_words(self, " of autoscale")
        for role in THRESHOLDS:
            down, up = self.thresholds(role)
            if not 0 <= down < up:
                raise InputError(f"autoscale: down={down}, up={up}: must be 0 ≤ down < up")

    def thresholds(self, role: str) -> tuple[float, float]:
        """(One less below the first, one more above the second) in a pool of this role."""
        down, up = THRESHOLDS[role][self.target]
        return down if self.down is None else self.down, up if self.up is None else self.up

    def wanted(self, look: Look) -> int:
        """See Rule. As in the planner: a prompt queue that is just at a threshold is over it, and below the threshold
        of latency."""
        prompts, (down, up) = look.role == "prefill", self.thresholds(look.role)
        loads = [load[0] if prompts else load[1] for load in look.loads]
        if not loads:
            return look.replicas
        if max(loads) > up or (prompts and max(loads) == up):
            return look.replicas + 1
        quiet = max(loads) < down or (prompts and self.target == "latency" and max(loads) == down)
        return look.replicas - quiet


THRESHOLDS = {
    "prefill": {"throughput": (0.1, 1.0), "latency": (0.0, 0.1)},
    "decode": {"throughput": (0.6, 1.0), "latency": (0.1, 0.4)},
    "mixed": {"throughput": (0.6, 1.0), "latency": (0.1, 0.4)},
}
"""Of Dynamo's planner: one less below the first, one more above the second."""


@dataclass(frozen=True)
class Hpa:
    """As Kubernetes' horizontal pod autoscaler: ⌈replicas · metric / target⌉ of the metric that asks for most, and no
    change within the tolerance (autoscaling/v2; KEDA sets the same autoscaler). The metrics are vLLM's: KV blocks in
    use, and prompts that wait. Its window before fewer replicas, five minutes, is ``interval``."""

    kv: float = 0.5
    """Target of the share of KV blocks that requests hold; the mean of the replicas."""
    queued: float = 0.25
    """Target of the prompt tokens that wait for each replica, by max_model_len."""
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        for name in ("kv", "queued"):
            if not 0 < getattr(self, name) < inf:
                raise InputError(f"autoscale: {name}={getattr(self, name)}: must be a target > 0")
        if not 0 <= self.tolerance < 1:
            raise InputError(f"autoscale: tolerance={self.tolerance}: must be a share from 0 to below 1")

    def wanted(self, look: Look) -> int:
        """See Rule."""
        ratios = (look.kv / self.kv, look.queued / self.queued)
        return max(
            look.replicas if abs(ratio - 1) <= self.tolerance else ceil(look.replicas * ratio) for ratio in ratios
        )


@dataclass(frozen=True)
class Forecast:
    """As many as the expected rate needs, as Dynamo's planner does by throughput: ⌈requests/s / ``rps``⌉, where
    ``rps`` is what one replica serves within its limits (``windtunnel plan`` knows it)."""

    rps: float = 0.0
    predictor: Literal["constant", "trend"] = "constant"
    """The rate of the last interval, or that and its change since the one before."""

    def __post_init__(self) -> None:
        _require_rps(self.rps)
        require_words(self, " of autoscale")

    def wanted(self, look: Look) -> int:
        """See Rule."""
        change = look.arrived - look.before if self.predictor == "trend" else 0.0
        return ceil(max(look.arrived + change, 0.0) / self.rps)


@dataclass(frozen=True)
class Foresight:
    """As many as the rate needs that will really come: a bound that no forecast beats with the same ``rps``."""

    rps: float = 0.0

    def __post_init__(self) -> None:
        _require_rps(self.rps)

    def wanted(self, look: Look) -> int:
        """See Rule."""
        return ceil(look.coming / self.rps)


@dataclass(frozen=True)
class Variant:
    """As llm-d's variant autoscaler with its queueing model and tuner (see ``policy.variant``): ⌈requests/s / what a
    replica serves within limits on its means⌉."""

    ttft: float = inf
    """Limit on the mean TTFT in seconds; without one and ``tpot`` they follow from what is learned."""
    tpot: float = inf
    slo_multiplier: float = 3.0
    """Times the shortest iteration that one may take, where no limits are given."""
    alpha: float = 0.0
    """Seconds of an iteration that the tuner begins with; 0: guessed from its first look, which an overload spoils."""
    beta: float = 0.0
    """Seconds for each token that is computed."""
    gamma: float = 0.0
    """Seconds for each token of KV that is read."""

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tpot > 0 and (self.ttft == inf) == (self.tpot == inf)):
            raise InputError(f"autoscale: ttft={self.ttft}, tpot={self.tpot}: give both, in seconds > 0, or neither")
        if not 1 < self.slo_multiplier < inf:
            raise InputError(f"autoscale: slo_multiplier={self.slo_multiplier}: must be > 1")
        start = self.alpha, self.beta, self.gamma
        if not (start == (0.0, 0.0, 0.0) or all(0 < one < inf for one in start)):
            raise InputError(f"autoscale: alpha, beta, gamma={start}: give all three, in seconds > 0, or none")

    def fresh(self) -> Rule:
        """The rule of one run, which has learned nothing."""
        from windtunnel.policy.variant import Sizing

        start = (self.alpha, self.beta, self.gamma) if self.alpha else None
        return Sizing(self.ttft, self.tpot, self.slo_multiplier, start)

    def wanted(self, look: Look) -> int:
        """By this look alone."""
        return self.fresh().wanted(look)


def _require_rps(rps: float) -> None:
    if not 0 < rps < inf:
        raise InputError(f"autoscale: rps={rps}: must be > 0, the requests/s that one replica serves within its limits")


Known = Thresholds | Planner | Hpa | Forecast | Foresight | Variant
RULES: dict[str, type[Known]] = {
    "thresholds": Thresholds,
    "planner": Planner,
    "hpa": Hpa,
    "variant": Variant,
    "forecast": Forecast,
    "foresight": Foresight,
}


@dataclass(frozen=True)
class Autoscale:
    """Replicas start and drain by a rule: a replica that drains gets no more requests and stops when it has none."""

    rule: Rule
    least: int = 1
    most: int = 8
    interval: float = 180.0
    """Seconds between ticks."""
    startup: float = 60.0
    """Seconds until a replica that is started serves."""
    pool: str = ""
    """The name of the pool that it scales, where there are several."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InputError(f"autoscale: least={self.least}, most={self.most}: must be 1 ≤ least ≤ most")
        if not 0 < self.interval < inf:
            raise InputError(f"autoscale: interval={self.interval}: must be seconds > 0")
        if not 0 <= self.startup < inf:
            raise InputError(f"autoscale: startup={self.startup}: must be seconds ≥ 0")

    @classmethod
    def of(cls, words: Mapping[str, str]) -> "Autoscale":
        """The autoscaler of these words, ``policy`` among them. Raises InputError for an unknown or a wrong one."""
        policy = words.get("policy", "thresholds")
        if policy not in RULES:
            raise unknown("policy of autoscale", policy, RULES)
        rule, own = RULES[policy], {name: kind for name, kind in get_type_hints(cls).items() if name != "rule"}
        left = {name: value for name, value in words.items() if name != "policy"}
        given = typed_words(left, own | get_type_hints(rule), "autoscale: ")
        settings = {name: value for name, value in given.items() if name in own}
        return cls(rule(**{name: value for name, value in given.items() if name not in own}), **settings)

    @property
    def learns(self) -> bool:
        """Whether its rule goes by the ``traffic`` of a look."""
        return isinstance(self.rule, Variant)

    def fresh(self) -> Rule:
        """Its rule for one run: one that learns has learned nothing."""
        return self.rule.fresh() if isinstance(self.rule, Variant) else self.rule

    def wanted(self, look: Look, rule: Rule | None = None) -> int:
        """How many replicas there should be, by its rule or by the one of a run."""
        return min(max((rule or self.rule).wanted(look), self.least), self.most)


OnFailure = Literal["lost", "retry", "migrate"]


class Failure(NamedTuple):
    """One failure of a replica, or of what joins it to others."""

    time: float
    replica: int
    """Counted through all pools; WHOLE_LINK: none of them."""
    down: float
    """Seconds until it is back."""
    part: str = "replica"


WHOLE_LINK = -1


@dataclass(frozen=True)
class Faults:
    """When replicas or their link fail, and what becomes of their requests.

    Either one fails once, or each one again and again, at random. A failed replica loses its KV and comes back empty.
    """

    replica: int = 0
    """Which one fails, counted from 0."""
    at: float = inf
    """When it does, in seconds."""
    down: float = 60.0
    """Seconds until a failed replica is back; of random failures the mean of an exponential distribution."""
    mtbf: float = 0.0
    """Mean seconds between the failures of a replica, exponentially distributed; 0: they are not random."""
    until: float = 86_400.0
    """Seconds up to which there are random failures."""
    on_failure: OnFailure = "retry"
    """``lost``: they end. ``retry``: they begin again elsewhere. ``migrate``: they go on elsewhere with the tokens that
    they have, whose KV is computed again (Dynamo's request migration)."""
    pool: str = ""
    """The name of the pool whose replica fails, where there are several."""
    part: Literal["replica", "link"] = "replica"
    """``link``: the replica's NICs fail, or, without a pool, the whole link between prefill and decode pools; a
    transfer that this breaks is ``lost``, or begins again when the link is back."""

    def __post_init__(self) -> None:
        require_words(self)
        if (self.at == inf) == (self.mtbf == 0):
            raise InputError("fail: give a time (at=600), or a mean time between failures (mtbf=3600)")
        for name in ("replica", "at", "down", "mtbf"):
            if not getattr(self, name) >= 0:
                raise InputError(f"fail: {name}={getattr(self, name)}: must be ≥ 0")

    def failures(self, replicas: int, seed: int, first: int = 0) -> list[Failure]:
        """What fails when, in order, in a pool of this many replicas, or (0) of the whole link; ``first`` is the number
        of the pool's first replica. Raises InputError for a replica that is not there."""
        if self.mtbf == 0:
            if replicas and self.replica >= replicas:
                raise InputError(f"fail: replica={self.replica}: there are {replicas}, counted from 0")
            return [Failure(self.at, first + self.replica if replicas else WHOLE_LINK, self.down, self.part)]
        found = []
        for j in range(first, first + replicas) if replicas else [WHOLE_LINK]:
            stream = [seed, 0, 7] if j == WHOLE_LINK else [seed, j, 5 if self.part == "replica" else 6]
            found += [Failure(time, j, down, self.part) for time, down in self._at_random(stream)]
        return sorted(found)

    def _at_random(self, stream: list[int]) -> list[tuple[float, float]]:
        """(When, for how long) up to ``until``: in turn the seconds up to a failure and those until it is over."""
        import numpy as np

        rng, now, found = np.random.default_rng(stream), 0.0, list[tuple[float, float]]()
        scales = np.array([self.mtbf, self.down] if self.down else [self.mtbf])
        while now < self.until:
            drawn = scales * rng.standard_exponential((64, len(scales)))
            up, down = drawn[:, 0], drawn[:, -1] if self.down else np.zeros(64)
            changes = np.cumsum(np.append(now, np.stack([up, down], axis=1)))
            found += zip(changes[1::2].tolist(), down.tolist(), strict=True)
            now = float(changes[-1])
        return [(time, down) for time, down in found if time < self.until]


class PoolLives(NamedTuple):
    """What became of the replicas of one pool."""

    unserved_s: float
    """Seconds in which none of them served."""
    starts: int
    failures: int


class Lives(NamedTuple):
    """What became of replicas that start, stop or fail, and of their requests."""

    paid_s: list[float]
    """Seconds that each replica was there, be it starting, draining or failed."""
    up_s: list[float]
    """Seconds in which it served."""
    seconds: float
    """From 0 to the last event."""
    unserved_s: float
    """Seconds in which no request could be served: none of the replicas that compute prompts was there, or none of
    those that decode."""
    starts: int
    failures: int
    """Of replicas."""
    retries: int
    """Requests that were on a failed replica and went on elsewhere, counted each time."""
    lost: list[int]
    """Requests that ended with their replica, or with the link."""
    pools: tuple[PoolLives, ...] = ()
    """In the order of the fleet's."""
    states: tuple[tuple[int, str, float, float], ...] = ()
    """(Replica, what it was, from, to): whenever one was starting, draining or failed; WHOLE_LINK or a replica whose
    link failed."""
    link_failures: int = 0
    resent: int = 0
    """Transfers that the link broke, or that waited for it, and that began again."""
