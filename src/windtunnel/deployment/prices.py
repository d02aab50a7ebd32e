"""Prices of clouds: what a GPU costs on demand, reserved for a year or more, or spot, with date and source.

The tables are ``data/prices.toml``: what public sources said on a day. Nothing in them is guessed.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.files import read_toml
from windtunnel.hardware import Device

TABLES = Path(__file__).parents[1] / "data" / "prices.toml"
TERMS: Mapping[str, str] = {"on_demand": "on demand", "reserved": "reserved", "spot": "spot"}
"""Ways to pay, and how they are said."""


@dataclass(frozen=True)
class Price:
    """What a cloud asks for one GPU."""

    cloud: str
    term: str
    """One of ``TERMS``."""
    device: str
    usd_per_hour: float
    date: str
    """The day that the source gives; ``undated`` where it gives none."""
    source: str
    """The cloud with its region and the way to pay, and who says so."""


@cache
def all_prices() -> tuple[Price, ...]:
    """Every price that is known, by cloud, term and device."""
    found = []
    for cloud, table in read_toml(TABLES).items():
        for term, words in TERMS.items():
            for said in table.get(term, ()):
                source = f"{table['name']} {words} ({said['source']})"
                found += [
                    Price(cloud, term, device, float(price), said["date"], source)
                    for device, price in said["usd_per_gpu_hour"].items()
                ]
    return tuple(found)


def prices_of(text: str) -> dict[str, Price]:
    """The prices of ``CLOUD`` (on demand) or ``CLOUD:TERM``, by device.

    Raises InputError for a cloud or a term that is not known, with the nearest, and for a term that the cloud has not.
    """
    cloud, _, term = text.lower().replace("-", "_").partition(":")
    term = term or "on_demand"
    clouds = {price.cloud for price in all_prices()}
    if cloud not in clouds:
        raise unknown("cloud", cloud, clouds)
    if term not in TERMS:
        raise unknown(f"way to pay {cloud}", term, TERMS)
    found = {price.device: price for price in all_prices() if (price.cloud, price.term) == (cloud, term)}
    if not found:
        terms = dict.fromkeys(price.term for price in all_prices() if price.cloud == cloud)
        raise InputError(f"prices={text}: no {TERMS[term]} prices are known: take one of {', '.join(terms)}")
    return found


def priced(device: Device, text: str | None) -> Device:
    """A device at the prices of a cloud, see ``prices_of``; as it is without one.

    Raises InputError where no price of the device is known there.
    """
    if text is None:
        return device
    prices = prices_of(text)
    if device.name not in prices:
        raise InputError(f"prices={text}: {device.name} is not sold there, as far as windtunnel list prices knows")
    price = prices[device.name]
    return replace(device, price_per_hour=price.usd_per_hour, price_source=price.source, price_date=price.date)
