"""Keys: what a config.json says, read with the defaults of its architecture."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeVar

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError

Json = Mapping[str, Any]
T = TypeVar("T")
LARGEST = {"num_hidden_layers": 10_000, "n_layer": 10_000}
"""Numbers that a simulation loops over, and the most that it takes; of all others MOST."""
MOST = 2**31


@dataclass(frozen=True)
class Keys:
    """The keys of one config.json. A missing one is an error that names it."""

    owner: str
    values: Json
    defaults: Json = field(default_factory=dict)
    """What the architecture's own class assumes for an absent key."""

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of ``names`` that is present and not null."""
        for source in (self.values, self.defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return default

    def integer(self, *names: str, default: int | None = None) -> int:
        """An integer ≥ 0 under the first of ``names`` that is present; InputError when absent without a default."""
        value = self.get(*names, default=default)
        if value is None:
            others = f" (or {', '.join(map(repr, names[1:]))})" if len(names) > 1 else ""
            raise InputError(f"{self.owner}: config.json has no key {names[0]!r}{others}, which its layers need")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value % 1 == 0 or value < 0:
            raise self.wrong(f"{names[0]}={value!r}", "must be an integer ≥ 0")
        most = LARGEST.get(names[0], MOST)
        if value > most:
            raise self.wrong(f"{names[0]}={value:g}", f"must be ≤ {most:,}")
        return int(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """A boolean under the first of ``names`` that is present."""
        return bool(self.get(*names, default=default))

    def of_layer(self, key: str, index: int, known: Mapping[Any, T]) -> T:
        """What stands for a layer in a list, or text, with an entry for each: one of these; InputError otherwise."""
        listed = self.get(key)
        if not isinstance(listed, str | list) or len(listed) <= index:
            raise self.wrong(f"{key}={listed!r}", "must have an entry for each layer")
        if not isinstance(listed[index], str | int) or listed[index] not in known:
            names = ", ".join(map(str, known))
            raise self.wrong(f"{key} has {listed[index]!r} for layer {index}", f"must be one of {names}")
        return known[listed[index]]

    def wrong(self, what: str, rule: str) -> InputError:
        """The error for what stands in the config, and the rule that it breaks."""
        return InputError(f"{self.owner}: {what} in config.json: {rule}")
