"""The profile of Dynamo's planner: its keys and units by hand, and read by Dynamo's own code."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import handmade
import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.report.planner_profile import decode_profile, prefill_profile, write_planner_profile
from windtunnel.scenario import Scenario, Server, vary
from windtunnel.scenario.simulate import simulate
from windtunnel.simulate.run import Run

DYNAMO = "WINDTUNNEL_DYNAMO"
"""Names a Python in which ai-dynamo can be imported."""


def apart(prefill: float = 0.001, decode: float = 0.1) -> Run:
    """Chunks of at most 2048 tokens take 0.1 s and ``prefill`` s a token; a decode step ``decode`` s."""
    run = handmade.disaggregated()
    pools = [
        pool | {"lockstep": False, "engine": pool["engine"] | {"max_num_batched_tokens": 2048, "max_model_len": 5000}}
        for pool in run.manifest["pools"]
    ]
    times = (handmade.flat_times(0.1, per_token=prefill), handmade.flat_times(decode))
    return replace(run, manifest=run.manifest | {"pools": pools}, times=times)


def test_a_prompt_alone_by_hand() -> None:
    """4,999 tokens are three steps: 0.3 s and 4.999 s; two GPUs share them."""
    found = prefill_profile(apart())
    assert found["prefill_isl"][[0, -1]].tolist() == [100, 4999]
    assert found["prefill_ttft"][[0, -1]] == pytest.approx([200.0, 5299.0])
    assert found["prefill_thpt_per_gpu"][[0, -1]] == pytest.approx([100 / 0.2 / 2, 4999 / 5.299 / 2])


def test_decode_steps_by_hand() -> None:
    """The cache holds 1,600 tokens: 16 requests of 100, and none of 4,999."""
    found = decode_profile(apart())
    assert found["max_kv_tokens"].tolist() == [1600]
    assert found["y_context_length"].max() <= 1600
    assert found["x_kv_usage"].max() == 1.0
    assert set(found["z_itl"].tolist()) == {100.0}
    at = found["y_context_length"] == 100
    assert (found["x_kv_usage"][at] * 16).tolist()[-1] == 16
    np.testing.assert_allclose(found["z_thpt_per_gpu"][at], found["x_kv_usage"][at] * 16 / 0.1 / 2)


def test_ranks_in_lockstep_count_together() -> None:
    run = apart()
    pools = [
        pool | {"lockstep": True, "gpus_per_replica": 4, "engine": pool["engine"] | {"data_parallel_size": 4}}
        for pool in run.manifest["pools"]
    ]
    times = tuple(handmade.flat_times(0.1, ranks=4, per_expert_token=slope) for slope in (0.0005, 0.0))
    run = replace(run, manifest=run.manifest | {"pools": pools}, times=times)
    assert decode_profile(run)["max_kv_tokens"].tolist() == [6400]
    assert decode_profile(run)["x_kv_usage"].max() == 1.0
    seconds = 0.1 + 4 * 100 * 0.0005
    assert prefill_profile(run)["prefill_thpt_per_gpu"][0] == pytest.approx(100 / seconds), "four prompts, four GPUs"


def test_pipelines_are_refused() -> None:
    run = apart()
    run.manifest["pools"][0]["engine"]["pipeline_parallel_size"] = 2
    with pytest.raises(InputError, match="knows no pipelines"):
        prefill_profile(run)


@pytest.mark.long
@pytest.mark.skipif(DYNAMO not in os.environ, reason=f"{DYNAMO} names no Python with ai-dynamo")
def test_dynamo_reads_what_is_written(tmp_path: Path) -> None:
    """Its planner takes the profile, its profiler the deployment."""
    from windtunnel.report import write_launch

    words = {"prefill": "replicas=2", "decode": "tensor_parallel_size=2", "random_input_len": 50, "num_prompts": 3}
    run = simulate(vary(Scenario(Server("Qwen/Qwen3-8B")), words))
    write_planner_profile(tmp_path, run)
    write_launch(tmp_path, run, "dynamo")
    script = Path(__file__).parent / "dynamo_reads.py"
    command = [os.environ[DYNAMO], str(script), str(tmp_path), str(tmp_path / "dynamo.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read = json.loads(done.stdout.splitlines()[-1])
    assert read["components"] == [["Frontend", "frontend", 1], ["prefill", "prefill", 2], ["decode", "decode", 1]]
    ours = prefill_profile(run)
    assert [row[:2] for row in read["steps"]["prefill"]] == [
        [pytest.approx(ttft / 1000), isl] for isl, ttft in zip(ours["prefill_isl"], ours["prefill_ttft"], strict=True)
    ]
    assert [row[0] for row in read["steps"]["decode"]] == pytest.approx((decode_profile(run)["z_itl"] / 1000).tolist())


def test_both_files_lie_where_dynamo_looks_for_them(tmp_path: Path) -> None:
    write_planner_profile(tmp_path, apart())
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.npz"))
    assert files == ["selected_decode_interpolation/raw_data.npz", "selected_prefill_interpolation/raw_data.npz"]
    with np.load(tmp_path / files[1]) as found:
        assert found["prefill_isl"][-1] == 4999
    with np.load(tmp_path / files[0]) as found:
        assert set(found.files) == {"x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu", "max_kv_tokens"}


def test_a_prompt_alone_has_no_decodes_beside_it_and_its_chunks_follow_each_other() -> None:
    """Attention of 1 µs for each pair of tokens: three chunks of 2,048, 2,048 and 903 tokens at 0, 2,048 and 4,096; the
    tables have it at knots, between which it is linear."""
    run = apart()
    pairs = handmade.flat_times(0.1, per_pair=1e-6, per_kv_token=1e-3)
    run = replace(run, times=(pairs, pairs))
    chunks = [(2048, 0), (2048, 2048), (903, 4096)]
    seconds = sum(pairs.batch(0, 0, [chunk]) for chunk in chunks)
    assert prefill_profile(run)["prefill_ttft"][-1] == pytest.approx(1000 * seconds)
    assert seconds > 0.3 + 1e-6 * 2048 * 2048, "the second chunk looks back at the first"
