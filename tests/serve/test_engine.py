"""What the engines do in which turn of the event loop."""

import asyncio
from collections.abc import Callable

from serve.endpoint import live
from windtunnel.serve.connection import Gate
from windtunnel.serve.engine import Engine
from windtunnel.simulate.live import Arrival

ASKED = Arrival(prompt_tokens=100, output_tokens=20, max_tokens=20)


class Hands:
    """A clock whose time is set by hand."""

    def __init__(self, slack: float = 0.0) -> None:
        self.time, self.slack = 0.0, slack

    def now(self) -> float:
        return self.time

    def at(self, seconds: float) -> float:
        return seconds

    async def wait(self, until: float, wake: asyncio.Event) -> None:
        while self.time < until and not wake.is_set():
            await asyncio.sleep(0)


def driven(engine: Engine, steps: Callable[[], list[Callable[[], None]]]) -> None:
    """Let an engine run, and do one thing after the other, a hundred turns each."""

    async def drive() -> None:
        running = asyncio.create_task(engine.run())
        for step in steps():
            step()
            for _ in range(100):
                await asyncio.sleep(0)
        assert not running.done()
        running.cancel()

    asyncio.run(drive())


def test_tokens_that_are_decided_go_out_while_a_request_waits_to_be_understood() -> None:
    clock = Hands()
    engine, seen = Engine(live(), clock), list[int]()

    def steps() -> list[Callable[[], None]]:
        stream = engine.submit(ASKED, lambda: None, 0.0)
        waiting = list[asyncio.Task[None]]()

        def later(seconds: float, shut: bool) -> Callable[[], None]:
            def step() -> None:
                seen.append(stream.tokens)
                if shut and not waiting:
                    engine.gate.shut = True
                    waiting.append(asyncio.create_task(engine.gate.passed()))
                engine.gate.shut = shut
                clock.time = seconds

            return step

        return [later(1e-4, False), later(1.0, True), later(2.0, True), later(2.0, False), later(2.0, False)]

    driven(engine, steps)
    assert seen == [0, 0, 2, 2, 20]  # vLLM decides a step ahead; the third is one that who waits could be part of


def test_a_decision_is_made_late_within_the_slack_and_when_a_request_comes() -> None:
    clock = Hands(slack=0.5)
    engine = Engine(live(), clock)
    decided = list[float]()

    def steps() -> list[Callable[[], None]]:
        engine.submit(ASKED, lambda: None, 0.0)

        def at(seconds: float) -> Callable[[], None]:
            def step() -> None:
                decided.append(engine.engine.next_decision())
                clock.time = seconds
                if seconds == 0.6:
                    engine.submit(ASKED, lambda: None, seconds)

            return step

        return [at(0.0), at(0.4), at(0.6), at(0.6)]

    driven(engine, steps)
    assert decided[:2] == [0.0, 0.0]
    assert decided[3] >= 0.6


def test_those_who_are_told_are_told_a_few_in_a_turn_and_nobody_passes_the_gate() -> None:
    clock = Hands()
    engine, turns, open_ = Engine(live(), clock), dict[int, int](), list[bool]()
    turn = 0

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            open_.append(not engine.gate.shut)
            await asyncio.sleep(0)

    def steps() -> list[Callable[[], None]]:
        counting.append(asyncio.create_task(count()))

        def told() -> None:
            turns[turn] = turns.get(turn, 0) + 1

        for number in range(40):
            engine.submit(Arrival(10, 1, 1), told, 1e-6 * number)
        return [lambda: None, lambda: setattr(clock, "time", 1.0), lambda: setattr(clock, "time", 2.0)]

    counting = list[asyncio.Task[None]]()
    driven(engine, steps)
    assert sum(turns.values()) == 40
    assert list(turns.values()) == [1 + Gate.FEW, Gate.FEW, 39 - 2 * Gate.FEW]  # the first one has a step of its own
    assert False in open_
    assert not engine.gate.shut
