"""serve: an endpoint that behaves like the simulated deployment."""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, progress
from windtunnel.cli.pasted import Told, show_pasted
from windtunnel.errors import InputError
from windtunnel.files import require_writable
from windtunnel.scenario import DEPLOYMENT, Scenario, Server
from windtunnel.scenario.pools import Pools
from windtunnel.scenario.scenario import POOLS
from windtunnel.serve.kv.publisher import KVEventsConfig
from windtunnel.serve.place import Place

if TYPE_CHECKING:
    from windtunnel.serve.clock import Clock
    from windtunnel.serve.front import Manners
    from windtunnel.serve.tokens import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Counting:
    """How tokens of a prompt are counted."""

    tokenizer: Path | None = None
    """A tokenizer.json, or its folder; without it, tokens are counted by --bytes-per-token."""
    bytes_per_token: int = 4
    """Bytes of UTF-8 that count as a token."""

    def reader(self) -> "Tokenizer":
        """What counts. Raises InputError for a file that is no tokenizer."""
        from windtunnel.serve.tokens import BytesRule, FileTokenizer

        return FileTokenizer(self.tokenizer) if self.tokenizer else BytesRule(self.bytes_per_token)


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What the server says, and to whom."""

    served_model_name: str | None = None
    """Name that clients ask for; the model's own without it."""
    answer_tokens: int | None = None
    """Mean tokens of an answer without ignore_eos, drawn for each; without it, answers go on to their max_tokens, or to
    256 tokens where they have none."""
    echo: Annotated[bool, Parameter(negative=())] = False
    """Answers repeat their prompts; without it they are words drawn by the seed and the prompt."""
    seed: int = 0
    """Of the answers, and of the random router."""
    api_key: tuple[str, ...] = ()
    """Keys of which clients must send one."""
    max_body_bytes: int = 16 << 20
    """Larger requests are refused (413)."""
    max_in_flight: int = 4096
    """Requests beyond this many are turned away (429)."""
    enable_sleep_mode: Annotated[bool, Parameter(negative=())] = False
    """Have vLLM's /sleep, /wake_up and /is_sleeping, without its VLLM_SERVER_DEV_MODE=1."""
    wake_up_seconds: float = 0.0
    """Simulated seconds until weights that slept are back: it depends on the model and on the host; measure yours."""

    def __post_init__(self) -> None:
        for name in ("answer_tokens", "max_body_bytes", "max_in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value}: must be ≥ 1")
        if not 0.0 <= self.wake_up_seconds < inf:
            raise InputError(f"wake_up_seconds={self.wake_up_seconds:g}: must be a number ≥ 0")
        if self.wake_up_seconds and not self.enable_sleep_mode:
            raise InputError(f"wake_up_seconds={self.wake_up_seconds:g}: needs --enable-sleep-mode")

    def manners(self, model: str, counting: Counting) -> "Manners":
        """As the server wants them."""
        from windtunnel.serve.front import Manners

        return Manners(
            model=self.served_model_name or model,
            tokenizer=counting.reader(),
            seed=self.seed,
            echo=self.echo,
            answer_tokens=self.answer_tokens,
            api_keys=self.api_key,
            max_body_bytes=self.max_body_bytes,
            max_in_flight=self.max_in_flight,
            enable_sleep_mode=self.enable_sleep_mode,
            wake_up_seconds=self.wake_up_seconds,
        )


def serve(
    server: Annotated[Server, Parameter(name="*", group=DEPLOYMENT)] = Server(model=""),  # noqa: B008 - frozen
    *,
    pasting: Annotated[Told, Parameter(name="*", group=DEPLOYMENT)] = Told(),  # noqa: B008 - frozen
    replicas: Annotated[int, Parameter(group=DEPLOYMENT)] = 1,
    router: Annotated[str, Parameter(group=DEPLOYMENT)] = "round_robin",
    pools: Annotated[Pools, Parameter(name="*", group=POOLS)] = Pools(),  # noqa: B008 - frozen
    calibration: Annotated[Path | None, Parameter(group=DEPLOYMENT)] = None,
    place: Annotated[Place, Parameter(name="*")] = Place(),  # noqa: B008 - frozen
    speed: float = 1.0,
    virtual_time: Annotated[bool, Parameter(negative=())] = False,
    behaviour: Annotated[Behaviour, Parameter(name="*")] = Behaviour(),
    counting: Annotated[Counting, Parameter(name="*")] = Counting(),
    log: Annotated[Literal["requests", "none"], Parameter(group=OUTPUT)] = "none",
    record: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    kv_events_config: Annotated[str, Parameter(group=OUTPUT)] = "{}",
) -> None:
    """Answer OpenAI clients as the deployment would: same schedulers, same batch times, made-up text.

    Serves /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /health, /version and /metrics until it is
    interrupted. Engine flags are those of run. Needs the extra serve: pip install 'windtunnel[serve]'.

    Parameters
    ----------
    replicas
        Copies of the server behind the router.
    router
        Which replica gets a request: a name of `windtunnel list routers`, or a function, `./mine.py:score`.
    calibration
        File of `windtunnel calibrate`: host overheads of your deployment. The client's path is the real one.
    speed
        Simulated seconds per second.
    virtual_time
        Do not wait: each step follows as soon as it is computed. Latencies are then in the headers and metrics only.
    log
        Write a JSON line for each answer to standard error, or nothing.
    record
        JSON lines file for the load that was served, to be replayed by run --trace.
    kv_events_config
        vLLM's or SGLang's JSON: publishes what enters and leaves the prefix caches over ZeroMQ, as they do.
    """
    _require_model(server)
    scenario = Scenario(server, replicas=replicas, router=router, pools=pools, calibration=calibration)
    if pasting.dry_run:
        show_pasted(pasting.lines, scenario, as_json=False)
        return
    if record:
        require_writable("record", record)
    kv_events = KVEventsConfig.read(kv_events_config)
    clock, manners = _clock(speed, virtual_time), behaviour.manners(server.model, counting)
    from windtunnel.serve.server import ANY_SITE, listen, log_to, serving
    from windtunnel.simulate.live import live

    with place.bind() as socket:
        with progress("reading batch times, and compiling the scheduler once on this machine"):
            overheads = scenario.overheads()
            deployment = live(scenario.deployment(), behaviour.seed, perf=server.perf, overheads=overheads)
            deployment.warm_up()
        app = serving(deployment, clock, manners, log_to(log), record, kv_events)
        listen(app, socket, f"{manners.model} on http://{place.host}:{socket.getsockname()[1]}", (ANY_SITE,))


def _require_model(server: Server) -> None:
    """Raise InputError for a server of no model."""
    if not server.model:
        raise InputError("no model: name one of `windtunnel list models`, or give its config.json")


def _clock(speed: float, virtual_time: bool) -> "Clock":
    """The clock that the flags ask for. Raises InputError for a speed that is none, or without the extra."""
    require_extra()
    from windtunnel.serve.clock import RealClock, VirtualClock

    return VirtualClock() if virtual_time else RealClock(speed)


def require_extra() -> None:
    """Raise InputError unless the packages of the extra are there."""
    from importlib.util import find_spec

    for name in ("starlette", "uvicorn", "prometheus_client", "httpx"):
        if find_spec(name) is None:
            raise InputError(f"the package {name} is missing: pip install 'windtunnel[serve]'")
