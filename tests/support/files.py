"""Comparison of folders."""

from __future__ import annotations

from pathlib import Path


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder and its subfolders, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
