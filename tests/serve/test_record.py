"""What was served is a load that a run replays, with the same latencies."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from serve.endpoint import app, client, deployment, live, tables
from windtunnel.errors import InputError
from windtunnel.serve import record
from windtunnel.serve.clock import RealClock
from windtunnel.serve.engine import Stream
from windtunnel.serve.record import Recent, Recorder
from windtunnel.simulate.live import Arrival
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


class Ended:
    """A recorder of blocks of 4 tokens, whose requests end when they are told to."""

    def __init__(self, folder: Path) -> None:
        size = SimpleNamespace(hash_block_size=4)
        self.engine = cast(Any, SimpleNamespace(deployment=size, observers=[], oldest=float("inf")))
        self.path = folder / "load.jsonl"
        self.recorder = Recorder(self.path, self.engine)

    def add(
        self,
        times: tuple[float, float],
        tokens: tuple[int, int],
        names: tuple[int, ...] = (),
        session: str = "",
        **more: Any,
    ) -> None:
        """One that arrived and ended at these times, with so many tokens of prompt and answer."""
        prompt, output = tokens
        asked = Arrival(prompt, output, output + 1, more.pop("priority", 0), names, session)
        stream = Stream(asked, times[0], 0, lambda: None, tokens=more.pop("given", output), last_token=times[1], **more)
        (end,) = self.engine.observers
        end(stream)

    def rows(self) -> list[dict[str, Any]]:
        self.recorder.close()
        head, *rows = map(json.loads, self.path.read_text().splitlines())
        assert head == {"schema_version": 2, "name": "load"}
        return rows


def plain(arrival: float, prompt: int, output: int, session: int, **more: Any) -> dict[str, Any]:
    found = {
        "arrival": arrival,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "max_tokens": output + 1,
        "priority": 0,
    }
    return found | {"session": session} | more


def test_rows_are_in_the_order_of_arrivals(tmp_path: Path) -> None:
    load = Ended(tmp_path)
    load.add((2.0, 3.0), (10, 2), priority=5)
    load.add((1.0, 9.0), (11, 3))
    load.add((0.5, 1.0), (12, 4), withdrawn=True)
    load.add((0.5, 1.0), (12, 4), given=0)  # it was ignored
    load.add((0.25, 1.0), (13, 5), given=0, failed="the replica has failed")
    load.engine.oldest = 2.0
    assert [load.recorder._writes_one(2.0) for _ in range(3)] == [True, True, False]  # one that came then may be next
    assert load.rows() == [
        plain(0.25, 13, 5, 0), plain(1.0, 11, 3, 1), plain(2.0, 10, 2, 2) | {"priority": 5},
    ]  # fmt: skip


def test_a_prompt_begins_with_another_one(tmp_path: Path) -> None:
    """Blocks of 4: prompts of 9 and 10 tokens share two full blocks; of one with 8 the second ends with the prompt; one
    of 7 has one full block. Whoever was first is named."""
    load = Ended(tmp_path)
    load.add((0.0, 9.0), (9, 2), (1, 2))
    load.add((1.0, 9.0), (10, 2), (1, 2, 3))
    load.add((2.0, 9.0), (8, 2), (1, 2))
    load.add((3.0, 9.0), (7, 2), (1, 2))
    load.add((4.0, 9.0), (8, 1), (1, 5))
    load.add((5.0, 9.0), (8, 1), (6, 7))
    load.add((6.0, 9.0), (3, 1), ())
    begins = [row.get("begins") for row in load.rows()]
    assert begins == [None, [0, 8], [0, 8], [0, 4], [0, 4], None, None]


def test_a_prompt_goes_on_from_an_answer_after_a_while(tmp_path: Path) -> None:
    """8 tokens of prompt and 8 of answer: blocks 1, 2 and 3, 4. Who asks for the third goes on from the answer; at 2.5
    s it came before its end, and so by the clock."""
    load = Ended(tmp_path)
    load.add((1.0, 3.0), (8, 8), (1, 2, 3, 4))
    load.add((2.5, 4.0), (16, 4), (1, 2, 3, 4, 5))
    load.add((3.0, 6.0), (12, 1), (1, 2, 3))
    load.add((7.5, 9.0), (17, 4), (1, 2, 3, 4, 9))
    first, early, at_once, later = load.rows()
    assert first == plain(1.0, 8, 8, 0) and early == plain(2.5, 16, 4, 1, begins=[0, 8])
    more = {"max_tokens": 2, "priority": 0, "begins": [0, 12], "after": [0], "think_time": 0.0, "session": 0}
    assert at_once == {"prompt_tokens": 12, "output_tokens": 1} | more
    assert later == {"prompt_tokens": 17, "output_tokens": 4} | more | {
        **{
            "max_tokens": 5,
            "begins": [0, 16],
            "after": [0, 2],
            "think_time": 1.5,
        }  # a join of both that nobody continued
    }


def test_only_what_ended_since_is_joined(tmp_path: Path) -> None:
    """1 and 2 go on from 0; 3 goes on from 1, after the end of 2; 4 from 2, which 3 has waited for already."""
    load = Ended(tmp_path)
    load.add((0.0, 1.0), (4, 4), (1, 2))
    load.add((2.0, 4.0), (8, 4), (1, 2, 3))
    load.add((2.5, 5.0), (9, 3), (1, 2, 6))
    load.add((6.0, 7.0), (12, 4), (1, 2, 3, 4))
    load.add((9.0, 9.5), (12, 4), (1, 2, 6, 7))
    rows = load.rows()
    assert [row.get("after") for row in rows] == [None, [0], [0], [1, 2], [2, 3]]
    assert [row.get("think_time") for row in rows] == [None, 1.0, 1.5, 1.0, 2.0]
    assert [row["session"] for row in rows] == [0] * 5


def test_whose_request_it_is(tmp_path: Path) -> None:
    """A name is a session from its first row on; text of another session is shared, but not waited for."""
    load = Ended(tmp_path)
    load.add((0.0, 1.0), (8, 8), (1, 2, 3, 4), "me")
    load.add((2.0, 3.0), (12, 4), (1, 2, 3, 8), "you")
    load.add((4.0, 5.0), (12, 4), (1, 2, 3, 9), "me")
    load.add((6.0, 7.0), (5, 4), (7, 7), "me")
    load.add((8.0, 9.0), (6, 2))
    first, other, mine, new, nobody = load.rows()
    assert [row["session"] for row in (first, other, mine, new, nobody)] == [0, 1, 0, 0, 4]
    assert "after" not in first and other["begins"] == [0, 8] and "after" not in other
    assert (mine["begins"], mine["after"], mine["think_time"]) == ([0, 12], [0], 3.0)
    assert new["after"] == [] and new["arrival"] == 6.0 and "after" not in nobody


def test_so_much_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What docs and the memory of a long run rest on; of a session's branches the oldest is forgotten."""
    assert (record.ON_DISK_SECONDS, record.MOST_BRANCHES) == (0.5, 4096)
    load = Ended(tmp_path)
    parts = [(known._parts.maxlen, known._size) for known in (load.recorder._first, load.recorder._open)]
    assert parts == [(8, 131_072), (4, 16_384)]
    assert (load.recorder._sessions._parts.maxlen, load.recorder._sessions._size) == (4, 16_384)
    monkeypatch.setattr(record, "MOST_BRANCHES", 2)
    load.add((0.0, 1.0), (4, 4), (1, 2), "me")
    for k in range(3):
        load.add((2.0 + k, 5.0 + k), (5, 4), (10 + k, 20 + k), "me")
    load.add((9.0, 9.5), (8, 4), (1, 2, 3), "me")
    assert load.rows()[-1]["after"] == [0, 2, 3]


def test_what_is_added_to_a_time_gives_the_other() -> None:
    for end, arrival in ((1.0, 1.0), (1.0, 3.5), (0.1, 0.3), (1e9 + 0.1, 1e9 + 0.7), (3.3, 1e9 + 1 / 3)):
        found = record._between(end, arrival)
        assert end + found == arrival and found == pytest.approx(arrival - end, abs=1e-6)


def test_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written \(Is a directory"):
        Recorder(tmp_path, SimpleNamespace(deployment=SimpleNamespace(hash_block_size=4)))  # type: ignore[arg-type]
