r"""Pack runs of ``torino eval`` into one archive for the repository, and unpack them to go on.

Paths of task files are stored relative to the working directory, so that an archive names no machine. Unpack it from the
root of a checkout in which ``make_tasks.py`` has written the same tasks; ``factorial.py`` then continues unfinished runs.

Examples
--------
::

    python research/scripts/pack_runs.py pack runs/factorial/lab/choose research/runs/lab-choose.tar.xz
    python research/scripts/pack_runs.py unpack research/runs/lab-choose.tar.xz runs/factorial/lab/choose
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

from torino.core.checksum import check_object, with_checksum
from torino.core.io import write_atomic, write_json


def localize(file: Path, *, relative: bool) -> None:
    """Rewrite the paths of the tasks in a ``run.json``: relative to the working directory, or absolute."""
    run = check_object(file, json.loads(file.read_text(encoding="utf-8")))
    for task in run["tasks"]:
        path = Path(task["path"])
        task["path"] = str(path.relative_to(Path.cwd()) if relative else Path.cwd() / path)
    write_json(file, with_checksum(run))


def pack(folder: Path, archive: Path) -> None:
    """Pack all runs of a folder, without logs and locks."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "runs"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.log", "*.lock"))
        runs = sorted(copy.glob("*/run.json"))
        if not runs:
            raise SystemExit(f"{folder} has no runs. Give the output folder of factorial.py.")
        for run in runs:
            localize(run, relative=True)
        archive.parent.mkdir(parents=True, exist_ok=True)

        def write(target: Path) -> None:
            with tarfile.open(target, "w:xz") as file:
                for path in sorted(copy.rglob("*")):
                    info = file.gettarinfo(path, str(path.relative_to(copy)))
                    info.uid = info.gid = 0
                    info.uname = info.gname = ""
                    if path.is_dir():
                        file.addfile(info)
                    else:
                        with path.open("rb") as data:
                            file.addfile(info, data)

        write_atomic(archive, write)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a new folder."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty. Give a new folder.")
    with tarfile.open(archive, "r:xz") as file:
        file.extractall(folder, filter="data")
    for run in sorted(folder.glob("*/run.json")):
        localize(run, relative=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    (pack if args.action == "pack" else unpack)(args.source, args.target)


if __name__ == "__main__":
    main()
