"""Read code blocks and links of the project's Markdown pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced code block."""

    language: str
    options: tuple[str, ...]
    code: str


def pages() -> list[Path]:
    """Return the pages that users read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def reports() -> list[Path]:
    """Return the research reports and other pages of the repository whose links must work."""
    return [
        *sorted((ROOT / "research").rglob("*.md")),
        *sorted((ROOT / "labs").rglob("*.md")),
        ROOT / "lab" / "README.md",
    ]


def blocks(path: Path) -> list[Block]:
    """Return the code blocks of a page."""
    found = []
    for info, code in FENCE.findall(path.read_text(encoding="utf-8")):
        language, *options = info.split() or [""]
        found.append(Block(language, tuple(options), code))
    return found


def links(path: Path) -> list[str]:
    """Return the relative links and pictures of a page, code blocks left out."""
    return LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.replace("`", "").lower()).strip().replace(" ", "-") for head in heads}


def name(path: Path) -> str:
    """Return the name of a page for test ids."""
    return path.relative_to(ROOT).as_posix()
