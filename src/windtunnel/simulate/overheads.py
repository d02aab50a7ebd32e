"""Overheads: time outside the kernels, as a deployment of your own has it: host work of a step, and the client's path.

The batch-time tables hold the host work of a typical server core (``perf.tabulate.host``), and a simulation's clock is
the engine's. A measured run can say how one deployment differs: ``windtunnel calibrate`` writes that as a small file.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, unknown
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
    """Beside the GPU: it bounds the step from below."""
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

    def delays(self, workload: Workload) -> Floats:
        """[n] seconds between the sending of each request and its arrival at the engine.

        Tokenising is a queue with one server for requests whose times of sending are known: those of an open loop, and
        the first ``max_concurrency`` of a closed one. Others come one by one and do not wait.
        """
        alone = self.request + self.request_per_token * workload.prompt_tokens
        known = np.flatnonzero(~np.isnan(workload.arrival))
        if workload.max_concurrency:
            known = known[: workload.max_concurrency]
        work = self.request_per_token * workload.prompt_tokens[known]
        begun = np.cumsum(work) - work
        # done of the queue: the largest of (came − work before it) so far, plus all work up to here
        came = workload.arrival[known] + self.request
        done = np.maximum.accumulate(came - begun) + begun + work
        delays: Floats = alone.astype(np.float64)
        delays[known] = done - workload.arrival[known]
        return delays


@dataclass(frozen=True)
class Overheads:
    """Both; without ``client`` all times are the engine's own."""

    host: HostOverhead = field(default_factory=HostOverhead)
    client: ClientPath | None = None

    def spec(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return {"host": asdict(self.host), "client": asdict(self.client) if self.client else None}


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


def read_overheads(path: Path) -> Overheads:
    """A calibration file. Raises InputError naming the key that is unknown or wrong."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"calibration {str(path)!r}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"calibration {str(path)!r}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"calibration {str(path)!r}: not a file that `windtunnel calibrate` wrote")
    client = document.get("client")
    return Overheads(
        _part(HostOverhead, document.get("host") or {}, path),
        None if client is None else _part(ClientPath, client, path),
    )


def _part(kind: Any, values: Mapping[str, Any], path: Path) -> Any:
    names = [entry.name for entry in fields(kind)]
    for name, value in values.items():
        if name not in names:
            raise InputError(f"calibration {str(path)!r}: {unknown('key', str(name), names)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise InputError(f"calibration {str(path)!r}: {name}={value!r}: must be seconds")
    return kind(**{name: float(value) for name, value in values.items()})
