"""What flags of public lines change of prompts: which are shared, who waits for whom; each by its sign and size.

Sources: TensorRT-LLM's docs/source/features/kvcache.md and llmapi/llm_args.py; its scheduler's recordings in replay.
"""

from typing import Any

import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.launch import Reading, read_line, read_source
from windtunnel.model import load_model
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload import Workload

SHARED, OWN = 15_360, 1_030


def reading(text: str) -> Reading:
    return read_line(read_source(text)[0])


def deployed(text: str, gpu: str = "h100") -> Deployment:
    said = reading(text)
    return Deployment((Pool(load_model(said.model), device(gpu), Engine(**said.settings)),))


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("", SHARED),
        ("--kv_cache_config.enable_block_reuse true", SHARED),
        ("--kv_cache_config.enable_block_reuse false", 0),
        ("--kv_cache_config.tokens_per_block 64 --kv_cache_config.max_tokens 16448", 0),  # memory for one prompt
    ],
)
def test_trtllm_computes_the_beginning_of_a_prompt_once(more: str, found: int) -> None:
    """Whole blocks of 32 tokens are shared, so that a prompt takes the time of its own 1,030 tokens behind 15,360: a
    tenth of the whole or less. A prompt of another beginning in between takes the memory where there is no more."""
    line = f"trtllm-serve Qwen/Qwen3-8B --max_seq_len 16448 --max_num_tokens 16448 {more}"
    begins, other = list(range(SHARED // 512)), list(range(100, 100 + SHARED // 512))
    asked = Workload.from_columns(
        arrival=[0.0, 20.0, 40.0],
        prompt_tokens=[SHARED + OWN] * 3,
        output_tokens=2,
        hash_ids=[[*begins, 901, 902, 903], [*other, 911, 912, 913], [*begins, 921, 922, 923]],
        hash_block_size=512,
    )
    one = deployed(line)
    (tables,) = batch_times(one, "modelled")
    requests = simulate(one, asked, tables=[tables]).requests
    assert requests.cached_tokens.tolist() == [0, 0, found]
    first, _, again = requests.first_token - requests.arrival
    rest = tables.times.rank(0, 0, [(SHARED + OWN - found, found)])
    assert again - first == pytest.approx(rest - tables.times.rank(0, 0, [(SHARED + OWN, 0)]), rel=1e-6)
    assert again == pytest.approx(first) if not found else again < 0.1 * first


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("", [SHARED + 20, 16_391, 16_392]),
        ("--kv_cache_config.enable_partial_reuse false", [SHARED, 16_384, 16_384]),
        ("--kv_cache_config.copy_on_partial_reuse false", [SHARED, 16_391, 16_384]),
    ],
)
def test_trtllm_shares_the_beginning_of_a_block_too(more: str, found: list[int]) -> None:
    """By kvCacheManager.cpp, in blocks of 32. The second prompt parts 20 tokens into a block that others follow, which
    is copied. The third goes on behind the second's 16,390 tokens and all of its answer but the last token, which was
    never computed: it writes on in that block, which nobody holds. The fourth goes on there as well, and copies the
    third's, where the last token is computed. Each takes the time of what is left."""
    line = f"trtllm-serve Qwen/Qwen3-8B --max_seq_len 16480 --max_num_tokens 16480 {more}"
    prompts = [SHARED + OWN, SHARED + OWN, 16_440, 16_440]
    asked = Workload.from_columns(
        arrival=[0.0, 20.0, 20.0, 20.0],
        prompt_tokens=prompts,
        output_tokens=2,
        session=[0, 1, 1, 1],
        think_time=[0.0, 0.0, 20.0, 20.0],
        begins=[None, [0, SHARED + 20], 1, 1],
    )
    one = deployed(line)
    (tables,) = batch_times(one, "modelled")
    requests = simulate(one, asked, tables=[tables]).requests
    assert requests.cached_tokens.tolist() == [0, *found]
    first = requests.first_token - requests.arrival
    rest = [tables.times.rank(0, 0, [(prompt - hit, hit)]) for prompt, hit in zip(prompts, [0, *found], strict=True)]
    assert (first - first[0]).tolist() == pytest.approx([each - rest[0] for each in rest], rel=1e-6, abs=1e-9)


def test_prompts_of_trtllm_wait_for_others_as_many_steps_as_the_line_says() -> None:
    """``batch_wait_timeout_iters``: a prompt that comes while another request generates joins 8 steps later, or at once
    where it alone is the share of a step that is enough."""
    line = "trtllm-serve Qwen/Qwen3-8B --max_seq_len 8192 --kv_cache_config.enable_block_reuse false"
    asked = Workload.from_columns(arrival=[0.0, 0.5], prompt_tokens=[512, 512], output_tokens=[400, 2])
    waits = "--batch_wait_timeout_iters 8 --batch_wait_max_tokens_ratio"
    tables = batch_times(deployed(line), "modelled")

    def first(more: str) -> Any:
        requests = simulate(deployed(f"{line} {more}"), asked, tables=tables).requests
        return requests.first_token[1] - requests.arrival[1]

    waited, enough = first(f"{waits} 0.9"), first(f"{waits} 0.05")
    step = tables[0].times.rank(1, 700, [])
    assert waited - enough == pytest.approx(8 * step, rel=0.15)
    assert enough - first("") < 1.1 * step


def test_ranks_of_trtllm_wait_for_prompts_of_all_before_they_take_one() -> None:
    """``attention_dp_config``: where all ranks generate and have a prompt, both wait ``batching_wait_iters`` steps. A
    prompt of one rank alone waits for the end of a count to ``timeout_iters`` that also runs while none is there."""
    start = "trtllm-serve Qwen/Qwen3-30B-A3B --tp_size 2 --ep_size 2 --enable_attention_dp true --max_seq_len 8192"
    balance = f"{start} --kv_cache_config.enable_block_reuse false --attention_dp_config.enable_balance true"
    line = f"{balance} --attention_dp_config.timeout_iters 30 --attention_dp_config.batching_wait_iters"
    words = "batching_wait_iters=5,enable_balance=true,timeout_iters=30"
    assert reading(f"{line} 5").settings["scheduler"] == f"trtllm-1.0:{words}"
    assert reading(balance).settings["scheduler"] == "trtllm-guaranteed-no-evict:balance_timeout=50"
    tables = batch_times(deployed(f"{line} 5"), "modelled")

    def steps(more: str, arrivals: list[float]) -> Any:
        """Steps from the arrival of each prompt to its first token, by the time of the two requests that generate."""
        asked = Workload.from_columns(
            arrival=[0.0, 0.0, *arrivals],
            prompt_tokens=[64, 64, *(512 for _ in arrivals)],
            output_tokens=[900, 900, *(2 for _ in arrivals)],
        )
        requests = simulate(deployed(f"{line} {more}"), asked, tables=tables).requests
        return (requests.first_token - requests.arrival)[2:] / step

    plain = simulate(deployed(f"{line} 5"), loop_of_two(900), tables=tables).requests
    step = float((plain.finish - plain.first_token)[0]) / 899
    few, many = steps("5", [1.0, 1.0]), steps("20", [1.0, 1.0])
    assert many - few == pytest.approx([15, 15], abs=0.5)
    alone = steps("5", [1.0 + 0.37 * k for k in range(10)]) - few[0] + 6  # of which the pair waited 6
    assert max(alone) <= 33 and max(alone) > 20 and min(alone) < 10


def loop_of_two(tokens: int) -> Workload:
    return Workload.from_columns(arrival=[0.0, 0.0], prompt_tokens=[64, 64], output_tokens=[tokens] * 2)
