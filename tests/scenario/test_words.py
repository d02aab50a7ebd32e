"""Words in one line: as a variant of `compare` or a pool gives them."""

import pytest

from windtunnel.errors import InputError
from windtunnel.scenario import parse_words
from windtunnel.scenario.words import written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seqs=64", {"max_num_seqs": "64"}),
        ("max-num-seqs=64 router=random", {"max_num_seqs": "64", "router": "random"}),
        ("--max-num-seqs 64 --router=random", {"max_num_seqs": "64", "router": "random"}),
        ("-tp 2 --no-async-scheduling", {"tensor_parallel_size": "2", "async_scheduling": "false"}),
        ("--enforce-eager", {"enforce_eager": "true"}),
        ("goodput=ttft:300 tpot:50 seed=1", {"goodput": "ttft:300 tpot:50", "seed": "1"}),
        ("--slo ttft_p99=0.3 tpot_p90=0.05 --seed 1", {"slo": "ttft_p99=0.3 tpot_p90=0.05", "seed": "1"}),
        ("--scheduler sarathi:chunk=512", {"scheduler": "sarathi:chunk=512"}),
        ("scheduler=sarathi:chunk=512", {"scheduler": "sarathi:chunk=512"}),
        ("trace='my trace.csv'", {"trace": "my trace.csv"}),
    ],
)
def test_words_are_written_with_an_equals_sign_or_as_flags(text: str, words: dict[str, str]) -> None:
    assert parse_words(text, "with") == words
    assert parse_words(written(words), "with") == words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seqs", "with 'max_num_seqs': 'max_num_seqs': must be word=value"),
        ("a=1 a=2", "a: given twice"),
        ("a='1", "no closing quotation"),
    ],
)
def test_what_is_no_word_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_words(text, "with")
