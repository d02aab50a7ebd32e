"""Models of one size: the page is what the command writes, and its verdict holds."""

from importlib.util import find_spec

import pytest

from benchmarks.page import PLACE
from benchmarks.same_size import MODELS, measure, page


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the kernel database is not installed")
def test_the_page_is_what_the_command_writes() -> None:
    found = [measure(name) for name in MODELS]
    of_eight = {one.name: one for one in found if one.fit < 512}
    assert 3 < of_eight["meta-llama/Llama-3.1-8B"].fit / of_eight["meta-llama/Llama-2-7b-hf"].fit < 4
    now = page(found)
    assert {name: (PLACE / name).read_text(encoding="utf-8") for name in now} == now
