"""MkDocs hooks: add the research reports to the site and adapt links that point outside ``docs/``.

Links in the Markdown files work in the repository. On the site, ``research/reports`` and ``research/images`` are pages
and files too; a link to any other file of the repository is shown as text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS, RESEARCH = ROOT / "docs", ROOT / "research"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the reports and their images below ``research/``."""
    for path in sorted([*RESEARCH.glob("reports/*.md"), *RESEARCH.glob("images/*")]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links for the site and keep the long reports out of the search index."""
    source = Path(page.file.abs_src_path)
    if source.is_relative_to(RESEARCH):
        page.meta["search"] = {"exclude": True}
    return LINK.sub(lambda match: _rewrite(match, source), markdown)


def site_path(target: Path) -> Path | None:
    """Return the path of a file of the repository on the site, or None if the site does not have it."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS)
    if target.is_relative_to(RESEARCH / "reports") or target.is_relative_to(RESEARCH / "images"):
        return target.relative_to(ROOT)
    return None


def _rewrite(match: re.Match[str], source: Path) -> str:
    image, text, link, anchor = match.groups()
    page, target = site_path(source), site_path((source.parent / link).resolve())
    if page is None or target is None:
        return text
    relative = os.path.relpath(target, page.parent).replace(os.sep, "/")
    return f"{image}[{text}]({relative}{anchor or ''})"
