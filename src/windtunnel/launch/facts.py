"""Facts: what no flag of an engine says, as a comment of a script has it: ``# windtunnel: device=b200 replicas=4``."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from windtunnel.deployment.versions import nearest_preset
from windtunnel.errors import InputError

IMAGES = {"vllm-openai": "vllm", "sglang": "sglang", "tensorrt-llm/release": "trtllm"}
"""Images by their names without the publisher's → the engine in them."""
ENTRY = "vllm-openai"
"""The one whose entry point starts its server; the others' commands name it."""
RELEASE = re.compile(rf"(?<!lmcache/)({'|'.join(IMAGES)})(?:-\w+)?:v?(\d+\.\d+[\w.]*)")
"""An engine's image, tagged with its release; LMCache's has LMCache's."""


def written(words: Mapping[str, Any]) -> str:
    """Words in one line, as ``read_facts`` reads them; a list is a word for each of its texts, None is left out."""
    pairs = [(key, each) for key, value in words.items() for each in (value if isinstance(value, list) else [value])]
    return " ".join(f"{key}={shlex.quote(_text(value))}" for key, value in pairs if value is not None)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_facts(text: str) -> dict[str, Any]:
    """The words by key; of one that stands several times all its texts. Raises InputError for what is no word."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"# windtunnel: {text}: {str(error).lower()}") from error
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"# windtunnel: {word!r}: must be word=value")
        found[key] = value if key not in found else (*_several(found[key]), value)
    return found


def facts_of_image(text: str) -> dict[str, Any]:
    """The engine preset that stands for the release in an image, and that; nothing where its tag names none."""
    found = RELEASE.search(text)
    return {"engine": nearest_preset(IMAGES[found[1]], found[2]), OF_IMAGE: found[2]} if found else {}


OF_IMAGE = "release"
"""Of an image's tag; no word of windtunnel."""


def started_by(image: str) -> str:
    """The engine whose server an image starts without a command; empty: none."""
    return IMAGES[ENTRY] if ENTRY in image else ""


def image_of(engine: str, version: str, vendor: str = "NVIDIA") -> str | None:
    """The image of a release, as its engine publishes it; None where there is none for GPUs of this vendor."""
    name = next(name for name, inside in IMAGES.items() if inside == engine)
    if vendor == "AMD":
        return f"{PUBLISHERS[engine]}{name}-rocm:v{version}" if engine != "trtllm" else None
    return f"{PUBLISHERS[engine]}{name}:{'v' * (engine != 'trtllm')}{version}"


PUBLISHERS = {"vllm": "vllm/", "sglang": "lmsysorg/", "trtllm": "nvcr.io/nvidia/"}


def _several(value: Any) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value,)
