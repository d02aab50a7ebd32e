"""list: the names that flags accept."""

from dataclasses import fields
from textwrap import fill
from typing import Any, Literal

from windtunnel.cli.arguments import Json, show_json

Row = dict[str, Any]
SETTINGS = 56
"""Letters in a line of a scheduler's settings."""


def listing(
    what: Literal["models", "devices", "prices", "engines", "schedulers", "routers", "links", "handovers", "traces"],
    /,
    *,
    as_json: Json = False,
) -> None:
    """List the names that flags accept.

    Parameters
    ----------
    what
        The kind of names.
    as_json
        Print one JSON document instead of the table.
    """
    kinds = {
        "models": _models,
        "devices": _devices,
        "prices": _prices,
        "engines": _engines,
        "schedulers": _schedulers,
        "routers": _routers,
        "links": _links,
        "handovers": _handovers,
        "traces": _traces,
    }
    rows = kinds[what]()
    if as_json:
        show_json(rows)
    else:
        from windtunnel.cli.terminal import show, show_rows

        show_rows([{key: value for key, value in row.items() if key != "sources"} for row in rows])
        if what == "prices":
            show("USD per GPU and hour, on the day that its source gives (--json names the sources).")


def _models() -> list[Row]:
    from windtunnel.model import model_names

    return [{"model": name} for name in model_names()]


def _devices() -> list[Row]:
    from windtunnel.hardware import GIB, load_devices

    return [
        {
            "device": found.name,
            "memory (GiB)": found.memory_bytes / GIB,
            "bandwidth (TB/s)": found.memory_bandwidth / 1e12,
            "bf16 (TFLOP/s)": found.flops["bfloat16"] / 1e12,
            "link": found.link,
            "power (W)": found.power_w,
            "price ($/h)": found.price_per_hour or None,
            "also": " ".join(found.aliases[:2]),
        }
        for found in load_devices().values()
    ]


def _prices() -> list[Row]:
    from windtunnel.deployment.prices import TERMS, all_prices

    rows: dict[tuple[str, str], Row] = {}
    for price in all_prices():
        none: Row = {"cloud": price.cloud, "device": price.device, **dict.fromkeys(TERMS), "as of": "", "sources": []}
        row = rows.setdefault((price.cloud, price.device), none)
        row[price.term] = price.usd_per_hour
        row["as of"] = ", ".join(dict.fromkeys(filter(None, (row["as of"], price.date))))
        row["sources"].append(price.source)
    return list(rows.values())


def _engines() -> list[Row]:
    from windtunnel.deployment import PRESETS

    return [
        {
            "engine": found.name,
            "scheduler": found.rules,
            "async scheduling": found.async_scheduling,
            "whole prompt reserved": found.scheduler_reserve_full_isl,
            "memory used": found.gpu_memory_utilization,
        }
        for found in PRESETS.values()
    ]


def _schedulers() -> list[Row]:
    from windtunnel.policy.named import ALIASES, IN_PYTHON, PRESETS

    short = {setting: word for word, setting in ALIASES.items()}

    rows = []
    for name, settings in [*PRESETS.items(), *((name, made()) for name, made in IN_PYTHON.items())]:
        values = {field.name: (getattr(settings, field.name), field.default) for field in fields(settings)}
        differing = [f"{short.get(key, key)}={value}" for key, (value, default) in values.items() if value != default]
        told = fill(" ".join(differing), SETTINGS, break_long_words=False)
        rows.append({"scheduler": name, "of": type(settings).__name__, "its settings": told})
    return rows


def _routers() -> list[Row]:
    from windtunnel.policy.named import ROUTERS

    return [{"router": name, "sends a request to": text} for name, text in ROUTERS.items()]


def _links() -> list[Row]:
    from windtunnel.deployment import LINKS
    from windtunnel.scenario.joined import OF_DEVICES

    named = [
        {"link": name, "GB/s": link.bandwidth / 1e9, "latency (ms)": 1e3 * link.latency, "what": ""}
        for name, link in LINKS.items()
    ]
    return [
        {"link": name, "GB/s": None, "latency (ms)": 0.0, "what": text} for name, text in OF_DEVICES.items()
    ] + named


def _handovers() -> list[Row]:
    from windtunnel.deployment import HANDOVERS

    return [
        {
            "handover": name,
            "transfer": found.transfer,
            "first token": found.first_token,
            "memory for": found.reservation,
            "asked": found.gate,
            "lease (s)": found.lease,
        }
        for name, found in HANDOVERS.items()
    ]


def _traces() -> list[Row]:
    from windtunnel.workload.builtin import builtin_names, fit_of

    return [
        {"trace": name, "requests": fit_of(name)["num_requests"], "requests/s": fit_of(name)["request_rate"]}
        for name in builtin_names()
    ]
