"""Served pairs: what two measured servers leave open of their simulated ratio."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.accuracy.points import Measured
from benchmarks.accuracy.served_pairs import (
    distance,
    halves_of_families,
    held,
    measured_divergence,
    pairs,
    report,
    symmetric,
)
from windtunnel.metrics.evidence import ServerKey
from windtunnel.metrics.pairs import BATCH, LENGTHS


def drawn(seed: int = 0) -> list[Measured]:
    """Points whose errors have a part that all layouts of a model share, a part of each, and a walk over clients."""
    random, found = np.random.default_rng(seed), []
    for family in range(12):
        shared = random.normal(0.0, 0.3)
        for layout in ("TP1", "TP2"):
            own = random.normal(0.0, 0.05)
            server = ServerKey("vllm", f"F{family}", "h100_sxm", "fp8", f"m/{family}", layout)
            for load in ("1024/1024", "8192/1024"):
                walk = 0.0
                for clients in (1, 2, 4, 8, 16, 32):
                    walk += random.normal(0.0, 0.02)
                    log = shared + own + walk
                    found.append(
                        Measured(server, f"{'/'.join(server)}/0.19", load, 0.1, log, 2 * log, clients=str(clients))
                    )
    return found


def test_what_is_wrong_alike_cancels() -> None:
    points = drawn()
    table = measured_divergence(points)
    assert {BATCH, LENGTHS, ("layout",)} <= {differ for differ, of in table if not of}
    alone = np.quantile([one.steps for one in points], 0.95)
    assert 0.05 < table[("layout",), ()].steps[4] < alone / 2
    assert table[BATCH, ()].steps[4] == pytest.approx(1.645 * 0.02, rel=0.25)  # of an octave
    assert table[("layout",), ()].first_token == pytest.approx([2 * log for log in table[("layout",), ()].steps])


def test_pairs_have_one_load_or_one_server() -> None:
    for differ, members in pairs(drawn()).items():
        for one, other in members:
            same = [getattr(one, name) == getattr(other, name) for name in ("setup", "load", "clients")]
            expected = {BATCH: [True, True, False], LENGTHS: [True, False, True]}
            assert same == expected.get(differ, [False, True, True])


def test_both_orders_of_a_pair_count() -> None:
    weights = np.ones(101)
    assert symmetric(list(np.linspace(0, 1, 101)), weights) == pytest.approx((-0.9, -0.5, 0.0, 0.5, 0.9), abs=0.01)
    one, *_, last = drawn()[:6]
    assert distance((one, last), "steps") == pytest.approx((last.steps - one.steps) / np.sqrt(5))


def test_what_is_known_to_be_off_is_in_no_pair() -> None:
    points = drawn()
    off = [replace(one, steps=one.steps + 1.0) if one.server.model == "m/0" else one for one in points]
    found = {one.server.model for members in pairs(off).values() for pair in members for one in pair}
    assert "m/0" not in found
    assert "m/1" in found


def test_other_families_pairs_hold_nine_tenths() -> None:
    one, other = halves_of_families(drawn())
    assert not {each.server.family for each in one} & {each.server.family for each in other}
    kept = [steps for _, steps, _ in held(one, measured_divergence(other))]
    assert np.mean(kept) == pytest.approx(0.9, abs=0.08)
    assert "| layout | all |" in report(drawn())
