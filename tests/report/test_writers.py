"""Every writer writes every kind of run."""

from pathlib import Path

import handmade
import pytest

from windtunnel.deployment import SLO
from windtunnel.files import write_whole
from windtunnel.report import TEXTS


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ["usual", "rejected", "empty"])
def test_every_writer_writes_every_run(name: str, kind: str, tmp_path: Path) -> None:
    runs = {
        "usual": handmade.preempted(),
        "rejected": handmade.run(
            handmade.requests(arrival=[0.0], status=[1], replica=[-1]), handmade.iterations(), footprint=None
        ),
        "empty": handmade.run(handmade.requests(arrival=[]), handmade.iterations()),
    }
    write_whole(tmp_path / "deep" / "file", TEXTS[name](runs[kind], SLO(ttft=1.0)))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]
