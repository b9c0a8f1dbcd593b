"""The repository: import cost, public names, module length, and what must not be committed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torino

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "torino"
BINARY = (".safetensors", ".npz", ".npy", ".jpg", ".png", ".webp", ".pdf", ".parquet", ".gz")
MAX_BYTES = 30_000_000


def test_importing_torino_stays_light() -> None:
    code = "import sys, torino; print(' '.join(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    for heavy in ("torch", "transformers", "matplotlib", "PIL", "scipy", "huggingface_hub", "typer", "rich"):
        assert heavy not in loaded, f"import torino also imports {heavy}"


def test_public_names_exist_and_are_documented() -> None:
    for name in torino.__all__:
        assert getattr(torino, name, None) is not None
        if not name.startswith("__"):
            assert (getattr(torino, name).__doc__ or "").strip(), f"{name} has no docstring"
    assert len(set(torino.__all__)) == len(torino.__all__)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_machine_path_or_secret_is_committed() -> None:
    machine = r"/(?:home|work|root|Users)/[a-z.]"
    secret = r"\bsk-[A-Za-z0-9]{32,}|\bhf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY"
    pattern = re.compile(f"{machine}|{secret}")
    found = [
        path.relative_to(ROOT)
        for path in tracked()
        if path.suffix not in BINARY
        and path != Path(__file__)
        and pattern.search(path.read_text(encoding="utf-8", errors="ignore"))
    ]
    assert not found


def test_committed_files_are_of_moderate_size() -> None:
    assert not [path.relative_to(ROOT) for path in tracked() if path.stat().st_size > MAX_BYTES]


def test_version_is_the_same_everywhere() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited
    assert cited.group(1) == torino.__version__
    assert f"## {torino.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_images_are_opened_only_in_photo_formats() -> None:
    folders = ("src", "lab", "labs", "scripts", "research", "benchmarks", "examples")
    files = [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders]
    calls = [
        (path.relative_to(ROOT), call)
        for path in files
        for call in re.findall(r"Image\.open\(.*", path.read_text(encoding="utf-8"))
    ]
    assert calls
    assert [(path, call) for path, call in calls if "formats=" not in call] == []
