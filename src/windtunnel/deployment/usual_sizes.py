"""Captured graphs that an engine would not have by itself, which a command must name."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from windtunnel.deployment.engine import Engine
from windtunnel.deployment.resolve import capture_sizes
from windtunnel.errors import InputError
from windtunnel.hardware import device


def other_capture_sizes(pool: Mapping[str, Any]) -> list[int]:
    """The sizes of a pool's entry in a manifest; empty where they are the engine's own, or nothing is captured. On a
    device that is not known by its name they count as its own."""
    given = pool.get("engine", {})
    sizes = list(given.get("cudagraph_capture_sizes") or ())
    if not sizes or "device" not in pool:
        return []
    settings = {entry.name: given[entry.name] for entry in fields(Engine) if entry.name in given}
    try:
        own = capture_sizes(Engine(**settings | {"cudagraph_capture_sizes": None}), device(pool["device"]))
    except InputError:
        return []
    return [] if sizes == list(own) else sizes
