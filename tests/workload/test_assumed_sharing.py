"""What prompts are assumed to share where a load does not say it."""

import numpy as np
import pytest

from windtunnel.core.texts.reuse import reuse
from windtunnel.errors import InputError
from windtunnel.scenario import Load
from windtunnel.workload import Workload
from windtunnel.workload.prompts import with_hit_rate, with_shared_prefix


def load(*prompts: int) -> Workload:
    return Workload.from_columns(prompt_tokens=list(prompts), output_tokens=1, arrival=np.arange(len(prompts)))


def test_by_a_hit_rate_a_cache_that_forgets_nothing_finds_it() -> None:
    prompts = np.random.default_rng(1).integers(50, 4000, 400)
    for rate in (0.1, 0.5, 0.9):
        assumed = with_hit_rate(load(*prompts.tolist()), rate)
        assert assumed.begins is not None
        assert assumed.begins[1].sum() / prompts.sum() == pytest.approx(rate, abs=0.01)
        found = reuse(assumed)
        assert found is not None and 0.95 * rate < found.hits.sum() / prompts.sum() <= rate + 0.01  # in whole blocks
        assert f"{100 * rate:g} % of prompt tokens assumed cached" in assumed.name


def test_a_shared_prefix_is_of_every_prompt_but_the_first() -> None:
    assumed = with_shared_prefix(load(100, 50, 200, 300), 150)
    assert assumed.begins is not None
    assert assumed.begins[0].tolist() == [-1, 0, 0, 2]
    assert assumed.begins[1].tolist() == [0, 50, 100, 150]


def test_what_cannot_be_assumed() -> None:
    with pytest.raises(InputError, match="more than prompts of these lengths"):
        with_hit_rate(load(10, 1000), 0.9)
    with pytest.raises(InputError, match="must be a share"):
        with_hit_rate(load(10, 10), 1.0)
    with pytest.raises(InputError, match="says what its prompts share"):
        with_shared_prefix(with_shared_prefix(load(10, 10), 5), 5)
    with pytest.raises(InputError, match="leave one out"):
        Load(prefix_hit_rate=0.5, shared_prefix=100)
    with pytest.raises(InputError, match="≥ 1"):
        Load(shared_prefix=0, random_input_len=10).workload()
