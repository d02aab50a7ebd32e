"""Handed over: the parts of the time to first token of disaggregated pools, and what goes over the link."""

from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from windtunnel.metrics.distribution import Distribution
from windtunnel.metrics.window import Window
from windtunnel.simulate.run import Floats, Handovers, Run

TTFT_PARTS = tuple(entry.name.removeprefix("ttft_") for entry in fields(Handovers) if entry.name.startswith("ttft_"))
"""Parts of the time to first token, in the order in which most engines go through them; see ``Handovers``."""


def parts_in_order(run: Run) -> dict[str, tuple[Floats, Floats]]:
    """When each part of the time to first token begins and ends, by name and one after the other; s, NaN without a
    first token. Nothing without prefill pools."""
    apart = run.handovers
    if apart is None:
        return {}
    asked_before = run.manifest["deployment"]["handover"]["gate"] == "before_prefill"
    found, begin = {}, run.requests.arrival
    for name in ("admission", *(part for part in TTFT_PARTS if part != "admission")) if asked_before else TTFT_PARTS:
        end = begin + getattr(apart, f"ttft_{name}")
        found[name] = begin, end
        begin = end
    return found


def first_token_parts(run: Run, window: Window) -> Mapping[str, Distribution]:
    """Each part of the time to first token over the requests of the window; nothing without prefill pools."""
    if run.handovers is None:
        return {}
    arrived = window.holds(run.requests.arrival)
    return {name: Distribution(getattr(run.handovers, f"ttft_{name}")[arrived]) for name in TTFT_PARTS}


def moved_bytes(run: Run) -> float:
    """Bytes that went over the link; 0 without one."""
    return 0.0 if run.handovers is None else float(np.nansum(run.handovers.kv_bytes))
