"""proxy: write down what a real server does, as a measured run."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT
from windtunnel.cli.live.serve import Counting, require_extra
from windtunnel.errors import InputError
from windtunnel.scenario import DEPLOYMENT, Server
from windtunnel.serve.place import Place

if TYPE_CHECKING:
    from windtunnel.deployment import Pool


def proxy(
    url: Annotated[str, Parameter(name="URL")],
    /,
    *,
    output: Annotated[Path, Parameter(group=OUTPUT)],
    server: Annotated[Server, Parameter(name="*", group=DEPLOYMENT)] = Server(model=""),  # noqa: B008 - frozen
    place: Annotated[Place, Parameter(name="*")] = Place(port=8001),  # noqa: B008 - frozen
    counting: Annotated[Counting, Parameter(name="*")] = Counting(),  # noqa: B008 - frozen
) -> None:
    """Proxy a server, pass everything on, and record its streamed answers as a measured run.

    `windtunnel validate FOLDER` then says how well it would have been simulated, and `windtunnel calibrate FOLDER`
    finds its overheads. Prompts are not stored. Flags say what serves, as for run. Stop it by Ctrl-C.

    Parameters
    ----------
    url
        The server, as http://localhost:8000.
    output
        Folder for run.json and requests.jsonl.
    """
    if not server.model:
        raise InputError("no model: say with --model, --device and engine flags what serves at the URL")
    require_extra()
    from windtunnel.serve.proxy import Proxy, RunFolder, address, proxying
    from windtunnel.serve.server import listen

    pool = server.pool()
    head = _head(server, pool, output.name)
    upstream, reader = address(url), counting.reader()
    with place.bind() as socket:
        folder = RunFolder(output, head)
        app = proxying(Proxy(upstream, folder, reader, int(head.get("hash_block_size", 0))))
        listen(app, socket, f"{url} on http://{place.host}:{socket.getsockname()[1]}, recorded to {output}")
    left = f", {folder.left_out} left out: not streamed, or not ended" if folder.left_out else ""
    sys.stdout.write(f"{folder.recorded} answers recorded{left}\n")


def _head(server: Server, pool: "Pool", name: str) -> dict[str, Any]:
    """run.json of what serves."""
    from windtunnel.deployment import PRESETS, engine_scheduler
    from windtunnel.validation.measured_run import SETTINGS

    engine, preset = server.engine, PRESETS[server.engine.preset]
    plain = {field.name: field.default for field in fields(engine) if field.name in SETTINGS}
    settings = {key: getattr(engine, key) for key, value in plain.items() if getattr(engine, key) != value}
    head: dict[str, Any] = {
        "id": name,
        "model": server.model,
        "device": server.device,
        "engine": {"name": preset.backend, "version": preset.release} | settings,
    }
    if engine_scheduler(pool.engine).prefix_caching:
        head["hash_block_size"] = int(pool.engine.resolved("block_size"))
    return head
