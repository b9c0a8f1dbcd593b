"""A tiny LLaVA with a chat template, an SAE and three photos."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_vlm import TEMPLATE, photo, write_files
from torino.integrations import ChatModel


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_files(tmp_path_factory.mktemp("integrations"))
    (folder / "llava" / "chat_template.jinja").write_text(TEMPLATE.replace("{{ bos_token }} ", ""))
    for seed in range(3):
        photo(seed=seed).save(folder / f"{seed}.png")
    return folder


@pytest.fixture(scope="module")
def stock(home: Path) -> ChatModel:
    return ChatModel(str(home / "llava"), reducer="none", device="cpu")
