"""A profile as the source of batch times: its times come back in tables, and what does not fit is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profiling.handmade import LLAMA_8B, seconds, write_profile

from perf.profile.test_folder import VIDUR, edit
from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.estimators.terms import FittedLinear
from windtunnel.perf.explain import explain, parse_batch
from windtunnel.perf.kernel_times import INTERPOLATED, MODELLED
from windtunnel.perf.kinds.elementwise import Elementwise
from windtunnel.perf.predictor import Predictor
from windtunnel.perf.profile.estimates import estimate, read_estimates
from windtunnel.perf.profile.folder import read_profile
from windtunnel.perf.profile.source import ProfilePredictor
from windtunnel.perf.sources import predictor_from as predictor
from windtunnel.perf.tabulate.grid import tabulate

LIMITS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 2048}


def pool(name: str = "h100", model: str = "meta-llama/Llama-3.1-8B", tp: int = 1, **engine: Any) -> Pool:
    return Pool(load_model(model), device(name), Engine(tensor_parallel_size=tp, **(LIMITS | engine)))


def test_a_profile_of_a_busy_machine_is_said_to_be_one(folder: Path) -> None:
    manifest = folder / "profile.json"
    about = json.loads(manifest.read_text())
    for differ, busy in ((0.2, False), (169.17, True)):
        manifest.write_text(json.dumps(about | {"repeats_differ": {"mlp_up_proj": differ, "add": 0.3, "rope": differ}}))
        notes = tabulate(pool(), f"profile:{folder}").notes
        assert ("points that were measured twice differ by 16917 %" in " ".join(notes)) is busy
    for waited, busy in ((0.1, False), (1.2, True)):  # all points alike, each time
        manifest.write_text(json.dumps(about | {"waited_for_cpu": waited}))
        notes = tabulate(pool(), f"profile:{folder}").notes
        assert ("threads waited 1.2 s for a CPU in each second" in " ".join(notes)) is busy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(tmp_path)
    return tmp_path


@pytest.mark.parametrize("tp", [1, 2])
def test_a_batch_takes_the_sum_of_its_operators(folder: Path, tp: int) -> None:
    """64 tokens of one prompt: all but the logits' gathering is in the profile, at a measured size."""
    found = explain(pool(tp=tp), parse_batch("prefill=1x64"), f"profile:{folder}")
    layers = {"attn_pre_proj": 1, "attn_post_proj": 1, "mlp_up_proj": 1, "mlp_down_proj": 1, "attn_rope": 1}
    layers |= {"attn_prefill": 1, "mlp_act": 1, "attn_kv_cache_save": 1, "all_reduce": 2 * (tp > 1)}
    layers |= {"input_layernorm": 1, "post_attention_layernorm": 1, "add": 1}
    expected = 32 * sum(count * seconds(name, tp, 64, 0) for name, count in layers.items() if count)
    expected += seconds("emb", tp, 64, 0) + seconds("input_layernorm", tp, 64, 0)
    expected += seconds("lm_head", tp, 1, 0) + seconds("sampling", tp, 1, 0)
    expected += seconds("all_reduce", tp, 64, 0) if tp > 1 else 0.0
    others = sum(row.seconds for row in found.rows if row.name == "logits_all_gather")
    assert found.gpu_seconds - others == pytest.approx(expected, rel=1e-9)
    assert found.total_seconds - found.gpu_seconds == pytest.approx(1e-3 + 1e-5)


def with_columns(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_trained_on_a_padded_vocabulary(folder: Path) -> None:
    """Vidur's CSV files say 128,512 where the model has 128,256: trained estimators are the model's, too."""

    def padded(rows: list[list[str]]) -> list[list[str]]:
        place = rows[0].index("vocab_size")
        return [rows[0], *([*row[:place], "128512", *row[place + 1 :]] for row in rows[1:])]

    edit(folder / "compute" / "h100_sxm" / "llama" / "mlp.csv", padded)
    estimate(read_profile(folder)).save(folder / "trained")
    assert read_estimates(folder / "trained").shape.vocab_size == 128512
    assert predictor(pool(), f"profile:{folder / 'trained'}").origin["device"] == "h100_sxm"
    with pytest.raises(InputError, match="estimators of another model"):
        read_estimates(folder / "trained", shape=replace(LLAMA_8B, n_embd=2048))


def test_vidurs_cpu_overheads_add_up_where_their_degree_is_asked(folder: Path) -> None:
    parts = "schedule_median,sampler_e2e_median,prepare_inputs_e2e_median,process_model_outputs_median"
    rows = [f"llama,{n},2,{0.1 * n},0.5,0.25,0.15,{2.0 + n}" for n in (1, 2, 4, 8, 16)]
    head = f"model_name,batch_size,tensor_parallel_degree,{parts},ray_comm_time_mean"
    with_columns(folder, "cpu_overhead/h100.csv", "\n".join([head, *rows, "other,1,1,9,9,9,9,9", ""]))
    (folder / "profile.json").unlink()
    found = tabulate(pool(tp=2), f"profile:{folder}").times
    assert found.host_serial[[0, 1, 8]].tolist() == pytest.approx([0.0, 4.0e-3, 11.7e-3])
    assert not found.host_overlapped.any()
    alone = tabulate(pool(), f"profile:{folder}")
    assert "its CPU overheads are of TP 2, not 1" in alone.notes[0]
    assert alone.times.host_overlapped.any()


def test_a_stage_sends_in_what_was_measured(folder: Path) -> None:
    head = "time_stats.send_recv.median,num_workers,size,devices_per_node"
    rows = [f"{0.25 * group * size / 2**20},2,{size},{group}" for size in (2**20, 2**22) for group in (1, 2)]
    with_columns(folder, "network/h100_sxm/send_recv.csv", "\n".join([head, *rows, ""]))
    found = explain(pool(pipeline_parallel_size=2), parse_batch("prefill=1x128"), f"profile:{folder}")
    sent = sum(row.seconds for row in found.rows if row.name == "send")
    assert sent == pytest.approx(2 * 0.5e-3)  # of 128 tokens hidden state and residual, 1 MiB each


def test_tables_are_interpolated_and_say_where_they_are_from(folder: Path) -> None:
    found = tabulate(pool(), f"profile:{folder}")
    origin = found.provenance[0]
    assert (origin["source"], origin["device"]) == ("profile", "h100_sxm")
    kinds = {row["operator"]: row["sources"] for row in found.provenance if "operator" in row}
    assert kinds["gate_up_proj"] == kinds["decode_attention"] == ["interpolated"]
    assert found.times.host_serial[4] == pytest.approx(1e-3 + 4e-5)


def test_beyond_the_points_times_count_as_modelled(folder: Path) -> None:
    larger = tabulate(pool(max_num_batched_tokens=1024), f"profile:{folder}")
    kinds = {row["operator"]: row["sources"] for row in larger.provenance if "operator" in row}
    assert kinds["gate_up_proj"] == ["interpolated", "modelled"]
    assert larger.doubts["beyond"].mixed_tokens[1024] > 0 == larger.doubts["beyond"].mixed_tokens[512]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 4}, r"has no shards of tensor_parallel_size=4 \(1, 2 measured\)"),
        ({"name": "a100"}, "measured on h100_sxm, the deployment has a100_sxm"),
        ({"model": "Qwen/Qwen3-0.6B"}, "no model of this shape"),
        ({"model": "mistralai/Mixtral-8x7B-v0.1"}, "no model of this shape"),
        ({"model": "openai/gpt-oss-20b"}, "equal layers of attention, also latent"),
    ],
)
def test_a_deployment_that_was_not_profiled(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        predictor(pool(**changes), f"profile:{folder}")


def test_times_in_another_unit_are_noticed(folder: Path) -> None:
    def in_seconds(rows: list[list[str]]) -> list[list[str]]:
        times = [i for i, name in enumerate(rows[0]) if name.startswith("time_stats")]
        return [
            rows[0],
            *([f"{float(x) / 1000}" if i in times and x else x for i, x in enumerate(row)] for row in rows[1:]),
        ]

    edit(folder / "compute" / "h100_sxm" / "llama" / "mlp.csv", in_seconds)
    with pytest.raises(InputError, match="times must be in ms"):
        predictor(pool(), f"profile:{folder}")


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(InputError, match="no such folder; write one with windtunnel profile"):
        predictor(pool(), "profile:/nowhere/at/all")
    with pytest.raises(InputError, match="profile:FOLDER"):
        predictor(pool(), "profil")


def test_where_an_estimator_predicts_no_time_the_roofline_answers_and_is_said_to(folder: Path) -> None:
    """A line for the rotary embedding that reaches zero at 100 tokens: above it stands, from there on it does not."""
    found = estimate(read_profile(folder))
    falling = FittedLinear(np.array([np.inf]), np.array([[1e-3, -1e-5]]))
    trained = {**found.trained, "attn_rope@1": replace(found.trained["attn_rope@1"], fitted=falling)}
    known = predictor(pool(), f"profile:{folder}")
    assert isinstance(known, ProfilePredictor)
    known.estimates = replace(found, trained=trained)
    shape = Elementwise(4.0 * (4096 + 1024))
    tokens, none = np.array([0.0, 50.0, 99.0, 100.0, 150.0, 400.0]), np.zeros(6)
    answered = known.times(known.own("rotary_embedding", shape), tokens, none)
    modelled = Predictor.times(known, shape, tokens, none)
    assert answered.seconds[:3] == pytest.approx([0.0, 5e-4, 1e-5])
    assert np.array_equal(answered.seconds[3:], modelled.seconds[3:])
    assert np.array_equal(answered.error[3:], modelled.error[3:])
    assert answered.sources.tolist() == [INTERPOLATED] * 3 + [MODELLED] * 3


def test_estimators_on_disk_answer_as_the_profile(folder: Path, tmp_path: Path) -> None:
    trained = estimate(read_profile(folder))
    trained.save(tmp_path / "trained")
    again = read_estimates(tmp_path / "trained")
    a, b = np.array([[3.0, 7.0], [16.0, 2.0]]), np.array([[100.0, 900.0], [1.0, 2000.0]])
    assert np.array_equal(trained.times("attn_decode", 2, a, b).seconds, again.times("attn_decode", 2, a, b).seconds)
    tables = [tabulate(pool(), f"profile:{place}").times for place in (folder, tmp_path / "trained")]
    assert np.array_equal(tables[0].mixed_tokens, tables[1].mixed_tokens)


@pytest.mark.skipif(not VIDUR.is_dir(), reason="Vidur's profile is not here")
def test_vidur_s_profile_serves_its_model() -> None:
    known = pool("a100", "meta-llama/Llama-2-70b-hf", 2, max_model_len=4096)
    found = explain(known, parse_batch("decode=15@1024,prefill=1x256"), f"profile:{VIDUR}")
    assert 0.05 < found.total_seconds < 0.3
    with pytest.raises(InputError, match=r"tensor_parallel_size=4 \(2 measured\)"):
        predictor(pool("a100", "meta-llama/Llama-2-70b-hf", 4), f"profile:{VIDUR}")
