"""Pools: what each of them did."""

from dataclasses import fields
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.metrics.usage import Floats, Usage, power, price, read_footprint, share_there
from windtunnel.metrics.window import Window
from windtunnel.simulate.run import Run


@dataclass(frozen=True)
class PoolUsage:
    """Means over a pool's replicas and the window, sums where the unit is one that adds up."""

    name: str
    role: str
    device: str
    replicas: int
    gpus: int
    busy: float
    """Share of the time in which a step ran."""
    kv: float
    kv_peak: float
    mfu: float
    mbu: float
    batch_size: float
    """Requests per step, mean over the steps that computed something."""
    prefill_tokens: float
    decode_tokens: float
    waiting: float
    """Requests that are in no step; mean over time, all replicas."""
    preemptions: int
    energy_wh: float
    cost_usd: float


def pool_usage(run: Run, used: Usage, window: Window) -> tuple[PoolUsage, ...]:
    """What each pool of a run did within the window."""
    prints = [read_footprint(pool) for pool in run.manifest["pools"]]
    table, hours = used.replicas, window.seconds / 3600
    busy = table.busy_seconds / window.seconds if window.seconds > 0 else np.zeros(len(table.pool))
    each = [pool.get("gpus_per_replica", 1) for pool in run.manifest["pools"]]
    there = share_there(run)
    watts, prices = power(table.pool, busy, prints) * there, price(table.pool, prints) * there
    found = []
    for index, pool in enumerate(run.manifest["pools"]):
        mine = table.pool == index
        share = there[mine].sum()

        def mean(values: Floats, mine: Any = mine, share: float = share) -> float:
            """Over the time for which the pool's replicas are paid."""
            return float(values[mine].sum() / share) if share > 0 else float("nan")

        steps = table.iterations[mine]
        requests = float(np.nansum(table.batch_size[mine] * steps))
        found.append(
            PoolUsage(
                name=str(pool.get("name", "pool")),
                role=str(pool.get("role", "mixed")),
                device=str(pool.get("device", "GPU")),
                replicas=int(mine.sum()),
                gpus=int(mine.sum()) * each[index],
                batch_size=requests / float(steps.sum()) if steps.sum() > 0 else float("nan"),
                busy=mean(busy),
                **{name: mean(getattr(table, name)) for name in ("kv", "mfu", "mbu")},
                kv_peak=float(table.kv_peak[mine].mean()),
                **{
                    name: float(getattr(table, name)[mine].sum())
                    for name in ("prefill_tokens", "decode_tokens", "waiting")
                },
                preemptions=int(table.preemptions[mine].sum()),
                energy_wh=float(watts[mine].sum()) * each[index] * hours,
                cost_usd=float(prices[mine].sum()) * each[index] * hours,
            )
        )
    return tuple(found)


def pools_json(pools: tuple[PoolUsage, ...]) -> list[dict[str, Any]]:
    """The pools for JSON."""
    return [{entry.name: getattr(pool, entry.name) for entry in fields(PoolUsage)} for pool in pools]
