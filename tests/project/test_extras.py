"""Optional dependencies: what a command says without them, and that the extras bring what the code imports."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from command import run_torino
from doc_pages import ROOT
from synthetic_run import write_synthetic_run
from without_packages import run_without

from tests.support.tiny_towers import write_photos, write_tower
from torino.core.errors import MissingPackage, TorinoError
from torino.core.extras import PACKAGES, optional_import

PHOTO = str(ROOT / "src" / "torino" / "data" / "example" / "photos" / "astronaut.jpg")
NOT_FOR_USERS = {"all", "dev", "docs"}
NOT_IN_ALL = {*NOT_FOR_USERS, "vllm"}  # vLLM pins torch and transformers
NEEDS_VLM = [
    ["look", PHOTO],
    ["ask", PHOTO, "Is there a person?"],
    ["compare", PHOTO, "Is there a person?"],
    ["eval", "--model", "lab", "--tasks", "task.jsonl", "--methods", "random", "--budget", "64", "-o", "run"],
    ["bench", "--model", "lab", "--methods", "random", "--budget", "64"],
    ["activations", "--tower", "lab", "--images", "photos", "-o", "store"],
    ["concepts", "example", "--images", "photos", "--tower", "lab", "-o", "concepts", "--keep", "2"],
    ["serve", "--port", "0"],
    ["reduce", "photos", "--method", "random", "--budget", "8", "-o", "tokens"],
]
NEEDS_LAB = [*NEEDS_VLM, ["info", "lab"], ["reduce", "--sae", "lab"], ["bench", "--sae", "lab"]]
NEEDS_TOWER = [*NEEDS_VLM, ["reduce"], ["calibrate", "--target", "128"], ["bench", "--methods", "random"]]
NEEDS_NOTHING = [
    ["list"],
    ["list", "models"],
    ["list", "layouts"],
    ["info", "example"],
    ["reduce", "--explain", "1"],
    ["calibrate", "--target", "128"],
    ["bench", "--methods", "random", "--count", "2", "--warmups", "1"],
    ["train", "store", "-o", "sae", "--latents", "16", "--k", "2", "--steps", "2"],
    ["report", "finished", "-o", "report", "--no-figures"],
]


def load_script(name: str) -> Any:
    spec = spec_from_file_location(Path(name).stem, ROOT / "scripts" / name)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with photos, a task, a store and a run."""
    place = tmp_path_factory.mktemp("extras")
    (place / "photos").mkdir()
    write_photos(place / "photos")
    (place / "photos.parquet").write_bytes(b"PAR1")
    row = '{"image": "photos/00.jpg", "question": "Is there a person?", "answer": "yes"}\n'
    (place / "task.jsonl").write_text(row, encoding="utf-8")
    tower = write_tower(place / "clip")
    run_torino("activations", "--tower", tower, "--block", "1", "--images", place / "photos", "-o", place / "store")
    write_synthetic_run(place / "finished", questions=4)
    write_synthetic_run(place / "graded", tasks=("MMVet",), questions=2)
    return place


def check_messages(results: Sequence[tuple[int, str]], commands: Sequence[Sequence[str]], message: str) -> None:
    for (code, text), words in zip(results, commands, strict=True):
        assert re.search(message, text), f"torino {' '.join(words)}: {text}"
        assert code == 2, f"torino {' '.join(words)}: {text}"


# ---------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("module", "requirement", "commands"),
    [
        ("PIL", "torino[vlm]", [*NEEDS_VLM, ["reduce", "--sae", "example", "--draw", "groups.png"]]),
        ("transformers", "torino[vlm]", NEEDS_TOWER),
        ("huggingface_hub", "torino[vlm]", [["info", "owner/repository"], *NEEDS_VLM]),
        ("onnx", "torino[lab]", NEEDS_TOWER),
        (
            "pyarrow",
            "torino[train]",
            [
                ["activations", "--tower", "clip", "--images", "photos.parquet", "-o", "new"],
                ["concepts", "example", "--images", "photos.parquet", "--tower", "clip", "-o", "concepts"],
            ],
        ),
        (
            "tensorboard",
            "torino[train]",
            [
                [
                    "train",
                    "store",
                    "-o",
                    "logged",
                    "--latents",
                    "16",
                    "--k",
                    "2",
                    "--steps",
                    "2",
                    "--log",
                    "tensorboard",
                ],
                ["sweep", "store", "-o", "sweep", "--expansions", "1", "--steps", "2", "--log", "tensorboard"],
            ],
        ),
        ("wandb", "wandb", [["train", "store", "-o", "sent", "--latents", "16", "--k", "2", "--log", "wandb"]]),
        ("matplotlib", "torino[plot]", [["plot", "paper", "-o", "figures"], ["plot", "finished", "-o", "figures"]]),
        *[(name, "torino[serve]", [["serve"]]) for name in ("fastapi", "httpx2", "prometheus_client", "uvicorn")],
        ("openai", "torino[judge]", [["report", "graded", "-o", "report"]]),
        ("ray", "torino[ray]", [["reduce", "photos", "--ray", "local", "-o", "tokens"]]),
        ("datasets", "datasets", [["activations", "--tower", "clip", "--images", "hf:beans:train", "-o", "new"]]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_commands_name_the_extra_of_a_missing_package(
    module: str, requirement: str, commands: list[list[str]], folder: Path
) -> None:
    judge = {"TORINO_JUDGE_URL": "http://127.0.0.1:9", "TORINO_JUDGE_MODEL": "grader"}
    install = f'"{requirement}"' if "[" in requirement else requirement
    message = rf"needs? {PACKAGES.get(module, module)}, which is not installed: pip install {re.escape(install)}\.$"
    check_messages(run_without([module], commands, folder, **judge), commands, message)


def test_commands_name_the_lab_if_it_is_missing(folder: Path) -> None:
    results = run_without([], NEEDS_LAB, folder, lab=False)
    check_messages(results, NEEDS_LAB, r'comes with torino-lab, which is not installed: pip install "torino\[lab\]"')


def test_without_extras_the_commands_that_need_none_run(folder: Path) -> None:
    packages = sorted(
        (module_names("all") | {"accelerate", "datasets", "gguf", "peft", "wandb"}) - {"pydantic"}
    )  # typer's
    for (code, text), words in zip(run_without(packages, NEEDS_NOTHING, folder, lab=False), NEEDS_NOTHING, strict=True):
        assert code == 0, f"torino {' '.join(words)}: {text}"


def test_without_matplotlib_a_report_has_no_figures(folder: Path) -> None:
    ((code, text),) = run_without(["matplotlib"], [["report", "finished", "-o", "plain"]], folder)
    assert code == 0, text
    assert 'Figures need matplotlib, which is not installed: pip install "torino[plot]".' in text
    assert (folder / "plain" / "report.html").is_file()


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_without_the_fast_extra_the_prefilter_is_left_out(package: str, folder: Path) -> None:
    command = ["bench", "--sae", "example", "--methods", "torino-m", "--prefilter", "int8", "--count", "2"]
    ((code, text),) = run_without([package], [command], folder)
    assert code == 0, text
    assert 'on a CPU it needs pip install "torino[fast]".' in text


def test_a_package_that_cannot_be_imported_is_not_called_missing() -> None:
    message = r'^Models need a package that cannot be imported \(cannot .*\): pip install "torino\[vlm\]" --upgrade\.$'
    with pytest.raises(MissingPackage, match=message), optional_import("Models need", "torino[vlm]"):
        from torino import no_such_name  # type: ignore[attr-defined] # noqa: F401


def test_the_reason_names_the_missing_dependency_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with (
        pytest.raises(TorinoError, match="The judge needs httpx2, which"),
        optional_import("The judge needs", "torino"),
    ):
        import httpx2  # noqa: F401


# ---------------------------------------------------------------------- declarations


def requirements(extra: str) -> set[str]:
    """Return the names of the distributions that an extra, such as ``torino[plot]``, installs beside torino's own."""
    package, _, names = extra.removesuffix("]").partition("[")
    file = ROOT / "lab" / "pyproject.toml" if package == "torino-lab" else ROOT / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    listed = [] if package == "torino" else list(project["dependencies"])
    for name in filter(None, names.split(",")):
        listed += project["optional-dependencies"][name]
    found: set[str] = set()
    for entry in listed:
        match = re.match(r"([\w.-]+)(\[[^]]*\])?", entry)
        assert match
        distribution, brackets = match.groups()
        if distribution in ("torino", "torino-lab"):
            found |= requirements(distribution + (brackets or ""))
        found.add(distribution.lower().replace("_", "-"))
    return found


def distribution_of(module: str) -> str:
    top = "tensorboard" if module == "torch.utils.tensorboard" else module.partition(".")[0]
    return PACKAGES.get(top, top).lower().replace("_", "-")


def module_names(extra: str) -> set[str]:
    """Return the modules of the distributions of an extra of torino, without torino-lab."""
    modules = {name: module for module, name in PACKAGES.items()}
    named = {modules.get(name.title(), name.replace("-", "_")) for name in requirements(f"torino[{extra}]")}
    return named - {"torino", "torino_lab"}


def test_extras_bring_what_the_code_imports() -> None:
    of_others = {"httpx2": "openai", "prometheus-client": "vllm"}  # dependencies of a package in the extra
    script = load_script("check_wheels.py")
    for folder in (ROOT / "src", ROOT / "lab" / "src"):
        found = script.optional_modules(folder)
        assert found
        for requirement, modules in found.items():
            installed = requirements(requirement) if requirement.startswith("torino") else {requirement}
            for module in modules:
                name = distribution_of(module)
                assert {name, of_others.get(name)} & installed, f"{requirement} does not install {name}"


def test_no_module_needs_an_optional_package_to_be_imported_without_a_message() -> None:
    optional = {name.partition(".")[0] for name in module_names("all")}
    script = load_script("check_wheels.py")
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        plain = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for module in script.imported_modules(plain):
            assert module.partition(".")[0] not in optional, f"{path.name}: put {module} into optional_import"


def test_all_has_every_extra_for_users() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (listed,) = extras["all"]
    assert set(re.findall(r"\w+", listed.partition("[")[2])) == set(extras) - NOT_IN_ALL
    for extra in set(extras) - NOT_IN_ALL:
        assert requirements(f"torino[{extra}]") <= requirements("torino[all]")
    assert {"onnx", "pyarrow", "pillow", "transformers", "torino-lab"} <= requirements("torino[all]")


@pytest.mark.parametrize("page", ["docs/get-started.md"])
def test_extras_are_documented_in_one_place(page: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `torino\[(\w+)\]` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert set(rows) == set(extras) - {"dev", "docs"}


# ---------------------------------------------------------------------- the wheel test


def test_wheel_test_runs_the_commands_of_the_readme() -> None:
    script = load_script("check_wheels.py")
    readme, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    commands = [" ".join(words) for words in script.readme_commands(readme, makefile)]
    assert "torino look --show" in commands  # of make demo
    assert "torino look coffee" in commands  # in the text
    assert "torino --help" in commands
    assert any(command.startswith("torino compare astronaut") for command in commands)
    assert not any("llava-hf" in command for command in commands)
    assert "torino.make(" in script.readme_python(readme)
    assert "wheel-test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_wheel_test_refuses_commands_that_it_does_not_know() -> None:
    script = load_script("check_wheels.py")
    with pytest.raises(SystemExit, match="cannot run: curl"):
        script.readme_commands("```console\ncurl x\n```\n", "")
    with pytest.raises(SystemExit, match="make nothing"):
        script.readme_commands("```console\nmake nothing\n```\n", "demo:\n")


def fake_environment(script: Any, folder: Path, program: str) -> Any:
    """Return an environment whose command ``torino`` is a Python program."""
    environment = object.__new__(script.Environment)
    environment.bin, environment.work, environment.environment = folder, folder, dict(os.environ)
    (folder / "torino").write_text(f"#!{sys.executable}\n{program}")
    (folder / "torino").chmod(0o755)
    return environment


HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler)
try:
    server.serve_forever()
except KeyboardInterrupt:
    sys.exit(STATUS)
"""


def test_wheel_test_stops_servers_and_commands_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("check_wheels.py")
    fake_environment(script, tmp_path, HEALTHY.replace("STATUS", "0")).run_server(["torino", "serve"])
    with pytest.raises(SystemExit, match="exit code 3: torino serve"):
        fake_environment(script, tmp_path, HEALTHY.replace("STATUS", "3")).run_server(["torino", "serve"])
    with pytest.raises(SystemExit, match=r"(?s)broken.*Never became healthy"):
        fake_environment(script, tmp_path, "print('broken')").run_server(["torino", "serve"])
    monkeypatch.setattr(script, "TIMEOUT", 0.5)
    with pytest.raises(SystemExit, match="Not finished after 0 s: torino look"):
        fake_environment(script, tmp_path, "import time; time.sleep(60)").run(["torino", "look"])
