"""The machine of InferMax's experiments: a linear batch time, memory in single tokens, requests all at once."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

from benchmarks.schedulers.machine import opt_13b
from windtunnel import Deployment, Engine, Pool, Run, Workload, device, load_model, simulate
from windtunnel.metrics import unroll
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.policy.settings import Settings
from windtunnel.policy.unified import Policy, infermax_grid
from windtunnel.workload import AllAtOnce, Arrivals, Both, RangeRatio, generate

GRID = infermax_grid()
VLLM, SARATHI = GRID["vllm-newest-fcfs"], GRID["sarathi-hybrid-chunked-newest-fcfs"]
RESERVE = GRID["sarathi-hybrid-reserve-fcfs"]
EVICT = GRID["sarathi-hybrid-newest-fcfs"]
LOOK_AHEAD = GRID["sarathi-hybrid-look_ahead-fcfs"]


@dataclass(frozen=True)
class Case:
    """One cell of a grid."""

    prompt: int = 256
    """I, tokens."""
    output: int = 256
    """O, tokens."""
    requests: int = 256
    """W."""
    memory: int = 30_000
    """M, tokens."""
    tokens: int = 8192
    """C, tokens of a batch."""
    places: int = 4096
    """R_max."""
    spread: float = 0.0
    """Lengths are uniform within this share."""
    per_kv: float = 1.0
    """Multiplies the time to read a token of KV."""

    def workload(self, arrivals: Arrivals | None = None) -> Workload:
        """The requests."""
        lengths = Both(RangeRatio(self.prompt, self.spread), RangeRatio(self.output, self.spread))
        return generate(arrivals or AllAtOnce(), lengths, self.requests, seed=1)


@dataclass(frozen=True, eq=False)
class Result:
    """What a run is judged by."""

    run: Run
    makespan: float
    e2el: float
    ttft: float
    tpot: float
    throughput: float
    """Output tokens a second."""
    evictions: float
    """A request."""

    @cached_property
    def batch(self) -> float:
        """Mean number of requests that decode, over the steps in which any does."""
        decodes = unroll(self.run).decodes
        return float(decodes[decodes > 0].mean())


@cache
def run(policy: Policy, case: Case) -> Result:
    """Simulate a cell."""
    return measured(policy, case, case.workload())


def measured(policy: Settings, case: Case, workload: Workload) -> Result:
    """Simulate a workload on the machine of a cell; the model decides nothing but that the memory fits its GPU."""
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    tokens = max(case.tokens, case.places, longest)
    places = min(case.places, case.requests)
    times = opt_13b(tokens, places, longest)
    times = replace(times, decode_attention=times.decode_attention * case.per_kv)
    times = replace(times, mixed_attention=times.mixed_attention * case.per_kv)
    engine = Engine(
        max_num_seqs=places,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        num_gpu_blocks_override=case.memory + 1,
        block_size=1,
        enable_prefix_caching=False,
    )
    deployment = Deployment((Pool(load_model("Qwen/Qwen3-8B"), device("h200"), engine),))
    tables = Tabulated(times, {"modelled": times}, {"other": times}, ())
    found = simulate(deployment, workload, tables=[tables], policies=[policy])
    return _result(found)


def _result(found: Run) -> Result:
    requests = found.requests
    finish, first, output = requests.finish, requests.first_token, requests.output_tokens
    seconds = float(finish.max() - requests.arrival.min())
    gaps = output > 1
    tpot = (finish - first)[gaps] / (output[gaps] - 1)
    return Result(
        found,
        seconds,
        float((finish - requests.arrival).mean()),
        float((first - requests.arrival).mean()),
        float(tpot.mean()) if len(tpot) else float("nan"),
        float(output.sum()) / seconds,
        float(requests.preemptions.mean()),
    )
