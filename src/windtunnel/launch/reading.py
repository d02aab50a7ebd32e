"""Reading: what a launch line says here, flag by flag: used, without effect, or not simulated."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, field, replace
from difflib import get_close_matches
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.launch import sglang, trtllm, vllm
from windtunnel.launch.asked import Asked, Settings
from windtunnel.launch.facts import OF_IMAGE
from windtunnel.launch.line import Line
from windtunnel.launch.overrides import read_overrides
from windtunnel.launch.table import UNKNOWN, Meaning, environment, table
from windtunnel.model import Model, load_model

RULES = {"vllm": vllm.settings, "sglang": sglang.settings, "trtllm": trtllm.settings}
PRESETS = {"vllm": "vllm-0.32", "sglang": "sglang-0.5", "trtllm": "trtllm-1.0"}
"""What is simulated unless the user names a version."""
CLOSE = 0.8


@dataclass(frozen=True)
class Word:
    """A flag or variable of a line."""

    flag: str
    """As the line writes it."""
    value: Any
    note: str
    """What it sets; why it changes neither time nor memory; or what it would change."""
    kernel: bool = False
    """It would change no more than which kernel runs."""


@dataclass(frozen=True)
class Reading:
    """One server of a line."""

    engine: str
    model: str
    settings: Mapping[str, Any]
    """Of ``deployment.Engine``, as far as the line says them."""
    used: tuple[Word, ...]
    ignored: tuple[Word, ...]
    not_simulated: tuple[Word, ...]
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the line does not say → what was taken for it."""
    role: str = "mixed"
    replicas: int = 1
    router: str | None = None
    handover: str | None = None
    stores: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What stands next to the flags, in windtunnel's words."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Other values for keys of the model's config.json."""

    def words(self) -> dict[str, Any]:
        """For JSON."""
        return {
            name: [
                {key: value for key, value in asdict(word).items() if key != "kernel" or value}
                for word in getattr(self, name)
            ]
            for name in ("used", "ignored", "not_simulated")
        }


def read_line(line: Line) -> Reading:
    """What a line says. Raises InputError for a value that is none, or that the line leaves open."""
    overrides, named = read_overrides(line), line.model
    line = _in_4_bits(line)
    asked = Asked(line, _known(line.model, overrides), preset=_version(line))
    release, version = str(line.facts.get(OF_IMAGE, "")), _version(line)
    if release and not f"{line.engine}-{release}.".startswith(f"{version}."):
        asked.notes["engine"] = f"the image has {release}, which is simulated by the rules of {version}"
    if line.model != named:
        asked.notes["model"] = f"{line.model}, whose 4 bits are what the line asks for: {named} is stored in others"
    found = RULES[line.engine](asked)
    words = [(state, word) for state, word in _words(asked)]
    settings = {"preset": PRESETS[line.engine], **found.given()}
    return Reading(
        engine=line.engine,
        model=line.model,
        settings=settings,
        used=tuple(word for state, word in words if state == "used"),
        ignored=tuple(word for state, word in words if state == "ignored"),
        not_simulated=tuple(word for state, word in words if state == "not_simulated"),
        notes=asked.notes,
        role=line.role or found.role or "mixed",
        replicas=line.replicas * found.replicas,
        router=found.router,
        handover=found.handover,
        stores=tuple(found.stores),
        facts={name: value for name, value in line.facts.items() if name != OF_IMAGE},
        overrides=overrides,
    )


def read_flags(engine: str, flags: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``deployment.Engine`` that flags by the names of the engine's table come to, whatever the model.
    ``facts``: as of a line. Raises InputError for a value that is none."""
    line = Line(engine, "", flags, facts=facts)
    return RULES[engine](Asked(line, None, preset=_version(line))).given()


def _in_4_bits(line: Line) -> Line:
    """A line whose weights are in ModelOpt's 4 bits has that checkpoint, whatever name it serves it by: with other
    weights the server would not start (``modelopt_quant.py`` of SGLang and vLLM)."""
    known = _known(line.model, {}) if line.flags.get("quantization") == "modelopt_fp4" else None
    stored = known and (known.quantization.methods if known.quantization else "")
    other = f"nvidia/{line.model.rpartition('/')[2]}-NVFP4"
    return replace(line, model=other) if stored not in (None, "nvfp4") and _known(other, {}) else line


def _version(line: Line) -> str:
    return str(line.facts.get("engine", PRESETS[line.engine]))


def _known(name: str, overrides: Mapping[str, Any]) -> Model | None:
    try:
        return load_model(name, overrides) if name else None
    except InputError:
        return None


def _words(asked: Asked) -> Iterator[tuple[str, Word]]:
    known = table(asked.line.engine)
    for flag, value in asked.line.flags.items():
        meaning = known.meaning(flag, value)
        if flag in asked.refused:
            meaning = Meaning("not_simulated", asked.refused[flag], flag in asked.kernels)
        elif flag in asked.unused and meaning.state != "ignored":
            meaning = Meaning("ignored", asked.unused[flag])
        note = meaning.note + _nearest(flag, known.known()) if meaning.note == UNKNOWN else meaning.note
        yield meaning.state, Word(asked.spelled(flag), value, note, meaning.kernel)
    prefixes, variables = environment()
    for name, text in asked.line.env.items():
        if name.startswith(prefixes):
            meaning = variables.meaning(name, text)
            off = meaning.state == "not_simulated" and text.strip().lower() in ("0", "false", "")
            yield (
                ("ignored", Word(name, text, "is off"))
                if off
                else (meaning.state, Word(name, text, meaning.note, meaning.kernel))
            )


def _nearest(flag: str, names: list[str]) -> str:
    near = get_close_matches(flag, names, n=1, cutoff=CLOSE)
    return f"; did you mean {near[0]}?" if near else ""


__all__ = ["Reading", "Settings", "Word", "read_flags", "read_line"]
