"""What a long body may hold at most, just below and just above, and what it is read as."""

import asyncio
import json
from typing import Any

import pytest

from windtunnel.serve.openai import documents
from windtunnel.serve.openai.documents import read_object
from windtunnel.serve.openai.requests import RefusedError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a size that tests can afford; every document is a long one."""
    limits = {"AT_ONCE": 4, "LONGEST_PARAMETER": 40, "LONGEST_LIST": 1500, "MOST_VALUES": 12, "DEEPEST": 5}
    for name, value in limits.items():
        monkeypatch.setattr(documents, name, value)


def read(document: Any) -> Any:
    return asyncio.run(read_object(json.dumps(document).encode()))


def refused(document: Any) -> str:
    with pytest.raises(RefusedError) as error:
        read(document)
    return str(error.value)


@pytest.mark.parametrize("first", [{}, {"model": "m"}, {"prompt": "p" * 200}])
def test_a_parameter_may_be_so_long(first: dict[str, Any]) -> None:
    """However much came before it, and in whatever it is wrapped."""
    for wrap in (lambda text: text, lambda text: [[text]], lambda text: {"a": {"b": text}}):
        fits, large = first | {"user": wrap("x" * 20), "n": 1}, first | {"user": wrap("x" * 42), "n": 1}
        assert read(fits) == fits
        assert refused(large) == "user: more than 40 characters"
    for name in ("prompt", "messages", "tokens"):
        assert read({name: ["x" * 400]}) == {name: ["x" * 400]}


@pytest.mark.parametrize("count", [10, 11, 12])
def test_so_many_values(count: int) -> None:
    texts = {"prompt": ["x"] * count}
    if count + 2 <= 12:  # with the object and the list
        assert read(texts) == texts
    else:
        assert refused(texts) == "prompt: more than 12 values"


def test_numbers_of_lists_do_not_count() -> None:
    tokens = {"prompt": list(range(1000)), "n": 1}
    assert read(tokens) == tokens
    assert refused({"prompt": [7] * 2000, "n": 1}).startswith("a list of more than 1500 numbers")


def test_so_deep() -> None:
    assert read({"prompt": [[[[1]]]]}) == {"prompt": [[[[1]]]]}
    assert "more than 5 levels" in refused({"prompt": [[[[[1]]]]]})


@pytest.mark.parametrize(
    "text", ['{"a" 1}', '{"a": 1 "b": 2}', "{a: 1}", '{"a": [1 "x"]}', '{"a": 1} x', '{"a": [1,]}']
)
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(RefusedError, match="the body is not JSON"):
        asyncio.run(read_object(text.encode()))


def test_what_is_no_object() -> None:
    assert refused([1, 2, 3, 4]) == "the body must be a JSON object"
    assert "half of a surrogate pair" in refused({"prompt": "\ud800"}) and "half" in refused({"\udfff": "word"})
