"""Overheads: host work beyond the tables, and what a client sees beside the engine."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.metrics import request_metrics
from windtunnel.model import load_model
from windtunnel.perf.batch_times import linear
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.simulate.overheads import (
    CLIENTS,
    ENGINE_CLOCK,
    Agreement,
    ClientPath,
    HostOverhead,
    KernelFactors,
    Overheads,
    client_of,
    read_overheads,
)
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import simulate
from windtunnel.workload.columns import Workload

POOL = Pool(load_model("Qwen/Qwen3-0.6B"), device("l40s"), Engine(max_model_len=2048, max_num_seqs=8))
PATH = ClientPath(request=0.004, request_per_token=1e-5, first_token=0.002, per_sequence=0.001)
TIMES = linear(1e-3, 1e-6, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256)


def served(workload: Workload, overheads: Overheads) -> Run:
    return simulate(Deployment((POOL,)), workload, perf="modelled", cache=False, overheads=overheads)


def loop(n: int, limit: int) -> Workload:
    return Workload.from_columns(prompt_tokens=[100 + i for i in range(n)], output_tokens=20, max_concurrency=limit)


def test_host_work_is_added_to_every_step_with_requests() -> None:
    found = HostOverhead(1e-3, 2e-6, 3e-3, 4e-6).applied(TIMES)
    n = np.arange(9)
    assert found.host_serial.tolist() == pytest.approx(np.where(n > 0, 1e-3 + 2e-6 * n, 0).tolist())
    assert found.host_overlapped.tolist() == pytest.approx(np.where(n > 0, 3e-3 + 4e-6 * n, 0).tolist())
    assert HostOverhead().applied(found).host_serial.tolist() == found.host_serial.tolist()
    with pytest.raises(InputError, match=r"host serial: -0\.001 s in a step"):
        HostOverhead(serial=-1e-3).applied(TIMES)


@given(
    st.lists(st.tuples(st.floats(0, 0.01), st.integers(1, 900)), min_size=1, max_size=9),
)
def test_prompts_are_tokenised_one_after_the_other(rows: list[tuple[float, int]]) -> None:
    arrival, prompts = np.cumsum([gap for gap, _ in rows]), [tokens for _, tokens in rows]
    workload = Workload.from_columns(arrival=arrival, prompt_tokens=prompts, output_tokens=1)
    free, expected = 0.0, []
    for came, tokens in zip(arrival + PATH.request, prompts, strict=True):
        free = max(free, came) + PATH.request_per_token * tokens
        expected.append(free)
    assert (workload.arrival + PATH.delays(workload)).tolist() == pytest.approx(expected)


def test_a_client_waits_for_the_way_there_and_back() -> None:
    workload = Workload.from_columns(arrival=[0.0, 5.0], prompt_tokens=[100, 200], output_tokens=20)
    engine, client = (served(workload, Overheads(client=path)) for path in (None, PATH))
    one, two = request_metrics(engine.requests), request_metrics(client.requests)
    assert client.requests.arrival.tolist() == [0.0, 5.0]
    assert (two.ttft - one.ttft).tolist() == pytest.approx([0.008, 0.009])
    assert (two.e2el - one.e2el).tolist() == pytest.approx([0.008, 0.009])
    assert two.tpot.tolist() == pytest.approx(one.tpot.tolist())
    assert client.manifest["overheads"]["client"]["request"] == 0.004


def test_the_first_requests_of_a_closed_loop_queue_for_the_tokeniser() -> None:
    found = served(loop(8, 4), Overheads(client=PATH)).requests
    delays = PATH.delays(loop(8, 4))
    assert np.diff(delays[:4]).tolist() == pytest.approx([PATH.request_per_token * n for n in (101, 102, 103)])
    assert delays[4:].tolist() == pytest.approx([0.004 + 1e-5 * n for n in (104, 105, 106, 107)])
    assert found.arrival[:4].tolist() == pytest.approx([0.0] * 4)
    assert (request_metrics(found).ttft > delays + PATH.first_token).all()


def test_a_closed_loop_turns_around_at_the_client() -> None:
    engine = served(loop(3, 1), ENGINE_CLOCK).requests
    assert engine.arrival[1:].tolist() == engine.finish[:-1].tolist()
    client = served(loop(3, 1), Overheads(client=PATH)).requests
    assert client.arrival[1:].tolist() == pytest.approx(client.finish[:-1].tolist())
    step = (engine.finish - engine.first_token) / 19
    assert request_metrics(client).tpot == pytest.approx(step, rel=1e-3)


def test_who_is_in_flight_waits_for_each_other() -> None:
    many, one = (served(loop(8, limit), Overheads(client=PATH)).requests for limit in (8, 1))
    plain = served(loop(8, 8), Overheads(client=replace(PATH, per_sequence=0.0))).requests
    later = many.first_token - plain.first_token
    assert (later.min(), later.max()) == pytest.approx((0.001, 0.008))  # prompts come one by one from the tokeniser
    assert (many.finish - plain.finish).tolist() == pytest.approx(later.tolist())
    alone = served(loop(8, 1), Overheads(client=replace(PATH, per_sequence=0.0))).requests
    assert (request_metrics(one).ttft - request_metrics(alone).ttft).tolist() == pytest.approx([0.001] * 8)


def test_turns_of_a_session_follow_when_the_client_has_the_answer() -> None:
    turns = Workload.from_columns(
        arrival=[0.0, np.nan], prompt_tokens=[100, 100], output_tokens=20, session=[1, 1], think_time=[0.0, 1.0]
    )
    found = served(turns, Overheads(client=replace(PATH, per_sequence=0.0))).requests
    assert found.arrival[1] == pytest.approx(found.finish[0] + 1.0)
    assert request_metrics(found).ttft[1] == pytest.approx(request_metrics(found).ttft[0], rel=0.2)


def test_without_overheads_nothing_changes() -> None:
    a, b = (served(loop(20, 4), overheads).requests for overheads in (ENGINE_CLOCK, Overheads()))
    assert a.finish.tolist() == b.finish.tolist()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema_version: 1\nhost: {serail: 1}\n", "did you mean 'serial'"),
        ("schema_version: 1\nclient: {request: soon}\n", "request='soon': must be a number"),
        ("schema_version: 1\nclient: {request: -1}\n", "client request=-1.0: must be ≥ 0"),
        ("host: {}\n", "not a file that `windtunnel calibrate` wrote"),
        ("{", "not YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_calibration_is_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read_overheads(path)


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "c.yaml"
    for found in (Overheads(HostOverhead(1e-3, 0.0, -2e-3)), Overheads(client=replace(PATH, request=0.5))):
        path.write_text(yaml.safe_dump({"schema_version": 1, **found.spec(), "note": 1}), encoding="utf-8")
        assert read_overheads(path) == found


def test_an_agreement_is_read_back_and_must_name_its_server(tmp_path: Path) -> None:
    import yaml

    said = Overheads(agreement=Agreement(("vllm", "F", "h100_sxm", "fp8", "m", "TP1"), 0.02, -0.1))
    path = tmp_path / "calibration.yaml"
    path.write_text(yaml.safe_dump({"schema_version": 1, **said.spec()}), encoding="utf-8")
    assert read_overheads(path) == said
    path.write_text(yaml.safe_dump({"schema_version": 1, "agreement": {"steps": 0.1}}), encoding="utf-8")
    with pytest.raises(InputError, match="must name the server"):
        read_overheads(path)


def test_factors_of_kernels_lengthen_what_they_name_and_no_host_work() -> None:
    times = tabulate(POOL).times
    slower = KernelFactors(products=2.0, attention=3.0, prompts=5.0).applied(times)
    np.testing.assert_allclose(slower.decode_tokens, 2 * times.decode_tokens)
    np.testing.assert_allclose(slower.decode_attention, 3 * times.decode_attention)
    np.testing.assert_allclose(slower.prefill_attention, 5 * times.prefill_attention)
    np.testing.assert_allclose(slower.mixed_tokens, 5 * times.mixed_tokens)
    assert np.array_equal(slower.host_serial, times.host_serial)
    assert KernelFactors().applied(times) is times
    with pytest.raises(InputError, match="kernels attention=0"):
        KernelFactors(attention=0)


@pytest.mark.parametrize(
    ("clock", "client"),
    [
        ("engine timestamps", ""),
        ("", ""),
        ("client", "other"),
        ("client: GuideLLM 0.3", "guidellm"),
        ("client, vllm bench serve", "vllm-bench"),
        ("client (inference-perf)", "inference-perf"),
        ("client: InferenceX", "inferencex"),
        ("client: of my own", "other"),
    ],
)
def test_whose_clock_a_run_has(clock: str, client: str) -> None:
    assert client_of(clock) == client


def test_a_request_in_flight_costs_the_client_of_the_served_points_more_than_others() -> None:
    assert {name for name, path in CLIENTS.items() if path.per_sequence > 1e-4} == {"inferencex"}


def test_a_calibration_names_a_client(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("schema_version: 1\nclient: guidellm\n", encoding="utf-8")
    assert read_overheads(file).client == CLIENTS["guidellm"]
    file.write_text("schema_version: 1\nclient: guidelm\n", encoding="utf-8")
    with pytest.raises(InputError, match="'guidellm'"):
        read_overheads(file)
