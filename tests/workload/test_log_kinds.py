"""Logs of more than thirty kinds, in the words of their own documentation: each is imported at the first command, or
refused with the one that works."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.workload.logs import import_logs

START = datetime(2026, 11, 23, 8, 0, 0, tzinfo=UTC)
REQUESTS = [(START + timedelta(seconds=0.75 * place), 100 + place, 10 + place) for place in range(12)]
"""Time, prompt and output tokens."""
Say = Callable[[datetime, int, int], Any]


def iso(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


def ns(at: datetime) -> int:
    return round(at.timestamp() * 1e6) * 1000


def ms(at: datetime) -> int:
    return ns(at) // 1_000_000


LINES: dict[str, Say] = {
    "openai responses": lambda t, p, o: {"created_at": t.timestamp(), "usage": {"input_tokens": p, "output_tokens": o}},
    "anthropic": lambda t, p, o: {"timestamp": iso(t), "usage": {"input_tokens": p, "output_tokens": o}},
    "bedrock": lambda t, p, o: {
        "timestamp": iso(t), "input": {"inputTokenCount": p}, "output": {"outputTokenCount": o},
    },
    "vertex": lambda t, p, o: {
        "logging_time": iso(t), "usageMetadata": {"promptTokenCount": p, "candidatesTokenCount": o, "totalTokens": p},
    },
    "openrouter": lambda t, p, o: {"created_at": iso(t), "tokens_prompt": p, "tokens_completion": o},
    "langsmith": lambda t, p, o: {"start_time": iso(t), "prompt_tokens": p, "completion_tokens": o, "session_id": "s"},
    "helicone": lambda t, p, o: {"request_created_at": iso(t), "prompt_tokens": p, "completion_tokens": o},
    "portkey": lambda t, p, o: {"created_at": iso(t), "req_units": p, "res_units": o, "total_units": p + o},
    "datadog": lambda t, p, o: {"start_ns": ns(t), "metrics": {"input_tokens": p, "output_tokens": o}},
    "openinference": lambda t, p, o: {
        "start_time": iso(t), "attributes": {"llm.token_count.prompt": p, "llm.token_count.completion": o},
    },
    "otel, old names": lambda t, p, o: {
        "timestamp": iso(t), "gen_ai.usage.prompt_tokens": p, "gen_ai.usage.completion_tokens": o,
    },
    "kong": lambda t, p, o: {"started_at": ms(t), "ai": {"usage": {"prompt_tokens": p, "completion_tokens": o}}},
    "cloudflare": lambda t, p, o: {"created_at": iso(t), "tokens_in": p, "tokens_out": o, "success": True},
    "databricks": lambda t, p, o: {
        "timestamp_ms": ms(t), "status_code": 200,
        "response": json.dumps({"usage": {"prompt_tokens": p, "completion_tokens": o}}),
    },
    "vllm": lambda t, p, o: {"arrival_time": t.timestamp(), "num_prompt_tokens": p, "num_generation_tokens": o},
    "tgi": lambda t, p, o: {"timestamp": iso(t), "span": {"input_length": p, "generated_tokens": o}},
    "ollama": lambda t, p, o: {"created_at": iso(t), "prompt_eval_count": p, "eval_count": o, "done": True},
    "aiperf": lambda t, p, o: {
        "metadata": {"request_start_ns": ns(t)},
        "metrics": {"input_sequence_length": {"value": p}, "output_sequence_length": {"value": o}},
    },
    "fireworks": lambda t, p, o: {"createTime": iso(t), "promptTokens": p, "completionTokens": o},
}  # fmt: skip
TABLES: dict[str, tuple[str, Say]] = {
    "azure": ("TIMESTAMP,ContextTokens,GeneratedTokens", lambda t, p, o: f"{t:%Y-%m-%d %H:%M:%S.%f},{p},{o}"),
    "burstgpt": ("Timestamp,Model,Request tokens,Response tokens", lambda t, p, o: f"{t.timestamp()},x,{p},{o}"),
    "apim": (
        "TimeGenerated [UTC],PromptTokens,CompletionTokens",
        lambda t, p, o: f'"{t:%m/%d/%Y, %I:%M:%S.%f %p}",{p},{o}',
    ),
    "points": ("time;input_tokens;output_tokens", lambda t, p, o: f"{t:%d.%m.%Y %H:%M:%S};{p};{o}"),
}  # fmt: skip


def holds(path: Path, within: float = 2e-3) -> None:
    found = import_logs([path]).workload
    assert found.arrival.tolist() == pytest.approx([0.75 * place for place in range(12)], abs=within)
    assert found.prompt_tokens.tolist() == [prompt for _, prompt, _ in REQUESTS]
    assert found.output_tokens.tolist() == [output for *_, output in REQUESTS]


@pytest.mark.parametrize("kind", LINES)
def test_lines_of_json(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(LINES[kind](*request)) for request in REQUESTS))
    holds(path)


@pytest.mark.parametrize("kind", TABLES)
def test_tables(tmp_path: Path, kind: str) -> None:
    head, row = TABLES[kind]
    path = tmp_path / "log.csv"
    path.write_text("\n".join([head, *(row(*request) for request in REQUESTS)]))
    holds(path, 1.0 if kind == "points" else 2e-3)


def test_detailed_results_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    times, prompts, outputs = zip(*REQUESTS, strict=True)
    found = {"input_lens": prompts, "output_lens": outputs, "start_times": [time.timestamp() for time in times]}
    path.write_text(json.dumps({"date": "x", "num_prompts": 12, **found}))
    holds(path)


def test_refusals_have_the_command_that_works(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("Zeit,Prompt size,n\n2026-11-23 08:00:00,7,5\n2026-11-23 08:00:01,7,5\n")
    with pytest.raises(InputError, match="add --columns arrival=Zeit;"):
        import_logs([path])
    with pytest.raises(InputError, match="add --columns prompt_tokens=Prompt size;"):
        import_logs([path], {"arrival": "Zeit"})
    columns = {"arrival": "Zeit", "prompt_tokens": "Prompt size", "output_tokens": "n"}
    assert len(import_logs([path], columns).workload) == 2
    path.write_text('{"timestamp": 0, "input_length": 7, "output_length": 5, "hash_ids": [1]}')
    with pytest.raises(InputError, match="give it to --trace as it is"):
        import_logs([path])


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"timestamp": 0, "hash_ids": {"sys_prompt": [1]}}, "hash_ids"),
        ({"session_id": "a", "turns": [{"text": "hello", "max_tokens": 3}]}, "turns"),
        ({"prompt_0": "hello", "output_tokens_0": 3}, "prompt_0"),
        ({"conversation_id": "a", "turn": 1, "role": "user", "content": "hello"}, "role"),
        ({"block_size": 64, "hash_id_scope": "local", "requests": []}, "hash_id_scope"),
    ],
)
def test_traces_of_sessions_are_no_logs(tmp_path: Path, row: dict[str, Any], key: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=f"has {key}: is a trace, not a log: give it to --trace as it is"):
        import_logs([path])
