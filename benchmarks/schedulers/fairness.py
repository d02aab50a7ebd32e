"""Which requests starve, and what priorities can do about it (checklist 272, 278, 417)."""

from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.charts import lines
from benchmarks.page import Findings, table
from benchmarks.schedulers.machine import Machine, Served, conversations
from windtunnel import Workload
from windtunnel.workload.synthetic import stream

LOADS = {"90 %": 0.9, "130 %": 1.3}
"""Share of the requests per second that the machine serves at most."""
URGENT = 0.7
"""Share of urgent requests."""
AGE = 10
"""Seconds of waiting that are worth one class of priority."""
BASE = "trtllm-guaranteed-no-evict:max_num_seqs=64"
CLASSES = {"fcfs": ("fcfs", False), "priority": ("priority", False), "priority that ages": ("priority", True)}
"""Label → (order of admission, whether a class is worth a time)."""
COUNTS = (500, 1000, 2000, 4000, 8000)
ORDERS = ("fcfs", "shortest_job", "longest_job", "shortest_output")


@cache
def capacity() -> float:
    """Requests per second that are served when all are there at once."""
    return Machine().serve(BASE, conversations(float("inf"), prompt=300, output=200)).summary.request_throughput


@cache
def load(share: float, aging: bool = False) -> Workload:
    """Conversations of two classes, 0 urgent and 1 not; with aging a class is worth ten seconds of arrival."""
    plain = conversations(share * capacity(), prompt=300, output=200)
    urgent = stream(3, "classes").random(len(plain)) < URGENT
    classes = np.where(urgent, 0, 1)
    return replace(plain, priority=np.floor(plain.arrival + AGE * classes).astype(np.int64) if aging else classes)


@cache
def served(order: str, share: float, aging: bool = False) -> Served:
    """The load in an order of admission, memory reserved."""
    return Machine().serve(f"{BASE},order={order}", load(share, aging))


def waits(run: Served, chosen: np.ndarray) -> tuple[float, float]:
    """Mean and longest time to the first step of some requests."""
    queue = run.run.requests.scheduled - run.run.requests.arrival
    return float(queue[chosen].mean()), float(queue[chosen].max())


@cache
def served_first(order: str, share: float, requests: int) -> Served:
    """So many requests at a load."""
    rate = share * capacity()
    return Machine().serve(f"{BASE},order={order}", conversations(rate, requests, prompt=300, output=200))


def findings() -> Findings:
    """Orders of admission, and two classes of priority with and without ageing."""
    usual, high = LOADS.values()
    rows = []
    for order in ORDERS:
        runs = [served(order, share) for share in LOADS.values()]
        rows.append((order, *(value for run in runs for value in (run.mean("ttft"), run.summary.max_wait))))
    urgent = load(high).priority == 0
    classes = []
    for label, (order, aging) in CLASSES.items():
        runs = [served(order, share, aging) for share in LOADS.values()]
        cells = [value for run in runs for value in (*waits(run, urgent), waits(run, ~urgent)[1])]
        classes.append((label, *cells))
    words = ("urgent mean, s", "urgent longest, s", "others longest, s")
    fcfs, shortest = served("fcfs", high), served("shortest_job", high)
    strict, aged = served("priority", high), served("priority", high, True)
    growth = {
        f"{order}, {name}": [(float(n), served_first(order, share, n).summary.max_wait) for n in COUNTS]
        for name, share in LOADS.items()
        for order in ("fcfs", "shortest_job")
    }
    facts = {
        "orders": table(("order of admission", *columns("TTFT mean, s", "longest wait, s")), rows),
        "classes": table(("", *columns(*words)), classes),
        "fcfs_ttft": fcfs.mean("ttft"),
        "shortest_ttft": shortest.mean("ttft"),
        "shortest_wait": shortest.summary.max_wait / fcfs.summary.max_wait,
        "most": COUNTS[-1],
        "usual_most": served_first("shortest_job", usual, COUNTS[-1]).summary.max_wait,
        "high_most": served_first("shortest_job", high, COUNTS[-1]).summary.max_wait,
        "urgent_strict": waits(strict, urgent)[1],
        "urgent_aged": waits(aged, urgent)[1],
        "urgent_fcfs": waits(fcfs, urgent)[1],
        "others_strict": waits(strict, ~urgent)[1],
        "others_aged": waits(aged, ~urgent)[1],
        "others_fcfs": waits(fcfs, ~urgent)[1],
        "age": AGE,
        "capacity": capacity(),
    }
    chart = lines("Longest wait", "requests served", "seconds", growth, log_x=True, log_y=True)
    return Findings(facts, {"fairness.svg": chart})


def columns(*words: str) -> list[str]:
    """Heads of the columns of both loads."""
    return [f"load {name}: {what}" for name in LOADS for what in words]
