"""Install the wheels with ``torino[all]`` into a fresh environment and run the README's commands outside the checkout.

The commands are those of the README's console blocks and of inline code. ``make TARGET`` stands for the torino commands
of that target of the Makefile. Commands that name a model of the hub are left out, because nothing is downloaded except
packages. Servers (``torino serve`` and ``explore``) must become healthy and stop cleanly; other commands must end
within ten minutes. The Python blocks of the README run too, and every module that an extra of ``torino[all]`` promises
is imported.

    python scripts/check_wheels.py dist
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:\.venv/bin/)?torino [^`\n]+)`")
SERVERS = (["torino", "serve"], ["torino", "explore"])
TIMEOUT = 600.0  # seconds for a command
HUB_MODEL = re.compile(r"--(?:model|tower|clip) +[\w.-]+/[\w.-]+")


def readme_commands(readme: str, makefile: str) -> list[list[str]]:
    """Return the README's torino commands, in blocks and in the text, that run without a model of the hub."""
    lines = [line for language, _, code in BLOCK.findall(readme) if language == "console" for line in _lines(code)]
    lines += INLINE.findall(BLOCK.sub("", readme))
    commands: list[list[str]] = []
    for line in lines:
        words = shlex.split(line.removeprefix(".venv/bin/"), comments=True)
        if words[0] == "make":
            commands += [command for target in words[1:] for command in make_commands(makefile, target)]
        elif words[0] != "torino":
            raise SystemExit(f"The README has a command that this script cannot run: {line}")
        elif not HUB_MODEL.search(line):
            commands.append(words)
    if not commands:
        raise SystemExit("The README has no commands to run.")
    return commands


def make_commands(makefile: str, target: str) -> list[list[str]]:
    """Return the torino commands of a target of the Makefile."""
    recipe = re.search(rf"^{target}:[^\n]*\n((?:\t[^\n]*\n)*)", makefile, re.MULTILINE)
    if recipe is None:
        raise SystemExit(f"The README names make {target}, which the Makefile does not have.")
    found = re.findall(r"^\t\$\(BIN\)/(torino [^\n]*)$", recipe[1], re.MULTILINE)
    return [shlex.split(command) for command in found]


def readme_python(readme: str) -> str:
    """Return the README's Python blocks as one program, without those marked ``notest``."""
    blocks = [
        code for language, options, code in BLOCK.findall(readme) if language == "python" and "notest" not in options
    ]
    return "\n".join(blocks)


def optional_modules(folder: Path) -> dict[str, set[str]]:
    """Return the modules that the code imports in ``with optional_import(purpose, requirement)``, by requirement."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.With) or not isinstance(call := node.items[0].context_expr, ast.Call):
                continue
            if not isinstance(call.func, ast.Name) or call.func.id != "optional_import":
                continue
            requirement = ast.literal_eval(call.args[1])
            found.setdefault(requirement, set()).update(imported_modules(node.body))
    return found


def imported_modules(body: Sequence[ast.stmt]) -> list[str]:
    """Return the modules that statements import, also by ``import_module("name")``."""
    names: list[str] = []
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_module":
            names += [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
    return names


def _lines(code: str) -> list[str]:
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


class Environment:
    """A fresh virtual environment with the wheels, and an empty folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TORINO_CACHE")
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment |= {
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "TORINO_CACHE": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }

    def install(self, *requirements: str) -> None:
        """Run ``pip install``."""
        options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
        self.run(["python", "-m", "pip", "install", *options, *requirements])

    def run(self, command: Sequence[str]) -> None:
        """Run a command of the environment in the empty folder, and stop if it fails."""
        began = time.perf_counter()
        shown = shlex.join(command if len(command[-1]) < 200 else [*command[:-1], "…"])
        process = self._start(command)
        try:
            printed, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SystemExit(f"{process.communicate()[0]}\nNot finished after {TIMEOUT:.0f} s: {shown}") from None
        print(f"{time.perf_counter() - began:6.1f} s  {shown}", flush=True)
        if process.returncode:
            raise SystemExit(f"{printed}\nFailed with exit code {process.returncode}: {shown}")

    def run_server(self, command: Sequence[str]) -> None:
        """Start a server on a free port, wait until it is healthy, and stop it with SIGINT."""
        began = time.perf_counter()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = self._start([*command, "--port", str(port)])
        while not (healthy := is_healthy(f"http://127.0.0.1:{port}/health")):
            if process.poll() is not None or time.perf_counter() - began > TIMEOUT:
                break
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        try:
            printed, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            printed = process.communicate()[0]
        shown = shlex.join(command)
        print(f"{time.perf_counter() - began:6.1f} s  {shown}", flush=True)
        if not healthy:
            raise SystemExit(f"{printed}\nNever became healthy: {shown}")
        if process.returncode not in (0, 128 + signal.SIGINT):
            raise SystemExit(f"{printed}\nStopped with exit code {process.returncode}: {shown}")

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.work,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def is_healthy(url: str) -> bool:
    """Return whether a server answers 200 at an address."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="folder with the wheels of torino and torino-lab")
    dist = parser.parse_args().dist.resolve()
    wheels = {name: sorted(dist.glob(f"{name}-*.whl")) for name in ("torino", "torino_lab")}
    for name, found in wheels.items():
        if len(found) != 1:
            raise SystemExit(f"{dist} must have one wheel of {name}, it has {len(found)}. Run make wheels.")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = readme_commands(readme, (ROOT / "Makefile").read_text(encoding="utf-8"))
    modules = {
        module
        for folder in (ROOT / "src", ROOT / "lab" / "src")
        for requirement, names in optional_modules(folder).items()
        if requirement.startswith("torino[")
        for module in names
    }
    folder = Path(tempfile.mkdtemp(prefix="torino-wheels-"))
    try:
        environment = Environment(folder)
        torch = re.search(r"^torch==.*$", constraints, re.MULTILINE)
        assert torch is not None
        environment.install(torch[0])
        torino, lab = wheels["torino"][0], wheels["torino_lab"][0]
        environment.install("--constraint", str(ROOT / "constraints.txt"), f"{torino}[all]", str(lab))
        environment.run(["python", "-m", "pip", "check"])
        environment.run(["python", "-c", f"import {', '.join(sorted(modules))}"])
        environment.run(["python", "-c", "import sys, torino; assert torino.__file__.startswith(sys.prefix)"])
        for command in commands:
            (environment.run_server if command[:2] in SERVERS else environment.run)(command)
        environment.run(["python", "-c", readme_python(readme)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(commands)} commands and the Python code of the README run from the wheels.")


if __name__ == "__main__":
    main()
