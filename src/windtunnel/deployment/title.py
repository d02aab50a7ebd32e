"""What serves, in one line."""

from collections.abc import Mapping
from typing import Any

SIZES = (("tensor", "TP"), ("pipeline", "PP"), ("data", "DP"), ("prefill_context", "PCP"))


def title(pools: list[Mapping[str, Any]], with_rules: bool = True) -> str:
    """``Qwen/Qwen3-8B on 2 replicas of 4 × H100 SXM, TP 4, vllm-0.32``, from the specifications of the pools; of
    several pools what each stands on. ``with_rules``: with the engine and, where it is another one, its scheduler."""
    rules = list(dict.fromkeys(_rules(pool) for pool in pools)) if with_rules else []
    shared, own = f", {rules[0]}" if len(rules) == 1 else "", len(rules) > 1
    if len(pools) == 1:
        return f"{pools[0]['model']} on {_servers(pools[0])}{shared}"
    texts = [f"{pool['name']} on {_servers(pool)}{f', {_rules(pool)}' if own else ''}" for pool in pools]
    return f"{pools[0]['model']}: {'; '.join(texts)}{shared.replace(', ', '; ', 1)}"


def device_name(name: str) -> str:
    """A device as people write it: ``H100 SXM``."""
    return name.replace("_", " ").upper()


def replicas_of(pool: Mapping[str, Any]) -> str:
    """``4 replicas of ``, of a pool that is scaled ``1 to 4 replicas of ``, and nothing of a lone one."""
    replicas, least = pool["replicas"], pool.get("least_replicas", pool["replicas"])
    return f"{f'{least} to ' * (least < replicas)}{replicas} replicas of " if replicas > 1 else ""


def _servers(pool: Mapping[str, Any]) -> str:
    engine, replicas = pool["engine"], pool["replicas"]
    sizes = [(engine.get(f"{name}_parallel_size", 1), short) for name, short in SIZES]
    split = "".join(f", {short} {size}" for size, short in sizes if size > 1)
    return f"{replicas_of(pool)}{pool['gpus'] // replicas} × {device_name(pool['device'])}{split}"


def _rules(pool: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, (pool["engine"]["preset"], pool["engine"]["scheduler"])))
