"""The documentation site builds without warnings and loads nothing from other servers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT

pytest.importorskip("mkdocs")


def test_site_builds_strictly_and_is_self_contained(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    loaded = re.compile(r"<(?:script|img|iframe)[^>]*\bsrc=\"https?:|<link[^>]*rel=\"?stylesheet\"?[^>]*href=\"https?:")
    for page in pages:
        assert not loaded.search(page.read_text(encoding="utf-8")), f"{page.name} loads from another server"
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?https?:", style.read_text(encoding="utf-8")), style.name
