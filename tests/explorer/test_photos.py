"""Photos, reductions and answers of the explorer, and inputs that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.explorer import ExplorerClient, to_bytes
from tests.support.tiny_vlm import PATCHES, QUESTION, photo
from torino import RawEmbedding, make
from torino.datasets.images import open_image

SPEC = "torino-m(k=2, delta=1)"


def test_a_photo_has_the_concepts_of_its_sae(client: ExplorerClient) -> None:
    found = client.get("/api/photos/photo-0")
    assert found["grid"] == [4, 4]
    tokens = client.explorer.model.encode("photo-0", client.explorer.library.open).tokens
    expected = client.encoder.top(tokens.patches, found["k"])
    assert found["indices"] == expected.indices.reshape(-1).tolist()
    assert found["values"] == pytest.approx(expected.values.reshape(-1).tolist(), abs=1e-3)


def test_the_tower_and_the_sae_run_once(client: ExplorerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.get("/api/photos/photo-0")

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("ran again")

    monkeypatch.setattr(client.explorer.model.vlm.adapter, "encode", fail)
    monkeypatch.setattr(client.encoder, "top", fail)
    for k in (1, 2, 3):
        for delta in range(1, k + 1):
            client.get("/api/photos/photo-0/reduction", by=f"torino-p(k={k}, delta={delta})")
    client.get("/api/photos/photo-0/reduction", by="torino-x(budget=5)")


def test_methods_inside_the_language_model_are_refused(client: ExplorerClient) -> None:
    names = [method["name"] for method in client.explorer.model.methods()]
    assert "torino-m" in names
    assert not {"fastv", "pyramiddrop", "dart"} & set(names)
    refusal = client.refused("/api/photos/photo-0/reduction", by="fastv(budget=3)")
    assert "inside the language model" in refusal
    client.refused("/api/photos/photo-0/reduction", by="random(budget=3)+fastv(budget=2)")


@pytest.mark.parametrize(
    "spec", [SPEC, "torino-p(k=3, delta=2, budget=5)", "visionzip(budget=6)", "tome-tower(budget=6)"]
)
def test_a_reduction_is_that_of_the_reducer(client: ExplorerClient, spec: str) -> None:
    found = client.get("/api/photos/photo-0/reduction", by=spec)
    model = client.explorer.model
    reducer = model.reducer(spec, client.encoder)
    image = model.vlm.encode(client.explorer.library.open("photo-0").image, [reducer])
    expected = model.vlm.reduce(image, reducer).plans[0]
    assert found["assigned"] == expected.assigned.tolist()
    assert found["anchor"] == expected.anchor.tolist()
    assert found["concept"] == expected.concept.tolist()
    assert (found["before"], found["after"]) == (PATCHES, len(expected))
    token = client.get("/api/photos/photo-0/tokens/1", by=spec)
    told = expected.explain(1, client.encoder.names)
    assert token["explanation"] == str(told)
    assert (token["sources"], token["stands_for"]) == (list(told.sources), list(told.stands_for))
    assert token["weights"] == pytest.approx(told.weights, abs=1e-4)


def test_answers_are_those_of_the_session(client: ExplorerClient) -> None:
    events = client.ask("photo-0", question=QUESTION, methods=["none", SPEC, "divprune(budget=999)"], max_tokens=6)
    vlm, image = client.explorer.model.vlm, client.explorer.library.open("photo-0").image
    for number, reducer in enumerate((None, make(SPEC, sae=client.encoder))):
        mine = [event for event in events if event["method"] == number]
        expected = vlm.answer(vlm.inputs(image, QUESTION), reducer, max_new_tokens=6)
        assert [mine[0]["event"], mine[-1]["event"]] == ["plan", "done"]
        assert mine[-1]["answer"] == expected.text.strip()
        assert "".join(e["text"] for e in mine if e["event"] == "text").strip() == expected.text.strip()
        assert (mine[-1]["tokens"], mine[-1]["new_tokens"]) == (expected.after, 6)
    assert [event["event"] for event in events if event["method"] == 2] == ["error"]


def test_an_ablated_concept_is_removed_from_the_tokens(client: ExplorerClient) -> None:
    photo_state = client.explorer.model.encode("photo-0", client.explorer.library.open)
    x, sae = photo_state.tokens.patches, client.encoder
    z = sae.encode(x)
    for latents in ([3], [3, 7]):
        kept = z.clone()
        kept[:, latents] = 0
        assert torch.allclose(sae.ablate(x, latents), x - (sae.decode(z) - sae.decode(kept)), atol=1e-4)
    every = list(range(sae.latents))
    (plain,) = [e for e in client.ask("photo-0", question=QUESTION, max_tokens=8) if e["event"] == "done"]
    (gone,) = [e for e in client.ask("photo-0", question=QUESTION, ablate=every, max_tokens=8) if e["event"] == "done"]
    assert plain["answer"] != gone["answer"]
    (same,) = [e for e in client.ask("photo-0", question=QUESTION, max_tokens=8) if e["event"] == "done"]
    assert same["answer"] == plain["answer"]


def test_ablation_follows_the_normalization_of_the_sae() -> None:
    from torino import SAE

    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(12, 8, generator=generator)
    x = torch.randn(5, 8, generator=generator) * 3 + 1
    for normalize in ("none", "constant_norm", "layer_norm"):
        sae = SAE(weights, W_dec=weights, normalize=normalize)
        every = list(range(12))
        offset = SAE(weights, W_dec=torch.zeros_like(weights), normalize=normalize).reconstruct(x)
        assert torch.allclose(x - sae.ablate(x, every), sae.reconstruct(x) - offset, atol=1e-4)


def test_an_explorer_works_without_an_sae(open_client: Callable[..., ExplorerClient]) -> None:
    client = open_client(sae=RawEmbedding())
    info = client.get("/api/info")
    assert info["sae"] is None
    assert client.get("/api/photos/photo-0/reduction", by=info["default"])["before"] == PATCHES
    assert "no SAE" in client.refused("/api/concepts", 404)
    (event,) = client.ask("photo-0", question=QUESTION, ablate=[1])
    assert "only with an SAE" in event["message"]


# ---------------------------------------------------------------------- uploads


def test_an_upload_stays_in_memory_unless_its_owner_agrees(client: ExplorerClient) -> None:
    data = to_bytes(photo(seed=9))
    added = client.upload(data)
    assert added["id"].startswith("upload-")
    assert not added["stored"]
    assert not client.folder.exists() or not [file for file in client.folder.rglob("*") if file.is_file()]
    stored = client.upload(data, **{"X-Torino-Store": "yes"})
    assert stored["stored"]
    file = client.folder / "photos" / stored["id"]
    assert file.read_bytes() == data
    assert client.http.delete(f"/api/photos/{stored['id']}").status_code == 200
    assert not file.exists()
    assert "Choose it again" in client.refused(f"/api/photos/{stored['id']}", 404)


def test_uploads_are_bounded(open_client: Callable[..., ExplorerClient]) -> None:
    client = open_client(max_bytes=20_000, max_pixels=10_000, uploads=2)
    assert "more than" in client.upload(bytes(30_000), 413)["error"]["message"]
    assert "pixels" in client.upload(to_bytes(Image.new("RGB", (200, 100))), 400)["error"]["message"]
    names = [client.upload(to_bytes(photo(seed=seed)))["id"] for seed in range(3)]
    client.explorer.model.forget(names[0])
    assert "Choose it again" in client.refused(f"/api/photos/{names[0]}", 404)
    assert client.get(f"/api/photos/{names[2]}")["id"] == names[2]


def test_a_body_without_a_length_is_bounded_too(open_client: Callable[..., ExplorerClient]) -> None:
    client = open_client(max_bytes=20_000)
    chunks = (bytes(8_000) for _ in range(10))
    response = client.http.post("/api/photos", content=chunks)
    assert response.status_code == 413, response.text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        to_bytes(photo())[:200],
        to_bytes(Image.new("RGB", (1, 1))),
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
    ],
    ids=["empty", "text", "svg", "cut off", "single pixel", "eps"],
)
def test_broken_photos_are_one_sentence(client: ExplorerClient, data: bytes) -> None:
    text = client.upload(data, 400)["error"]["message"]
    assert text.endswith(".")
    assert "Traceback" not in text


def test_a_huge_photo_is_refused_before_it_is_decoded(client: ExplorerClient) -> None:
    # a PNG header that declares 60,000 x 60,000 pixels
    import struct
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    assert "pixels" in client.upload(data, 400)["error"]["message"]


def test_of_an_animation_the_first_frame_is_shown(client: ExplorerClient) -> None:
    frames = [photo(seed=seed) for seed in range(3)]
    data = to_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)
    added = client.upload(data)
    assert added["notes"] == ["It has several frames; only the first is shown."]
    shown = client.explorer.library.open(added["id"]).image
    with pytest.warns(UserWarning, match="several frames"):
        first = open_image(data)
    assert np.array_equal(np.asarray(shown), np.asarray(first))


@pytest.mark.parametrize(
    "name", ["nothing", "photo-99", "photo-x", "bundled-..", "upload-../../x", "run0-AAAA", "run0-%00", "bundled-"]
)
def test_unknown_photos_are_not_found(client: ExplorerClient, name: str) -> None:
    assert client.refused(f"/api/photos/{name}", 404).endswith(".")


@pytest.mark.parametrize(
    "spec",
    [
        "nothing",
        "torino-m(k=2, delta=9)",
        "torino-m(k=__import__('os'))",
        "torino-m(sae=3)(k=2)",
        "torino-p(budget=5000)",
        "visionzip",
        "torino-m(" + "k=2," * 20 + ")",
        "cdpruner(budget=4)",
        "torino-m(k=1000000000)",
    ],
)
def test_wrong_specs_are_one_sentence(client: ExplorerClient, spec: str) -> None:
    text = client.refused("/api/photos/photo-0/reduction", by=spec)
    assert text.endswith(".")


def test_a_long_spec_and_wrong_numbers_are_refused(client: ExplorerClient) -> None:
    assert "by cannot be used" in client.refused("/api/photos/photo-0/reduction", by="x" * 300)
    assert "token" in client.refused("/api/photos/photo-0/tokens/99", by=SPEC)
    assert "limit" in client.refused("/api/photos", limit=100_000)
    for body in (
        {"question": ""},
        {"question": "x" * 3000},
        {"question": "x", "methods": []},
        {"question": "x", "y": 1},
    ):
        response = client.http.post("/api/photos/photo-0/answers", json=body)
        assert response.status_code == 400, body
        assert "cannot be used" in response.json()["error"]["message"]


def test_exports_are_self_contained_and_escaped(client: ExplorerClient) -> None:
    client.encoder.names = dict.fromkeys(range(client.encoder.latents), "<script>alert(1)</script>")
    page = client.http.get("/api/photos/photo-1/export.html", params={"by": SPEC})
    assert page.status_code == 200
    assert "<script" not in page.text
    assert "&lt;script&gt;" in page.text
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text
    picture = client.http.get("/api/photos/photo-1/export.png", params={"by": SPEC})
    assert picture.content.startswith(b"\x89PNG")
    assert "attachment" in picture.headers["content-disposition"]
    assert client.http.get("/api/photos/photo-1/export.exe").status_code == 400


def test_captions_are_data_not_markup(client: ExplorerClient) -> None:
    response = client.http.get("/api/photos/photo-1")
    assert response.json()["texts"] == ["<img src=x onerror=alert(1)>"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"


def test_photos_are_listed_and_searched(client: ExplorerClient, tmp_path: Path) -> None:
    assert client.get("/api/photos")["total"] == 4
    assert [entry["id"] for entry in client.get("/api/photos", search="photo2")["photos"]] == ["photo-2"]
    assert client.get("/api/photos", offset=3)["photos"] == [{"id": "photo-3", "name": "photo3.png"}]
    assert client.http.get("/api/photos/photo-3/thumbnail").content.startswith(b"\xff\xd8")
    assert client.http.get("/api/photos/photo-3/image").content.startswith(b"\xff\xd8")
