"""The settings of recordings of vLLM's v1 scheduler, and the policy that they make of a version's rules."""

from dataclasses import replace
from typing import Any

from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.vllm_v1 import VERSIONS

Settings = dict[str, Any]

CONFIG: Settings = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks": 1000,
    "block_size": 16,
    "max_model_len": 32768,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "max_num_active_seqs": None,
    "async_scheduling": False,
}
"""The recorder's settings and what holds when a recording does not give them."""

BATCH_TIME = {"base": 0.01, "per_prefill_tok": 1e-4, "per_decode": 1e-4, "per_ctx": 1e-7}
"""The recorder's coefficients in seconds."""

SINCE_0_32 = ("vllm-0.33", "vllm-0.32")
"""Versions that know ``watermark``, ``max_num_active_seqs`` and ``long_prefill_token_threshold_adaptive``."""

TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def known(given: Settings, defaults: Settings, kind: str) -> Settings:
    """The given values over the defaults; null stands for the default."""
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in defaults:
            raise unknown(kind, name, defaults)
        expected = int if defaults[name] is None else type(defaults[name])
        fits = type(value) is expected or (expected is float and type(value) is int)
        if value is not None and not fits:
            raise InputError(f"{name}={value!r}: must be {TYPES[expected]}")
    return defaults | values


def limits(config: Settings) -> Limits:
    """What one scheduler may use; the first block is never handed out."""
    if config["num_gpu_blocks"] < 2:
        raise InputError(f"num_gpu_blocks={config['num_gpu_blocks']}: must be ≥ 2, of which the first is never used")
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")
    return Limits(**{name: config[name] for name in names}, num_blocks=config["num_gpu_blocks"] - 1)


def policy(config: Settings, version: str) -> VllmV1:
    """The version's rules with the recording's settings."""
    rules = VERSIONS[version]
    if config["policy"] not in ("fcfs", "priority"):
        raise unknown("policy", config["policy"], ("fcfs", "priority"))
    new = version in SINCE_0_32
    return replace(
        rules.with_flags(config | {"scheduling_policy": config["policy"], "pipeline_parallel_size": 1}),
        reserve_full_prompt=rules.reserve_full_prompt and config["scheduler_reserve_full_isl"],
        watermark=config["watermark"] if new else 0.0,
        max_num_active_seqs=(config["max_num_active_seqs"] or 0) if new else 0,
        adaptive_threshold=new and config["long_prefill_token_threshold_adaptive"],
    )
