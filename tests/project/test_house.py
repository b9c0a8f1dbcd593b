"""The house itself: who imports whom, what importing costs, how long files are, and what must not be committed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torino

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "torino"
CORE = [
    "version",
    "errors",
    "files",
    "packed",
    "tokens",
    "strongest",
    "screen",
    "concepts",
    "sae",
    "formats",
    "grouping",
    "story",
]
REDUCING = [
    "reduction",
    "stages",
    "reducers",
    "calibration",
    "example",
    "testing",
    "terminal",
    "images",
    "draw",
    "sheet",
]
MODELS = ["photos", "vlm", "lab", "train", "judge", "ask", "evaluate", "plots", "bench", "guests"]
COMMANDS = [
    "options",
    "bars",
    "cli_ask",
    "cli_look",
    "cli_compare",
    "cli_harvest",
    "cli_train",
    "cli_concepts",
    "cli_eval",
    "cli_report",
    "cli_bench",
]
ROOMS = [*CORE, *REDUCING, *MODELS, *COMMANDS, "cli", "__main__"]
# Deferred imports that look to the right on purpose: SAE.load and SAE.save open the room that knows layouts.
ALLOWED = {("sae", "formats")}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torino."):
            found.add(node.module.split(".")[1])
        if isinstance(node, ast.ImportFrom) and node.module == "torino":
            found |= {name.name for name in node.names if name.name in ROOMS}
    return found


def test_each_room_imports_only_rooms_to_its_left() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        if room == "__init__":
            continue
        assert room in ROOMS, f"{path.name} is a room of no known place; add it to ROOMS"
        for other in imports(path) - {room}:
            if ROOMS.index(other) > ROOMS.index(room) and (room, other) not in ALLOWED:
                wrong.append(f"{room} imports {other}")
    assert not wrong, wrong


def test_readme_names_the_rooms() -> None:
    line = next(
        row for row in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if row.startswith("errors ·")
    )
    named = [name.strip().rstrip("/") for name in line.split("·")]
    assert named == [room for room in ROOMS if room not in ("version", "__main__")]


def test_importing_torino_stays_light() -> None:
    code = "import sys, torino; print(' '.join(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    for heavy in ("transformers", "matplotlib", "PIL", "scipy", "huggingface_hub", "typer", "rich"):
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
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_path_of_a_machine_is_committed() -> None:
    pattern = re.compile(r"/(?:home|work|root|Users)/[a-z.]")
    found = []
    for path in tracked():
        if path.suffix in (".safetensors", ".npz", ".jpg", ".png") or path == Path(__file__) or not path.is_file():
            continue
        if pattern.search(path.read_text(encoding="utf-8", errors="ignore")):
            found.append(path.name)
    assert not found


def test_version_is_said_once() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited
    assert cited.group(1) == torino.__version__
    assert f"## {torino.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
