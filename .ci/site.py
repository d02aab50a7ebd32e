"""What the site needs beyond docs/: the pages of the repository's root, and links between the two."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File of the root → page of the site."""
LINK = re.compile(r"\]\(((?:\.\./)*)([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, whose links begin at the root."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_from_root, text)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links from docs/ to the root's pages lead to those of the site."""
    depth = page.file.src_uri.count("/")

    def moved(match: re.Match[str]) -> str:
        up, target, anchor = match[1], match[2], match[3] or ""
        if target in PAGES and up.count("../") == depth + 1:
            return f"]({'../' * depth}{PAGES[target]}{anchor})"
        return match[0]

    return LINK.sub(moved, markdown)


def _from_root(match: re.Match[str]) -> str:
    target, anchor = match[2], match[3] or ""
    return f"]({PAGES.get(target, target.removeprefix('docs/'))}{anchor})"
