"""README and docs: Python blocks run, commands and options exist, links work, generated parts are up to date."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer.main
from doc_pages import ROOT, anchors, blocks, links, name, pages, reports

from torino.cli.main import app
from torino.reducers import base


def script(file: str) -> Any:
    spec = spec_from_file_location(Path(file).stem, ROOT / "scripts" / file)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    folder = str(ROOT / "scripts")
    if folder not in sys.path:  # scripts import each other
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------- Python


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what examples register."""
    from torino.vlm.adapters import base as adapters

    monkeypatch.setattr(base, "_registry", dict(base._registry))
    monkeypatch.setattr(adapters, "_adapters", dict(adapters._adapters))


def runnable(path: Path) -> list[str]:
    return [block.code for block in blocks(path) if block.language == "python" and "notest" not in block.options]


WITH_PYTHON = [path for path in pages() if runnable(path)]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_python_blocks_run_in_order(
    path: Path, registries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "docs_example", "__file__": str(tmp_path / "my_package.py")}
    monkeypatch.setitem(sys.modules, "docs_example", type(sys)("docs_example"))
    given = set(scope)
    for code in runnable(path):
        exec(compile(code, name(path), "exec", dont_inherit=True), scope)
    assert set(scope) - given, "the blocks define or import nothing"


def test_main_pages_have_python_that_runs() -> None:
    shown = {name(path) for path in WITH_PYTHON}
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md", "docs/get-started.md"} <= shown


# ---------------------------------------------------------------------- commands


def command_lines(path: Path) -> Iterator[str]:
    """Yield the torino commands of console blocks and of inline code, without ``torino`` itself."""
    text = path.read_text(encoding="utf-8")
    for block in blocks(path):
        if block.language == "console":
            for line in block.code.replace("\\\n", " ").splitlines():
                if match := re.match(r"(?:\.venv/bin/)?torino (.*)", line.strip()):
                    yield match[1]
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        if match := re.fullmatch(r"(?:\.venv/bin/)?torino ([a-z]+( .*)?)", code):
            yield match[1]


def case_id(value: object) -> str:
    return name(value) if isinstance(value, Path) else str(value)


COMMANDS = [(path, line) for path in pages() for line in command_lines(path) if path.name != "CHANGELOG.md"]


@pytest.mark.parametrize(
    ("path", "line"), COMMANDS, ids=lambda value: name(value) if isinstance(value, Path) else value
)
def test_commands_and_options_exist(path: Path, line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if word != "…"]
    known: Any = typer.main.get_command(app)
    if words[0].startswith("-"):
        assert words == ["--help"] or words == ["--version"]
        return
    assert words[0] in known.commands, f"{name(path)}: there is no command torino {words[0]}"
    command = known.commands[words[0]]
    options = {text: option for option in command.params for text in (*option.opts, *option.secondary_opts)}
    options["--help"] = None
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            continue
        flag, _, value = word.partition("=")
        assert flag in options, f"{name(path)}: torino {words[0]} has no option {flag}"
        option = options[flag]
        if option is None or getattr(option, "is_flag", False):
            continue
        value = value or next(rest, "…")
        allowed = literals(get_type_hints(inspect.unwrap(command.callback))[option.name])
        if allowed and value != "…":
            assert value in allowed, f"{name(path)}: {flag} accepts {allowed}, not {value}"


def literals(annotation: Any) -> tuple[str, ...]:
    """Return the choices of an option from its annotation, such as Literal, list[Literal] or Literal | None."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in literals(part))


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages())
    wanted = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"demo", "test", "docs"} <= wanted
    for target in wanted:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"there is no make {target}"


def test_continuous_integration_runs_the_commands_of_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make demo" in ci
    assert "make test" in ci


# ---------------------------------------------------------------------- links, generated parts


@pytest.mark.parametrize("path", [*pages(), *reports()], ids=name)
def test_links_and_pictures_exist(path: Path) -> None:
    for link in links(path):
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{name(path)} links to {link}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name(path)} links to {link}, which has no such heading"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    listed = set(re.findall(r"[\w/-]+\.md", navigation))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_generated_tables_are_up_to_date() -> None:
    tables = script("make_tables.py")
    for path in tables.pages():
        text = path.read_text(encoding="utf-8")
        assert tables.fill(text) == text, f"{name(path)} is out of date: run make tables"
        for begin in re.findall(r"<!-- begin: ([\w-]+) -->", text):
            assert begin in tables.REGIONS
        assert text.count("<!-- begin:") == text.count("<!-- end -->")


def test_every_generated_table_is_shown() -> None:
    tables = script("make_tables.py")
    shown = "".join(path.read_text(encoding="utf-8") for path in tables.pages())
    assert not [region for region in tables.REGIONS if f"<!-- begin: {region} -->" not in shown]


def test_results_name_an_existing_report_and_their_command() -> None:
    for path in (ROOT / "research" / "results").glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not str(result.get("format", "")).startswith("torino-results/"):
            continue
        assert result["name"] == path.stem
        if result["report"] is None:
            assert result["notes"], f"{path.name} must say why it has no report"
        else:
            assert (ROOT / result["report"]).is_file()
            assert result["command"]


def test_methods_page_is_that_of_the_classes() -> None:
    written = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert written == script("make_methods.py").page(), "run make tables"


def test_tables_format_numbers_as_the_reports_do() -> None:
    tables = script("make_tables.py")
    assert tables.rounded(95.35) == "95.4"
    assert tables.versus("lab-fourth-original-positions", 192, "FOLDER (full)") == "−1.0 [−2.9, 1.0]"
    assert tables.relative("lab-fourth", 64, "nothing") == "–"
    assert tables.table(["a", "b"], [["x", None]]) == "| a | b |\n| --- | ---: |\n| x |  |"


def test_docstrings_become_markdown() -> None:
    site = script("site/docstrings.py")
    assert site.to_markdown("See :meth:`ClipText.query`::") == "See `ClipText.query`:"
    linked = site.to_markdown(":func:`~torino.vlm.reduced`")
    assert linked == '<autoref identifier="torino.vlm.reduced" optional><code>reduced</code></autoref>'


def test_links_are_rewritten_for_the_site() -> None:
    hooks = script("site/hooks.py")
    page = ROOT / "docs" / "guides" / "evaluate.md"
    rewrite = lambda text: hooks.LINK.sub(lambda match: hooks._rewrite(match, page), text)  # noqa: E731
    assert rewrite("[x](../../research/reports/lab.md#a)") == "[x](../research/reports/lab.md#a)"
    assert rewrite("[x](scoring.md)") == "[x](scoring.md)"
    assert rewrite("[the rules](../../CONTRIBUTING.md)") == "the rules"
    assert rewrite("[x](https://example.org)") == "[x](https://example.org)"
