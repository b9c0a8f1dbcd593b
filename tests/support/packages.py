"""Install a dummy distribution with entry points, as a third party would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_package(site: Path, package: str, code: str, entry_points: Mapping[str, str]) -> tuple[Path, str]:
    """Write a module and its dist-info into a folder of its own.

    Parameters
    ----------
    site : Path
        Folder for all dummy packages of a test.
    package : str
        Name of the distribution.
    code : str
        Source of its only module.
    entry_points : mapping of str to str
        For each group, ``name = object`` of the module.

    Returns
    -------
    folder : Path
        To be put on ``sys.path``.
    module : str
        Name of the module.
    """
    module = f"dummy_{package.replace('-', '_')}"
    folder = site / package
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    lines: list[str] = []
    for group, text in entry_points.items():
        name, _, target = (part.strip() for part in text.partition("="))
        lines += [f"[{group}]", f"{name} = {module}:{target}"]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder, module
