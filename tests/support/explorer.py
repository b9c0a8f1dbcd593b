"""An explorer in the test's process, and a client for it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from PIL import Image

from tests.support.tiny_vlm import photo
from torino import SAE
from torino.explorer.app import build_app
from torino.explorer.launch import ExplorerSources, open_explorer
from torino.explorer.options import ExplorerOptions
from torino.serving.server.gate import ServerState


def to_bytes(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return an image file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


class ExplorerClient:
    """A client of an explorer with two photos; the SAE is a copy, so that names can be changed."""

    def __init__(self, vlm: Any, home: Path, folder: Path, *, sae: Any = None, runs: Any = (), **options: Any) -> None:
        folder.mkdir()
        self.sae_folder, self.folder = folder / "sae", folder / "cache"
        shutil.copytree(home / "sae", self.sae_folder)
        photos = folder / "photos"
        photos.mkdir()
        for number in range(4):
            photo(seed=number).save(photos / f"photo{number}.png")
        (photos / "photo1.txt").write_text("<img src=x onerror=alert(1)>", encoding="utf-8")
        self.encoder = SAE.load(self.sae_folder) if sae is None else sae
        sources = ExplorerSources([str(photos)], list(runs), None, self.folder)
        self.explorer = open_explorer(vlm, self.encoder, "tiny", sources, ExplorerOptions(**options))
        self.app = build_app(self.explorer, ServerState())
        self.http = TestClient(self.app, base_url="http://localhost", raise_server_exceptions=False)

    def close(self) -> None:
        self.http.close()

    def build_atlas(self) -> ExplorerClient:
        """Finish the atlas now."""
        assert self.explorer.atlas is not None
        self.explorer.atlas.build()
        assert not self.explorer.atlas.error
        return self

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of a response that must be good."""
        response = self.http.get(path, params=query)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, status: int = 400, **query: Any) -> str:
        """Return the sentence of a refusal."""
        response = self.http.get(path, params=query)
        assert response.status_code == status, response.text
        return str(response.json()["error"]["message"])

    def upload(self, data: bytes, status: int = 200, **headers: str) -> Any:
        response = self.http.post("/api/photos", content=data, headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    def ask(self, photo: str, **body: Any) -> list[dict[str, Any]]:
        response = self.http.post(f"/api/photos/{photo}/answers", json=body)
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.text.splitlines()]
