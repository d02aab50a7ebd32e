"""Handover: by which rules a request goes from the replica that computes its prompt to the one that decodes it."""

from dataclasses import fields
from math import inf
from typing import Any, Literal

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_not_negative, require_words, unknown

Transfer = Literal["none", "pull", "push", "chunked", "layerwise"]
FirstToken = Literal["prefill", "relayed", "decode"]
Gate = Literal["after_prefill", "before_prefill"]
Reservation = Literal["memory", "seats", "seats_and_few"]
OnExpiry = Literal["wait", "fail", "recompute"]


@dataclass(frozen=True)
class Handover:
    """The rules of an engine. Times in seconds. Without any settings the KV is on the other side at once.

    With any transfer the prefill replica holds the blocks of a prompt until they have been sent, and the decode replica
    has memory for them before that begins.
    """

    transfer: Transfer = "none"
    """When the KV leaves: never (it is there at once), all of it when the prompt is computed and the decode replica has
    memory (``pull``) or had it before (``push``), each chunk of the prompt when it is computed (``chunked``), or each
    layer (``layerwise``): then all but the last layer is sent while the prompt is computed, if the link is as fast."""
    first_token: FirstToken = "prefill"
    """Who makes the token that the client sees first: the prefill replica, which sends it at once; the prefill replica,
    whose token the decode replica sends on when the request joins (``relayed``); or the decode replica, which computes
    the last token of the prompt again."""
    gate: Gate = "after_prefill"
    """When the decode replica is asked for memory; ``before_prefill``: the prompt waits for it."""
    reserved_decode_tokens: int = 0
    """Tokens that the decode replica keeps free for each request that it has, before it takes another one."""
    reservation: Reservation = "memory"
    """How many requests may have memory on the decode replica: any number, as long as one more may run (``memory``); as
    many as may run at once (``seats``); or, where at most 32 may, two more for each (``seats_and_few``)."""
    polling_interval: int = 1
    """Steps of the decode replica from one look at what has arrived to the next (SGLang's
    disaggregation_decode_polling_interval)."""
    max_local_prefill_length: int = 0
    """Prompts of up to this many tokens stay: the decode replica computes them itself (conditional disaggregation of
    TensorRT-LLM 1.0 and of Dynamo, by this name; llm-d's decider counts from the next token on). What its cache holds
    of a prompt is not known here, and counts as nothing."""
    proxy: float = 0.0
    """From the end of the prompt to the question for memory on the other side."""
    lease: float = inf
    """How long the engine's prefill replica holds the blocks of a prompt before its transfer is asked for."""
    timeout: float = inf
    """How long the engine's request waits for memory on the other side."""
    on_expiry: OnExpiry = "wait"
    """What follows when one of them runs out. ``wait``: nothing; a run says how many requests waited longer. Otherwise
    the prefill replica frees the blocks at the end of the lease, which the decode replica finds out when it has memory
    for the request: it ends with an error (``fail``), or its prompt is computed there (``recompute``; vLLM's
    kv_load_failure_policy). At the end of ``timeout`` it ends with an error in either case."""

    def __post_init__(self) -> None:
        require_words(self, " of a hand-over")
        require_not_negative(
            "handover",
            reserved_decode_tokens=self.reserved_decode_tokens,
            max_local_prefill_length=self.max_local_prefill_length,
        )
        if self.polling_interval < 1:
            raise InputError(f"handover: polling_interval={self.polling_interval}: must be ≥ 1")
        if not 0 <= self.proxy < inf:
            raise InputError(f"handover: proxy={self.proxy!r}: must be seconds ≥ 0")
        for name in ("lease", "timeout"):
            if not getattr(self, name) > 0:
                raise InputError(
                    f"handover: {name}={getattr(self, name)!r}: must be seconds > 0; leave it out for none"
                )
        self._check_expiry()
        if self.transfer == "none" and self.gate == "before_prefill":
            raise InputError("handover: gate='before_prefill' without a transfer: memory is set aside for one; name it")
        if self.transfer in ("chunked", "layerwise") and self.gate == "after_prefill":
            raise InputError(
                f"handover: transfer={self.transfer!r} sends before the prompt ends: needs gate='before_prefill'"
            )
        if self.transfer == "none" and self.first_token != "prefill":
            raise InputError(f"handover: first_token={self.first_token!r} needs a transfer: name one, such as 'pull'")

    def _check_expiry(self) -> None:
        if self.on_expiry != "wait" and self.lease == self.timeout == inf:
            raise InputError(f"handover: on_expiry={self.on_expiry!r}: nothing runs out: give lease=… or timeout=…")
        if self.on_expiry == "recompute" and self.first_token == "relayed":
            raise InputError(
                "handover: on_expiry='recompute' with first_token='relayed': the engines that relay it give up: use "
                "on_expiry=fail"
            )

    def spec(self) -> dict[str, Any]:
        """The rules for JSON; a time without limit is None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: None if value == inf else value for name, value in values.items()}


HANDOVERS: dict[str, Handover] = {
    "ideal": Handover(),
    "vllm-0.32-nixl-pull": Handover("pull", "decode", lease=30.0),
    "vllm-0.32-nixl-push": Handover("push", "decode", lease=480.0),
    "vllm-0.32-mooncake": Handover("pull", "decode", lease=480.0),
    "sglang-0.5-bootstrap": Handover(
        "chunked",
        "relayed",
        gate="before_prefill",
        reserved_decode_tokens=512,
        reservation="seats_and_few",
        timeout=300.0,
    ),
    "trtllm-1.0": Handover("pull", "relayed", reservation="seats", timeout=60.0),
    "distserve": Handover("pull", "prefill"),
    "simdistserve": Handover(),
}
"""Rules by engine and version. vLLM 0.32.0: distributed/kv_transfer (connectors) and v1/core/sched. SGLang 0.5.23:
srt/disaggregation. TensorRT-LLM 1.0: its context and generation servers, where GUARANTEED_NO_EVICT of the scheduler
reserves the output. DistServe at 82831f1: its engine, and simdistserve, whose transfers take no time."""


def find_handover(name: str) -> Handover:
    """The rules of this name. Raises InputError where there are none."""
    if name not in HANDOVERS:
        raise unknown("hand-over", name, HANDOVERS)
    return HANDOVERS[name]


def usual_handover(backend: str) -> str:
    """The name of what an engine (``vllm``, ``sglang``, ``trtllm``) does unless it is told otherwise."""
    usual = {"sglang": "sglang-0.5-bootstrap", "trtllm": "trtllm-1.0"}
    return usual.get(backend, "vllm-0.32-nixl-pull")
