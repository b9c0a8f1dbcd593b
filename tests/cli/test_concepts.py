"""The command ``torino concepts``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from tests.support import colored_squares as squares
from tests.support.dashboard import read_dashboard_data
from tests.support.files import read_folder, read_only
from torino import SAE
from torino.cli.concepts import EPILOG, concepts
from torino.core.errors import TorinoError
from torino.interpret import TopActivations
from torino.interpret.top_activations import FILE

app = typer.Typer(rich_markup_mode="rich")
app.command(epilog=EPILOG)(concepts)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tower, and photos with captions, without, and with a missing caption."""
    folder = tmp_path_factory.mktemp("concepts")
    squares.write_tower(folder)
    for name, texts in (("captioned", True), ("plain", False), ("partly", True)):
        photos = squares.make_photos(texts=texts).photos
        columns: dict[str, Any] = {"image": [photo.data for photo in photos]}
        columns |= {"captions": [list(photo.texts) for photo in photos]} if texts else {}
        if name == "partly":
            columns["captions"][0] = []
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


def run(data: Path, sae: Path | str, *options: str, images: str = "captioned.parquet") -> Any:
    tower = str(data / squares.TOWER_NAME)
    arguments = [str(sae), "--images", str(data / images), "--tower", tower, "--keep", "6", *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_writes_sheet_dashboard_scores_and_names(tmp_path: Path, data: Path) -> None:
    squares.make_sae().save(tmp_path / "sae")
    result = run(data, tmp_path / "sae", "-o", str(tmp_path / "out"), "--top", "3", "--page", "4", "--save-names")
    assert result.exit_code == 0, result.output
    assert Image.open(tmp_path / "out" / "concepts.png").size[0] > 600
    page = read_dashboard_data(tmp_path / "out" / "concepts.html")
    assert [concept["latent"] for concept in page["concepts"]] == [4, 3, 2, 0]
    assert SAE.load(tmp_path / "sae").names == {0: "red", 2: "green", 3: "blue"}
    assert TopActivations.load(tmp_path / "out" / FILE).photo_count == 24
    assert "1 never active" in result.stdout
    assert re.search(r"3 +blue +6.25% +33.3%", result.stdout)
    again = run(data, tmp_path / "sae", "--latents", "3,0", "--rank", "lift", "--batch", "5")
    assert again.exit_code == 0, again.output
    page = read_dashboard_data(tmp_path / "sae" / "concepts.html")
    assert [concept["latent"] for concept in page["concepts"]] == [0, 3]
    assert page["sort"] == "lift"


def test_nothing_is_written_outside_the_output(tmp_path: Path, data: Path) -> None:
    sae = squares.make_sae()
    sae.names = {0: "hand-made"}
    sae.save(tmp_path / "sae")
    before = read_folder(tmp_path / "sae")
    with read_only(tmp_path / "sae"):
        result = run(data, tmp_path / "sae", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert read_folder(tmp_path / "sae") == before
    assert sorted(read_folder(tmp_path / "out")) == ["concepts.html", "concepts.png", "names.json", FILE]
    assert "The names of the SAE were not changed. Give --save-names" in result.stderr
    shutil.copy(tmp_path / "out" / "names.json", tmp_path / "sae")  # they fit the SAE
    assert SAE.load(tmp_path / "sae").names == {0: "red", 2: "green", 3: "blue"}


def test_names_are_not_replaced_by_fewer(tmp_path: Path, data: Path) -> None:
    sae = squares.make_sae()
    sae.names = names = {latent: f"name {latent}" for latent in range(5)}
    sae.save(tmp_path / "sae")
    kept = "has 5 names, and only 3 would replace them. It is not changed; use --replace-names"
    result = run(data, tmp_path / "sae")
    assert result.exit_code == 0, result.output
    assert kept in " ".join(result.stderr.split())
    assert SAE.load(tmp_path / "sae").names == names
    failed = run(data, tmp_path / "sae", "-o", str(tmp_path / "out"), "--save-names")
    assert isinstance(failed.exception, TorinoError)
    assert kept in str(failed.exception)
    assert SAE.load(tmp_path / "sae").names == names
    result = run(data, tmp_path / "sae", "--replace-names")
    assert "Saved 3 names in" in result.stdout
    assert "in place of 5" in result.stdout
    assert SAE.load(tmp_path / "sae").names == {0: "red", 2: "green", 3: "blue"}


def test_similarity_by_another_tower(tmp_path: Path, data: Path) -> None:
    squares.make_sae().save(tmp_path / "sae")
    tower = str(data / squares.TOWER_NAME)
    result = run(data, tmp_path / "sae", "--embedder", tower, "--embedder-block", "1", "--pool", "max")
    assert result.exit_code == 0, result.output
    activations = TopActivations.load(tmp_path / "sae" / FILE)
    assert activations.metadata["embedding"] == f"CLS token of {squares.TOWER_NAME}, block 1"
    assert activations.metadata["pool"] == "max"
    assert len(activations.monosemanticity.defined) == 3, "one is never active, one equally active on all photos"


def test_photos_without_captions_leave_concepts_unnamed(tmp_path: Path, data: Path) -> None:
    squares.make_sae().save(tmp_path / "sae")
    result = run(data, tmp_path / "sae", images="plain.parquet")
    assert result.exit_code == 0, result.output
    assert "no captions or labels, so concepts stay unnamed" in result.stderr
    assert SAE.load(tmp_path / "sae").names == {}


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        (["--rank", "beauty"], "'usage', 'monosemanticity', 'lift'"),
        (["--pool", "sum"], "'mean', 'max'"),
        (["--padding", "round"], "'crop', 'square'"),
    ],
)
def test_unknown_choices_are_refused(tmp_path: Path, data: Path, options: list[str], choices: str) -> None:
    squares.make_sae().save(tmp_path / "sae")
    result = run(data, tmp_path / "sae", *options)
    assert result.exit_code == 2
    assert f"'{options[1]}' is not one of {choices}" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--latents", "3,x"], "--latents takes whole numbers separated by commas, such as 3,17, got '3,x'."),
        (["--latents", "3,9"], "--latents contains 9, but this SAE has 5 latents, numbered from 0."),
        (["--embedder-block", "1"], "Give one: --embedder TOWER."),
        (["--keep", "24"], "Comparing the top 24 photos of each latent with the others needs more than 24 photos"),
        (["--limit", "5"], "captioned.parquet has 5."),
        (["--images", "nowhere"], "nowhere"),
        (["--tower", "./nowhere"], "There is no folder './nowhere'"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, data: Path, options: list[str], message: str) -> None:
    squares.make_sae().save(tmp_path / "sae")
    result = run(data, tmp_path / "sae", *options)
    assert isinstance(result.exception, TorinoError), result.output
    assert message in str(result.exception)


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path, data: Path) -> None:
    squares.make_sae().update_card(block=1).save(tmp_path / "other")
    assert run(data, tmp_path / "other").exit_code == 0, "the block of the card is used"
    squares.make_sae().update_card(encoder="openai/clip").save(tmp_path / "sae")
    assert "from openai/clip, block -1" in str(run(data, tmp_path / "sae").exception)
    squares.make_sae().save(tmp_path / "sae")
    lift = run(data, tmp_path / "sae", "--rank", "lift", images="plain.parquet")
    assert "--rank lift needs names" in str(lift.exception)
    partly = run(data, tmp_path / "sae", "--rank", "lift", images="partly.parquet")
    assert partly.exit_code == 0, "the first photo has no caption, but the others do"
    assert "give a folder for the results: -o FOLDER" in str(run(data, "example").exception)
    unsaved = run(data, "example", "-o", str(tmp_path / "out"), "--save-names")
    assert "example is not a local folder, so --save-names cannot save names there" in str(unsaved.exception)
    assert "SAE cannot be none" in str(run(data, "none").exception)
    (tmp_path / "file").write_text("")
    blocked = run(data, tmp_path / "sae", "-o", str(tmp_path / "file"))
    assert "Choose another folder: -o FOLDER" in str(blocked.exception)
