"""Strict: a device, an engine version or a shape that the kernel database lacks is refused when asked to."""

import pytest

from windtunnel.cli import main
from windtunnel.perf.database import find_systems

ASKED = ["run", "--model", "Qwen/Qwen3-0.6B", "--isl", "100", "--osl", "20", "--num-prompts", "5", "--json", "--strict"]

pytestmark = pytest.mark.skipif(find_systems() is None, reason="the kernel database is not installed")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--device a10", "strict: kernel times of a10 would be modelled"),
        ("--device h100 --perf modelled", "modelled times were asked for"),
        ("--device h100", "the kernel database has no vllm 0.32.0 on h100_sxm: ask for what it has, kernel_version="),
    ],
)
def test_what_is_not_measured_is_refused(capsys: pytest.CaptureFixture[str], flags: str, words: str) -> None:
    assert main([*ASKED, *flags.split()]) == 2
    assert words in capsys.readouterr().err
    assert main([*(word for word in ASKED if word != "--strict"), *flags.split()]) == 0


def test_a_shape_beyond_the_tables_is_refused_and_one_inside_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    exact = ("--device", "h100", "--kernel-version", "0.24.0")
    llama = [word.replace("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B") for word in ASKED]
    assert main([*llama, *exact, "--tensor-parallel-size", "2"]) == 0
    assert (
        main([*llama, *exact, "--tensor-parallel-size", "1"]) == 2
    )  # a head of 128,256 rows; the tables end at 65,536
    assert "of the batch time is beyond the kernel data" in capsys.readouterr().err
