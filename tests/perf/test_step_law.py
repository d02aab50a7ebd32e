"""Step laws: their tables are exact, samples give their terms back, and simdistserve's runs come out of them."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.metrics import request_metrics
from windtunnel.model import load_model
from windtunnel.perf.step_law import StepLaw, Terms, fit
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload

DISAGG = Path(__file__).parents[3] / "shared" / "truth" / "disagg"
LAW = StepLaw(Terms(0.018, 1e-4, 7e-9), Terms(0.02, 6e-7, 4e-5), Terms(0.007, 5e-7, 2e-4), large_from=5)
LIMITS = {"max_num_batched_tokens": 4096, "max_num_seqs": 64, "max_model_len": 512}


@given(st.lists(st.integers(1, 512), min_size=1, max_size=8))
def test_prompts_of_any_length_take_what_the_law_says(prompts: list[int]) -> None:
    seconds = LAW.tables(**LIMITS).batch(0, 0, [(n, 0) for n in prompts])
    assert seconds == pytest.approx(0.018 + 1e-4 * sum(prompts) + 7e-9 * sum(n * n for n in prompts), rel=1e-12)


@given(st.lists(st.integers(1, 511), min_size=1, max_size=20))
def test_decodes_follow_the_law_of_their_number(contexts: list[int]) -> None:
    n, cached = len(contexts), sum(contexts)
    law = (0.02, 6e-7, 4e-5) if n < 5 else (0.007, 5e-7, 2e-4)
    expected = law[0] + law[1] * cached + law[2] * n
    assert LAW.tables(**LIMITS).batch(n, cached, []) == pytest.approx(expected, rel=1e-12)


def test_chunks_add_up_to_their_prompt() -> None:
    times = LAW.tables(**LIMITS)
    whole = times.batch(0, 0, [(500, 0)])
    parts = times.batch(0, 0, [(200, 0)]) + times.batch(0, 0, [(300, 200)])
    assert parts == pytest.approx(whole + LAW.prefill.constant, rel=1e-12)


def test_samples_give_the_terms_back() -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 512, rng.integers(1, 9)).tolist() for _ in range(50)]
    batches = [(n, int(cached)) for n, cached in zip(range(1, 51), rng.integers(100, 20_000, 50), strict=True)]
    times = LAW.tables(max_num_batched_tokens=4096, max_num_seqs=64, max_model_len=20_000)
    found = fit(
        [(each, times.batch(0, 0, [(n, 0) for n in each])) for each in prompts],
        [(n, cached, times.batch(n, cached, [])) for n, cached in batches],
        large_from=5,
    )
    for terms, expected in ((found.prefill, LAW.prefill), (found.decode, LAW.decode)):
        assert terms == pytest.approx(expected, rel=1e-9)
    assert found.decode_large == pytest.approx(LAW.decode_large, rel=1e-9)


def test_small_batches_alone_have_one_law() -> None:
    samples = [(1, 100, 0.02), (2, 100, 0.03), (2, 400, 0.04)]
    assert fit([((10,), 1.0), ((20,), 2.0), ((10, 20), 3.0)], samples).decode_large is None


def test_samples_that_say_too_little_are_refused() -> None:
    with pytest.raises(InputError, match="2 prefills: do not determine three terms"):
        fit([((10,), 1.0), ((20,), 2.0)], [(1, 100, 0.02), (2, 100, 0.03), (2, 400, 0.04)])


def test_a_law_below_zero_is_refused() -> None:
    with pytest.raises(InputError, match="mixed_tokens holds a negative"):
        StepLaw(Terms(-1.0, 0.0, 0.0), LAW.decode).tables(**LIMITS)


def simulated(laws: tuple[StepLaw, StepLaw], tensor_parallel: tuple[int, int], requests: Any) -> Any:
    """Latencies of every request by one prefill and one decode replica of OPT-13B, which are never full."""
    arrival, prompts, outputs = requests
    pools = tuple(
        Pool(
            load_model("facebook/opt-13b"),
            device("a100"),
            Engine(
                tensor_parallel_size=size,
                max_num_seqs=512,
                max_num_batched_tokens=65_536,
                num_gpu_blocks_override=3_000,
                enable_chunked_prefill=False,
                enable_prefix_caching=False,
                async_scheduling=False,
                gpu_memory_utilization=1.0,
            ),
            role=role,
        )
        for role, size in zip(("prefill", "decode"), tensor_parallel, strict=True)
    )
    limits = {"max_num_batched_tokens": 65_536, "max_num_seqs": 512, "max_model_len": 2048}
    tables = [law.in_simdistserve().tabulated(**limits) for law in laws]
    # a request of o tokens decodes o times there, its first token apart
    workload = Workload.from_columns(arrival=arrival, prompt_tokens=prompts, output_tokens=np.add(outputs, 1))
    return request_metrics(simulate(Deployment(pools), workload, tables=tables).requests)


def played(laws: tuple[StepLaw, StepLaw], requests: Any) -> tuple[list[float], list[float]]:
    """TTFT and TPOT of every request by simdistserve's rules, written down a second time."""
    arrival, prompts, outputs = (list(column) for column in requests)
    n, (a, b, c) = len(arrival), laws[0].prefill
    first, end, time, at = [0.0] * n, [0.0] * n, 0.0, 0
    while at < n:
        time, start = max(time, arrival[at]), at
        while at < n and arrival[at] <= time:
            at += 1
        total, squares = sum(prompts[start:at]), sum(prompt**2 for prompt in prompts[start:at])
        time += a + b * total + c * squares + 3e-3 + 1e-7 * total
        first[start:at] = [time] * (at - start)
    coming, decoded, time = deque(sorted(range(n), key=first.__getitem__)), [0] * n, 0.0
    running: list[int] = []
    while coming or running:
        time = time if running else max(time, first[coming[0]])
        while coming and first[coming[0]] <= time:
            running.append(coming.popleft())
        small = len(running) < laws[1].large_from
        a, b, c = laws[1].decode if small else laws[1].decode_large or laws[1].decode
        total = sum(prompts[r] + decoded[r] for r in running)
        time += a + b * (total + len(running)) + c * len(running) + 2e-3 + 1e-7 * total
        for r in running:
            decoded[r] += 1
            end[r] = time
        running = [r for r in running if decoded[r] < outputs[r]]
    ttft = [time - of for time, of in zip(first, arrival, strict=True)]
    return ttft, [(end[r] - first[r]) / outputs[r] for r in range(n)]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(0.5, 20.0))
def test_every_request_is_as_in_simdistserve(seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    requests = rng.exponential(1 / rate, 40).cumsum(), rng.integers(1, 1025, 40), rng.integers(1, 60, 40)
    found = simulated((LAW, LAW), (1, 1), requests)
    for metric, expected in zip((found.ttft, found.tpot), played((LAW, LAW), requests), strict=True):
        np.testing.assert_allclose(metric, expected, rtol=0, atol=1e-9)


@pytest.mark.skipif(not DISAGG.is_dir(), reason="the published runs are not beside the checkout")
def test_simdistserves_published_runs() -> None:
    published = json.loads((DISAGG / "simdistserve.json").read_text(encoding="utf-8"))
    known = json.loads((DISAGG / "step_laws.json").read_text(encoding="utf-8"))["laws"]
    sizes = published["prefill"]["tp"], published["decode"]["tp"]
    laws = tuple(law(known, published["model"], size) for size in sizes)
    for point in published["points"]:
        rng = np.random.default_rng(7)
        arrival = np.cumsum(rng.exponential(1 / point["rate"], 300))
        requests = arrival - arrival[0], rng.integers(64, 1025, 300), rng.integers(16, 257, 300)
        found = simulated((laws[0], laws[1]), sizes, requests)
        for name, of_requests in (("ttft", found.ttft), ("tpot", found.tpot)):
            wanted = point[f"{name}_mean_ms"], point[f"{name}_p90_ms"]
            milliseconds = np.array([of_requests.mean(), np.quantile(of_requests, 0.9)]) * 1e3
            np.testing.assert_allclose(milliseconds, wanted, rtol=0, atol=1e-9)


def law(known: list[dict[str, Any]], model: str, size: int) -> StepLaw:
    entry = next(each for each in known if (each["model"], each["tp"]) == (model, size))
    names = ("prefill", "decode_small", "decode_large")
    prefill, small, large = (Terms(*(term * 1e-3 for term in entry[name])) for name in names)
    return StepLaw(prefill, small, large, entry["large_from"])
