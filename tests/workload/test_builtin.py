from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.workload import FORMATS, builtin, builtin_names, describe, load_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
ORIGINALS = {
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
    "mooncake-conversation": "conversation_trace.jsonl",
    "mooncake-synthetic": "synthetic_trace.jsonl",
}


def test_the_names() -> None:
    assert {*ORIGINALS, "sharegpt", "arxiv-summarization"} <= set(builtin_names())
    with pytest.raises(InputError, match="unknown workload 'azure-con': did you mean 'azure-conv'"):
        builtin("azure-con")


def test_azure_conv_is_an_hour_of_requests() -> None:
    workload = builtin("azure-conv")
    assert len(workload) == 19_366
    assert workload.duration == pytest.approx(3_502, abs=3)
    assert (workload.name, workload.notes) == ("azure-conv", ())


@pytest.mark.parametrize("name", builtin_names())
def test_same_seed_same_bits_other_seed_other_bits(name: str) -> None:
    assert builtin(name, seed=3, num_requests=500).equals(builtin(name, seed=3, num_requests=500))
    assert not builtin(name, seed=3, num_requests=500).equals(builtin(name, seed=4, num_requests=500))


@pytest.mark.parametrize("name", builtin_names())
def test_another_rate_and_number_are_exact(name: str) -> None:
    workload = builtin(name, num_requests=2_000, request_rate=16.0, max_concurrency=9)
    assert workload.arrival[-1] == pytest.approx(125.0)
    assert (len(workload), workload.max_concurrency) == (2_000, 9)
    assert (builtin(name, num_requests=10, request_rate=float("inf")).arrival == 0).all()


def test_another_rate_leaves_the_lengths_alone() -> None:
    slow, fast = (builtin("azure-conv", num_requests=300, request_rate=rate) for rate in (1.0, 50.0))
    assert (slow.prompt_tokens == fast.prompt_tokens).all()
    assert (slow.output_tokens == fast.output_tokens).all()
    np.testing.assert_allclose(slow.arrival, fast.arrival * 50, rtol=1e-9)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not beside the repository")
@pytest.mark.parametrize("name", ORIGINALS)
def test_the_fit_is_close_to_the_original(name: str) -> None:
    jitter = 3.0 if name == "mooncake-conversation" else 0.0
    original = describe(load_trace(TRACES / ORIGINALS[name], jitter=jitter))
    ours = [describe(builtin(name, seed=seed)) for seed in range(3)]

    def mean(key: str, part: str = "") -> float:
        return float(np.mean([side[key][part] if part else side[key] for side in ours]))

    assert mean("request_rate") == pytest.approx(original["request_rate"], rel=0.005)
    assert mean("gap_cv") == pytest.approx(original["gap_cv"], rel=0.1)
    assert mean("correlation") == pytest.approx(original["correlation"], abs=0.03)
    for key in ("prompt_tokens", "output_tokens"):
        assert mean(key, "mean") == pytest.approx(original[key]["mean"], rel=0.03)
        for level in ("p25", "p50", "p75", "p90", "p95"):
            assert mean(key, level) == pytest.approx(original[key][level], rel=0.08, abs=60)


def test_assumptions_are_in_the_notes() -> None:
    sharegpt = builtin("sharegpt", num_requests=50_000)
    assert "only mean lengths are published" in sharegpt.notes[0]
    assert sharegpt.prompt_tokens.mean() == pytest.approx(161.31, rel=0.03)
    assert sharegpt.output_tokens.mean() == pytest.approx(337.99, rel=0.03)
    writing = builtin("writing-prompts", num_requests=50_000)
    assert writing.prompt_tokens.mean() == pytest.approx(4 / 3 * 28.4, rel=0.03)
    assert writing.output_tokens.mean() == pytest.approx(4 / 3 * 734.5, rel=0.03)
    assert "lengths only" in builtin("arxiv-summarization", num_requests=10).notes[0]
    assert builtin("arxiv-summarization", num_requests=10, request_rate=3.0).notes == (), "this rate is the user's"
    assert len(builtin("sharegpt").notes) == 2
    assert [note[:23] for note in builtin("sharegpt", request_rate=3.0).notes] == ["only mean lengths are p"]


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="num_requests=0"):
        builtin("azure-conv", num_requests=0)
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="request_rate="):
            builtin("azure-conv", request_rate=rate)


def test_the_page_on_workloads_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    examples = page.split("```python\n")[1:]
    assert examples
    for example in examples:
        exec(example.split("```")[0], {})
    for name in (*FORMATS, *builtin_names()):
        assert f"`{name}`" in page, f"{name} is not in docs/workloads.md"
