"""A small configuration, and what a page's requests about it are answered."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from windtunnel.ui.routes import application

SMALL: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "perf": "roofline",
    "random_input_len": 200,
    "random_output_len": 20,
    "request_rate": 40,
    "num_prompts": 60,
}
JSON = {"content-type": "application/json"}


def ask(
    *calls: tuple[str, str, Any],
    start: dict[str, Any] | None = None,
    studies: Sequence[Path] = (),
    headers: Mapping[str, str] = MappingProxyType({}),
) -> list[httpx.Response]:
    """The answers to (method, path, body); a body that is no bytes is sent as JSON."""
    app = application(start or SMALL, studies)

    async def sent() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            found = []
            for method, path, body in calls:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                content = data if method == "POST" else None
                found.append(await client.request(method, path, content=content, headers=JSON | dict(headers)))
            return found

    return asyncio.run(sent())


def stages(words: dict[str, Any]) -> list[dict[str, Any]]:
    """Every stage of the figures of these words."""
    (answer,) = ask(("POST", "/api/figures", {"words": words}))
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]
