"""Host work of latent attention in TensorRT-LLM's steps with prompts: ``python -m benchmarks.accuracy.eager_host``.

Each constant is chosen of VALUES by the first tokens of one half of the served points that it decides (DeepSeek without
attention data parallelism, prompts of 1,024 tokens: longer ones hide the host), and the error of the other half is
printed, for both halves in turn; then what all points choose, which is what ``perf.tabulate.host`` has.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from statistics import median

from windtunnel.deployment import Deployment
from windtunnel.perf.tabulate import host
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.simulate.overheads import CLIENTS
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.validation.comparison import Options
from windtunnel.validation.served_points import Point, read_points
from windtunnel.validation.served_replay import replay_all
from windtunnel.workload.columns import Workload

VALUES = (0.8e-3, 1.0e-3, 1.2e-3, 1.4e-3, 1.6e-3, 1.8e-3, 2.0e-3, 2.25e-3, 2.5e-3, 2.75e-3, 3.0e-3, 3.5e-3)
PROMPT = 1024


@dataclass(frozen=True)
class WithTables(Options):
    """Simulations with tables that no other run may find on disk."""

    tables: dict[str, list[Tabulated]] = field(default_factory=dict)

    def run(self, deployment: Deployment, workload: Workload, client: str) -> Run:
        """Simulate as a client sees it."""
        pool = str(deployment.pools[0].spec())
        if pool not in self.tables:
            self.tables[pool] = batch_times(deployment, cache=False)
        overheads = replace(self.overheads, client=CLIENTS[client])
        return simulate(deployment, workload, overheads=overheads, tables=self.tables[pool])


@dataclass(frozen=True)
class Constant:
    """One constant, and the points that it decides."""

    name: str
    decides: Callable[[Point], bool]
    put: Callable[[float], None]


def captured(point: Point) -> bool:
    """Whether steps with prompts were captured in pieces."""
    return bool(point.settings().get("prompt_graph_tokens"))


def eager(blackwell: bool) -> Callable[[float], None]:
    """What puts the seconds of latent attention from no graph."""

    def put(seconds: float) -> None:
        key = ("trtllm", blackwell)
        host.EAGER[key] = replace(host.EAGER[key], latent=seconds)

    return put


def in_pieces(seconds: float) -> None:
    """Put the seconds of latent attention between captured pieces."""
    host.CAPTURED_LATENT = seconds


CONSTANTS = (
    Constant("EAGER, before Blackwell", lambda one: one.system == "h200_sxm", eager(False)),
    Constant("EAGER, Blackwell", lambda one: one.system == "b200_sxm" and not captured(one), eager(True)),
    Constant("CAPTURED_LATENT", captured, in_pieces),
)


def points_of(constant: Constant) -> list[Point]:
    """The points that a constant decides, each measurement once."""
    found = [one for one in read_points() if isinstance(one, Point) and one.mode == "agg" and one.scripted]
    latent = [one for one in found if one.backend == "trtllm" and "DeepSeek" in one.model_path and one.dp == 1]
    read = [one for one in latent if one.isl == PROMPT and not one.repeats and one.system.endswith("200_sxm")]
    return [one for one in read if constant.decides(one)]


def halves(points: Sequence[Point]) -> tuple[list[int], list[int]]:
    """Places of the points of two halves, in the order of a hash."""
    order = sorted(range(len(points)), key=lambda place: sha256(points[place].id.encode()).hexdigest())
    return order[::2], order[1::2]


def main() -> int:
    """Print what every constant's halves choose."""
    eager_costs, in_graphs = dict(host.EAGER), host.CAPTURED_LATENT
    for constant in CONSTANTS:
        host.EAGER.update(eager_costs)
        host.CAPTURED_LATENT = in_graphs
        points = points_of(constant)
        errors: dict[float, list[float]] = {}
        for value in VALUES:
            constant.put(value)
            errors[value] = [abs(one.error("ttft")) for one in replay_all(points, WithTables())]

        def missed(value: float, places: Sequence[int], errors: dict[float, list[float]] = errors) -> float:
            return median(errors[value][place] for place in places)

        one, other = halves(points)
        said = []
        for deciding, rest in ((one, other), (other, one)):
            chosen = min(VALUES, key=lambda value: missed(value, deciding))
            said.append(f"a half chooses {1e3 * chosen:g} ms, the other half is then {missed(chosen, rest):.1%} off")
        best = min(VALUES, key=lambda value: missed(value, [*one, *other]))
        print(f"{constant.name}: {len(points)} points; {'; '.join(said)}; all choose {1e3 * best:g} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
