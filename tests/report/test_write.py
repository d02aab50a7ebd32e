"""Every writer writes every kind of run, and a failed write leaves nothing."""

from pathlib import Path
from typing import Any

import handmade
import pytest

from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.report import WRITERS
from windtunnel.report.write import write_whole


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", ["usual", "rejected", "empty"])
def test_every_writer_writes_every_run(name: str, kind: str, tmp_path: Path) -> None:
    runs = {
        "usual": handmade.preempted(),
        "rejected": handmade.run(
            handmade.requests(arrival=[0.0], status=[1], replica=[-1]), handmade.iterations(), footprint=None
        ),
        "empty": handmade.run(handmade.requests(arrival=[]), handmade.iterations()),
    }
    WRITERS[name](runs[kind], tmp_path / "deep" / "file", SLO(ttft=1.0))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def parts() -> Any:
        yield "half"
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="No space left"):
        write_whole(tmp_path / "page.html", parts())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "file" / "page.html", ["x"])
