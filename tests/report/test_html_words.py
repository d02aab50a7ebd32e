"""What the page of a run says, cell by cell, of runs written by hand."""

import re
from dataclasses import replace
from typing import Any

import handmade
import pytest

from windtunnel.deployment import SLO
from windtunnel.deployment.slo import PercentileLimit
from windtunnel.metrics import summary, unroll
from windtunnel.report import html_report
from windtunnel.simulate.run import Run


def page(run: Run, slo: SLO | None = None) -> str:
    steps = unroll(run)
    text = html_report(steps, summary(run, slo, steps=steps), slo)
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)


def cards(text: str) -> dict[str, tuple[str, str]]:
    """Name → value and the line below."""
    found = re.findall(
        r'<div class="name">(.*?)</div><div class="value">(.*?)</div><div class="more">(.*?)</div>', text
    )
    return {name: (value, more) for name, value, more in found}


def rows(text: str) -> dict[str, list[str]]:
    """First cell of each row → the others."""
    found = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", text)]
    return {cells[0]: cells[1:] for cells in found if cells}


def told(run: Run, **more: Any) -> Run:
    return replace(run, manifest=run.manifest | more)


def test_key_numbers_by_hand() -> None:
    """Two GPUs for 0.4 s at 3 USD an hour each: 667 µUSD for 6 tokens, 111 USD for a million; steps take all of it."""
    found = cards(page(handmade.two_requests()))
    assert found["First token, median"] == ("125 ms", "p99 150 ms")
    assert found["Per output token, median"] == ("100 ms", "p99 100 ms")
    assert found["End to end, median"] == ("325 ms", "p99 398 ms")
    assert found["Output tokens per second"] == ("15.0", "5.00 requests/s")
    assert found["Queueing delay, median"] == ("25.0 ms", "p99 49.5 ms")
    assert found["Cost / M output tokens"] == ("$111", "$6.00 an hour, $0.000667 for this run")
    assert found["GPUs busy"][0] == "100 %"
    assert found["KV cache in use"] == ("3.50 %", "of 100 blocks a rank")
    assert found["Computed per prompt"] == ("24.0 tokens", "0 % of tokens cached")
    assert found["Requests finished"] == ("2", "of 2; 0 preemptions, longest wait 50.0 ms")
    million, whole = found["Energy / M output tokens"]
    assert float(million.split()[0]) * 6e-6 == pytest.approx(float(whole.split()[0]), rel=0.01)


def test_what_was_found_is_told_by_kind() -> None:
    run = told(handmade.two_requests(), reuse={"history": 30, "answers": 6, "system": 3, "others": 1})
    kinds = "75.0 % the session&#x27;s earlier prompts, 15.0 % its answers, 7.50 % system prompts, 2.50 % other prompts"
    assert cards(page(run))["Computed per prompt"][1] == f"0 % of tokens cached ({kinds})"
    again = told(run, computed_again=36, why_again={"evicted": 24, "elsewhere": 12, "early": 0})
    known = "36 tokens known before and computed again: 50.0 % evicted before reuse, 25.0 % on another replica"
    assert cards(page(again))["Computed per prompt"][1] == f"0 % of tokens cached ({kinds}); {known}"


def test_limits_of_requests_replace_the_queue_by_goodput() -> None:
    """One request of two has its first token within 120 ms."""
    text = page(handmade.two_requests(), SLO(ttft=0.12, e2el=2.0))
    assert cards(text)["Goodput, requests/s"] == ("2.50", "ttft ≤ 120 ms, e2el ≤ 2.00 s")
    assert "Queueing delay, median" not in cards(text)
    words = "Goal missed: 50.0 % of requests meet ttft ≤ 120 ms and e2el ≤ 2.00 s (goal 90.0 %)."
    assert f'<p class="verdict bad">{words}</p>' in text
    assert '<p class="verdict good">Goal met: 100 % of requests' in page(handmade.two_requests(), SLO(ttft=0.2))
    assert 'class="verdict' not in page(handmade.two_requests())


@pytest.mark.parametrize(("limit", "kind", "word"), [(0.2, "good", "met"), (0.14, "bad", "missed")])
def test_percentile_limits_are_the_verdict(limit: float, kind: str, word: str) -> None:
    slo = SLO(percentiles=(PercentileLimit("ttft", 50, 1.0), PercentileLimit("ttft", 99, limit)))
    text = page(handmade.two_requests(), slo)
    limits = f"ttft_p50 125 ms (limit 1.00 s) · ttft_p99 150 ms (limit {limit * 1000:.0f} ms)"
    assert f'<p class="verdict {kind}">Goal {word}: {limits}.</p>' in text
    assert cards(text)["Queueing delay, median"], "no limit of each request"


def test_nine_of_ten_good_requests_are_good() -> None:
    """The share that ``run`` and ``plan`` ask for is 90 %."""
    first = [0.1] * 9 + [0.5]
    run = handmade.run(
        handmade.requests(arrival=[0.0] * 10, scheduled=[0.0] * 10, first_token=first, finish=[1.0] * 10),
        handmade.iterations(),
    )
    assert '<p class="verdict good">Goal met: 90.0 % of requests' in page(run, SLO(ttft=0.2))


def test_bands_stand_behind_their_figures() -> None:
    bands = {
        "ttft": {"p99": [0.1, 0.3]},
        "e2el": {"p99": [0.39, None]},
        "attainment": [0.4, 0.6],
        "grade": ["low", "nothing is known"],
        "cost_per_million_output_tokens": [100.0, 120.0],
        "words": {"TTFT": "measured"},
        "known_bad": "<never> right",
    }
    text = page(told(handmade.two_requests(), bands=bands), SLO(ttft=0.12))
    assert cards(text)["First token, median"][1] == "p99 150 ms (100-300 ms on a real server)"
    assert cards(text)["Cost / M output tokens"][1].startswith("$100 to $120 on a real server; $6.00 an hour, ")
    latencies = rows(text)
    times = ["125 ms", "125 ms", "145 ms", "148 ms", "150 ms", "150 ms"]
    assert latencies["first token (TTFT)"] == [*times, "100-300 ms"]
    assert latencies["end to end"][-1] == "390 ms to overloaded"
    assert latencies["between tokens (ITL)"] == [*["100 ms"] * 6, "–"]
    assert latencies["TTFT"] == ["measured"]
    assert "What is known of real servers" in text and "On a real server expect 40.0 % to 60.0 %." in text
    assert '<p class="sub">Confidence low: nothing is known.</p>' in text
    assert "<li>&lt;never&gt; right</li>" in text
    without = page(handmade.two_requests())
    assert "real server" not in without and "overloaded" not in without
    assert re.findall("<th>(.*?)</th>", without)[:6] == ["mean", "p50", "p90", "p95", "p99", "max"]


def test_gaps_to_the_best_schedule() -> None:
    gap = {"makespan": {"value": 2.0, "bound": 1.6, "gap": 0.25}, "proof": "words"}
    text = page(told(handmade.two_requests(), gap=gap))
    assert rows(text)["makespan"] == ["2.00 s", "1.60 s", "25.0 %"]
    assert "no scheduler beats" in text
    assert "no scheduler beats" not in page(told(handmade.two_requests(), gap={"proof": "words"}))


def test_refused_and_aborted_requests_are_said() -> None:
    run = handmade.run(
        handmade.requests(
            arrival=[0.0, 0.0, 0.0], status=[0, 1, 2], replica=[0, -1, 0], scheduled=[0.0, float("nan"), 0.0],
            first_token=[0.1, float("nan"), 0.1], finish=[0.2, 0.0, 0.2], preemptions=[1200, 0, 0],
        ),
        handmade.iterations(),
    )  # fmt: skip
    value, more = cards(page(run))["Requests finished"]
    assert (value, more.partition(";")[0]) == ("1", "of 3, 1 rejected, 1 aborted")
    assert "1,200 preemptions" in more


def test_the_first_lines() -> None:
    text = page(told(handmade.two_requests(), seed=7, workload={"name": "a & b"}))
    assert "<h1>Qwen/Qwen3-32B on 2 × H100 SXM</h1>" in text
    assert '<p class="sub">a &amp; b · 2 requests · 400 ms, the whole run</p>' in text
    assert "<footer>windtunnel 0.1.0 · seed 7 · simulated" in text
    two = handmade.run(handmade.requests(arrival=[0.0]), handmade.iterations(), replicas=2)
    assert "<h1>Qwen/Qwen3-32B on 2 replicas of 2 × H100 SXM</h1>" in page(told(two, workload={}))
    assert '<p class="sub">workload · 1 requests' in page(told(two, workload={}))
    steps = unroll(handmade.two_requests())
    trimmed = html_report(steps, summary(steps.run, steps=steps, exclude_warmup=True))
    assert "measured without warm-up and drain" in trimmed


def test_replicas_have_a_row_each_up_to_sixty_four() -> None:
    text = page(handmade.two_requests())
    heads = re.findall("<th>(.*?)</th>", text)
    first = heads.index("replica")
    names = "busy, iterations, batch, tokens / iteration, running, waiting, KV, KV peak, MFU, MBU, preemptions"
    assert heads[first + 1 : first + 12] == names.split(", ")
    own = rows(text)["0"]
    assert own[:2] == ["400 ms", "4"]
    assert own[4:8] == ["1.50", "0.125", "3.50 %", "5.00 %"], "requests 1.5 in the mean, one of 0.4 s waits 0.05"
    for replicas, more in ((64, None), (65, "and 1 more replicas"), (70, "and 6 more replicas")):
        text = page(handmade.run(handmade.requests(arrival=[0.0]), handmade.iterations(), replicas=replicas))
        assert "63" in rows(text) and "64" not in rows(text)
        assert (more in text) if more else ("more replicas" not in text)


def test_pools_have_a_row_each_and_name_their_replicas() -> None:
    text = page(handmade.disaggregated())
    pools = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", text)]
    named = {cells[0]: cells for cells in pools if cells and "× H100 SXM" in " ".join(cells)}
    assert set(named) == {"prefill", "decode"}
    assert named["decode"][1] == "1 × 2 × H100 SXM"
    assert rows(text)["0"][0] == "prefill" and rows(text)["1"][0] == "decode"
    assert cards(text)["KV cache in use"][1] == "of all pools"
    assert "0.00000614 GB of KV went over the link" in text
    assert text.count('<button type="button" data-copy=') == 2
    assert "<h3>prefill</h3>" in text


def test_settings_and_the_sources_of_times_are_listed() -> None:
    provenance = [
        {"operator": "up", "rows": 12}, {"operator": "down", "rows": 3}, [{"only": 1.5}], "words that are no row",
    ]  # fmt: skip
    text = page(told(handmade.two_requests(), provenance=provenance))
    found = rows(text)
    assert found["router"] == ["round_robin"]
    assert (found["up"], found["down"], found["only"]) == (["12"], ["3"], ["1.5"])
    assert found["tensor_parallel_size"] == ["2"] and found["kv_blocks"] == ["100"]
    assert not any(name.startswith(("footprint", "engine.")) for name in found)
    assert "Where the kernel times come from" in text
    assert "Where the kernel times come from" not in page(handmade.two_requests())
    assert "<h3>pool</h3>" not in text, "one pool needs no name"
