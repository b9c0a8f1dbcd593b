"""The README's Python runs as printed, its commands are the Makefile's and the command line's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    found = blocks(README, "python")
    assert found
    for block in found:
        exec(compile(block, "README.md", "exec", dont_inherit=True), scope)
    assert "Token 0 of" in capsys.readouterr().out


def test_contributing_example_is_a_reducer() -> None:
    from torino import list_reducers
    from torino.reducers import base
    from torino.testing import check_reducer

    lines = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .split("```python\n", 1)[1]
        .split("```", 1)[0]
        .splitlines()
    )
    block = "\n".join(line.removeprefix("   ") for line in lines)
    scope: dict[str, object] = {"__name__": __name__}
    before = dict(base._registry)
    try:
        exec(compile(block, "CONTRIBUTING.md", "exec", dont_inherit=True), scope)
        assert "loudest" in list_reducers()
        check_reducer(base.make("loudest", budget=16))
    finally:
        base._registry.clear()
        base._registry.update(before)


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"README list_reducers make {target}"
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in ci
    assert "make demo" in ci


def test_pictures_and_links_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_zoo_page_is_that_of_the_classes() -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("make_zoo", ROOT / "scripts" / "make_zoo.py")
    assert spec
    assert spec.loader
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    written = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    assert written == script.page(), "run python scripts/make_zoo.py"
