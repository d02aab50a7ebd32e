"""Models by name: the configs that the kernel database's package ships, our own, and the user's files."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError, unknown
from windtunnel.files import parse_json, read_text, read_toml
from windtunnel.model.config import read_config
from windtunnel.model.relatives import find_relative, where_to_get
from windtunnel.model.spec import Model

OWN = Path(__file__).parents[1] / "data" / "models.toml"
SUFFIX, QUANT_SUFFIX = "_config.json", "_hf_quant_config.json"
SIZE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
"""What ``size`` of an entry in models.toml lists."""

Entry = Mapping[str, Any] | Path
"""A config as read from models.toml, or the file that holds it."""


def load_model(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Model:
    """The model with this name (``Qwen/Qwen3-32B``, ``qwen3-32b``), or of this config.json or folder. ``overrides``:
    other values for keys of its config.json, as engines take them (vLLM's ``--hf-overrides``).

    Raises InputError for an unknown name (with the nearest), an unreadable file, a missing key, or layers that are not
    simulated.
    """
    if not name_or_path.strip():
        raise InputError(f"model {name_or_path!r}: give a config.json, its folder, or a model's name")
    path = Path(name_or_path)
    inside = path / "config.json"
    if inside.is_file() or path.suffix == ".json" or path.is_file():
        file = inside if path.is_dir() else path
        named = file.stem if file.suffix == ".json" and file.name != inside.name else file.resolve().parent.name
        return _read_file(file, named, overrides)
    entries = _entries()
    name = _index().get(name_or_path.lower())
    if name is None and path.is_dir():
        raise InputError(f"{path}: this folder has no config.json; give a config.json, its folder, or a model's name")
    if name is None:
        name = _index().get(name_or_path.rstrip("/").rsplit("/", 1)[-1].lower())
    if name is None:
        return _read_relative(name_or_path, entries, overrides)
    entry = entries[name]
    if isinstance(entry, Path):
        return _read_file(entry, name, overrides)
    return read_config(name, _with(_inherited(entry, entries), overrides), entry.get("hf_quant_config"))


def _family(name: str) -> str:
    """The first word of a name without its organisation: what another size of a model has in common with it."""
    found = re.match("[a-z]+", name.rsplit("/", 1)[-1].lower())
    return found[0] if found else ""


def _read_relative(wanted: str, entries: Mapping[str, Entry], overrides: Mapping[str, Any] | None) -> Model:
    """Another version, or another format, of a model in the catalogue. Raises InputError where there is none."""
    found = find_relative(wanted, entries)
    if found is None:
        where = where_to_get(wanted)
        akin = [name for name in entries if not where or _family(name) == _family(wanted)]
        said = str(unknown("model", wanted, akin)).partition(": known: ")[0] if akin else f"unknown model {wanted!r}"
        told = where or ("" if ": did you" in said else ": windtunnel list models has those there are")
        raise InputError(said + told)
    model = load_model(found.name, overrides)
    if found.quantization is not None:
        entry = entries[found.name]
        config = dict(_read_json(entry) if isinstance(entry, Path) else _inherited(entry, entries))
        config.pop("quantization_config", None)
        if "text_config" in config:
            config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
        if found.quantization:
            ignored = ["lm_head", *(["*self_attn*"] if model.has_mla else [])]
            config["quantization_config"] = {**found.quantization, "ignore": ignored}
        model = read_config(found.name, _with(config, overrides))
    return replace(model, name=wanted.rstrip("/"), notes=(*model.notes, found.note))


def model_names() -> list[str]:
    """Names in the catalogue whose layers can be simulated, sorted."""
    return [name for name in sorted(_entries(), key=str.lower) if _is_simulated(name)]


@cache
def _is_simulated(name: str) -> bool:
    """Whether a model of the catalogue, which is the same as long as the program runs, can be simulated."""
    try:
        load_model(name)
    except InputError:
        return False
    return True


def _with(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A config with other values, those of its text part where that is what holds the key."""
    found = dict(config)
    for key, value in (overrides or {}).items():
        inner = found.get("text_config")
        if key != "text_config" and isinstance(inner, dict) and key not in found:
            found["text_config"] = {**inner, key: value}
        elif isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = {**found[key], **value}
        else:
            found[key] = value
    return found


def _read_file(path: Path, name: str, overrides: Mapping[str, Any] | None = None) -> Model:
    config = _with(_read_json(path), overrides)
    beside = path.with_name(
        path.name.replace(SUFFIX, QUANT_SUFFIX) if path.name.endswith(SUFFIX) else "hf_quant_config.json"
    )
    return read_config(name, config, _read_json(beside) if beside.is_file() else None)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = parse_json(read_text(path))
    except InputError as error:
        meant = "; give a config.json, its folder, or a model's name" if not path.exists() else ""
        raise InputError(f"{path}: {error}{meant}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: must hold a JSON object, not {type(content).__name__}")
    return content


@cache
def _entries() -> dict[str, Entry]:
    """Every model in the catalogue by its Hugging Face name; our own files win."""
    package = find_spec("aiconfigurator_core")
    folders = [Path(place) / "model_configs" for place in (package.submodule_search_locations or [])] if package else []
    shipped = {
        file.name.removesuffix(SUFFIX).replace("--", "/"): file
        for folder in folders
        for file in sorted(folder.glob(f"*{SUFFIX}"))
        if not file.name.endswith(QUANT_SUFFIX)
    }
    entries: dict[str, Entry] = {**shipped, **_own_entries()}
    return {
        name: entry for name, entry in entries.items() if isinstance(entry, Path) or entry.get("like", name) in entries
    }


def _own_entries() -> dict[str, Entry]:
    """The models of models.toml with the keys that their config.json has."""
    architectures = read_toml(OWN)
    found: dict[str, Entry] = {name: {"like": other} for name, other in architectures.pop("like").items()}
    found |= {name: {"like": it, "vision_config": {"of": name}} for name, it in architectures.pop("text_of").items()}
    for architecture, models in architectures.items():
        found |= {name: {"architectures": [architecture], **_spelled_out(keys)} for name, keys in models.items()}
    return found


def _spelled_out(keys: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {key: _spelled_out(value) if key == "text_config" else value for key, value in keys.items()}
    found |= zip(SIZE, found.pop("size", ()), strict=False)
    if "layer_types" in found:
        found["layer_types"] = list(islice(cycle(found["layer_types"]), found["num_hidden_layers"]))
    return found


@cache
def _index() -> dict[str, str]:
    """Lower-case names, with and without organisation, to the name in the catalogue."""
    entries = _entries()
    short = {name.rsplit("/", 1)[-1].lower(): name for name in reversed(entries)}
    return short | {name.lower(): name for name in entries}


def _inherited(entry: Mapping[str, Any], entries: Mapping[str, Entry]) -> Mapping[str, Any]:
    """An entry's config; ``like`` takes another model's keys first."""
    if "like" not in entry:
        return entry
    other = entries[entry["like"]]
    base = _read_json(other) if isinstance(other, Path) else _inherited(other, entries)
    return {**base, **entry}
