"""The dashboard is one self-contained HTML file with all data of its concepts."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support import colored_squares as squares
from tests.support.dashboard import read_dashboard_data
from torino import SAE
from torino.core.errors import BadParameter
from torino.interpret import TopActivations, collect_top_activations, name_concepts
from torino.interpret.dashboard import nearest_latents, write_dashboard
from torino.interpret.photos import PhotoReader
from torino.interpret.sheet import select_concepts


@pytest.fixture(scope="module")
def reader() -> PhotoReader:
    return PhotoReader(squares.make_photos(), squares.make_tower(), squares.make_tower(block=0))


@pytest.fixture(scope="module")
def activations(reader: PhotoReader) -> TopActivations:
    return collect_top_activations(squares.make_sae(), reader, keep=6)


def test_dashboard_contains_all_it_shows(tmp_path: Path, activations: TopActivations, reader: PhotoReader) -> None:
    names = name_concepts(activations, reader.get_texts())
    hostile = "</script><!--<script><b>mean</b>"
    texts = [(hostile,), *reader.get_texts()[1:]]
    path = write_dashboard(
        tmp_path / "page.html",
        squares.make_sae(),
        activations,
        select_concepts(activations, names),
        reader.get_picture,
        photos=4,
        title="<Squares>",
        texts=texts,
    )
    text = path.read_text("utf-8")
    assert "<h1>&lt;Squares&gt;</h1>" in text
    assert "<b>mean" not in re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert "http" not in text
    assert "<dt>Latents</dt><dd>5 (1 never active, 4 on this page)</dd>" in text
    assert "<dt>Similarity</dt><dd>CLS token of tiny-colors, block 0</dd>" in text
    data = read_dashboard_data(path)
    assert [concept["latent"] for concept in data["concepts"]] == [4, 3, 2, 0]
    red = data["concepts"][3]
    assert (red["name"], red["words"], red["lift"]) == ("red", [["red", 3.0]], 3.0)
    assert [tile["photo"] for tile in red["tiles"]] == [0, 3, 6, 9]
    for tile in red["tiles"]:
        assert list(base64.b64decode(tile["map"])) == [tile["photo"] % 16, 0, 255]
        photo = data["photos"][str(tile["photo"])]
        assert photo["grid"] == [4, 4]
        opened = Image.open(io.BytesIO(base64.b64decode(photo["jpeg"])))
        assert opened.size == (168, 168)
        center = [int((part + 0.5) * 42) for part in divmod(tile["photo"] % 16, 4)]
        assert np.abs(np.subtract(opened.getpixel((center[1], center[0])), (254, 0, 0))).max() < 8
    assert data["photos"]["0"]["text"] == hostile
    assert "<!--" not in text, "a browser would ignore the end of the script"
    score = data["concepts"][0]["monosemanticity"]
    assert score is None or -1 <= score <= 1


def test_nearest_latents_have_similar_decoder_rows() -> None:
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [-1.0, 0.0]])
    nearest = nearest_latents(SAE(rows, W_dec=rows), [0, 2], 2)
    assert [latent for latent, _ in nearest[0]] == [1, 2]
    assert nearest[0][0][1] == pytest.approx(2 / (4.01**0.5))
    assert [latent for latent, _ in nearest[2]] == [1, 0]
    assert nearest_latents(SAE(rows), [0], 2) == {}


def test_invalid_input_is_refused(tmp_path: Path, activations: TopActivations, reader: PhotoReader) -> None:
    concepts = select_concepts(activations)
    with pytest.raises(BadParameter, match=r"must end in \.html"):
        write_dashboard(tmp_path / "page.txt", squares.make_sae(), activations, concepts, reader.get_picture)
    with pytest.raises(BadParameter, match="nothing to show"):
        write_dashboard(tmp_path / "page.html", squares.make_sae(), activations, [], reader.get_picture)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_script_is_valid_javascript(tmp_path: Path, activations: TopActivations, reader: PhotoReader) -> None:
    concepts = select_concepts(activations)
    path = write_dashboard(tmp_path / "page.html", squares.make_sae(), activations, concepts, reader.get_picture)
    script = path.read_text("utf-8").rpartition("<script>")[2].partition("</script>")[0]
    asset = (files("torino.interpret") / "assets" / "dashboard.js").read_text(encoding="utf-8")
    assert script.strip() == asset.strip(), "the script is not escaped"
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True)
