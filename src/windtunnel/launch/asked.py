"""Asked: the flags of one line while an engine's rules read them, and what became of each."""

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.launch.line import Line, is_placeholder
from windtunnel.model import Model

LENGTHS = ("max-model-len", "context-length", "max-seq-len")
"""Flags of the longest request, which a line may leave open: then it is the model's."""
ADD_STORE = "the line does not say how much it holds: add --store"
"""Of KV that goes where a line says no size for."""
SIZES = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
"""Endings of whole numbers, as vLLM's ``human_readable_int`` has them."""


@dataclass
class Asked:
    """Values by flag; ``refused`` and ``unused`` collect what a rule cannot follow, or what makes no difference."""

    line: Line
    model: Model | None
    """None where its name is not known."""
    refused: dict[str, str] = field(default_factory=dict)
    """Flag → what it would change."""
    unused: dict[str, str] = field(default_factory=dict)
    """Flag → why it changes nothing."""
    kernels: set[str] = field(default_factory=set)
    """Refused flags that would change no more than which kernel runs."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the line does not say and had to be taken from elsewhere → what was taken."""
    preset: str = ""
    """The version that is simulated, by the name of its preset."""

    def get(self, flag: str) -> Any:
        """The value; None where the flag is not there. Raises InputError for a gap that nobody has filled in."""
        value = self.line.flags.get(flag)
        if is_placeholder(value) and flag in LENGTHS:
            self.notes["max_model_len"] = f"{self.spelled(flag)}={value} leaves it open: the model's length is taken"
            return None
        if is_placeholder(value):
            raise InputError(
                f"{self.spelled(flag)}={value}: the line does not say what this stands for: put it in, or write "
                "NAME=value in front of the line"
            )
        return value

    def spelled(self, flag: str) -> str:
        """The flag as the line writes it, dashes in front."""
        name = self.line.spelled.get(flag, flag)
        return name if name.startswith("-") or self.line.engine == "trtllm" else f"--{name}"

    def integer(self, flag: str) -> int | None:
        """A whole number, ``32k`` among them; None for ``auto`` too."""
        value = self.get(flag)
        if isinstance(value, str):
            if value.lower() in ("auto", ""):
                return None
            if found := re.fullmatch(r"([\d.]+)([kKmMgG])i?[bB]?", value):
                return round(float(found[1]) * SIZES[found[2]])
            if value.isdecimal():  # in quotes, as JSON may have it
                return int(value)
        return self._whole(flag, value)

    def _whole(self, flag: str, value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise InputError(f"{self.spelled(flag)}={value}: must be a whole number")
        return int(value)

    def number(self, flag: str) -> float | None:
        """A number."""
        value = self.get(flag)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise InputError(f"{self.spelled(flag)}={value}: must be a number")

    def truth(self, flag: str) -> bool:
        """Whether a switch is on."""
        value = self.get(flag)
        return value is True or (isinstance(value, int) and value == 1)

    def given(self, flag: str) -> bool | None:
        """A switch with two sides; None where it is not there."""
        return None if self.line.flags.get(flag) is None else self.truth(flag)

    def text(self, flag: str) -> str:
        """A word, empty where the flag is not there."""
        value = self.get(flag)
        return "" if value is None or value is True else str(value)

    def text_of(self, flag: str) -> str:
        """A word that may be a gap."""
        value = self.line.flags.get(flag)
        return "" if value is None else str(value)

    def sizes(self, flag: str) -> tuple[int, ...] | None:
        """Different whole numbers in order; None where the flag is not there."""
        found = self.numbers(flag)
        return None if found is None else tuple(sorted(set(found)))

    def numbers(self, flag: str) -> tuple[int, ...] | None:
        """Whole numbers as they stand; None where the flag is not there."""
        value = self.get(flag)
        if value is None:
            return None
        many = value if isinstance(value, list) else re.split(r"[,\s]+", value) if isinstance(value, str) else [value]
        try:
            return tuple(int(each) for each in many)
        except (TypeError, ValueError):
            raise InputError(f"{self.spelled(flag)}={value}: must be whole numbers") from None

    @property
    def experts(self) -> bool:
        """Whether the model is a mixture of experts, as far as it is known."""
        return self.model is None or self.model.has_moe


@dataclass
class Settings:
    """What the rules of an engine make of a line."""

    engine: dict[str, Any]
    """Settings of ``deployment.Engine``; None: not said."""
    replicas: int = 1
    role: str = ""
    router: str | None = None
    handover: str | None = None
    stores: list[str] = field(default_factory=list)

    def given(self) -> dict[str, Any]:
        """The settings that are said."""
        return {name: value for name, value in self.engine.items() if value is not None}


def environment_value(env: Mapping[str, str], name: str) -> float | None:
    """A number in the environment; None where there is none."""
    try:
        return float(env[name])
    except (KeyError, ValueError):
        return None
