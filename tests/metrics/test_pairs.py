"""Pairs: what is open of the ratio of two servers, by what they differ in."""

from math import exp, hypot

import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.metrics.evidence import ServerKey, doubt
from windtunnel.metrics.pairs import (
    BATCH,
    LENGTHS,
    Divergence,
    Table,
    Twin,
    differences,
    divergence,
    known_of,
    measured_pairs,
    of_two,
)
from windtunnel.model import load_model

TWIN = Twin(ServerKey("vllm", "F", "h100_sxm", "fp8", "m/1", "TP1"), "0.19")
STEPS, FIRST = (-0.2, -0.1, 0.0, 0.1, 0.2), (-0.4, -0.2, 0.0, 0.2, 0.4)
TABLE: Table = {
    (names, of): Divergence(names, 100, 12, tuple(size * log for log in STEPS), tuple(size * log for log in FIRST), of)
    for names, of, size in (
        (BATCH, (), 1.0),
        (LENGTHS, (), 2.0),
        (("layout",), (), 0.5),
        (("layout",), ("sglang",), 4.0),
        (("layout",), ("sglang", "F"), 8.0),
        (("device", "layout"), (), 3.0),
    )
}


def other(version: str = "0.19", **changes: str) -> Twin:
    return Twin(TWIN.key._replace(**changes), version)


@pytest.mark.parametrize(
    ("twin", "found"),
    [
        (TWIN, BATCH),
        (other("0.20"), ("version",)),
        (other("0.5", engine="sglang"), ("engine",)),  # versions of other engines say nothing
        (other(family="G", model="m/2", dtype="nvfp4"), ("model",)),  # so do formats of other families
        (other(model="m/2", dtype="nvfp4"), ("model", "dtype")),
        (other(device="l40s", layout="TP2"), ("device", "layout")),
    ],
)
def test_what_two_servers_differ_in(twin: Twin, found: tuple[str, ...]) -> None:
    assert differences(TWIN, twin) == differences(twin, TWIN) == found


def test_the_nearest_pairs_that_differ_in_as_much_say_what_is_open() -> None:
    assert of_two(TWIN, other(layout="TP2"), TABLE).steps == TABLE[("layout",), ()].steps
    assert of_two(TWIN, other(device="l40s"), TABLE).steps == TABLE[("device", "layout"), ()].steps


def test_engines_and_families_are_drawn_towards_all_by_their_servers() -> None:
    one, two = (Twin(twin.key._replace(engine="sglang"), "0.5") for twin in (TWIN, other(layout="TP2")))
    engine = (12 * 4.0 + 4 * 0.5) / 16
    assert of_two(one, two, TABLE).steps[4] == pytest.approx(0.2 * (12 * 8.0 + 4 * engine) / 16)
    assert "(sglang, F)" in of_two(one, two, TABLE).words
    one, two = (Twin(twin.key._replace(family="G"), "0.5") for twin in (one, two))
    assert of_two(one, two, TABLE).steps[4] == pytest.approx(0.2 * engine)


def test_batches_of_one_server_are_a_random_walk_apart() -> None:
    assert of_two(TWIN, TWIN, TABLE, octaves=0.0).factors("steps") == (1.0, 1.0)
    assert of_two(TWIN, TWIN, TABLE).steps == STEPS
    found = of_two(TWIN, TWIN, TABLE, octaves=4.0)
    assert found.factors("steps") == pytest.approx((exp(-0.4), exp(0.4)))
    assert found.factors("first_token", 0.5) == pytest.approx((exp(-0.4), exp(0.4)))
    assert "by a factor of 16" in found.words


def test_without_pairs_errors_are_independent() -> None:
    twin = other(family="G", model="m/2")
    found, alone = of_two(TWIN, twin, TABLE), [doubt(each.key, float("nan")).steps for each in (TWIN, twin)]
    middle = alone[1][2] - alone[0][2]
    assert found.pairs == 0
    assert found.steps[4] == pytest.approx(middle + hypot(alone[1][4] - alone[1][2], alone[0][2] - alone[0][0]))
    assert found.steps[0] == pytest.approx(middle - hypot(alone[1][2] - alone[1][0], alone[0][4] - alone[0][2]))
    assert "independent" in found.words
    back = of_two(twin, TWIN, TABLE)
    assert [-log for log in reversed(back.steps)] == pytest.approx(list(found.steps))


def test_other_lengths_are_open_beside_the_servers() -> None:
    pool = Pool(load_model("Qwen/Qwen3-0.6B"), device("l40s"), Engine(max_model_len=2048))
    specs = [one.spec() for one in Deployment((pool,)).pools]
    same, longer = divergence(specs, specs), divergence(specs, specs, other_lengths=True)
    lengths = known_of(LENGTHS, ("vllm", "Qwen3ForCausalLM"), measured_pairs())
    assert lengths is not None
    assert longer.steps[4] == pytest.approx(hypot(same.steps[4], lengths.steps[4]))
    assert longer.differ == (*BATCH, *LENGTHS)


def test_the_file_is_symmetric_and_nested() -> None:
    for key, found in measured_pairs().items():
        assert (found.differ, found.of) == key
        assert (found.differ, ()) in measured_pairs()
        for logs in (found.steps, found.first_token):
            assert [-log for log in reversed(logs)] == pytest.approx(list(logs), abs=1e-9)
            assert list(logs) == sorted(logs)
