"""The space: axes by vLLM's names, constraints, and every point that cannot run counted with its reason."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from plan.planning import question, small_space
from windtunnel.deployment import Deployment, Engine
from windtunnel.errors import InputError
from windtunnel.plan.advice import advise
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.space import (
    AXES,
    Candidate,
    Constraints,
    Space,
    ends,
    load_space,
    load_spaces,
    said,
    typed_values,
    word_of,
)
from windtunnel.plan.trial import candidate_key, deployment_key
from windtunnel.report.plan_figures import short

OWN = """
class Mine:
    def schedule(self, now, waiting, running, limits):
        return None
"""
FILE = """
model: Llama-3.1-8B
device: [h100, l40s]
tensor-parallel-size: [1, 2]
max_num_seqs: [32, 64]
max_model_len: 2048
enable_expert_parallel: no
constraints:
  gpus: {h100: 1}
  max_price_per_hour: 3
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "space.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_axes_are_the_words_of_scenarios() -> None:
    assert {"engine", "device", "replicas", "router", "max_num_seqs", "kv_cache_dtype"} <= set(AXES)
    assert "preset" not in AXES


def test_a_file_is_a_space(tmp_path: Path) -> None:
    space = load_space(write(tmp_path, FILE))
    assert space.size == 8
    assert space.axes["tensor_parallel_size"] == (1, 2)
    assert space.axes["max_model_len"] == (2048,)
    assert space.constraints == Constraints(gpus={"h100_sxm": 1}, max_price_per_hour=3)
    found = space.enumerate()
    assert found.size == 8
    assert found.pruned == {"more than the 1 h100_sxm that are available": 2}
    assert [candidate.index for candidate in found.candidates] == [0, 1, 4, 5, 6, 7]


def test_what_cannot_run_is_counted_with_its_reason() -> None:
    found = small_space(device=("h100", "l4"), tensor_parallel_size=(1, 3), max_num_seqs=(64, 512)).enumerate()
    assert found.pruned.total() + len(found.candidates) == 16
    reasons = " ".join(found.pruned)
    assert "tensor_parallel_size=3: must divide the 32 heads" in reasons
    assert "max_num_batched_tokens=256: must be ≥ max_num_seqs=512" in reasons
    large = Space("Llama-3.1-70B", {"device": ("a10",), "tensor_parallel_size": (1,)}).enumerate()
    assert list(large.pruned) == ["meta-llama/Llama-3.1-70B does not fit into the memory of 1 × a10"]


def test_points_that_come_to_the_same_are_taken_once() -> None:
    found = small_space(block_size=(None, 16)).enumerate()
    assert found.pruned == {"the same as another once defaults are filled in": len(found.candidates)}


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (Constraints(max_gpus=1), 12),
        (Constraints(max_gpus_per_node=1), 12),
        (Constraints(max_price_per_hour=2.0), 12),
        (Constraints(gpus={"l40s": 1}), 18),
    ],
)
def test_constraints_hold(limits: Constraints, left: int) -> None:
    space = small_space()
    assert len(Space(space.model, space.axes, limits).enumerate().candidates) == left


def test_a_price_can_be_needed() -> None:
    space = small_space(device=("h100", "h20"))
    assert len(space.enumerate().candidates) == 2 * len(space.enumerate(with_price=True).candidates)
    assert any("the price of h20 is not known" in reason for reason in space.enumerate(with_price=True).pruned)


def test_a_device_without_a_price_is_not_left_out_in_silence() -> None:
    answer = search(small_space(device=("h100", "h20")).enumerate(with_price=True), question(), RatePerDollar(), top=1)
    advice = advise(answer)
    assert advice is not None
    assert advice.notes[0].startswith("the price of h20 is not known: give it in a --devices-file, or count GPUs")


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("max_num_seqs", (64, None)),
        ("scheduler", ("sarathi", None)),
        ("async_scheduling", (True, False, None)),
        ("cudagraph_capture_sizes", ((1, 2), None)),
        ("gpu_memory_utilization", (0.9,)),
        ("quantization", ("fp8", None)),
    ],
)
def test_every_word_that_a_table_prints_is_one_of_a_file(axis: str, values: tuple[Any, ...]) -> None:
    document = yaml.safe_load(f"{axis}: [{', '.join(map(said, values))}]")
    assert typed_values(axis, document[axis]) == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device: h100", "model is missing"),
        ("model: Llama-3.1-8B", "needs the axis device"),
        (
            "model: Llama-3.1-8B\ndevice: h100\nmax_num_seq: 3",
            "unknown axis 'max_num_seq': did you mean 'max_num_seqs'",
        ),
        ("model: Llama-3.1-8B\ndevice: h100\nmax_num_seqs: [many]", "max_num_seqs=['many']"),
        ("model: Llama-3.1-8B\ndevice: h100\nmax_num_seqs: [8, 8]", "a value stands twice"),
        ("model: Llama-3.1-8B\ndevice: h100\nmax_num_seqs: []", "at least one value"),
        ("model: Llama-3.1-8B\ndevice: h100\nconstraints: {max_gpu: 3}", "did you mean 'max_gpus'"),
        ("model: Llama-3.1-8B\ndevice: h100\nconstraints: {max_gpus: 0}", "max_gpus=0: must be"),
        ("model: Llama-3.1-8B\ndevice: h100\nconstraints: {gpus: 3}", "lines of `device: number`"),
        ("- a", "must be lines of"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_space(write(tmp_path, text))
    assert words in str(caught.value)
    assert "space.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_space(tmp_path / "none.yaml")


def test_the_spec_is_json_able() -> None:
    spec = small_space().spec()
    assert spec["axes"]["max_num_seqs"] == [4, 16, 64]
    assert spec["constraints"]["gpus"] == {}


def test_a_scheduler_of_your_own_is_known_by_its_content(tmp_path: Path) -> None:
    """A changed file is another deployment, so that no old simulation stands for it."""
    file = tmp_path / "mine.py"
    pool = small_space().deployment({"device": "h100", "max_model_len": 2048}).pools[0]
    keys = []
    for text in (OWN, OWN + "# changed", OWN + "# changed"):
        file.write_text(text, encoding="utf-8")
        engine = Engine(max_model_len=2048, scheduler=f"{file}:Mine")
        own = Deployment((replace(pool, engine=engine),))
        keys.append((deployment_key(own, "roofline"), candidate_key(question(), own)))
    assert keys[0][0] != keys[1][0] == keys[2][0]
    assert keys[0][1] != keys[1][1] == keys[2][1]


def test_vidurs_space_is_as_large_as_its_own() -> None:
    """4,374 jobs in Vidur: its points under three loads."""
    space = load_space(Path(__file__).parents[2] / "docs" / "studies" / "llama2-70b.yaml")
    assert 3 * space.size >= 4374
    assert {axis for axis, values in space.axes.items() if len(values) > 1} == {
        "device",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "scheduler",
        "max_num_batched_tokens",
        "max_num_seqs",
    }
    found = space.enumerate(with_price=True)
    ran = {(one.settings["scheduler"], one.settings["pipeline_parallel_size"]) for one in found.candidates}
    assert ran == {(name, stages) for name in space.axes["scheduler"] for stages in (1, 2, 4)}


def test_sizes_at_an_end_go_on_where_they_are_open() -> None:
    space = replace(
        small_space(max_num_seqs=(4, 16, 64), max_num_batched_tokens=(256, 1024)), open=frozenset({"max_num_seqs"})
    )
    smallest = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "tensor_parallel_size": 1}
    assert ends(space.axes, smallest) == {"max_num_batched_tokens": 128}  # fewer than 8 requests are not worth a trial
    largest = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "tensor_parallel_size": 2}
    assert ends(space.axes, largest) == {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
    larger = space.beyond(largest)
    assert larger is not None
    assert larger.axes["max_num_seqs"] == (4, 16, 64, 128)
    assert larger.axes["max_num_batched_tokens"] == (256, 1024)
    assert space.beyond({"max_num_seqs": 16, "max_num_batched_tokens": 1024}) is None
    assert ends({"max_num_seqs": (64,)}, {"max_num_seqs": 64}) == {}
    left_open = {"max_num_seqs": (None, 16, 64)}
    assert (ends(left_open, {"max_num_seqs": 64}), ends(left_open, {"max_num_seqs": None})) == (
        {"max_num_seqs": 128},
        {},
    )


def test_as_stored_is_a_word() -> None:
    found = small_space(quantization=typed_values("quantization", ["stored", "fp8"]))
    names = {one.deployment.pools[0].engine.quantization for one in found.enumerate().candidates}
    assert names == {None, "fp8"}


@pytest.mark.parametrize(
    ("axis", "values", "at", "following"),
    [
        ("max_num_seqs", (16, 64), 16, 8),
        ("max_num_seqs", (8, 64), 8, None),
        ("max_num_seqs", (64, 1024), 1024, 2048),
        ("max_num_seqs", (64, 2048), 2048, None),
        ("max_num_batched_tokens", (256, 512), 256, 128),
        ("max_num_batched_tokens", (128, 512), 128, None),
        ("max_num_batched_tokens", (256, 16384), 16384, 32768),
        ("max_num_batched_tokens", (256, 32768), 32768, None),
        ("max_num_seqs", (16, 32, 64), 32, None),
        ("tensor_parallel_size", (1, 2), 2, None),
        ("max_num_seqs", (None, 64), None, None),
    ],
)
def test_sizes_double_and_halve_as_far_as_they_are_worth_a_trial(
    axis: str, values: tuple[Any, ...], at: Any, following: int | None
) -> None:
    assert ends({axis: values}, {axis: at}) == ({} if following is None else {axis: following})


def test_limits_may_be_reached_and_not_passed() -> None:
    """Three replicas of two GPUs, at twice the price of one for each."""
    chosen = small_space().deployment({"device": "h100", "tensor_parallel_size": 2, "replicas": 3})
    price = chosen.price_per_hour
    limits: tuple[tuple[str, Any, Any], ...] = (
        ("gpus", {"h100_sxm": 6}, {"h100_sxm": 5}),
        ("max_gpus", 6, 5),
        ("max_gpus_per_node", 2, 1),
        ("max_price_per_hour", price, price - 0.01),
    )
    for limit, at, below in limits:
        assert Constraints(**{limit: at}).broken_by(chosen) is None
        assert Constraints(**{limit: below}).broken_by(chosen) is not None
    assert Constraints(max_gpus=5).broken_by(chosen) == "more than max_gpus=5"
    assert Constraints(max_gpus_per_node=1).broken_by(chosen) == "tensor_parallel_size > max_gpus_per_node=1"
    assert Constraints(max_price_per_hour=1.5).broken_by(chosen) == "more than max_price_per_hour=1.5 USD"
    both = replace(chosen, pools=(*chosen.pools, replace(chosen.pools[0], replicas=1)))
    assert Constraints(gpus={"h100_sxm": 8}).broken_by(both) is None
    assert Constraints(gpus={"h100_sxm": 7}).broken_by(both) == "more than the 7 h100_sxm that are available"
    assert Constraints(gpus={"l40s": 1}).broken_by(both) is None


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_gpus": True}, "max_gpus=True: must be an integer ≥ 1"),
        ({"max_gpus_per_node": 1.5}, "max_gpus_per_node=1.5: must be an integer ≥ 1"),
        ({"gpus": {"h100": 0}}, "gpus of h100=0: must be an integer ≥ 1"),
        ({"max_price_per_hour": 0.0}, "max_price_per_hour=0: must be > 0"),
    ],
)
def test_limits_that_nothing_keeps_are_refused(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Constraints(**limits)
    Constraints(max_gpus=1, max_gpus_per_node=1, gpus={"h100": 1}, max_price_per_hour=0.01)


def test_spaces_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match=r"gpus a100_sxm=4: is not searched, only h100_sxm, l40s: leave it out"):
        Space("Llama-3.1-8B", {"device": ("h100", "l40s")}, Constraints(gpus={"a100": 4}))
    with pytest.raises(InputError, match="least_outstandin"):
        small_space(router=("round_robin", "least_outstandin"))
    with pytest.raises(InputError, match="sarathy"):
        small_space(scheduler=(None, "sarathy"))
    with pytest.raises(InputError, match="store 'teir=host': unknown word 'teir': did you mean 'tier'"):
        small_space(store=("none", "teir=host"))


def test_with_and_without_a_store_of_kv() -> None:
    axes = {"device": ("h100",), "tensor_parallel_size": (1,), "max_num_batched_tokens": (256,), "max_num_seqs": (4,)}
    space = small_space(store=("none", "tier=host capacity=1e12"), engine=("vllm-0.32", "trtllm-1.0"), **axes)
    found = space.enumerate()
    stores = [(one.settings["engine"], [store.capacity for store in one.deployment.pools[0].stores]) for one in
              found.candidates]  # fmt: skip
    assert stores == [("vllm-0.32", []), ("trtllm-1.0", []), ("vllm-0.32", [1e12])]
    assert next(iter(found.pruned)).startswith("stores: ")
    assert len({candidate_key(question(), one.deployment) for one in found.candidates}) == 3


def test_several_tiers_are_one_value_of_an_axis() -> None:
    tiers = "tier=host capacity=1e11 + tier=disk capacity=4e12 read=7e9 write=5e9"
    axes = {"device": ("h100",), "tensor_parallel_size": (1,), "max_num_seqs": (64,), "max_num_batched_tokens": (1024,)}
    plain, tiered = small_space(store=("none", tiers), **axes).enumerate().candidates
    assert plain.deployment.pools[0].stores == ()
    assert [store.tier for store in tiered.deployment.pools[0].stores] == ["host", "disk"]
    with pytest.raises(InputError, match="hots"):
        small_space(store=("tier=host capacity=1e11 + tier=hots",))


def test_shares_of_pools_are_scaled_together() -> None:
    """Two and four replicas are one and two of the smallest deployment of this kind."""
    one = small_space().deployment({"device": "h100", "replicas": 2})
    several = replace(one, pools=(one.pools[0], replace(one.pools[0], replicas=4)))
    scaled = Candidate(0, {}, several).scaled(3)
    assert [pool.replicas for pool in scaled.pools] == [3, 6]
    assert Candidate(0, {}, one).scaled(5).replicas == 5


def test_settings_in_words_and_the_order_of_points() -> None:
    settings = {"device": "h100", "enforce_eager": True, "async_scheduling": False, "block_size": None}
    assert Candidate(0, settings, small_space().deployment({"device": "h100"})).name == (
        "device h100, enforce_eager on, async_scheduling off, block_size default"
    )
    points = list(Space("Llama-3.1-8B", {"device": ("h100", "l40s"), "replicas": (1, 2)}).points())
    assert [(one["device"], one["replicas"]) for one in points] == [
        *(("h100", 1), ("h100", 2), ("l40s", 1), ("l40s", 2)),
    ]


def test_a_file_of_several_models_has_a_space_for_each(tmp_path: Path) -> None:
    listed = write(tmp_path, "model: [Llama-3.1-8B, Qwen/Qwen3-8B]\ndevice: h100\n")
    assert [space.model for space in load_spaces(listed)] == ["Llama-3.1-8B", "Qwen/Qwen3-8B"]
    assert [space.model for space in load_spaces(listed, ("Qwen/Qwen3-4B",))] == ["Qwen/Qwen3-4B"]
    with pytest.raises(InputError, match="has 2 models: say which"):
        load_space(listed)
    own = write(tmp_path, "model: {Llama-3.1-8B: {max-num-seqs: 8}, Qwen/Qwen3-8B: }\ndevice: h100\nmax_num_seqs: 16\n")
    assert [dict(space.axes)["max_num_seqs"] for space in load_spaces(own)] == [(8,), (16,)]
    with pytest.raises(InputError, match="for this model alone"):
        load_spaces(write(tmp_path, "model: {Llama-3.1-8B: 7}\ndevice: h100\n"))


def test_what_a_file_excludes_is_left_out(tmp_path: Path) -> None:
    text = (
        "model: Llama-3.1-8B\ndevice: [h100, l40s]\ntensor_parallel_size: [1, 2]\nmax_num_seqs: [8, 16]\n"
        "exclude: [{device: l40s, tensor-parallel-size: 2}, {device: h100, max_num_seqs: [8]}]\n"
    )
    found = load_space(write(tmp_path, text)).enumerate()
    kept = {tuple(one.settings.values()) for one in found.candidates}
    assert kept == {("h100", 1, 16), ("h100", 2, 16), ("l40s", 1, 8), ("l40s", 1, 16)}
    assert found.pruned == {"left out by exclude": 4} and found.size == 8


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{device: l40s}", "must be a list of axes with values"),
        ("[{device: a100}]", "exclude: device a100: is not searched, only h100, l40s"),
        ("[{block_size: 16}]", "exclude: unknown axis 'block_size'"),
        ("[{devic: l40s}]", "did you mean 'device'"),
        ("[{}]", "leaves out everything"),
    ],
)
def test_an_exclusion_of_nothing_is_an_error(tmp_path: Path, rule: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        load_space(write(tmp_path, f"model: Llama-3.1-8B\ndevice: [h100, l40s]\nexclude: {rule}\n"))


def test_the_heads_of_tables_are_words_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(
        "model: Qwen/Qwen3-8B\ndevice: l40s\nTP: [1, 2]\nweights: [default, fp8]\nenforce eager: [off, on]\nKV: fp8\n"
        "exclude: [{TP: 2, weights: fp8}]\n"
    )
    space = load_space(file)
    assert space.axes["tensor_parallel_size"] == (1, 2)
    assert space.axes["quantization"] == (None, "fp8")
    assert space.axes["enforce_eager"] == (False, True)
    assert space.axes["kv_cache_dtype"] == ("fp8",)
    assert space.exclude == ({"tensor_parallel_size": (2,), "quantization": ("fp8",)},)
    assert [word_of(short(axis)) for axis in AXES] == list(AXES)
