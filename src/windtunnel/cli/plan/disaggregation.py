"""Flags of plan for disaggregated prefill and decode, and the space that they describe."""

import shlex
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Group

from windtunnel.cli.plan.flags import Values, split
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from windtunnel.deployment import Link, Pool
    from windtunnel.plan.disaggregation.pool_space import PoolSpace
    from windtunnel.plan.question import Question
    from windtunnel.plan.space import Space

RATIO = 4
KINDS = ("mixed", "separate", "both")
POOLS = Group("Disaggregated prefill and decode", sort_key=0)
OF_PREFILL, OF_DECODE = "max_num_batched_tokens", "max_num_seqs"
"""Axes of mixed servers that only one side needs."""
BATCHED_TOKENS = ("2048", "8192", "16384")
"""Tokens of a prefill step that are tried: what may be larger than where decodes wait for it."""


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Prefill and decode in their own pools."""

    pools: Literal["mixed", "separate", "both"] = "mixed"
    """Mixed servers, disaggregated ones (separate), or both kinds and which is better."""
    prefill: Values = ()
    """Axes of the prefill side alone: WORD=VALUE,VALUE, e.g. device=h100,a100 tensor_parallel_size=1,2. The axes above
    hold for both sides, but max_num_batched_tokens is prefill's and max_num_seqs decode's."""
    decode: Values = ()
    """Axes of the decode side alone, in the same words."""
    decode_router: Values = ()
    """Routers of the decode side; default: as --router."""
    ratio: int = RATIO
    """Largest number of replicas of a side in the ratios that are tried."""
    placement: Literal["high", "low"] | None = None
    """DistServe's placement instead of all pairs: each side's layout by itself (high: KV gets anywhere fast), or pairs
    within a node (low); then simulated as a whole."""
    link: str | None = None
    """The link between both sides, in the words of ``windtunnel run``."""
    handover: str | None = None
    """Hand-over rules, in the words of ``windtunnel run``; default: the engine's."""

    def __post_init__(self) -> None:
        """Refuse words for what is not searched."""
        names = ("prefill", "decode", "decode_router", "ratio", "placement", "link", "handover")
        given = [name for name in names if getattr(self, name) != getattr(type(self), name)]
        if self.pools == "mixed" and given:
            raise InputError(f"{given[0]}: is for disaggregated prefill and decode: add --pools separate or both")

    def of_file(self, file: "Path | None") -> "Disaggregation":
        """What the file of a space says, or these flags where it says nothing. Raises InputError where both do."""
        from windtunnel.plan.space import pools_of
        from windtunnel.scenario.joined import joint_text

        found = pools_of(file) if file is not None else {}
        if not found:
            return self
        if self != Disaggregation():
            raise InputError(f"space {str(file)!r}: says what prefill and decode are: leave out the flags")
        words: dict[str, Any] = {"pools": "separate"} | found
        try:
            words |= {side: _axes_of(side, found[side]) for side in ("prefill", "decode") if side in found}
            if "decode_router" in found:
                given = found["decode_router"]
                words["decode_router"] = tuple(map(str, given if isinstance(given, list) else [given]))
            if words["pools"] not in KINDS:
                raise InputError(f"pools={words['pools']!r}: must be one of {', '.join(KINDS)}")
            if isinstance(words.get("ratio", 1), bool) or not isinstance(words.get("ratio", 1), int):
                raise InputError(f"ratio={words['ratio']!r}: must be an integer ≥ 1")
            words |= {name: joint_text(found[name]) for name in ("link", "handover") if name in found}
            return Disaggregation(**words)
        except InputError as error:
            raise InputError(f"space {str(file)!r}: {error}") from error

    def spaces(self, mixed: "Space", question: "Question", rate: float | None) -> "list[Space | PoolSpace]":
        """What is searched, mixed servers first; a placement is for the question at this rate, or at the load's."""
        if self.pools == "mixed":
            return [mixed]
        separate = self.space(mixed)
        if self.placement is not None:
            from windtunnel.plan.disaggregation.placed import placed

            found = placed(separate, question, rate or question.workload.request_rate, self.placement)
            sys.stderr.write(f"windtunnel: {found.words}\n")
            separate = found.space
        return [mixed, separate] if self.pools == "both" else [separate]

    def space(self, mixed: "Space") -> "PoolSpace":
        """Both sides, from the space of mixed servers that the other flags describe.

        Raises InputError for what cannot be.
        """
        from windtunnel.plan.disaggregation.pool_space import PoolSpace
        from windtunnel.scenario.joined import handover_of, link_of

        sides = {role: self._side(mixed, role) for role in ("prefill", "decode")}
        some = next(iter(sides["decode"].enumerate().candidates), None)
        if some is None:
            raise InputError("decode: none of its servers can run: give it other axes")
        decode = some.deployment.pools[0]

        def link(pools: "Sequence[Pool]") -> "Link":
            return link_of(self.link, pools)

        return PoolSpace(
            prefill=sides["prefill"],
            decode=sides["decode"],
            link=link,
            handover=handover_of(self.handover, [replace(decode, role="decode")]),
            constraints=mixed.constraints,
            ratio=self.ratio,
            routers=self._routers(mixed),
            decode_routers=tuple(split(self.decode_router)) or (None,),
        )

    def _routers(self, mixed: "Space") -> tuple[str, ...]:
        """Those that were given; others are tried for mixed servers alone."""
        return tuple(mixed.axes["router"]) if "router" in frozenset(mixed.axes) - mixed.open else ("round_robin",)

    def _side(self, mixed: "Space", role: str) -> "Space":
        """The axes of one side: those that were given, the usual ones that it needs, and its own."""
        from windtunnel.plan.space import Constraints, typed_values, word_of

        own, other = (OF_PREFILL, OF_DECODE) if role == "prefill" else (OF_DECODE, OF_PREFILL)
        needed = {"device", "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", own}
        given = frozenset(mixed.axes) - mixed.open
        if self.placement is not None and role == "prefill":
            needed.add("pipeline_parallel_size")
        taken = (needed | given) - {"router", other}
        if "autoscale" in given:
            raise InputError("autoscale: is an axis of mixed servers: leave it out, or search --pools mixed")
        found: dict[str, Any] = {axis: values for axis, values in mixed.axes.items() if axis in taken}
        if role == "prefill" and OF_PREFILL not in given:
            found[OF_PREFILL] = typed_values(OF_PREFILL, list(BATCHED_TOKENS))
        for text in _words(getattr(self, role)):
            word, equals, values = text.partition("=")
            if not equals:
                raise InputError(f"{role} {text!r}: must be WORD=VALUE,VALUE, e.g. tensor_parallel_size=1,2")
            word = word_of(word)
            found[word] = typed_values(word, split((values,)))
        return replace(mixed, axes=found, open=frozenset(), constraints=Constraints())


def _axes_of(side: str, axes: Any) -> tuple[str, ...]:
    """The axes of a side as a file has them, in the words of the flag."""
    if not isinstance(axes, dict):
        raise InputError(f"{side}={axes!r}: must be lines of `axis: [values]`, e.g. max_num_seqs: [64, 256]")
    return tuple(
        shlex.quote(f"{axis}={','.join(_text(value) for value in (values if isinstance(values, list) else [values]))}")
        for axis, values in axes.items()
    )


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _words(texts: tuple[str, ...]) -> list[str]:
    """Words of flags, quoted together or not: "device=h100 'store=none,tier=host capacity=1e12'"."""
    return [word for text in texts for word in shlex.split(text)]
