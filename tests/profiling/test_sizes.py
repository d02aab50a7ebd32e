"""Sizes: few where time is straight, more where it bends, and never more than asked."""

from windtunnel.profiling.sizes import adaptive, decode_sizes, octaves, prefill_sizes


def test_octaves_end_at_the_last() -> None:
    assert octaves(6) == [1, 2, 4, 6]
    assert octaves(1) == [1]
    assert octaves(64, 16) == [16, 32, 64]


def test_a_straight_line_needs_few() -> None:
    found = adaptive(lambda a: 1.0 + a, 4096, 0.05, 100)
    assert len(found) <= 12
    assert {1, 4096} <= set(found)


def test_a_step_is_closed_in_upon() -> None:
    found = adaptive(lambda a: 1.0 if a <= 700 else 2.0, 4096, 0.05, 40)
    low = max(a for a in found if a <= 700)
    high = min(a for a in found if a > 700)
    assert high - low <= 4
    assert len(found) < 40


def test_never_more_than_asked_and_known_sizes_only() -> None:
    asked: list[int] = []

    def jagged(a: int) -> float | None:
        asked.append(a)
        return None if a > 1000 else 1.0 + (a * 7919 % 13)

    found = adaptive(jagged, 4096, 0.01, 15)
    assert len(found) <= 15
    assert max(found) <= 1000
    assert len(asked) == len(set(asked))


def test_planes_stay_in_the_context() -> None:
    assert decode_sizes(4, 64) == [(a, b) for a in (1, 2, 4) for b in (16, 32, 64)]
    assert all(a + b <= 256 and a <= 128 for a, b in prefill_sizes(128, 256))
    assert (128, 128) in prefill_sizes(128, 256)
