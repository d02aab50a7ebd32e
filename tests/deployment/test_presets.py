"""What each version of an engine does by default, written once more: a slip in one of the two tables is noticed."""

from dataclasses import astuple, fields
from typing import Any

import pytest

from windtunnel.deployment.engine import Engine
from windtunnel.deployment.presets import (
    MEMORY_SECOND_RUNNER,
    MEMORY_TORCH_SAMPLER,
    PRESETS,
    EnginePreset,
    preset,
    require_pipeline,
)
from windtunnel.errors import InputError
from windtunnel.policy.routing import RankBalancer

SINCE_0_19: dict[str, Any] = {"async_scheduling": True, "scheduler_reserve_full_isl": True, "server_per_rank": True}
SINCE_0_20 = SINCE_0_19 | {"gpu_memory_utilization": 0.92, "pipelines": (False,)}
SINCE_0_24 = SINCE_0_20 | {"lacks": ()}
SINCE_0_27 = SINCE_0_24 | {"balancer_rotates": True, "counts_in_flight": True}
SINCE_0_29 = SINCE_0_27 | {"max_capture_size_blackwell": 1024, "captures_max_num_seqs": True}
SINCE_0_31 = SINCE_0_29 | {"pipelines": (True, False)}
BESIDES_DEFAULTS: dict[str, dict[str, Any]] = {
    "vllm-0.33": SINCE_0_31,
    "vllm-0.32": SINCE_0_31,
    "vllm-0.31": SINCE_0_31 | {"scheduler": "vllm-0.32"},
    "vllm-0.29": SINCE_0_29 | {"scheduler": "vllm-0.24"},
    "vllm-0.28": SINCE_0_27 | {"scheduler": "vllm-0.24", "max_capture_size_blackwell": 1024},
    "vllm-0.27": SINCE_0_27 | {"scheduler": "vllm-0.24"},
    "vllm-0.25": SINCE_0_24 | {"scheduler": "vllm-0.24", "balancer_rotates": True},
    "vllm-0.24": SINCE_0_24,
    "vllm-0.22": SINCE_0_20 | {"scheduler": "vllm-0.20"},
    "vllm-0.20": SINCE_0_20,
    "vllm-0.19": SINCE_0_19 | {"scheduler": "vllm-0.20", "gpu_memory_utilization": 0.9, "pipelines": (False,)},
    "vllm-0.17": {
        "async_scheduling": True,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "scheduler": "vllm-0.16",
        "pipelines": (False,),
        "server_per_rank": True,
    },
    "vllm-0.16": {
        "async_scheduling": True,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "pipelines": (False,),
        "server_per_rank": True,
        "pads_ranks": True,
    },
    "vllm-0.15": {
        "async_scheduling": True,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "scheduler": "vllm-0.16",
        "pipelines": (False,),
        "server_per_rank": True,
        "pads_ranks": True,
    },
    "vllm-0.14": {
        "async_scheduling": True,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "scheduler": "vllm-0.16",
        "pipelines": (False,),
        "pads_ranks": True,
    },
    "vllm-0.13": {
        "async_scheduling": False,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "scheduler": "vllm-0.12",
        "fuses_all_reduce": False,
        "pipelines": (False,),
        "pads_ranks": True,
    },
    "vllm-0.12": {
        "async_scheduling": False,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "fuses_all_reduce": False,
        "pipelines": (False,),
        "pads_ranks": True,
        "pads_experts": True,
    },
    "vllm-0.11": {
        "async_scheduling": False,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "scheduler": "vllm-0.12",
        "fuses_all_reduce": False,
        "since": "0.11.1",
        "pipelines": (False,),
        "pads_ranks": True,
        "pads_experts": True,
    },
    "vllm-0.10": {
        "async_scheduling": False,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "fuses_all_reduce": False,
        "deepep": False,
        "pipelines": (False,),
        "pads_ranks": True,
    },
    "vllm-0.8": {
        "async_scheduling": False,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "scheduler": "vllm-0.10",
        "fuses_all_reduce": False,
        "deepep": False,
        "pipelines": (False,),
    },
    "vllm-0.6": {
        "async_scheduling": False,
        "scheduler_reserve_full_isl": False,
        "gpu_memory_utilization": 0.9,
        "max_capture_size": 256,
        "max_capture_size_blackwell": 256,
        "scheduler": "vllm-0.8-v0",
        "enable_prefix_caching": False,
        "graphs_prefill": False,
        "overlaps_prologues": False,
        "fuses_all_reduce": False,
        "deepep": False,
        "pipelines": (False,),
        "before_v1": True,
    },
    "sglang-0.5": {
        "async_scheduling": True,
        "scheduler_reserve_full_isl": True,
        "gpu_memory_utilization": 0.88,
        "since": "0.5.22",
        "scheduler": "sglang-0.5.23",
        "graphs_prefill": False,
        "pipelines": (False,),
        "turns_stages_synchronous": True,
        "shares_memory": False,
    },
    "sglang-0.4.6": {
        "async_scheduling": True,
        "scheduler_reserve_full_isl": True,
        "gpu_memory_utilization": 0.88,
        "graphs_prefill": False,
        "pipelines": (False,),
        "turns_stages_synchronous": True,
        "shares_memory": False,
    },
    "trtllm-0.11": {
        "async_scheduling": False,
        "scheduler_reserve_full_isl": True,
        "gpu_memory_utilization": 0.9,
        "scheduler": "trtllm-guaranteed-no-evict",
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "graphs_prefill": False,
        "overlaps_prologues": False,
        "one_block_per_head": True,
        "fuses_all_reduce": False,
        "own_all_reduce": False,
        "deepep": False,
        "pipelines": (False,),
        "turns_stages_synchronous": True,
        "shares_memory": False,
    },
    "trtllm-1.0": {
        "async_scheduling": True,
        "scheduler_reserve_full_isl": True,
        "gpu_memory_utilization": 0.9,
        "scheduler": "trtllm-guaranteed-no-evict",
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "graphs_prefill": False,
        "deepep": False,
        "pipelines": (False,),
        "turns_stages_synchronous": True,
        "shares_memory": False,
    },
    "trtllm-1.1": {
        "async_scheduling": True,
        "scheduler_reserve_full_isl": True,
        "gpu_memory_utilization": 0.9,
        "scheduler": "trtllm-guaranteed-no-evict",
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "graphs_prefill": False,
        "launches_early": True,
        "deepep": False,
        "pipelines": (False,),
        "turns_stages_synchronous": True,
        "shares_memory": False,
    },
}
MEMORY: dict[str, tuple[Any, ...]] = {
    "vllm-0.33": (46, 2, 4, ((1, 0.26), (2, 0.61)), False),
    "vllm-0.32": (46, 2, 4, ((1, 0.26), (2, 0.61)), False),
    "vllm-0.31": (46, 2, 4, ((1, 0.26), (2, 0.61)), False),
    "vllm-0.29": (14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), True),
    "vllm-0.28": (14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), True),
    "vllm-0.27": (14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), True),
    "vllm-0.25": (14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), True),
    "vllm-0.24": (14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), True),
    "vllm-0.22": (14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), True),
    "vllm-0.20": (14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.19": (14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.17": (14.5, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.16": (38.3, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.15": (38.3, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.14": (38.3, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.13": (38.3, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.12": (38.3, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.11": (38.3, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.10": (38.3, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.8": (38.3, 1, 3, ((1, 0.1), (2, 0.5), (8, 2.3)), False),
    "vllm-0.6": (38.3, 1, 3, ((1, 0.26), (2, 0.28), (4, 0.61)), False),
    "sglang-0.5": (46, 2, 4, ((1, 0.26), (2, 0.61)), False),
    "sglang-0.4.6": (46, 2, 4, ((1, 0.26), (2, 0.61)), False),
    "trtllm-0.11": (0, 2, None, ((1, 2.5),), False),
    "trtllm-1.0": (0, 2, None, ((1, 2.5),), False),
    "trtllm-1.1": (0, 2, None, ((1, 2.5),), False),
}
DEFAULTS: dict[str, Any] = {
    "max_capture_size": 512,
    "max_capture_size_blackwell": 512,
    "captures_max_num_seqs": False,
    "lacks": ("watermark", "prefill_schedule_interval"),
    "since": "",
    "scheduler": "",
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "graphs_prefill": True,
    "launches_early": False,
    "overlaps_prologues": True,
    "one_block_per_head": False,
    "fuses_all_reduce": True,
    "own_all_reduce": True,
    "deepep": True,
    "pads_experts": False,
    "pads_ranks": False,
    "pipelines": (),
    "turns_stages_synchronous": False,
    "before_v1": False,
    "server_per_rank": False,
    "balancer_rotates": False,
    "counts_in_flight": False,
    "shares_memory": True,
}


def test_there_are_no_others() -> None:
    assert list(PRESETS) == list(BESIDES_DEFAULTS) and preset("vllm").name == "vllm-0.32"


@pytest.mark.parametrize("name", BESIDES_DEFAULTS)
def test_a_version_has_its_defaults(name: str) -> None:
    found = {field.name: getattr(preset(name), field.name) for field in fields(EnginePreset)}
    assert found.pop("name") == name and astuple(found.pop("memory")) == MEMORY[name]
    assert found == DEFAULTS | BESIDES_DEFAULTS[name]


def test_memory_of_a_group_is_that_of_the_smaller_one() -> None:
    assert [MEMORY_TORCH_SAMPLER.reserve(gpus) for gpus in (1, 2, 7, 8, 9)] == [0.1, 0.5, 0.5, 2.3, 2.3]
    assert MEMORY_SECOND_RUNNER.without_cuda == MEMORY_SECOND_RUNNER
    assert preset("vllm-0.19").memory.without_cuda.bytes_per_logit == 38.3


def test_pipelines_that_are_simulated() -> None:
    for name, found in PRESETS.items():
        require_pipeline(found, 1, True)
        for asynchronous in (False, True):
            if asynchronous in BESIDES_DEFAULTS[name].get("pipelines", ()):
                require_pipeline(found, 2, asynchronous)
                continue
            with pytest.raises(InputError, match="pipeline_parallel_size=2") as error:
                require_pipeline(found, 2, asynchronous)
            alone = found.async_scheduling and not BESIDES_DEFAULTS[name].get("turns_stages_synchronous", False)
            assert ("use async_scheduling=False" in str(error.value)) == alone


@pytest.mark.parametrize(
    ("name", "given", "servers", "rotates", "counts"),
    [
        ("vllm-0.32", None, 4, True, True),
        ("vllm-0.32", 1, 1, True, True),
        ("vllm-0.25", None, 4, True, False),
        ("vllm-0.15", None, 4, False, False),
        ("vllm-0.14", None, 1, False, False),
        ("vllm-0.14", 2, 2, False, False),
        ("sglang-0.5", 8, 1, False, False),
    ],
)
def test_ranks_are_balanced_by_as_many_api_servers_as_the_version_has(
    name: str, given: int | None, servers: int, rotates: bool, counts: bool
) -> None:
    engine = Engine(name, data_parallel_size=4, api_server_count=given)
    assert engine.balancer == RankBalancer(servers, rotates, counts)
