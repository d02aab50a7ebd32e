"""The documentation as a site: it is built without a warning, and every page can be reached from its menu."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def pages(menu: Any) -> list[str]:
    """The pages of a menu, in order."""
    if isinstance(menu, str):
        return [menu]
    return [page for entry in (menu.values() if isinstance(menu, dict) else menu) for page in pages(entry)]


def test_every_page_stands_in_the_menu_once() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    docs = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages(menu)) == sorted([*docs, "index.md", "contributing.md", "changelog.md"])


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Strict: a link or an anchor that leads nowhere is an error."""
    pytest.importorskip("mkdocs", reason="extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "before you pay for the GPUs" in home  # the README, with links to pages
    assert 'href="first-ten-minutes.html"' in home
