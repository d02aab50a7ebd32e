"""Relatives: which known architecture a checkpoint's name stands for: another version of it, or another format.

A name is taken apart into what it is and how it is stored: ``nvidia/Qwen3-32B-NVFP4`` is Qwen3-32B in NVFP4. What a
config.json of its own would say is better, and a note says that there was none.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Json = Mapping[str, Any]
MODELOPT = {"quant_method": "modelopt", "kv_cache_scheme": "FP8"}
PREVIEW, ENDING = r"([-_]preview)?", r"[-_.]?(v\d+)?$"
FORMATS: tuple[tuple[str, str, Json], ...] = (
    ("nvfp4", r"[-_](nvfp4|fp4)", MODELOPT | {"quant_algo": "NVFP4"}),
    ("mxfp4", r"[-_]mxfp4", {"quant_method": "mxfp4"}),
    ("mxfp8", r"[-_]mxfp8", {"quant_method": "mxfp8"}),
    ("fp8_block", r"[-_]fp8[-_]block", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ("fp8", r"[-_]fp8([-_](dynamic|static|kv|per[-_]?tensor))?", {"quant_method": "fp8"}),
    ("int4", r"[-_](gptq[-_])?(int4|w4a16|awq|4bit)([-_]awq)?", {"quant_method": "awq"}),
    (
        "int8",
        r"[-_](w8a8|int8)",
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}}
            },
        },
    ),
    ("16 bits", r"[-_](bf16|fp16)", {}),
)
"""Name of a format, the ending that names it, and what config.json says of it."""
BLOCKS = ("qwen", "deepseek-ai", "minimaxai", "stepfun-ai", "internlm", "moonshotai")
"""Organisations whose FP8 checkpoints have a scale for each block of 128×128 weights (their config.json)."""
VERSIONS = (
    r"[-_](instruct|thinking|reasoning|base|chat|it|hf|pt|preview|prev|exp|speciale|terminus|coding)",
    r"[-_](\d{4}|\d{6})",
)
"""Endings of a name that say how it was trained, or when: the architecture is the same."""


class Relative(NamedTuple):
    """Whose config.json stands for a name, and with which weights."""

    name: str
    """In the catalogue."""
    quantization: Json | None
    """None: as that checkpoint is stored; empty: in 16 bits."""
    note: str


class _Parts(NamedTuple):
    stem: str
    """Lower case, without organisation, format and version."""
    bare: str
    """Without organisation and format."""
    format: str


def find_relative(name: str, known: Iterable[str]) -> Relative | None:
    """The closest relative of a name among those that are known; None where there is none."""
    wanted = _apart(name)
    candidates = [(each, _apart(each)) for each in known]
    near = [(each, parts) for each, parts in candidates if parts.bare == wanted.bare]
    near = near or [(each, parts) for each, parts in candidates if parts.stem == wanted.stem]
    if not near:
        return None
    alike = [each for each, parts in near if parts.format == wanted.format]
    if alike or not wanted.format:
        unquantised = [each for each, parts in near if not parts.format]
        found = (alike or unquantised or [near[0][0]])[0]
        stored: Json | None = {} if not alike and not unquantised else None
        return Relative(found, stored, _note(found, "16 bits" if stored is not None else ""))
    plain = [each for each, parts in near if not parts.format]
    found = (plain or [near[0][0]])[0]
    return Relative(found, _stored(name, wanted.format), _note(found, wanted.format))


def _note(found: str, form: str) -> str:
    stored = f" in {form}" if form else ""
    return f"not in the catalogue: read as {found}{stored}, by its name; its config.json would be surer"


def _stored(name: str, form: str) -> Json:
    organisation = name.rpartition("/")[0].rsplit("/", 1)[-1].lower()
    if form == "fp8" and organisation in BLOCKS:
        form = "fp8_block"
    return next(config for each, _, config in FORMATS if each == form)


def _apart(name: str) -> _Parts:
    bare = name.rstrip("/").rsplit("/", 1)[-1].lower()
    form = ""
    for each, pattern, _ in FORMATS:
        shorter = re.sub(pattern + PREVIEW + ENDING, "", bare)
        if shorter != bare:
            form, bare = each, shorter
            break
    stem, before = bare, ""
    while stem != before:
        before = stem
        for pattern in VERSIONS:
            stem = re.sub(pattern + "$", "", stem)
    return _Parts(stem, bare, form)


def where_to_get(name: str) -> str:
    """What a user can do about a name of the hub, or a folder of another machine; empty for a name that is neither."""
    if name.startswith(("/", "~", ".")) or name.count("/") > 1:
        return f"; no folder {name} is on this machine: copy its config.json to a folder here and give --model FOLDER"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return ""
    folder = name.rpartition("/")[2]
    page = f"https://huggingface.co/{name}/resolve/main/config.json"
    return f"; save {page} as {folder}/config.json and give --model {folder}"
