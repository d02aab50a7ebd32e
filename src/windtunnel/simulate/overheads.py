"""Overheads: time outside the kernels, as your own deployment has it: host work of a step, and the client's path.

The batch-time tables hold the host work of a typical server core (``perf.tabulate.host``), and a simulation's clock is
the engine's. A measured run can say how one deployment differs: ``windtunnel calibrate`` writes that as a small file.
On a device without measured kernels it also says how much longer than modelled they take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.files import read_yaml
from windtunnel.perf.batch_times import BatchTimes, StageTimes, Times
from windtunnel.simulate.run import Requests
from windtunnel.workload.columns import Workload

SCHEMA_VERSION = 1

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class HostOverhead:
    """Seconds that host work takes beyond the tables', in every step: fixed, and for each request in the batch.

    They may be negative, for a host that is faster than the tables' one.
    """

    serial: float = 0.0
    """While the GPU waits."""
    serial_per_sequence: float = 0.0
    overlapped: float = 0.0
    """Next to the GPU: it bounds the step from below."""
    overlapped_per_sequence: float = 0.0

    @overload
    def applied(self, times: BatchTimes) -> BatchTimes: ...

    @overload
    def applied(self, times: Times) -> Times: ...

    def applied(self, times: Times) -> Times:
        """Tables with this overhead, its serial part in the first stage of a pipeline.

        Raises InputError where host work would take less than no time.
        """
        if isinstance(times, StageTimes):
            others = replace(self, serial=0.0, serial_per_sequence=0.0)
            first, *rest = times.stages
            return replace(times, stages=(self.applied(first), *(others.applied(table) for table in rest)))
        n = np.arange(times.max_num_seqs + 1, dtype=float)
        serial = times.host_serial + np.where(n > 0, self.serial + self.serial_per_sequence * n, 0.0)
        overlapped = times.host_overlapped + np.where(n > 0, self.overlapped + self.overlapped_per_sequence * n, 0.0)
        for name, seconds in (("serial", serial), ("overlapped", overlapped)):
            if seconds.min() < 0:
                raise InputError(f"host {name}: {seconds.min():g} s in a step: calibrate again for this deployment")
        return replace(times, host_serial=serial, host_overlapped=overlapped)


@dataclass(frozen=True)
class KernelFactors:
    """How many times as long the GPU takes as the tables say: for a device without measured kernels."""

    products: float = 1.0
    """Steps of decodes, but for their attention."""
    attention: float = 1.0
    """Attention of decodes."""
    prompts: float = 1.0
    """Steps with prompts, and their attention."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not (isfinite(value) and value > 0):
                raise InputError(f"kernels {entry.name}={value}: must be a factor > 0")

    @overload
    def applied(self, times: BatchTimes) -> BatchTimes: ...

    @overload
    def applied(self, times: Times) -> Times: ...

    def applied(self, times: Times) -> Times:
        """Tables with these factors; host work stays."""
        if self == KernelFactors():
            return times
        if isinstance(times, StageTimes):
            return replace(times, stages=tuple(self.applied(table) for table in times.stages))
        factors = {
            **dict.fromkeys(("decode_tokens", "sequences", "expert_tokens"), self.products),
            **dict.fromkeys(("decode_attention", "mixed_attention"), self.attention),
            **dict.fromkeys(("mixed_tokens", "prefill_attention", "prefill_base"), self.prompts),
        }
        return replace(times, **{name: factor * getattr(times, name) for name, factor in factors.items()})


@dataclass(frozen=True)
class ClientPath:
    """What a request passes outside the engine, seconds; the client's clock runs all the while.

    A front end receives a request (``request``), then tokenises prompts one after the other (``request_per_token``),
    and hands them to the engine; the first token, as every later one, needs ``first_token`` to get back. The delays
    between tokens stay as they are.
    """

    request: float = 4e-3
    """HTTP, parsing and validation, the prompt's template, and the hand-over to the engine's process: a few
    milliseconds of Python in vLLM's and SGLang's servers."""
    request_per_token: float = 5e-6
    """Tokenising: fast tokenisers encode 0.2 to 0.5 million tokens a second on one core."""
    first_token: float = 2e-3
    """From the end of the step to the client: copy to the host, detokenising, the server-sent event."""
    per_sequence: float = 0.6e-3
    """For every request in flight: server and client are event loops that turn to one token of one request after the
    other, 60 to 80 µs each where they are the limit (vLLM's pull request 12287), and a new request and its first token
    wait for their turn 8 to 10 times. The product was calibrated on vLLM's rows of the first half of the served points
    (0.2 to 1 ms tried), and holds from 16 to 512 clients."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not (isfinite(value) and value >= 0):
                raise InputError(f"client {entry.name}={value}: must be ≥ 0 seconds")

    def turnaround(self, workload: Workload, delays: Floats) -> Floats:
        """[n] seconds from the end of a request at the engine to the arrival of the one that takes its place."""
        in_flight = min(workload.max_concurrency, len(workload))
        return self.first_token + self.per_sequence * in_flight + delays

    def streaming(self, interval: int) -> "ClientPath":
        """The path of events of this many tokens: both event loops turn to as many fewer of them."""
        return replace(self, per_sequence=self.per_sequence / interval)

    def delays(self, workload: Workload, servers: int = 1) -> Floats:
        """[n] seconds between the sending of each request and its arrival at the engine.

        Tokenising is a queue with this many servers, taken for one that is as many times as fast, for requests whose
        times of sending are known: those of an open loop, and the first ``max_concurrency`` of a closed one. Others
        come one by one and do not wait.
        """
        alone = self.request + self.request_per_token * workload.prompt_tokens
        known = np.flatnonzero(~np.isnan(workload.arrival))
        if workload.max_concurrency:
            known = known[: workload.max_concurrency]
        work = self.request_per_token * workload.prompt_tokens[known] / servers
        begun = np.cumsum(work) - work
        # done of the queue: the largest of (came − work before it) so far, plus all work up to here
        came = workload.arrival[known] + self.request
        done = np.maximum.accumulate(came - begun) + begun + work
        delays: Floats = alone.astype(np.float64)
        delays[known] = np.maximum(done - workload.arrival[known], alone[known])
        return delays


INFERENCEX = ClientPath()
"""The client of most served points; a request in flight costs its event loop, which turns to every token."""

OTHER_CLIENT = ClientPath(request=4.7e-3, per_sequence=0.035e-3)
"""6.7 ms there and back, and 0.035 ms for every request in flight: what clients other than InferenceX' were measured to
add (issue 12 of this project, a median over several)."""

VLLM_BENCH = ClientPath(request=1e-3, first_token=1.5e-3, per_sequence=0.035e-3)
"""vLLM's own, on the server's machine: 2.5 ms there and back, by first tokens of vLLM 0.8.5 on one H100 PCIe
(`python -m benchmarks.accuracy.open_loads ../shared/truth/iog`: median error 7.1 %)."""

CLIENTS = {
    "inferencex": INFERENCEX,
    "vllm-bench": VLLM_BENCH,
    **dict.fromkeys(("sglang-bench", "guidellm", "inference-perf", "aiperf", "genai-perf"), OTHER_CLIENT),
    "other": OTHER_CLIENT,
}
"""Name of a client → its path."""


def client_of(clock: str) -> str:
    """Whose clock a measured run has: a name of CLIENTS; empty for the engine's.

    ``clock`` is what the run says: ``client`` with the client's name behind it (``client: guidellm 0.3``).
    """
    if not clock.startswith("client"):
        return ""
    plain = _letters(clock.removeprefix("client"))
    return next((name for name in CLIENTS if _letters(name) in plain), "other")


def _letters(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


@dataclass(frozen=True)
class Agreement:
    """How well simulations with overheads agree with the runs that they were calibrated to."""

    server: tuple[str, ...]
    """What was measured: the key of ``metrics.evidence``."""
    steps: float
    """log(measured ÷ simulated) of the mean time per output token."""
    first_token: float | None = None
    """Of the mean time to first token; None where steps alone were recorded."""


@dataclass(frozen=True)
class Overheads:
    """All of them; without ``client`` all times are the engine's own."""

    host: HostOverhead = field(default_factory=HostOverhead)
    client: ClientPath | None = None
    kernels: KernelFactors = field(default_factory=KernelFactors)
    agreement: Agreement | None = None
    """Where they were calibrated, which narrows the error bands of that server."""

    def spec(self) -> dict[str, Any]:
        """For JSON and YAML."""
        found = {
            "host": asdict(self.host),
            "client": asdict(self.client) if self.client else None,
            "kernels": asdict(self.kernels),
        }
        if self.agreement:
            said = asdict(self.agreement) | {"server": list(self.agreement.server)}
            found["agreement"] = {name: value for name, value in said.items() if value is not None}
        return found

    @overload
    def applied(self, times: BatchTimes) -> BatchTimes: ...

    @overload
    def applied(self, times: Times) -> Times: ...

    def applied(self, times: Times) -> Times:
        """Tables with these kernels and this host. Raises InputError where host work would take less than no time."""
        return self.host.applied(self.kernels.applied(times))


ENGINE_CLOCK = Overheads()
"""Nothing beyond the tables: what is simulated unless something else is said."""


def at_engine(workload: Workload, delays: Floats, client: ClientPath) -> Workload:
    """The requests when they reach the engine; later turns of a session also wait for the answer's way back, as if
    alone, since who else is in flight is not known yet. Those of a closed loop do so by ``ClientPath.turnaround``."""
    arrival = workload.arrival + delays
    later = np.isnan(workload.arrival)
    if workload.max_concurrency:
        arrival = np.fmax.accumulate(arrival)
        arrival[later] = np.nan
    think_time = np.where(later, workload.think_time + delays + client.first_token, workload.think_time)
    return replace(workload, arrival=arrival, think_time=think_time)


def at_client(requests: Requests, workload: Workload, delays: Floats, client: ClientPath) -> Requests:
    """Requests of a run of ``at_engine`` with the times of their client; ``scheduled`` stays the engine's."""
    gated = np.isnan(workload.arrival) | (workload.max_concurrency > 0)
    back = client.first_token + client.per_sequence * in_flight(requests)
    return replace(
        requests,
        arrival=np.where(gated, requests.arrival - delays, workload.arrival),
        first_token=requests.first_token + back,
        finish=requests.finish + back,
    )


def in_flight(requests: Requests) -> Floats:
    """[n] requests that a replica has scheduled and not finished when it ends the first token of each, that one too."""
    found = np.zeros(len(requests.id))
    for replica in np.unique(requests.replica[requests.replica >= 0]):
        own = requests.replica == replica
        begun, ended = np.sort(requests.scheduled[own]), np.sort(requests.finish[own])
        at = requests.first_token[own]
        found[own] = np.searchsorted(begun, at, side="left") - np.searchsorted(ended, at, side="left")
    return found


def overheads_of(calibration: Path | None) -> Overheads:
    """Those of a calibration file; without one none, by the engine's clock. Raises InputError as ``read_overheads``."""
    return read_overheads(calibration) if calibration else ENGINE_CLOCK


def read_overheads(path: Path) -> Overheads:
    """A calibration file. Raises InputError naming the key that is unknown or wrong."""
    try:
        document = read_yaml(path)
    except InputError as error:
        raise InputError(f"calibration {str(path)!r}: {error}") from error
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"calibration {str(path)!r}: not a file that `windtunnel calibrate` wrote")
    client = document.get("client")
    return Overheads(
        _part(HostOverhead, document.get("host") or {}, path),
        client if client is None else _client(client, path),
        _part(KernelFactors, document.get("kernels") or {}, path),
        read_agreement(document.get("agreement"), path),
    )


def _client(client: Any, path: Path) -> ClientPath:
    """A path as its numbers, or by the name of a client."""
    if not isinstance(client, str):
        return cast(ClientPath, _part(ClientPath, client, path))
    if client not in CLIENTS:
        raise InputError(f"calibration {str(path)!r}: {unknown('client', client, CLIENTS)}")
    return CLIENTS[client]


def read_agreement(found: Any, path: Path) -> Agreement | None:
    """The agreement of a calibration file or a run's manifest; None where it has none. Raises InputError if wrong."""
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("server"), list):
        raise InputError(f"calibration {str(path)!r}: agreement={found!r}: must name the server: calibrate again")
    numbers = {name: value for name, value in found.items() if name != "server"}
    server = tuple(str(word) for word in found["server"])
    return _part(partial(Agreement, server), numbers, path, ("steps", "first_token"))  # type: ignore[no-any-return]


def _part(kind: Any, values: Mapping[str, Any], path: Path, names: Sequence[str] = ()) -> Any:
    names = names or [entry.name for entry in fields(kind)]
    for name, value in values.items():
        if name not in names:
            raise InputError(f"calibration {str(path)!r}: {unknown('key', str(name), names)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise InputError(f"calibration {str(path)!r}: {name}={value!r}: must be a number")
    return kind(**{name: float(value) for name, value in values.items()})
