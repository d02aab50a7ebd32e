"""What launch lines say, flag by flag, and what they come to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from windtunnel.cli.arguments import Pasting, show_json
from windtunnel.errors import InputError
from windtunnel.scenario import Scenario

if TYPE_CHECKING:
    from windtunnel.deployment import Pool
    from windtunnel.scenario.pasted import Pasted

TITLES = {"used": "used", "ignored": "without effect on time or memory", "not_simulated": "not simulated"}

NOTES = {"used": "sets", "ignored": "why", "not_simulated": "what it would change"}


@dataclass(frozen=True, kw_only=True)
class Told(Pasting):
    """Launch lines, simulated or only told flag by flag."""

    dry_run: Annotated[bool, Parameter(negative=())] = False
    """Say what each flag of --from does, and what would be simulated, without simulating it."""


@dataclass(frozen=True, kw_only=True)
class Tried(Told):
    """The same, and how strictly."""

    strict: Annotated[bool, Parameter(negative=())] = False
    """Refuse kernel times beyond the data: other devices, engine versions, shapes or sizes than were measured; and
    flags of --from that are not simulated."""


def show_pasted(texts: Sequence[str], scenario: Scenario, as_json: bool) -> int:
    """Print the flags of launch lines by what becomes of them, and the deployment; 0. Raises InputError without
    lines."""
    from windtunnel.scenario.pasted import DEVICE

    if not texts:
        raise InputError("dry_run: needs a launch line: add --from 'vllm serve …'")
    pasted, deployment = _named(texts, scenario.server.model), scenario.deployment()
    if set(scenario.pools.store).difference(pasted.words.get("store", ())):
        pasted = pasted.with_stores()
    if as_json:
        show_json({"schema_version": 1, **pasted.spec(), "remarks": pasted.remarks(), "deployment": deployment.spec()})
        return 0
    from windtunnel.cli.terminal import show, table, wrapped

    for name, words in pasted.spec().items():
        if words:
            show(table((TITLES[name], "value", NOTES[name]), _rows(words, pasted), left=3))
    show(wrapped(_deployed(deployment.pools)))
    for remark in pasted.remarks():
        if not remark.startswith("not simulated") and (scenario.server.device == DEVICE or "device:" not in remark):
            show(wrapped(remark))
    return 0


def _rows(words: Sequence[Mapping[str, Any]], pasted: "Pasted") -> list[tuple[str, str, str]]:
    """Flag, value and note; what only some of unlike servers have with their roles, what all have once."""
    roles = dict.fromkeys(reading.role for reading in pasted.readings)
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for word in words:
        value = "" if word["value"] is None else str(word["value"])
        found.setdefault((word["flag"], value, word["note"]), {})[word.get("role", "")] = None
    return [
        (f"{flag} ({', '.join(those)})" if 0 < len(those) < len(roles) else flag, value, note)
        for (flag, value, note), those in found.items()
    ]


def _named(texts: Sequence[str], model: str) -> "Pasted":
    """The lines as they stand if they name this model, else with it in its place."""
    from windtunnel.scenario.pasted import read_pasted

    try:
        found = read_pasted(texts)
    except InputError:
        return read_pasted(texts, model)
    return found if found.words["model"] == model else read_pasted(texts, model)


def _deployed(pools: "Sequence[Pool]") -> str:
    """``Qwen/Qwen3-8B on one server of 2 h100_sxm GPUs is simulated, by the rules of vllm-0.32.``"""
    servers = " and ".join(_servers(pool) for pool in pools)
    rules = " and ".join(dict.fromkeys(pool.engine.preset for pool in pools))
    return f"{pools[0].model.name} on {servers} is simulated, by the rules of {rules}."


def _servers(pool: "Pool") -> str:
    role, gpus = "" if pool.role == "mixed" else f"{pool.role} ", pool.engine.world_size
    each = f"{gpus} {pool.device.name} GPU{'s' * (gpus > 1)}"
    return f"one {role}server of {each}" if pool.replicas == 1 else f"{pool.replicas} {role}servers of {each} each"
