"""The package that docs/guides/extend.md shows is found through its entry points."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks

from torino.evaluation import benchmarks, find_benchmark
from torino.vlm.loading import model_package, model_packages

PAGE = ROOT / "docs" / "guides" / "extend.md"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the package of the guide into a folder on the path."""
    shown = {block.options: block for block in blocks(PAGE)}
    code = shown[('title="my_package.py"',)].code
    entries = shown[('title="pyproject.toml"',)].code
    (tmp_path / "my_package.py").write_text(code, encoding="utf-8")
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n", encoding="utf-8")
    text = re.sub(r'\[project\.entry-points\."([\w.]+)"\]', r"[\1]", entries).replace('"', "")
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    benchmarks._index_plugins.cache_clear()
    yield tmp_path
    sys.modules.pop("my_package", None)
    benchmarks._index_plugins.cache_clear()


def test_model_of_a_package_is_found(package: Path) -> None:
    assert "my-model" in model_packages()
    found = model_package("my-model")
    assert found is not None
    assert found.folder() == package / "model"
    assert found.sae is not None
    assert found.sae() == package / "sae"
    assert found.block == 10


def test_task_of_a_package_is_found(package: Path) -> None:
    found = find_benchmark("birds_test")
    assert found is not None
    assert (found.name, found.kind) == ("Birds", "mcq")
    assert find_benchmark("POPE") is not None
