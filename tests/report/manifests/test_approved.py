"""The files of every format, whole, as they were read and approved: whatever changes a word of them is noticed.

``python -m tests.report.manifests.test_approved`` writes them again; read the difference before you commit it.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # where it is run as a script, which has no pytest to do this

from report.manifests.fleets import apart, mixed, nodes
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.report.manifests.formats import FORMATS

FOLDER = Path(__file__).parent / "approved"
FLEETS = {
    "one server": mixed(1),
    "six servers of two GPUs": mixed(),
    "three ranks": mixed(3, "vllm_dp"),
    "a server that spans two nodes": mixed(2, "round_robin", tensor_parallel_size=8, pipeline_parallel_size=2),
    "five of SGLang's servers": mixed(5, "prefix_aware:queue=2", preset="sglang-0.5"),
    "two sides of vLLM": apart(),
    "two sides of vLLM that meet by Mooncake": apart(router="prefix_aware:queue=2", handover="vllm-0.32-mooncake"),
    "two sides of vLLM that push": apart(handover="vllm-0.32-nixl-push"),
    "two sides of SGLang": apart("sglang"),
    "two sides of TensorRT-LLM": apart("trtllm", "least_outstanding"),
}


def written(kind: str) -> str:
    """What the format has of all fleets."""
    return "\n".join(f"==== {name}\n{whole(kind, deployment)}" for name, deployment in FLEETS.items())


def whole(kind: str, deployment: Deployment) -> str:
    try:
        files = FORMATS[kind](deployment.spec(), nodes(deployment))
    except InputError as refusal:
        return f"refused: {refusal}\n"
    return "".join(f"---- {name}\n{text}" for name, text in sorted(files.items()))


@pytest.mark.parametrize("kind", FORMATS)
def test_files_are_those_that_were_approved(kind: str) -> None:
    assert written(kind) == (FOLDER / f"{kind}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    for each in FORMATS:
        (FOLDER / f"{each}.txt").write_text(written(each), encoding="utf-8")
