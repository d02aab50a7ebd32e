"""Keys: what a config.json says, read with the defaults of its architecture."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windtunnel.errors import InputError

Json = Mapping[str, Any]


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
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise InputError(f"{self.owner}: {names[0]}={value!r} in config.json: must be an integer ≥ 0")
        return int(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """A boolean under the first of ``names`` that is present."""
        return bool(self.get(*names, default=default))
