"""The concept atlas: statistics against a slow count, the tree, names, and a folder that cannot be written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.explorer import ExplorerClient
from torino import SAE
from torino.explorer import naming
from torino.explorer.tree import ConceptTree


@pytest.fixture
def atlas(client: ExplorerClient) -> ExplorerClient:
    return client.build_atlas()


def dense(client: ExplorerClient) -> np.ndarray[Any, Any]:
    """Return all activations of the four photos, patch by patch."""
    model, library = client.explorer.model, client.explorer.library
    photos = [model.encode(f"photo-{number}", library.open).tokens.patches for number in range(4)]
    return client.encoder.encode(torch.cat(photos)).numpy()


def test_statistics_are_those_of_all_activations(atlas: ExplorerClient) -> None:
    z = dense(atlas)
    for latent in range(atlas.encoder.latents):
        found = atlas.get(f"/api/concepts/{latent}")
        active = z[:, latent] > 0
        assert found["patch_share"] == pytest.approx(active.mean(), abs=1e-5)
        assert found["specificity"] == pytest.approx(1 - active.reshape(4, -1).any(1).mean(), abs=1e-5)
        assert sum(found["histogram"]["counts"]) == active.sum()
        together = {}
        for other in range(atlas.encoder.latents):
            both, either = (active & (z[:, other] > 0)).sum(), (active | (z[:, other] > 0)).sum()
            if other != latent and both:
                together[other] = both / either
        expected = sorted(together, key=lambda other: (-together[other], other))[:8]
        assert [entry["id"] for entry in found["cofiring"]] == expected
        assert [entry["jaccard"] for entry in found["cofiring"]] == pytest.approx(
            [together[other] for other in expected], abs=1e-3
        )


def test_top_photos_and_patches(atlas: ExplorerClient) -> None:
    z = dense(atlas).reshape(4, 16, -1)
    latent = int(z.max((0, 1)).argmax())
    found = atlas.get(f"/api/concepts/{latent}")
    order = np.argsort(-z[:, :, latent].max(1), kind="stable")
    assert [entry["photo"] for entry in found["photos"]] == order[: len(found["photos"])].tolist()
    first = found["photos"][0]
    assert first["patches"] == np.flatnonzero(z[order[0], :, latent]).tolist()
    assert atlas.http.get(f"/api/atlas/photos/{first['photo']}/image").content.startswith(b"\xff\xd8")
    assert "numbered from 0" in atlas.refused("/api/atlas/photos/99/image")


def test_concepts_are_searched_and_sorted(atlas: ExplorerClient) -> None:
    atlas.encoder.names = {3: "zebra", 5: "Apple tree"}
    assert [entry["id"] for entry in atlas.get("/api/concepts", search="apple")["concepts"]] == [5]
    assert [entry["id"] for entry in atlas.get("/api/concepts", search="#7")["concepts"]] == [7]
    named = [entry["id"] for entry in atlas.get("/api/concepts", sort="name")["concepts"]]
    assert named[:2] == [5, 3]
    for sort, field in (("specificity", "specificity"), ("usage", "patch_share"), ("strength", "max")):
        values = [entry[field] for entry in atlas.get("/api/concepts", sort=sort)["concepts"]]
        assert values == sorted(values, reverse=True)
    assert "sort" in atlas.refused("/api/concepts", sort="nothing")
    assert "numbered from 0" in atlas.refused("/api/concepts/9999")


def test_an_atlas_is_read_again_and_made_again_if_damaged(
    open_client: Callable[..., ExplorerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_client().build_atlas()
    before = client.get("/api/concepts/1")
    again = client.explorer.atlas
    assert again is not None
    again.data = None
    monkeypatch.setattr(again, "_collect", lambda folder: pytest.fail("made again"))
    again.build()
    assert client.get("/api/concepts/1") == before
    monkeypatch.undo()
    for file in client.folder.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    again.data = None
    client.build_atlas()
    assert client.get("/api/concepts/1") == before


def test_without_an_atlas_names_and_neighbors_are_known(client: ExplorerClient) -> None:
    assert not client.get("/api/atlas")["ready"]
    found = client.get("/api/concepts/2")
    rows = torch.nn.functional.normalize(client.encoder.W_dec, dim=1)
    cosines = rows @ rows[2]
    cosines[2] = -2
    assert found["nearest"][0]["id"] == int(cosines.argmax())
    assert found["photos"] == []


def test_the_tree_puts_each_concept_below_the_nearest_of_the_level_before() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(14, 6, generator=generator)
    tree = ConceptTree(SAE(rows, W_dec=rows, groups=(3, 4, 7)))
    bounds = [(0, 3), (3, 7), (7, 14)]
    for latent in range(14):
        level = next(number for number, (low, high) in enumerate(bounds) if low <= latent < high)
        assert tree.level(latent) == level
        if not level:
            assert tree.parent(latent) is None
            continue
        low, high = bounds[level - 1]
        cosines = [float(torch.cosine_similarity(rows[latent], rows[other], dim=0)) for other in range(low, high)]
        assert tree.parent(latent) == low + int(np.argmax(cosines))
        assert latent in tree.children(low + int(np.argmax(cosines)))
    assert tree.roots() == [0, 1, 2]


def test_an_sae_without_levels_has_only_roots() -> None:
    tree = ConceptTree(SAE(torch.eye(4)))
    assert tree.roots() == [0, 1, 2, 3]
    assert tree.children(0) == []


# ---------------------------------------------------------------------- names


def rename(client: ExplorerClient, latent: int, name: str, status: int = 200) -> Any:
    response = client.http.patch(f"/api/concepts/{latent}", json={"name": name})
    assert response.status_code == status, response.text
    return response.json()


def test_a_name_is_stored_beside_the_sae(client: ExplorerClient) -> None:
    assert rename(client, 3, "  red   wine ") == {"id": 3, "name": "red wine"}
    assert client.get("/api/concepts/3")["name"] == "red wine"
    assert SAE.load(client.sae_folder).names == {3: "red wine"}
    assert rename(client, 3, "")["name"] == ""
    assert SAE.load(client.sae_folder).names == {}


def test_the_automatic_name_comes_back(client: ExplorerClient) -> None:
    from torino.sae.formats.native import read_digest, write_names

    entries = {2: {"name": "edge", "kind": "edge", "confidence": 0.5}, 4: {"name": "dog"}}
    write_names(client.sae_folder, entries, 24, digest=read_digest(client.sae_folder), photos="some")
    client.encoder.names = SAE.load(client.sae_folder).names
    rename(client, 2, "stripes")
    rename(client, 2, "stripe")
    assert SAE.load(client.sae_folder).names == {2: "stripe", 4: "dog"}
    content = json.loads((client.sae_folder / "names.json").read_text(encoding="utf-8"))
    assert content["names"]["2"]["confidence"] == 0.5
    assert content["made_from"] == {"photos": "some"}
    assert rename(client, 2, "")["name"] == "(edge)"
    assert SAE.load(client.sae_folder).names == {2: "(edge)", 4: "dog"}


def test_html_in_a_name_is_kept_as_text(client: ExplorerClient) -> None:
    name = "<img src=x onerror=alert(1)>\x1b[31m"
    shown = rename(client, 1, name)["name"]
    assert shown == "<img src=x onerror=alert(1)>\\u001b[31m"
    assert SAE.load(client.sae_folder).names == {1: shown}


def test_wrong_names_are_refused(client: ExplorerClient) -> None:
    assert "at most 80" in rename(client, 1, "x" * 81, 400)["error"]["message"]
    assert "numbered from 0" in rename(client, 999, "x", 400)["error"]["message"]
    assert "cannot be used" in rename(client, 1, "x" * 500, 400)["error"]["message"]


def test_renaming_can_be_turned_off(
    open_client: Callable[..., ExplorerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_client(edits=False)
    assert "--read-only" in rename(client, 1, "x", 403)["error"]["message"]
    assert "--read-only" in client.get("/api/info")["sae"]["read_only"]
    assert "stores nothing" in client.upload(b"x", 403, **{"X-Torino-Store": "yes"})["error"]["message"]
    monkeypatch.setattr(naming.os, "access", lambda *_: False)
    other = open_client()
    assert "read-only" in rename(other, 1, "x", 400)["error"]["message"]


def test_a_damaged_file_of_names_is_not_overwritten(client: ExplorerClient) -> None:
    file: Path = client.sae_folder / "names.json"
    file.write_text("{broken", encoding="utf-8")
    assert "names.json" in rename(client, 1, "x", 400)["error"]["message"]
    assert file.read_text(encoding="utf-8") == "{broken"


def test_the_explorer_waits_for_the_atlas_before_it_ends(
    open_client: Callable[..., ExplorerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torino.explorer.atlas import ConceptAtlas

    finished: list[bool] = []

    def build(self: ConceptAtlas) -> None:
        self._stop.wait(60)
        time.sleep(0.2)
        finished.append(self._stop.is_set())

    monkeypatch.setattr(ConceptAtlas, "build", build)
    with open_client().http:
        assert not finished
    assert finished == [True]
