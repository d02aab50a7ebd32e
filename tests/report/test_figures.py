"""What plots draw of large samples."""

from dataclasses import fields, replace

import handmade
import numpy as np
import pytest

from windtunnel.deployment import SLO
from windtunnel.metrics import Distribution, summary, timeline, unroll
from windtunnel.report.figures import cdf, figures, histogram, over_time, rounded
from windtunnel.simulate.run import Handovers


def test_downsampling_keeps_ends_and_counts() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, 100_000)
    x, percents = cdf(summary(handmade.two_requests()).latencies["itl"].__class__(values))
    assert len(x) <= 502
    assert (x[0], x[-1], percents[-1]) == (values.min(), values.max(), 100.0)
    for data in (values, np.arange(1000), np.full(5, 7), np.zeros(0)):
        edges, counts = histogram(data)
        assert counts.sum() == len(data)
        assert len(edges) == len(counts) + 1
        assert len(counts) <= 52


def test_bars_by_hand() -> None:
    """Whole numbers get whole bars, the largest value one of its own; one value of a kind still gets a bar."""
    edges, counts = histogram(np.array([3, 3, 4, 7]))
    assert counts[:5].tolist() == [2, 1, 0, 0, 1]
    assert edges[:6].tolist() == [3, 4, 5, 6, 7, 8]
    edges, counts = histogram(np.arange(100), bins=50)
    assert np.diff(edges).max() == 2
    assert counts[:50].tolist() == [2] * 50
    edges, counts = histogram(np.array([0.0, 0.9, 1.0, 4.0]), bins=4)
    assert (edges.tolist(), counts.tolist()) == ([0, 1, 2, 3, 4], [2, 1, 0, 1])
    assert histogram(np.array([5.0, 5.0]), bins=2)[0].tolist() == [5.0, 5.5, 6.0]


def test_numbers_keep_their_significant_digits() -> None:
    assert rounded(np.array([123456.0, 0.000123456, np.nan, np.inf])) == [123500.0, 0.0001235, None, None]


def test_latencies_are_drawn_in_their_unit_with_their_limits() -> None:
    """Gaps of 0.1 s are 100 ms; first tokens after 0.1 and 0.15 s, and their median at half of the height."""
    run = handmade.two_requests()
    steps = unroll(run)
    slo = SLO(ttft=0.12, tpot=0.2)
    drawn = figures(steps, summary(run, slo, steps=steps), slo)
    requests, tokens = drawn["requests-cdf"], drawn["tokens-cdf"]
    assert [trace["name"] for trace in requests["data"]] == ["ttft", "e2el", "queue"]
    ttft = dict(zip(requests["data"][0]["y"], requests["data"][0]["x"], strict=True))
    assert (ttft[0.0], ttft[50.0], ttft[100.0]) == (0.1, 0.125, 0.15)
    assert {*tokens["data"][0]["x"]} == {100.0}
    assert [shape["x0"] for shape in requests["layout"]["shapes"]] == [0.12]
    assert [shape["x0"] for shape in tokens["layout"]["shapes"]] == [200.0]
    lines = over_time(timeline(steps, 4))
    series = {trace["name"]: trace["y"] for trace in lines["data"]}
    assert series["KV blocks in use"] == pytest.approx([2, 3, 4, 5])
    assert series["running"] == pytest.approx([1, 1, 2, 2])
    assert lines["data"][0]["x"] == pytest.approx([0.05, 0.15, 0.25, 0.35])


def test_rows_of_the_time_line_stand_one_below_the_other() -> None:
    drawn = over_time(timeline(unroll(handmade.two_requests()), 2))
    layout = drawn["layout"]
    assert [layout[f"yaxis{n}"]["domain"] for n in ("", 2, 3, 4)] == [
        [0.78, 1.0], [0.53, 0.75], [0.28, 0.5], [0.03, 0.25]
    ]  # fmt: skip
    assert layout["xaxis"]["anchor"] == "y4"
    places = [(trace["name"], trace["yaxis"], trace["meta"]) for trace in drawn["data"]]
    assert places == [
        ("running", "y", 0), ("waiting", "y", 1), ("KV blocks in use", "y2", 2), ("output tokens", "y3", 3),
        ("arriving", "y4", 4), ("finishing", "y4", 5),
    ]  # fmt: skip
    series = {trace["name"]: trace["y"] for trace in drawn["data"]}
    assert series["output tokens"] == pytest.approx([5, 25]), "one token at 0.1; one at 0.2, two at 0.3 and at 0.4"
    assert series["arriving"] == pytest.approx([10, 0])


def test_lengths_and_arrivals_are_counted_in_bars() -> None:
    """Prompts of 32 and 16 tokens; the last bar holds the longest one in a hundred. Arrivals after 0 and 0.15 s."""
    drawn = figures(unroll(handmade.two_requests()), summary(handmade.two_requests()), None)
    (prompts,), (arrivals,) = drawn["prompts"]["data"], drawn["arrivals"]["data"]
    held = {x: y for x, y in zip(prompts["x"], prompts["y"], strict=True) if y}
    assert held == {16.5: 1, 31.5: 1}, "99 % of the way from 16 to 32 is 31"
    assert (prompts["width"][0], prompts["meta"]) == (1, 0)
    assert len(arrivals["x"]) == 100
    assert (arrivals["y"][0], arrivals["y"][-1], arrivals["width"][0]) == (1, 1, 0.0015)
    assert arrivals["x"][0] == 0.00075
    assert (drawn["outputs"]["data"][0]["meta"], arrivals["meta"]) == (1, 2)
    assert drawn["arrivals"]["layout"] == {
        "xaxis": {"title": {"text": "arrival, seconds after the first"}},
        "yaxis": {"title": {"text": "requests"}},
        "bargap": 0,
        "showlegend": False,
    }
    late = handmade.run(handmade.requests(arrival=[5.0, 7.0]), handmade.iterations())
    assert figures(unroll(late), summary(late), None)["arrivals"]["data"][0]["x"][0] == 0.01


def test_shares_of_the_step_time_are_sorted_and_sources_are_not() -> None:
    """Steps of 0.4 s: 0.1 attention and 0.3 products, of which 0.1 is measured and 0.3 modelled; no time, no bar."""
    parts = {"measured": handmade.flat_times(0.1), "modelled": handmade.flat_times(0.3)}
    groups = {"attention": handmade.flat_times(0.1), "gemm": handmade.flat_times(0.3), "host": handmade.flat_times(0.0)}
    run = handmade.two_requests()
    run = replace(run, times=(handmade.flat_times(0.4),), sources=(parts,), groups=(groups,))
    drawn = figures(unroll(run), summary(run), None)["breakdown"]
    bars = [(bar["y"], bar["name"], bar["x"], bar["text"], bar["meta"]) for bar in drawn["data"]]
    assert bars == [
        (["by operator"], "gemm", [75.0], ["gemm 75 %"], 0),
        (["by operator"], "attention", [25.0], ["attention 25 %"], 1),
        (["by source"], "measured", [25.0], ["measured 25 %"], 2),
        (["by source"], "modelled", [75.0], ["modelled 75 %"], 3),
    ]
    assert drawn["layout"]["xaxis"]["range"] == [0, 100]
    assert drawn["layout"]["barmode"] == "stack"


def test_the_band_and_the_limits_of_latencies_are_drawn_where_they_are() -> None:
    """A factor of 0.5 to 2 on first tokens of 0.1 to 0.15 s; with waits from 0.5 ms on, the axis is of powers."""
    manifest = {"bands": {"factors": {"ttft": {"90": [0.5, 2.0]}}}}
    run = handmade.two_requests()
    run = replace(run, manifest=run.manifest | manifest)
    drawn = figures(unroll(run), summary(run), SLO(ttft=0.12))["requests-cdf"]
    names = [trace["name"] for trace in drawn["data"]]
    assert names == ["ttft", "ttft, end of the band", "ttft, end of the band", "e2el", "queue"]
    assert [(trace["x"][0], trace["x"][-1]) for trace in drawn["data"][:3]] == [(0.1, 0.15), (0.05, 0.075), (0.2, 0.3)]
    assert [trace["meta"] for trace in drawn["data"]] == [0, 0, 0, 1, 2]
    assert drawn["data"][1]["showlegend"] is False
    (note,) = drawn["layout"]["annotations"]
    assert (note["x"], note["text"], note["meta"]) == (pytest.approx(-0.92082, abs=1e-5), "ttft limit", 0)
    (mark,) = drawn["layout"]["shapes"]
    assert (mark["x0"], mark["x1"], mark["y0"], mark["y1"], mark["meta"]) == (0.12, 0.12, 0, 1, 0)
    assert drawn["layout"]["yaxis"] == {"title": {"text": "% of values"}, "range": [0, 101]}
    across = {"title": {"text": "ttft · e2el · queue (s)"}, "rangemode": "tozero"}
    assert drawn["layout"]["xaxis"] == across | {"type": "log", "range": [-3.5, -0.25], "dtick": 1}


def test_latencies_that_lie_far_apart_are_drawn_over_powers_of_ten() -> None:
    first, finish = np.array([0.02, 0.03]), np.array([1.7, 1.6])
    run = handmade.run(
        handmade.requests(arrival=[0.0, 0.0], scheduled=[0.015, 0.02], first_token=first, finish=finish),
        handmade.iterations(),
    )
    drawn = figures(unroll(run), summary(run), SLO(ttft=0.1))["requests-cdf"]["layout"]
    assert drawn["xaxis"]["type"] == "log"
    assert drawn["xaxis"]["range"] == [-2.0, 0.25], "from 0.015 s down to a half power, from 1.7 s up to a quarter"
    assert drawn["annotations"][0]["x"] == pytest.approx(-1.0), "notes stand at powers, shapes at values"
    assert drawn["shapes"][0]["x0"] == 0.1
    near = handmade.run(
        handmade.requests(arrival=[0.0], scheduled=[0.2], first_token=[1.0], finish=[9.9]), handmade.iterations()
    )
    assert "range" not in figures(unroll(near), summary(near), None)["requests-cdf"]["layout"]["xaxis"], "49.5 times"


def test_the_slowest_tenth_is_at_least_one_request_and_rounded_up() -> None:
    """Eleven requests whose first tokens come ever later: the slowest tenth are two."""
    several = handmade.disaggregated()
    number = 11
    rows = np.zeros(number, dtype=np.int64)
    queue = np.arange(number) / 10
    requests = handmade.requests(
        arrival=np.zeros(number), replica=rows + 1, pool=rows + 1, scheduled=queue, first_token=queue + 0.5,
        finish=queue + 1,
    )  # fmt: skip
    assert several.handovers is not None
    parts = {field.name: getattr(several.handovers, field.name)[rows] for field in fields(several.handovers)}
    parts |= {"ttft_queue": queue}
    run = replace(several, requests=requests, handovers=Handovers(**parts))
    drawn = figures(unroll(run), summary(run), None)["first-token"]
    bars = {bar["name"]: (bar["x"], bar["meta"]) for bar in drawn["data"]}
    assert bars["queue"] == ([500.0, 950.0], 0)
    assert bars["prefill"][0] == [100.0, 100.0]
    assert drawn["data"][0]["y"] == ["all requests", "slowest 10 %"]


def test_the_last_per_cent_is_drawn_a_hundred_times_as_finely() -> None:
    percents = cdf(Distribution(np.arange(10.0)))[1]
    assert percents[:3].tolist() == [0.0, 0.25, 0.5]
    assert percents[-3:].tolist() == pytest.approx([99.98, 99.99, 100.0])
    assert ((percents > 99) & (percents < 100)).sum() == 99


def test_axes_and_places_of_the_time_line_whole() -> None:
    """Thirds of 0.4 s; six digits."""
    drawn = over_time(timeline(unroll(handmade.two_requests()), 3))
    assert drawn["data"][0]["x"] == [0.0666667, 0.2, 0.333333]
    titles = ("requests", "KV cache, %", "tokens / s", "requests / s")
    domains = ([0.78, 1.0], [0.53, 0.75], [0.28, 0.5], [0.03, 0.25])
    assert drawn["layout"] == {
        "xaxis": {"title": {"text": "seconds after the first arrival"}, "anchor": "y4", "rangemode": "tozero"},
        "hovermode": "x",
    } | {
        f"yaxis{place}": {"title": {"text": title}, "domain": domain, "rangemode": "tozero", "nticks": 5}
        for place, title, domain in zip(("", "2", "3", "4"), titles, domains, strict=True)
    }
    whole = figures(unroll(handmade.two_requests()), summary(handmade.two_requests()), None)["timeline"]
    assert len(whole["data"][0]["x"]) == 600


def test_what_is_far_too_small_does_not_stretch_an_axis() -> None:
    """From a queue of 0.1 µs to 2 s: not below a hundred thousandth of that, 10^−4.7, down to a half power."""
    run = handmade.run(
        handmade.requests(arrival=[0.0], scheduled=[1e-7], first_token=[1.0], finish=[2.0]), handmade.iterations()
    )
    drawn = figures(unroll(run), summary(run), SLO(ttft=0.5))["requests-cdf"]["layout"]
    assert drawn["xaxis"]["range"] == [-5.0, 0.5]
    (note,) = drawn["annotations"]
    assert {name: note[name] for name in ("y", "yref", "xanchor", "yanchor", "text", "showarrow", "meta")} == {
        "y": 0.5, "yref": "paper", "xanchor": "left", "yanchor": "middle", "text": "ttft limit", "showarrow": False,
        "meta": 0,
    }  # fmt: skip
    assert note["x"] == pytest.approx(np.log10(0.5))


def test_bars_of_nothing_and_of_thirds() -> None:
    edges, counts = histogram(np.zeros(0))
    assert (edges.tolist(), counts.tolist()) == ([0.0, 0.0], [0.0])
    assert len(histogram(np.array([0.0, 1.0]))[1]) == 50
    late = handmade.run(handmade.requests(arrival=[0.0, 1 / 3]), handmade.iterations())
    (bars,) = figures(unroll(late), summary(late), None)["arrivals"]["data"]
    assert (bars["x"][0], bars["width"][0], bars["x"][1]) == (0.00166667, 0.00333333, 0.005)
    whole = handmade.two_requests()
    parts = {"measured": handmade.flat_times(0.1), "modelled": handmade.flat_times(0.2)}
    run = replace(whole, times=(handmade.flat_times(0.3),), sources=(parts,))
    drawn = figures(unroll(run), summary(run), None)["breakdown"]["data"]
    assert [bar["x"] for bar in drawn if bar["y"] == ["by source"]] == [[33.333], [66.667]]


def test_without_a_first_token_its_parts_are_nothing() -> None:
    apart = handmade.disaggregated()
    unknown = np.full(2, np.nan)
    run = replace(apart, requests=replace(apart.requests, first_token=unknown, finish=unknown))
    bars = figures(unroll(run), summary(run), None)["first-token"]["data"]
    assert len(bars) >= 5
    assert all(bar["x"] == [0.0, 0.0] for bar in bars)
