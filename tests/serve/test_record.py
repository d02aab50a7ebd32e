"""What was served is a load that a run replays, with the same latencies."""

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from serve.endpoint import app, client, deployment, live, tables
from windtunnel.serve.clock import RealClock
from windtunnel.serve.engine import Stream
from windtunnel.serve.record import Recent, Recorder
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import load_trace, save


async def talk(served: Any, number: int, seed: int) -> list[dict[str, float]]:
    """Clients that come one after the other; their latencies by the headers."""
    rng = np.random.default_rng(seed)

    async def one(i: int) -> dict[str, float]:
        await asyncio.sleep(float(rng.random()) * 0.02)
        prompt = ("shared beginning " * 20 if i % 3 else "") + f"client {i} " * int(rng.integers(1, 200))
        body = {"prompt": prompt, "max_tokens": int(rng.integers(1, 60)), "priority": int(rng.integers(0, 3))}
        answer = await found.post("/v1/completions", json=body)
        assert answer.status_code == 200
        parts = ("queue", "prefill", "decode")
        return {part: float(answer.headers[f"x-windtunnel-{part}-seconds"]) for part in parts}

    async with client(served) as found:
        return list(await asyncio.gather(*map(one, range(number))))


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 4},
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.long),  # each is compiled anew
        pytest.param({"preset": "sglang-0.5"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_run_of_the_record_has_the_latencies_that_were_served(
    settings: dict[str, Any], virtual: bool, tmp_path: Path
) -> None:
    served, path = deployment(**settings), tmp_path / "load.jsonl"
    clock = None if virtual else RealClock(20.0)
    found = asyncio.run(talk(app(live(served), clock, record=path), 60, 1))
    load = load_trace(path)
    assert len(load) == 60
    run = simulate(served, load, tables=tables(served))
    rows = run.requests
    for part, (begin, end) in {
        "queue": (rows.arrival, rows.scheduled),
        "prefill": (rows.scheduled, rows.first_token),
        "decode": (rows.first_token, rows.finish),
    }.items():
        assert np.allclose(np.sort(end - begin), np.sort([one[part] for one in found]), rtol=0, atol=1e-6), part


def test_what_was_used_lately_is_known_and_no_more_is_kept() -> None:
    draw, known, used = Random(1), Recent[int](3, 4), list[int]()
    for _ in range(500):
        name = draw.randrange(20)
        assert known.get(name) == 10 * name if name in used[-8:] else known.get(name) in (None, 10 * name)
        if known.get(name) is None:
            known[name] = 10 * name
        used.append(name)
    for k in range(100, 112):
        known[k] = 0
    assert {known.get(name) for name in range(20)} == {None}


USER = "Please look at the files of this project, one after the other, and say what each of them does. "


async def agent(served: Any, clients: int) -> tuple[list[tuple[int, int]], list[str]]:
    """Agents that ask, split their work into two branches, join them and go on: (prompt tokens, cached tokens) of all
    their calls, and what the agents said to each other last."""
    calls, said = list[tuple[int, int]](), list[str]()

    async def ask(messages: list[dict[str, str]], **more: Any) -> dict[str, str]:
        body = {"messages": messages, "max_tokens": 90 + len(messages), **more}
        answer = (await found.post("/v1/chat/completions", json=body)).json()
        usage, message = answer["usage"], answer["choices"][0]["message"]
        calls.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
        return {"role": "assistant", "content": message["content"]}

    async def one(number: int) -> None:
        await asyncio.sleep(0.003 * number)
        root = [{"role": "system", "content": "You are an agent. " * 20}, {"role": "user", "content": USER * number}]
        root.append(await ask(root))
        branches = [[*root, {"role": "user", "content": f"Part {part}: {USER}"}] for part in range(2)]
        results = await asyncio.gather(*map(ask, branches))
        both = " ".join(result["content"] for result in results)
        joined = [*branches[0], results[0], {"role": "user", "content": f"Sum up: {both}"}]
        joined.append(await ask(joined))
        said.append((await ask([*joined, {"role": "user", "content": "Is that all?"}]))["content"])

    async with client(served) as found:
        await asyncio.gather(*map(one, range(1, clients + 1)))
    return calls, said


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"num_gpu_blocks_override": 250}, id="little memory"),
        pytest.param({"preset": "sglang-0.5"}, marks=pytest.mark.long),
        pytest.param(
            {"preset": "trtllm-1.1", "scheduler": "trtllm-1.0:enable_block_reuse=true"}, marks=pytest.mark.long
        ),
        pytest.param({"preset": "vllm-0.6", "enable_prefix_caching": True}, marks=pytest.mark.long),
    ],
)
def test_an_agent_has_the_hits_of_a_run_of_the_record(settings: dict[str, Any], virtual: bool, tmp_path: Path) -> None:
    served, path = deployment(**settings), tmp_path / "load.jsonl"
    clock = None if virtual else RealClock(20.0)
    found, _ = asyncio.run(agent(app(live(served), clock, record=path), 3))
    load = load_trace(path)
    rows = simulate(served, load, tables=tables(served)).requests
    assert sorted(zip(rows.prompt_tokens.tolist(), rows.cached_tokens.tolist(), strict=True)) == sorted(found)
    assert len(load) == 15 and load.after is not None
    edges = len(load.after[1])
    assert edges == 15 if virtual else edges >= 15  # of a join two; more where a branch came late


async def graph(served: Any, seed: int) -> None:
    """Agents whose turns split into one to four branches, some of which split again, and are joined by the next one."""
    draw = Random(seed)

    async def ask(messages: list[dict[str, str]]) -> list[dict[str, str]]:
        body = {"messages": messages, "max_tokens": draw.randint(1, 90)}
        answer = (await found.post("/v1/chat/completions", json=body)).json()
        return [*messages, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]

    async def turn(before: list[dict[str, str]], depth: int) -> list[dict[str, str]]:
        await asyncio.sleep(draw.choice([0.0, draw.random() * 0.1]))
        said = await ask([*before, {"role": "user", "content": USER * draw.randint(1, 5)}])
        for _ in range(draw.randint(0, 2) if depth else 0):
            branches = await asyncio.gather(*(turn(said, depth - 1) for _ in range(draw.randint(1, 4))))
            results = " ".join(branch[-1]["content"] for branch in branches)
            said = await ask([*said, {"role": "user", "content": results}])
        return said

    async with client(served) as found:
        await asyncio.gather(*(turn([{"role": "system", "content": USER * 4}], 2) for _ in range(3)))


@pytest.mark.parametrize("seed", [1, pytest.param(range(2, 30), marks=pytest.mark.long)], ids=str)
def test_forks_and_joins_are_those_that_were_served_to_the_bit(
    seed: int | range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times and hits of a run of the record, written and read again, are those of the run; its times are the server's
    up to the first arrival that no think time leads to: adding it to an end rounds to a neighbour."""
    ended, end = list[Stream](), Recorder.end

    def noted(self: Recorder, stream: Stream) -> None:
        ended.append(stream)
        end(self, stream)

    monkeypatch.setattr(Recorder, "end", noted)
    joins = to_the_bit = 0
    for one in [seed] if isinstance(seed, int) else seed:
        served, path = deployment(num_gpu_blocks_override=900), tmp_path / "load.jsonl"
        ended.clear()
        asyncio.run(graph(app(live(served), record=path), one))
        load = load_trace(path)
        rows = simulate(served, load, tables=tables(served)).requests
        ended.sort(key=lambda stream: stream.arrived)
        order = np.argsort(rows.arrival, kind="stable")
        arrived = np.array([stream.arrived for stream in ended])
        exact = np.append(np.flatnonzero(rows.arrival[order] != arrived), len(ended))[0]
        before = rows.finish[order] < np.append(arrived, np.inf)[exact]
        assert rows.finish[order][before].tolist() == np.array([stream.last_token for stream in ended])[before].tolist()
        to_the_bit += exact == len(ended)
        joins += int((np.diff(load.waits[0]) > 1).sum())
        for name in ("again.jsonl", "again.parquet"):
            save(load, tmp_path / name)
            again = simulate(served, load_trace(tmp_path / name), tables=tables(served)).requests
            for column in ("arrival", "first_token", "finish", "cached_tokens"):
                assert getattr(again, column).tolist() == getattr(rows, column).tolist(), (one, name, column)
    assert joins > 0 and (isinstance(seed, int) or to_the_bit > len(seed) // 2)


def test_an_answer_is_found_where_it_was_computed() -> None:
    found, _ = asyncio.run(agent(app(), 1))
    (first, none), *branches, (joined, of_branch), (last, of_join) = found
    assert none == 0
    for prompt, cached in branches:
        assert first + 90 < prompt and cached == (first + 92 - 1) // 16 * 16  # all but the token that is never computed
    assert of_branch == (branches[0][0] + 94 - 1) // 16 * 16 < joined
    assert of_join == (joined + 96 - 1) // 16 * 16 < last


def test_a_router_that_looks_chooses_the_same_replicas(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    (pool,) = deployment(max_num_seqs=4).pools
    for router in ("round_robin", "least_outstanding", "random", "vllm_dp"):
        served = replace(deployment(), pools=(replace(pool, replicas=3),), router=router)
        found = asyncio.run(talk(app(live(served), record=path), 40, 2))
        rows = simulate(served, load_trace(path), tables=tables(served)).requests
        expected = np.sort(rows.finish - rows.arrival)
        assert np.allclose(expected, np.sort([sum(one.values()) for one in found]), rtol=0, atol=1e-5), router


def test_conversations_of_one_user_do_not_wait_for_each_other(tmp_path: Path) -> None:
    path, served = tmp_path / "load.jsonl", deployment()

    async def ask() -> None:
        async with client(app(live(served), record=path)) as found:
            bodies = [{"prompt": f"{i} " * 90, "max_tokens": 40, "user": "one"} for i in range(3)]
            await asyncio.gather(*(found.post("/v1/completions", json=body) for body in bodies))

    asyncio.run(ask())
    load = load_trace(path)
    rows = simulate(served, load, tables=tables(served)).requests
    assert load.waits[0].tolist() == [0, 0, 0, 0] and (rows.arrival < rows.finish.min()).all()


def test_prompts_are_not_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    asyncio.run(talk(app(record=path), 5, 3))
    assert "client" not in path.read_text() and "shared" not in path.read_text()
    assert load_trace(path).begins is not None


def test_a_client_that_leaves_is_recorded_with_what_was_computed(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    served = app(record=path, clock=RealClock())

    async def leave() -> None:
        async with client(served) as found:
            body = {"prompt": "a" * 100, "max_tokens": 30_000, "stream": True}
            answers = [asyncio.create_task(found.post("/v1/completions", json=body)) for _ in range(2)]
            await asyncio.sleep(0.5)
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
            await asyncio.sleep(0.2)
            gauges = (await found.get("/metrics")).text
            assert 'vllm:num_requests_running{engine="0",model_name="small"} 0.0' in gauges
            assert 'finished_reason="abort",model_name="small"} 2.0' in gauges
            await asyncio.sleep(1.0)
            assert len(path.read_text().splitlines()) == 3  # on disk while the server runs

    asyncio.run(leave())
    load = load_trace(path)
    assert len(load) == 2 and (load.output_tokens < 20_000).all() and (load.max_tokens == 30_000).all()
