"""The tables of prices: sourced, of devices that there are, in one place for every command."""

from datetime import date

import pytest
from plan.planning import small_space

from windtunnel.cli import DONE, main
from windtunnel.deployment.prices import TERMS, all_prices, priced, prices_of
from windtunnel.errors import InputError
from windtunnel.hardware import device, load_devices
from windtunnel.scenario import Server


def test_every_price_has_a_device_a_day_and_a_source() -> None:
    prices = all_prices()
    assert {price.term for price in prices} == set(TERMS)
    assert len({(price.cloud, price.term, price.device) for price in prices}) == len(prices), "one price of a thing"
    for price in prices:
        assert price.device in load_devices(), price
        assert price.usd_per_hour > 0, price
        assert price.date == "undated" or date.fromisoformat(price.date), price
        assert TERMS[price.term] in price.source, price


def test_a_commitment_and_spot_cost_less_than_on_demand() -> None:
    on_demand = {(price.cloud, price.device): price.usd_per_hour for price in all_prices() if price.term == "on_demand"}
    others = [price for price in all_prices() if price.term != "on_demand" and (price.cloud, price.device) in on_demand]
    assert len(others) > 20
    for price in others:
        assert price.usd_per_hour < on_demand[price.cloud, price.device], price


def test_a_device_takes_the_price_of_the_cloud() -> None:
    bought = priced(device("h100"), "aws")
    assert (bought.price_per_hour, bought.price_date) == (6.88, "2026-11-09")
    assert bought.price_source.startswith("AWS us-east-1 on demand (")
    assert priced(device("h100"), "gcp:reserved").price_per_hour == prices_of("GCP:Reserved")["h100_sxm"].usd_per_hour
    assert priced(device("h100"), "runpod-community").price_per_hour == 2.69
    assert priced(device("h100"), None) == device("h100")
    assert Server("Qwen/Qwen3-8B", prices="lambda").gpu().price_per_hour == 3.99


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("asw", "did you mean 'aws'"),
        ("aws:spots", "did you mean 'spot'"),
        ("lambda:spot", "no spot prices are known: take one of on_demand"),
        ("aws:spot", "h100_sxm is not sold there, as far as windtunnel list prices knows"),
    ],
)
def test_what_is_not_sold_is_said(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Server("Qwen/Qwen3-8B", prices=text).gpu()


def test_a_search_leaves_out_what_the_cloud_does_not_sell() -> None:
    space = small_space(device=("h100", "mi300x"), tensor_parallel_size=(1,), max_num_seqs=(4,))
    found = type(space)(space.model, space.axes, prices="aws").enumerate()
    assert {one.deployment.price_per_hour for one in found.candidates} == {6.88}
    (reason,) = found.pruned
    assert reason.startswith("prices=aws: mi300x is not sold there")
    with pytest.raises(InputError, match="did you mean 'azure'"):
        type(space)(space.model, space.axes, prices="azur")


def test_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "prices"]) == DONE
    out = capsys.readouterr().out
    for text in ("hyperstack", "on_demand", "reserved", "spot", "2026-08-26", "--json names the sources"):
        assert text in out
