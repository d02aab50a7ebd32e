"""How prefill and decode pools are joined, in words: ``bandwidth=50e9 latency=0.0004`` or a name, or a name with other
values for some of its words."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_type_hints

from windtunnel.deployment import HANDOVERS, LINKS, Handover, Link, Pool, network, usual_handover
from windtunnel.errors import unknown
from windtunnel.files import typed_words
from windtunnel.scenario.words import parse_words, written

Rules = TypeVar("Rules", Link, Handover)
NETWORK, NODE = "network", "node"
OF_DEVICES = {
    NETWORK: "between nodes, as the devices have it per GPU, at the line rate of the slower side",
    NODE: "what joins the GPUs of a node",
}
"""Links that follow from the devices: name → what it is."""


def link_of(text: str | None, pools: Sequence[Pool]) -> Link:
    """The link of these words; what they do not say is as in the devices' network.

    Raises InputError for an unknown word or name.
    """
    node = min(pool.engine.world_size * pool.device.link_bandwidth for pool in pools)
    return _changed("link", text or "", {NETWORK: network(pools), NODE: Link(bandwidth=node), **LINKS}, NETWORK)


def handover_of(text: str | None, pools: Sequence[Pool]) -> Handover:
    """The rules of these words; without a name those of the decode pools' engine. Raises InputError as ``link_of``."""
    backend = next(pool.engine.backend for pool in pools if pool.role == "decode")
    return _changed("handover", text or "", HANDOVERS, usual_handover(backend))


def _changed(what: str, text: str, named: Mapping[str, Rules], usual: str) -> Rules:
    """What the first word names, or what is usual, with other values for the words that follow."""
    first, _, rest = text.strip().partition(" ")
    name, words = (usual, text) if not first or "=" in first or first.startswith("-") else (first, rest)
    if name not in named:
        raise unknown(what, name, named)
    found = named[name]
    given = parse_words(words, what) if words.strip() else {}
    return replace(found, **typed_words(given, get_type_hints(type(found)), f"{what}: "))


def joint_text(value: Any) -> Any:
    """A mapping as one line; its ``preset`` is the name in front."""
    if not isinstance(value, Mapping):
        return value
    words = {str(key): each for key, each in value.items()}
    return f"{words.pop('preset', '')} {written(words)}".strip()
