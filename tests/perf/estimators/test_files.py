"""Trained estimators on disk: the same after reading, equal bytes for equal points, and nothing foreign is read."""

import json
from pathlib import Path

import numpy as np
import pytest

from perf.estimators.test_terms import points
from windtunnel.errors import InputError
from windtunnel.perf.estimators.files import ARRAYS, MANIFEST, key_of, load, save, train
from windtunnel.perf.estimators.interpolation import Interpolation
from windtunnel.perf.estimators.kinds import GRIDS, NEED_A_LIBRARY, grid
from windtunnel.perf.estimators.points import Points
from windtunnel.perf.estimators.selection import best, folds
from windtunnel.perf.estimators.terms import Linear, Polynomial


def measured() -> Points:
    a = np.arange(1.0, 41.0)
    return points("tokens", list(a), [0.0] * 40, 1.0 + 0.3 * a + 0.01 * a**2)


def write(folder: Path) -> None:
    trained = {name: train(name, grid(name)[0], measured()) for name in GRIDS if name not in NEED_A_LIBRARY}
    save(folder, trained, {"device": "x"})


def test_what_was_written_predicts_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    trained, about = load(tmp_path)
    assert about == {"device": "x"}
    for name, one in trained.items():
        again = train(name, grid(name)[0], measured())
        assert one.key == again.key
        assert np.array_equal(one.fitted.times(measured()), again.fitted.times(measured()))


def test_times_of_zero_or_less_are_counted_in_the_manifest(tmp_path: Path) -> None:
    """A line that follows five falling times is below zero at the sixth, which weighs next to nothing."""
    odd = points("tokens", [1, 2, 3, 4, 5, 12], [0] * 6, [5.0, 4.0, 3.0, 2.0, 1.0, 1000.0])
    trained = {"line": train("line", Linear(), odd), "between": train("between", Interpolation(), odd)}
    save(tmp_path, trained, {})
    rows = json.loads((tmp_path / MANIFEST).read_text())["operators"]
    assert {name: row["impossible"] for name, row in rows.items()} == {"line": 1, "between": 0}
    assert {name: one.impossible for name, one in load(tmp_path)[0].items()} == {"line": 1, "between": 0}


def test_equal_points_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name)
    for file in (ARRAYS, MANIFEST):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_the_key_changes_with_points_and_settings() -> None:
    other = points("tokens", [1, 2], [0, 0], [1.0, 2.0])
    keys = {key_of(learner, some) for learner in (Linear(), Linear(2), Polynomial()) for some in (measured(), other)}
    assert len(keys) == 6


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    whole = (tmp_path / ARRAYS).read_bytes()
    (tmp_path / ARRAYS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"estimators\.npz': not the file that its manifest names"):
        load(tmp_path)


def test_a_foreign_file_is_refused_and_not_run(tmp_path: Path) -> None:
    write(tmp_path)
    for text in ("{}", '{"format": "something else"}', "[1]", "no json"):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(InputError, match=r"estimators\.json"):
            load(tmp_path)


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    import hashlib

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("code of the file ran",))

    write(tmp_path)
    with (tmp_path / ARRAYS).open("wb") as file:
        np.savez(file, **{"linear/below": np.array([Bomb()], dtype=object)})  # type: ignore[arg-type]
    document = json.loads((tmp_path / MANIFEST).read_text())
    document["sha256"] = hashlib.sha256((tmp_path / ARRAYS).read_bytes()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(InputError, match="holds no estimators as the manifest says"):
        load(tmp_path)


def test_the_grid_search_finds_the_degree() -> None:
    learner, errors = best(grid("polynomial"), measured())
    assert isinstance(learner, Polynomial)
    assert learner.degree >= 2
    assert errors.median < 1e-9 < best([Polynomial(1)], measured())[1].median


def test_the_ends_are_never_held_out() -> None:
    fold = folds(measured())
    assert fold[0] == fold[-1] == -1
    assert {*fold[1:-1].tolist()} == {0, 1, 2, 3, 4}


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(InputError, match="interpolation"):
        grid("interpolaton")
    assert grid("interpolation") == (Interpolation(),)
