from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.workload import Workload, at_rate, copies, cut_to, head, repeat, scale_time, with_concurrency
from windtunnel.workload.rules import LATEST
from windtunnel.workload.synthetic import stream
from windtunnel.workload.transforms import spread, with_longer_prompts
from workload.random_workloads import workloads


def three() -> Workload:
    return Workload.from_columns(arrival=[1.0, 2.0, 5.0], prompt_tokens=[1, 2, 3], output_tokens=1, think_time=4.0)


def test_scaling_time_moves_arrivals_only() -> None:
    scaled = scale_time(three(), 0.5)
    assert scaled.arrival.tolist() == [0.5, 1.0, 2.5]
    assert scaled.think_time.tolist() == [4, 4, 4]


@given(workloads(), st.floats(0.01, 100))
def test_a_wanted_rate_is_met(workload: Workload, rate: float) -> None:
    if workload.duration > 0:
        assume(np.nanmax(workload.arrival) * workload.request_rate / rate <= LATEST)
        assert at_rate(workload, rate).request_rate == pytest.approx(rate)
    else:
        with pytest.raises(InputError, match="all requests arrive at once"):
            at_rate(workload, rate)
    assert np.nanmax(at_rate(workload, float("inf")).arrival) == 0


def test_what_is_too_long_is_cut_in_proportion_as_vidur_does() -> None:
    """3,000 + 1,500 tokens are 404 too many: 270 of the prompt (269.3) and 135 of the output (134.7)."""
    base = Workload.from_columns(
        arrival=[0.0, 1.0, 2.0], prompt_tokens=[3000, 4096, 4095], output_tokens=[1500, 1, 1], max_tokens=[4000, 9, 7]
    )
    cut = cut_to(base, 4096)
    assert cut.prompt_tokens.tolist() == [2730, 4095, 4095]
    assert cut.output_tokens.tolist() == [1365, 1, 1]
    assert cut.max_tokens.tolist() == [1366, 1, 7]
    assert cut.notes == ("2 of 3 requests are cut to 4,096 tokens",)
    assert cut_to(base, 5000) is base
    with pytest.raises(InputError, match="must be ≥ 2"):
        cut_to(base, 1)
    with pytest.raises(InputError, match="prompts of this load share text"):
        cut_to(replace(base, begins=(np.array([-1, 0, -1]), np.array([0, 5, 0]))), 100)


def test_repeating_keeps_the_rate_and_makes_new_content() -> None:
    base = Workload.from_columns(
        arrival=[1.0, 2.0, 5.0, 9.0],
        prompt_tokens=[8, 8, 8, 8],
        output_tokens=1,
        session=[3, -1, 3, 0],
        hash_ids=[[4, 5], [4], [4, 5], []],
        hash_block_size=4,
    )
    twice = repeat(base, 2)
    assert twice.request_rate == pytest.approx(base.request_rate)
    released = ~np.isnan(twice.arrival)
    assert twice.arrival[released].tolist() == [1, 2, 9, 13, 14, 21]
    assert twice.session.tolist() == [3, -1, 0, 7, -1, 4, 3, 7]
    assert twice.begins is not None
    assert [part.tolist() for part in twice.begins] == [
        [-1, 0, -1, -1, 3, -1, 0, 3],
        [0, 4, 0, 0, 4, 0, 8, 8],
    ]


@given(workloads(), st.integers(1, 4))
def test_repeating_multiplies_everything(workload: Workload, times: int) -> None:
    longer = repeat(workload, times)
    assert len(longer) == times * len(workload)
    assert longer.prompt_tokens.sum() == times * workload.prompt_tokens.sum()
    assert longer.spec()["sessions"] == times * workload.spec()["sessions"]
    assert (longer.follow >= 0).sum() == times * (workload.follow >= 0).sum()
    if workload.texts is not None:
        assert longer.texts is not None
        assert longer.texts[1].sum() == times * workload.texts[1].sum()
    assert repeat(workload, 1).equals(workload)


@given(workloads(), st.integers(1, 14))
def test_the_head_is_a_valid_beginning(workload: Workload, count: int) -> None:
    begun = head(workload, count)
    assert len(begun) == min(count, len(workload))
    if workload.session.max() < 0:
        assert (begun.prompt_tokens == workload.prompt_tokens[:count]).all()


def test_the_head_takes_sessions_turn_by_turn() -> None:
    workload = Workload.from_columns(
        arrival=[0, 1, 2, 3, 4], prompt_tokens=[1, 2, 3, 4, 5], output_tokens=1, session=[0, 1, 0, 0, 1]
    )
    assert head(workload, 3).prompt_tokens.tolist() == [1, 3, 4]
    assert head(workload, 4).prompt_tokens.tolist() == [1, 2, 3, 4]


def test_concurrency_closes_and_opens_the_loop() -> None:
    closed = with_concurrency(three(), 2)
    assert closed.max_concurrency == 2
    assert with_concurrency(closed, 0).equals(three())


def test_impossible_transforms_are_refused() -> None:
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="time scale"):
            scale_time(three(), factor)
    for rate in (0.0, -2.0, float("nan")):
        with pytest.raises(InputError, match="request_rate="):
            at_rate(three(), rate)
    with pytest.raises(InputError, match="repeat=0"):
        repeat(three(), 0)
    with pytest.raises(InputError, match="num_prompts=0"):
        head(three(), 0)
    with pytest.raises(InputError, match="max_concurrency=-1"):
        with_concurrency(three(), -1)


def test_copies_follow_each_other_by_one_mean_gap() -> None:
    """Three requests in 3 s; at 2 requests/s they last 1 s, so that the next copy begins 0.5 s after the last."""
    load = Workload.from_columns(
        prompt_tokens=np.full(3, 1), output_tokens=np.full(3, 1), arrival=np.array([0.0, 1.0, 3.0])
    )
    faster = at_rate(load, 2.0)
    assert faster.arrival.tolist() == pytest.approx([0.0, load.request_rate / 2, 3 * load.request_rate / 2])
    assert faster.request_rate == pytest.approx(2.0)
    twice = repeat(load, 2)
    gap = 3.0 + 1 / load.request_rate
    assert twice.arrival.tolist() == pytest.approx([0.0, 1.0, 3.0, gap, gap + 1.0, gap + 3.0])
    assert scale_time(load, 0.5).arrival.tolist() == [0.0, 0.5, 1.5]


def test_the_rate_that_was_asked_for_scales_with_time() -> None:
    asked = replace(three(), asked_rate=3.0, burstiness=0.5)
    assert scale_time(asked, 0.5).asked_rate == 6.0
    assert at_rate(asked, 1.0).asked_rate == pytest.approx(3.0 / asked.request_rate)
    at_once = at_rate(asked, float("inf"))
    assert (at_once.asked_rate, at_once.arrival.tolist()) == (0.0, [0, 0, 0])


def test_copies_of_what_comes_at_once_come_at_once() -> None:
    load = Workload.from_columns(prompt_tokens=[1, 2], output_tokens=1, max_concurrency=3, name="two", notes=["as is"])
    twice = repeat(load, 2)
    assert twice.arrival.tolist() == [0, 0, 0, 0]
    assert twice.prompt_tokens.tolist() == [1, 2, 1, 2]
    assert (twice.max_concurrency, twice.name, twice.notes) == (3, "two", ("as is",))
    assert repeat(load, 1) is load


def test_numbers_too_large_to_go_on_are_given_anew() -> None:
    """Sessions 2^62 and 2^62 + 9: a third copy would end beyond 2^63 only if the span were that large."""
    large = 2**62
    near = Workload.from_columns(prompt_tokens=[4, 4], output_tokens=1, session=[large, large + 9])
    assert (repeat(near, 3).session - large).tolist() == [0, 9, 10, 19, 20, 29]
    far = Workload.from_columns(prompt_tokens=[4, 4], output_tokens=1, session=[0, 2 * large - 2])
    assert repeat(far, 3).session.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("last", "renumbered"), [(2**63 - 1 - 2, False), (2**63 - 1 - 1, True)])
def test_the_largest_number_is_reached_and_not_passed(last: int, renumbered: bool) -> None:
    load = Workload.from_columns(prompt_tokens=[4, 4], output_tokens=1, session=[last - 1, last])
    found = repeat(load, 2).session.tolist()
    assert found == ([0, 1, 2, 3] if renumbered else [last - 1, last, last + 1, last + 2])


def test_a_head_as_long_as_the_load_is_the_load() -> None:
    load = three()
    assert head(load, 3) is load
    assert head(load, 2).prompt_tokens.tolist() == [1, 2]
    assert head(load, 1).prompt_tokens.tolist() == [1]


def test_longer_prompts_have_so_many_times_the_tokens() -> None:
    one = Workload.from_columns(prompt_tokens=[1, 10, 25], output_tokens=[3, 4, 5])
    assert with_longer_prompts(one, 1.5).prompt_tokens.tolist() == [2, 15, 38]
    assert with_longer_prompts(one, 0.01).prompt_tokens.tolist() == [1, 1, 1]
    assert with_longer_prompts(one, 2).name == "workload, prompts × 2"
    assert with_longer_prompts(one, 1) is one
    shared = Workload.from_columns(prompt_tokens=[16], output_tokens=[1], hash_ids=[[1]], hash_block_size=16)
    with pytest.raises(InputError, match="share text"):
        with_longer_prompts(shared, 2)
    with pytest.raises(InputError, match="must be a finite number > 0"):
        with_longer_prompts(one, 0)


def test_users_with_the_same_habits_share_nothing_and_come_at_other_times() -> None:
    """A chat of two turns and two lone requests, the second of which begins with the first's prompt; four users."""
    log = Workload.from_columns(
        arrival=[0.0, 40.0, 60.0, 0.0], prompt_tokens=[5, 9, 12, 20], output_tokens=[5, 1, 2, 3],
        session=[0, -1, -1, 0], begins=[None, None, [1, 6], [0, 10]],
    )  # fmt: skip
    found = copies(log, 4, 15.0)
    first = found.arrival[~np.isnan(found.arrival)]
    assert (np.diff(first) >= 0).all()
    assert len(set(first)) > 4
    for place, prompt in enumerate((5, 9, 12)):
        times = found.arrival[found.prompt_tokens == prompt]
        most = 15.0 if place == 1 else 0.0
        assert (np.abs(times - log.arrival[place]) <= most).all()
    assert sorted(np.bincount(found.session[found.session >= 0])) == [2, 2, 2, 2]
    assert found.begins is not None
    others, tokens = found.begins
    shared = others >= 0
    pairs = zip(found.prompt_tokens[shared], found.prompt_tokens[others[shared]], tokens[shared], strict=True)
    assert sorted(pairs) == [(12, 9, 6)] * 4 + [(20, 5, 10)] * 4
    assert len(set(others[shared].tolist())) == 8
    assert copies(log, 4, 15.0).equals(found)
    assert not copies(log, 4, 15.0, seed=1).equals(found)
    assert copies(log, 1) is log


@pytest.mark.parametrize(("times", "shift"), [(0, 1.0), (2, -1.0), (2, float("inf"))])
def test_copies_need_a_number_and_a_time(times: int, shift: float) -> None:
    with pytest.raises(InputError, match=r"must be ≥ 1|must be finite seconds"):
        copies(three(), times, shift)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.floats(0.1, 3), st.integers(0, 3))
def test_jitter_spreads_ties_but_keeps_the_order_and_the_ticks(ticks: list[int], quantum: float, seed: int) -> None:
    arrival = np.sort(np.array(ticks, np.float64))
    moved = spread(arrival, quantum, stream(seed, "jitter"))
    assert (np.diff(moved) >= 0).all()
    assert (moved >= arrival).all()
    assert (moved <= arrival + quantum).all()
    later = arrival[np.minimum(np.searchsorted(arrival, arrival, side="right"), len(arrival) - 1)]
    assert ((moved <= later) | (later == arrival)).all()


def test_ties_are_spread_over_the_tick_or_to_the_next_time() -> None:
    """A thousand at 0 and at 2, and one at 2.5: over one second, half a second, and one second."""
    arrival = np.array([0.0] * 1000 + [2.0] * 1000 + [2.5])
    moved = spread(arrival, 1.0, stream(0, "jitter"))
    first, second = moved[:1000], moved[1000:2000]
    assert (first.mean(), first.max()) == pytest.approx((0.5, 1.0), abs=0.03)
    assert (second.mean(), second.max()) == pytest.approx((2.25, 2.5), abs=0.02)
    assert 2.5 < moved[-1] < 3.5
    with pytest.raises(InputError, match="jitter=0: must be seconds > 0, or 0 for none"):
        spread(arrival, 0.0, stream(0, "jitter"))
