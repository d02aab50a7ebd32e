"""Words that a page may send: what run refuses is refused in a line, and a link runs no code and fills no memory."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ui.words import SMALL, ask
from windtunnel.errors import InputError
from windtunnel.scenario import Scenario, vary, words_of
from windtunnel.scenario.scenario import places
from windtunnel.ui.asked import read_words, refuse_code, refuse_devices, refuse_files, scenario_of, words_given

REFUSED = {
    "unknown word": ({"modle": "x"}, "did you mean 'model'"),
    "unknown model": ({"model": "Qwen/Qwen3-33B"}, "did you mean"),
    "unknown device": ({"device": "h101"}, "unknown device"),
    "no number": ({"request_rate": "fast"}, "request_rate"),
    "contradiction": ({"trace": "azure-conv"}, "leave out random_input_len"),
    "attainment alone": ({"attainment": "0.9"}, "of which limits"),
    "one side": ({"prefill": "replicas=1"}, "prefill without decode"),
    "too many requests": ({"num_prompts": 10**9}, "at most 1,000,000"),
    "too many replicas": ({"replicas": 10**6}, "at most 4,096"),
    "too many in a pool": ({"mixed": ["replicas=4000", "replicas=4000"]}, "at most 4,096"),
    "code": ({"scheduler": "./mine.py:Mine"}, "runs no code"),
    "code in a pool": ({"mixed": ["scheduler=./mine.py:Mine"]}, "runs no code"),
    "a file that is not there": ({"calibration": "nothing.json"}, "only where the command line names them"),
    "a file that is there": ({"devices_file": "/etc/passwd"}, "only where the command line names them"),
    "a trace that is there": ({"trace": "/etc/passwd"}, "unknown trace '/etc/passwd'"),
    "a profile": ({"perf": "profile:/etc"}, "windtunnel ui --perf FILE"),
    "a folder": ({"model": "/etc"}, "windtunnel ui FOLDER"),
    "a file in a pool": ({"mixed": ["devices_file=/etc/passwd"]}, "only where the command line names them"),
    "no name of a file": ({"model": "a" * 5000}, "aaa"),
    "no name at all": ({"model": "a\0b"}, ""),
    "no finite rate": ({"request_rate": "nan"}, "nan"),
}


@pytest.mark.parametrize(("words", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_words_are_one_line(words: dict[str, Any], said: str) -> None:
    (answer,) = ask(("POST", "/api/figures", {"words": SMALL | words}))
    assert answer.status_code == 400
    assert said in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "x",
        {},
        {"words": []},
        {"words": {"model": {}}},
        {"words": {"model": [[]]}},
        {"words": {"seed": 10**400}},
    ],
)
def test_bodies_that_are_no_words(document: Any) -> None:
    with pytest.raises(InputError):
        read_words(document)


VALUES = st.one_of(
    st.text(max_size=12), st.integers(-5, 2000), st.floats(), st.booleans(), st.lists(st.text(max_size=8), max_size=2),
    st.sampled_from(["inf", "-1", "1e400", "replicas=0", "policy=thresholds", "tier=host capacity=1e9", "zipf:1"]),
)  # fmt: skip
FEW = {"num_prompts": "20", "model": "Qwen/Qwen3-0.6B", "perf": "roofline"}


@given(st.dictionaries(st.sampled_from(sorted(set(places()) - {"num_prompts", "model", "perf"})), VALUES, max_size=3))
@settings(max_examples=60, deadline=None)
def test_whatever_the_words_the_scenario_is_there_or_a_line_says_why(words: dict[str, Any]) -> None:
    try:
        scenario_of(read_words({"words": FEW | words})).deployment()
    except InputError as error:
        assert "\n" not in str(error).strip() or len(str(error)) < 2000


def test_code_of_the_command_line_may_run() -> None:
    words = {"scheduler": "./mine.py:Mine"}
    refuse_code(words, words)
    with pytest.raises(InputError, match="runs no code"):
        refuse_code({"scheduler": "./other.py:Mine"}, words)


def test_files_of_the_command_line_and_of_its_studies_may_be_read() -> None:
    words = {"trace": "own.jsonl", "mixed": ["replicas=2 calibration=a.json"]}
    refuse_files(words, {"trace": "own.jsonl"}, {("calibration", "a.json")})
    with pytest.raises(InputError, match=r"calibration='a.json'"):
        refuse_files(words, {"trace": "own.jsonl"})
    with pytest.raises(InputError, match="unknown trace"):
        refuse_files(words, {}, {("calibration", "a.json")})


def test_a_device_of_the_command_line_is_no_file() -> None:
    with pytest.raises(InputError, match="neither a file"):
        refuse_devices({"trace": "/dev/zero"})


def test_a_scenario_comes_back_from_its_words() -> None:
    scenario = vary(Scenario(), SMALL | {"goodput": "ttft:300", "prefill": "replicas=2", "decode": "replicas=1"})
    words = words_given(scenario)
    assert words["prefill"] == ["replicas=2"]
    assert words_of(scenario_of(words)) == words_of(scenario)
