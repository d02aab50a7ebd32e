"""The store: each simulation once, several searches at once, what was killed goes on, and what is not ours stays."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plan.planning import question, small_space
from windtunnel.errors import InputError
from windtunnel.plan.bound import Bound
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.store import APPLICATION, Store

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
