"""What a request says of sampling, checked as vLLM checks it. Sampled words change no step, so nothing else is done."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from windtunnel.serve.openai.requests import RefusedError

RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, float("inf"), True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, float("inf"), False),
    "length_penalty": (float("-inf"), float("inf"), True),
}
"""Least and most of each number, and whether the least is allowed (vLLM 0.33, SamplingParams._verify_args)."""
NOT_SIMULATED = (
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "prompt_embeds", "use_beam_search", "audio"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "truncate_prompt_tokens"),
    *("bad_words", "allowed_token_ids", "stop_token_ids", "functions", "function_call", "prediction"),
)
"""Parameters that would change an answer's tokens or its document."""

MOST_BIASED = 4096
"""Tokens of a logit_bias."""


def check_sampling(body: Mapping[str, Any]) -> None:
    """Raise RefusedError for a parameter that vLLM refuses, and for one that would change the answer."""
    for name in NOT_SIMULATED:
        if body.get(name) not in (None, False, 0, "", [], {}, "none"):
            raise RefusedError(f"{name}: not simulated: leave it out")
    for name, limits in RANGES.items():
        if (value := body.get(name)) is not None:
            _check_number(name, value, *limits)
    top_k = body.get("top_k")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1):
        raise RefusedError(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    bias = body.get("logit_bias")
    if bias is not None and not isinstance(bias, dict):
        raise RefusedError("logit_bias: must be an object of numbers by token")
    if bias and len(bias) > MOST_BIASED:
        raise RefusedError(f"logit_bias: {len(bias)} tokens are not simulated: at most {MOST_BIASED} are")
    if bias and not all(map(_is_number, bias.values())):
        raise RefusedError("logit_bias: must be an object of numbers by token")
    best_of = body.get("best_of")
    if best_of is not None and best_of != (body.get("n") or 1):
        raise RefusedError(f"best_of={best_of}: not simulated; use n")


def _check_number(name: str, value: Any, least: float, most: float, closed: bool) -> None:
    if not _is_number(value):
        raise RefusedError(f"{name}: must be a number")
    if not (least <= value <= most) or (value == least and not closed):
        bounds = f"{'[' if closed else '('}{least:g}, {most:g}]"
        raise RefusedError(f"{name} must be in {bounds}, got {value}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
