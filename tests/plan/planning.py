"""What the tests of planning share: deployments with a known cost, small spaces, and questions about them."""

from typing import Any

from windtunnel.deployment import SLO, Deployment, Engine, Pool, parse_goodput
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.batch_times import linear
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.plan.question import Question
from windtunnel.plan.space import Space
from windtunnel.workload import Both, Fixed, Gamma, Lognormal, Workload, generate

LENGTHS = Both(Lognormal(300, 0.7, 1500), Lognormal(60, 0.7, 400))


def server(batch: int, base: float, token: float = 0.0) -> tuple[Deployment, tuple[Tabulated, ...]]:
    """A replica whose steps take base + token · (tokens) seconds, with so many requests at most, and its tables."""
    engine = Engine(
        max_model_len=64, max_num_seqs=batch, max_num_batched_tokens=64, async_scheduling=False, enforce_eager=True
    )
    times = linear(base, token, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=batch, max_model_len=64)
    pool = Pool(load_model("Llama-3.1-8B"), device("h100"), engine)
    return Deployment((pool,)), (Tabulated(times, {}, {}, ()),)


def single_tokens(count: int, seed: int = 0, **settings: Any) -> Workload:
    """Poisson arrivals of requests of one step: a prompt of one token, answered by one."""
    return generate(Gamma(1.0), Both(Fixed(1), Fixed(1)), count, seed, **settings)


def chat(count: int = 300, seed: int = 0) -> Workload:
    """Poisson arrivals of short conversations."""
    return generate(Gamma(1.0), LENGTHS, count, seed)


def question(
    workload: Workload | None = None, goodput: tuple[str, ...] = ("ttft:400", "tpot:30"), **more: Any
) -> Question:
    settings: dict[str, Any] = {"slo": parse_goodput(goodput) if goodput else SLO(), "perf": "modelled"}
    return Question(workload or chat(), **(settings | more))


def small_space(**axes: Any) -> Space:
    """Llama-3.1-8B on three devices with a short context: tables are quick to build."""
    usual: dict[str, Any] = {
        "device": ("h100", "l40s"),
        "tensor_parallel_size": (1, 2),
        "max_num_seqs": (4, 16, 64),
        "max_num_batched_tokens": (256, 1024),
        "max_model_len": (2048,),
    }
    return Space("Llama-3.1-8B", usual | axes)
