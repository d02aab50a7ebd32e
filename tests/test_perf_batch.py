import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.perf.explain import Batch, parse_batch


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("decode=32@4096,prefill=2x1024@8192", Batch(32, 32 * 4096, ((1024, 8192), (1024, 8192)))),
        ("decode=1", Batch(1, 0)),
        ("prefill=2048", Batch(chunks=((2048, 0),))),
        ("prefill=1x7@16, decode=2@10, decode=3@20", Batch(5, 80, ((7, 16),))),
    ],
)
def test_the_grammar(text: str, batch: Batch) -> None:
    assert parse_batch(text) == batch


@given(
    st.integers(0, 50), st.integers(0, 5000), st.lists(st.tuples(st.integers(1, 999), st.integers(0, 999)), max_size=4)
)
def test_a_batch_reads_back_from_its_own_words(decodes: int, context: int, chunks: list[tuple[int, int]]) -> None:
    if decodes or chunks:
        batch = Batch(decodes, decodes * context, tuple(chunks))
        assert parse_batch(str(batch)) == batch
        assert batch.tokens == decodes + sum(n for n, _ in chunks)
        assert batch.sequences == decodes + len(chunks)


@pytest.mark.parametrize(
    "text",
    ["", "decode", "decode=x", "decode=2x3@4", "decoed=3", "prefill=0", "prefill=2x0", "decode=0", "decode=-1", "1"],
)
def test_what_is_not_a_batch_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(InputError, match="batch"):
        parse_batch(text)
