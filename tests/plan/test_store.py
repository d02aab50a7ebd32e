"""The store: each simulation once, several searches at once, what was killed goes on, and what is not ours stays."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plan.chosen import outcome
from plan.planning import question, small_space
from windtunnel.errors import InputError
from windtunnel.plan.bound import Bound
from windtunnel.plan.elimination import Asked
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.store import APPLICATION, Store, _alive

SEARCH = """
import sys
from plan.planning import question, small_space
from windtunnel.plan.workers import in_turn, processes
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.store import Store

if __name__ == "__main__":
    team = processes(int(sys.argv[2])) if int(sys.argv[2]) else in_turn()
    with Store(sys.argv[1]) as store:
        answer = search(small_space().enumerate(with_price=True), question(), RatePerDollar(), store=store, team=team)
        print(answer.best.index, answer.best.promise, answer.trials, answer.reused)
"""


def searching(store: Path, workers: int = 0) -> "subprocess.Popen[str]":
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        (sys.executable, "-c", SEARCH, str(store), str(workers)),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def finished(process: "subprocess.Popen[str]") -> tuple[int, float, int, int]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    index, promise, trials, reused = out.split()
    return int(index), float(promise), int(trials), int(reused)


def keys(store: Path) -> list[str]:
    connection = sqlite3.connect(store)
    try:
        return [key for (key,) in connection.execute("SELECT key FROM trials")]
    except sqlite3.OperationalError:
        return []
    finally:
        connection.close()


@pytest.fixture(scope="module")
def expected() -> tuple[int, float]:
    best = search(small_space().enumerate(with_price=True), question(), RatePerDollar()).best
    assert best is not None
    return best.index, best.promise


def test_a_killed_search_goes_on(tmp_path: Path, expected: tuple[int, float]) -> None:
    store = tmp_path / "studies.db"
    process = searching(store)
    while not (len(keys(store)) >= 5 if store.exists() else False):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = set(keys(store))
    index, promise, trials, reused = finished(searching(store))
    assert (index, promise) == expected
    after = keys(store)
    assert before <= set(after)
    assert len(after) == len(set(after)) == len(before) + trials
    assert reused > 0


def test_two_searches_share_a_store(tmp_path: Path, expected: tuple[int, float]) -> None:
    store = tmp_path / "studies.db"
    results = [finished(process) for process in (searching(store), searching(store))]
    assert [result[:2] for result in results] == [expected, expected]
    assert len(keys(store)) == sum(trials for _, _, trials, _ in results)


@pytest.mark.long
def test_a_search_killed_twenty_times_loses_nothing(tmp_path: Path, expected: tuple[int, float]) -> None:
    """kill -9 of the search, or of one of its workers, at random moments."""
    import random

    moments = random.Random(7)
    for attempt in range(20):
        store = tmp_path / f"{attempt}.db"
        process = searching(store, workers=2)
        time.sleep(moments.uniform(1.0, 5.0))
        children = subprocess.run(
            ("pgrep", "-g", str(process.pid)), capture_output=True, text=True, check=False
        ).stdout.split()
        if attempt % 2 and len(children) > 1:
            victim = moments.choice([int(child) for child in children if int(child) != process.pid])
            os.kill(victim, signal.SIGKILL)
            assert finished(process)[:2] == expected
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        before = set(keys(store)) if store.exists() else set()
        index, promise, trials, _ = finished(searching(store, workers=2))
        assert (index, promise) == expected
        after = keys(store)
        assert before <= set(after)
        assert len(after) == len(set(after)) == len(before) + trials


def test_studies_are_kept_by_name(tmp_path: Path) -> None:
    with Store(tmp_path / "studies.db") as store:
        store.begin("one", "q", "cost", {"space": 1})
        store.begin("one", "q", "cost", {"space": 2})
        store.begin("two", "q", "energy", {})
        store.finish("one", {"ranking": []})
        assert [study.name for study in store.studies()] == ["one", "two"]
        assert store.study("one").spec == {"space": 2}
        assert store.study("one").answer == {"ranking": []}
        assert store.study("two").answer is None
        with pytest.raises(InputError, match="asks something else"):
            store.begin("one", "other", "cost", {})
        with pytest.raises(InputError, match="did you mean 'one'"):
            store.study("onee")


def test_bounds_are_kept(tmp_path: Path) -> None:
    with Store(tmp_path / "studies.db") as store:
        store.record_bounds("q", {"a": ("pools", Bound(3.0, 0.5, 2))})
        store.record_bounds("q", {"a": ("pools", Bound(9.0, 0.5, 2))})
        assert store.bounds("q") == {"a": ("pools", Bound(3.0, 0.5, 2))}
        assert store.bounds("other") == {}


def test_a_claim_is_one_process_alone(tmp_path: Path) -> None:
    path = tmp_path / "studies.db"
    with Store(path) as mine:
        assert mine.claim("q", ["a", "b"]) == {"a", "b"}
        other = (
            "import sys; from windtunnel.plan.store import Store; print(sorted(Store(sys.argv[1]).claim('q', 'abc')))"
        )
        seen = subprocess.run((sys.executable, "-c", other, str(path)), capture_output=True, text=True, check=True)
        assert seen.stdout.strip() == "['c']"
        assert mine.claim("q", ["c"]) == {"c"}, "its owner has ended"
        mine.renew()
        mine.release("q", ["a"])
        seen = subprocess.run((sys.executable, "-c", other, str(path)), capture_output=True, text=True, check=True)
        assert seen.stdout.strip() == "['a']"


def newer(path: Path) -> None:
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE things (name TEXT)")
    connection.close()


def damaged(path: Path) -> None:
    with Store(path) as store:
        store.begin("one", "q", "cost", {"text": "x" * 20_000})
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(path.read_bytes())
    data[4096:12288] = b"\xa5" * 8192
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (newer, "has version 99, this windtunnel reads 1"),
        (foreign, "is not a store of studies"),
        (damaged, "studies.db"),
        (lambda path: path.write_text("notes\n" * 1000), "not a database"),
        (lambda path: path.mkdir(), "is a folder"),
    ],
    ids=("newer", "foreign", "damaged", "text", "folder"),
)
def test_what_is_not_a_store_stays_as_it_is(tmp_path: Path, make: object, words: str) -> None:
    path = tmp_path / "studies.db"
    make(path)  # type: ignore[operator]
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(InputError) as caught:
        Store(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        Store(tmp_path / "none" / "studies.db")


def test_our_files_say_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "studies.db"
    Store(path).close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION,)
    connection.close()


def test_a_file_says_whose_it_is_in_its_header(tmp_path: Path) -> None:
    """SQLite's format: the version at byte 60, the application at 68."""
    path = tmp_path / "studies.db"
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    header = path.read_bytes()[:72]
    assert (header[60:64], header[68:72]) == (b"\0\0\0\1", b"wind")


def test_a_file_of_nothing_becomes_a_store_and_that_of_another_application_does_not(tmp_path: Path) -> None:
    nothing, empty, other = (tmp_path / name for name in ("nothing.db", "empty.db", "other.db"))
    nothing.touch()
    for path, pragma in ((empty, "PRAGMA application_id = 0"), (other, "PRAGMA application_id = 5")):
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE gone (name TEXT)")
        connection.execute("DROP TABLE gone")
        connection.execute(pragma)
        connection.close()
        assert path.stat().st_size > 0
    for path in (nothing, empty):
        with Store(path) as store:
            store.begin("one", "q", "cost", {})
            assert [study.name for study in store.studies()] == ["one"]
    with pytest.raises(InputError, match="is not a store of studies"):
        Store(other)


def test_trials_are_rows_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 30.0, 20.0))
    monkeypatch.setattr("windtunnel.plan.store.time.time", lambda: next(clock))
    with Store() as store:
        for key, asked, rate in (("a", "q", 1.0), ("b", "q", 2.0), ("c", "other", 3.0)):
            one = Asked(f"pools of {key}", 4, outcome(rate, 50.0, 0.25, 0.5, met=key == "a"), 0.125)
            store.record(asked, {key: one})
        monkeypatch.undo()
        assert [row["key"] for row in store.trials()] == ["a", "c", "b"]
        first, second = store.trials("q")
        document = outcome(1.0, 50.0, 0.25, 0.5).to_json()
        assert first == {
            "key": "a", "question": "q", "pools": "pools of a", "rate": 1.0, "replicas": 4, "met": 1,
            "cpu_seconds": 0.125, "recorded": 10.0, "outcome": document,
        }  # fmt: skip
        assert (second["key"], second["met"], second["recorded"]) == ("b", 0, 30.0)
        known = store.known("q", ["pools of b", "pools of b", "pools of c"])
        assert [(key, one.rate, one.met, one.output_throughput) for key, one in known.items()] == [
            ("b", 2.0, False, 50.0)
        ]
        assert store.known("other", ["pools of b"]) == {}


def test_studies_stand_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    with Store(tmp_path / "studies.db") as store:
        for name in ("b", "a"):
            store.begin(name, "q", "cost", {"z": 1, "a": 2})
        store.finish("b", {"ranking": []})
        found = store.studies()
        assert [(study.name, study.question, study.objective) for study in found] == [
            ("b", "q", "cost"), ("a", "q", "cost"),
        ]  # fmt: skip
        assert found[0].created <= found[1].created
        assert found[0].spec == {"z": 1, "a": 2}
        store.begin("b", "q", "cost", {})
        assert (store.study("b").answer, store.study("b").spec) == (None, {}), "resumed: not finished"
        with pytest.raises(InputError, match="asks something else"):
            store.begin("b", "q", "energy", {})


def test_a_claim_holds_while_its_owner_is_there_and_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.plan.store.time.time", lambda: 1000.0)
    monkeypatch.setattr("windtunnel.plan.store.socket.gethostname", lambda: "here")
    signals: dict[int, type[OSError] | None] = {1: None, 2: ProcessLookupError, 3: PermissionError}

    def kill(process: int, what: int) -> None:
        assert what == 0, "nobody is hurt"
        if error := signals[process]:
            raise error

    monkeypatch.setattr("windtunnel.plan.store.os.kill", kill)
    for host, process, renewed, alive in (
        ("here", 1, 1000.0, True), ("here", 2, 1000.0, False), ("here", 3, 1000.0, True), ("there", 2, 1000.0, True),
        ("here", 1, 940.0, True), ("here", 1, 939.9, False), ("there", 1, 939.9, False),
    ):  # fmt: skip
        assert _alive(host, process, renewed) is alive, (host, process, renewed)


def test_claims_of_others_are_left_to_them(tmp_path: Path) -> None:
    """Process 1 lives. What lapsed is taken; what is another's is neither renewed nor released."""
    path = tmp_path / "studies.db"
    with Store(path) as store:
        assert store.claim("q", ["mine"]) == {"mine"} == store.claim("q", ["mine"])
        connection = sqlite3.connect(path, isolation_level=None)
        values = [("q", "theirs", "elsewhere", 1, time.time()), ("q", "lapsed", "elsewhere", 1, time.time() - 61)]
        connection.executemany("INSERT INTO claims VALUES (?, ?, ?, ?, ?)", values)
        assert store.claim("q", ["theirs", "lapsed", "new"]) == {"lapsed", "new"}
        assert store.claim("another", ["theirs"]) == {"theirs"}
        connection.execute("UPDATE claims SET renewed = 5")
        store.renew()
        renewed = dict(connection.execute("SELECT pools, renewed FROM claims WHERE question = 'q'"))
        assert renewed["theirs"] == 5
        assert all(abs(renewed[name] - time.time()) < 60 for name in ("mine", "lapsed", "new"))
        store.release("q", ["mine", "theirs"])
        left = {name for (name,) in connection.execute("SELECT pools FROM claims WHERE question = 'q'")}
        assert left == {"theirs", "lapsed", "new"}
        store.release_all()
        assert [name for (name,) in connection.execute("SELECT pools FROM claims")] == ["theirs"]
        connection.close()
