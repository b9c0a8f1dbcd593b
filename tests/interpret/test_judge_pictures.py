"""Pictures of concepts, and the command that makes them."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import squares
import torch
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from torino import SAE, Reduction
from torino.cli.concepts import EPILOG
from torino.cli.concepts import concepts as command
from torino.core.errors import BadParameter, TorinoError
from torino.interpret import Evidence, gather, name_concepts
from torino.interpret.dashboard import neighbours_of, write_page
from torino.interpret.photos import Looking
from torino.interpret.sheet import concepts, draw_concepts, shrunk, spotlight
from torino.viz.draw import draw_reduction, draw_sheet
from torino.viz.terminal import draw_groups


@pytest.fixture(scope="module")
def looking() -> Looking:
    return Looking(squares.squares(), squares.tower(), squares.tower(block=0))


@pytest.fixture(scope="module")
def evidence(looking: Looking) -> Evidence:
    return gather(squares.sae(), looking, keep=6)


def test_concepts_are_ranked(evidence: Evidence, looking: Looking) -> None:
    names = name_concepts(evidence, looking.texts())
    assert [one.latent for one in concepts(evidence)] == [4, 3, 2, 0]
    assert [one.title for one in concepts(evidence, names, top=3)] == ["latent 4", "blue", "green"]
    assert [one.latent for one in concepts(evidence, names, rank="lift")] == [0, 2, 3]
    scores = evidence.monosemanticity.values
    by = [one.latent for one in concepts(evidence, rank="monosemanticity")]
    assert by == sorted((c for c in range(5) if not scores[c].isnan()), key=lambda c: -float(scores[c]))
    few = replace(evidence, fired_photos=torch.tensor([8, 0, 5, 8, 24]))
    assert [one.latent for one in concepts(few, rank="monosemanticity")] == [c for c in by if c != 2]
    asked = concepts(evidence, latents=[2, 1, 2])
    assert [(one.latent, one.usage) for one in asked] == [(2, 16 / 384), (1, 0.0)]
    assert (asked[0].photos, asked[0].peak) == (1 / 3, pytest.approx(1.0))
    above = (scores[2] - evidence.monosemanticity.chance) / (1 - evidence.monosemanticity.chance)
    assert asked[0].above == pytest.approx(float(above))


def test_ranking_says_what_is_wrong(evidence: Evidence) -> None:
    with pytest.raises(BadParameter, match="rank must be 'usage', 'monosemanticity' or 'lift', got 'beauty'"):
        concepts(evidence, rank="beauty")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="no captions or labels"):
        concepts(evidence, rank="lift")
    with pytest.raises(BadParameter, match="no latent 5: this SAE has 5"):
        concepts(evidence, latents=[5])
    with pytest.raises(BadParameter, match="nothing to draw"):
        draw_concepts(evidence, [], lambda photo: Image.new("RGB", (8, 8)))


def test_a_spotlight_is_on_what_fires() -> None:
    picture = Image.new("RGB", (40, 20), (200, 100, 0))
    shown = np.asarray(spotlight(picture, (2, 4), torch.tensor([1, 6]), torch.tensor([1.0, 0.0])))
    pale = round(0.32 * 100 + 0.68 * 255)
    assert (shown[:10, 10:20] == (200, 100, 0)).all()
    assert (shown[:, :10] == pale).all()
    weak = [round(pale + 0.25 * (value - pale)) for value in (200, 100, 0)]
    assert np.abs(shown[10:, 20:30].astype(int) - weak).max() <= 1
    assert shrunk(picture, 10).size == (10, 5)


def test_the_sheet_shows_the_squares(evidence: Evidence, looking: Looking) -> None:
    names = name_concepts(evidence, looking.texts())
    shown = concepts(evidence, names, latents=[0, 3])
    sheet = np.asarray(draw_concepts(evidence, shown, looking.picture, photos=4, side=56, title="Squares"))
    colours = {tuple(colour) for colour in sheet.reshape(-1, 3).tolist()}
    assert {(255, 0, 0), (0, 0, 255)} <= colours
    assert (0, 255, 0) not in colours, "green is in no photo of these concepts"
    blue, red = (np.argwhere((sheet == colour).all(-1)) for colour in ((0, 0, 255), (255, 0, 0)))
    assert blue[:, 0].max() < red[:, 0].min(), "the one used most comes first"
    assert len(red) == 4 * 14 * 14
    assert len(blue) == 4 * 3 * 14 * 14


def test_a_photo_stays_in_shape(evidence: Evidence) -> None:
    shown = concepts(evidence, latents=[0])
    sheet = np.asarray(draw_concepts(evidence, shown, lambda photo: Image.new("RGB", (40, 20), (255, 0, 0)), side=56))
    reds = np.argwhere((sheet == (255, 0, 0)).all(-1))
    assert len(reds) == 6 * 14 * 7


# ---------------------------------------------------------------------- the page


def page_data(path: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_all_it_shows(tmp_path: Path, evidence: Evidence, looking: Looking) -> None:
    names = name_concepts(evidence, looking.texts())
    mean = "</script><!--<script><b>mean</b>"
    said = [(mean,), *looking.texts()[1:]]
    shown = concepts(evidence, names)
    path = write_page(
        tmp_path / "page.html", squares.sae(), evidence, shown, looking.picture, photos=4, title="<Squares>", texts=said
    )
    text = path.read_text("utf-8")
    assert "&lt;Squares&gt;" in text
    assert "<b>mean" not in re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert "http" not in text
    data = page_data(path)
    assert [one["latent"] for one in data["concepts"]] == [4, 3, 2, 0]
    red = data["concepts"][3]
    assert (red["name"], red["words"], red["lift"]) == ("red", [["red", 3.0]], 3.0)
    assert [tile["photo"] for tile in red["tiles"]] == [0, 3, 6, 9]
    for tile in red["tiles"]:
        packed = base64.b64decode(tile["map"])
        assert list(packed) == [tile["photo"] % 16, 0, 255]
        photo = data["photos"][str(tile["photo"])]
        assert photo["grid"] == [4, 4]
        opened = Image.open(io.BytesIO(base64.b64decode(photo["jpeg"])))
        assert opened.size == (168, 168)
        middle = [int((part + 0.5) * 42) for part in divmod(tile["photo"] % 16, 4)]
        assert np.abs(np.subtract(opened.getpixel((middle[1], middle[0])), (254, 0, 0))).max() < 8
    assert data["photos"]["0"]["text"] == mean
    assert "<!--" not in text, "which would have a browser read on over the end of the script"
    assert data["concepts"][0]["ms"] is None or -1 <= data["concepts"][0]["ms"] <= 1


def test_neighbours_are_decoder_rows_that_point_the_same_way() -> None:
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [-1.0, 0.0]])
    found = neighbours_of(SAE(rows, W_dec=rows), [0, 2], 2)
    assert [latent for latent, _ in found[0]] == [1, 2]
    assert found[0][0][1] == pytest.approx(2 / (4.01**0.5))
    assert [latent for latent, _ in found[2]] == [1, 0]
    assert neighbours_of(SAE(rows), [0], 2) == {}


def test_the_page_says_what_is_wrong(tmp_path: Path, evidence: Evidence, looking: Looking) -> None:
    with pytest.raises(BadParameter, match=r"must end in \.html"):
        write_page(tmp_path / "page.txt", squares.sae(), evidence, concepts(evidence), looking.picture)
    with pytest.raises(BadParameter, match="nothing to show"):
        write_page(tmp_path / "page.html", squares.sae(), evidence, [], looking.picture)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_is_javascript(tmp_path: Path, evidence: Evidence, looking: Looking) -> None:
    path = write_page(tmp_path / "page.html", squares.sae(), evidence, concepts(evidence), looking.picture)
    script = path.read_text("utf-8").rpartition("<script>")[2].partition("</script>")[0]
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True)


# ---------------------------------------------------------------------- groups with names


def test_the_largest_groups_carry_their_names() -> None:
    plan = Reduction.of([{i: 1.0} for i in (0, 10)], (4, 4))
    groups = Reduction(
        **{**vars(plan), "concept": torch.tensor([3, 5]), "assigned": torch.tensor([0] * 8 + [1] * 8)}  # type: ignore[arg-type]
    )
    bare = np.asarray(draw_reduction(groups, side=96))
    assert (np.asarray(draw_reduction(groups, side=96, names={})) == bare).all()
    one = np.asarray(draw_reduction(groups, side=96, names={3: "sky"}))
    assert (one[48:] == bare[48:]).all(), "the second group has no name"
    assert (one[:48] != bare[:48]).any()
    console = Console(width=80, color_system="truecolor", force_terminal=True, file=io.StringIO())
    console.print(draw_groups([("photo", groups)], 80, {3: "sky", 5: "sea"}))
    assert re.search(r"38;2;[0-9;]+msky .*38;2;[0-9;]+msea ", console.file.getvalue())  # type: ignore[attr-defined]
    both = np.asarray(draw_sheet({"photo": (None, [("by hand", groups)])}, side=96, names={3: "sky", 5: "sea"}))
    assert (both != np.asarray(draw_sheet({"photo": (None, [("by hand", groups)])}, side=96))).any()


# ---------------------------------------------------------------------- the command

app = typer.Typer()
app.command(epilog=EPILOG)(command)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tower and photos, with captions and without."""
    folder = tmp_path_factory.mktemp("concepts")
    squares.saved_tower(folder)
    for name, texts in (("said", True), ("silent", False), ("partly", True)):
        photos = squares.squares(texts=texts).photos
        columns: dict[str, Any] = {"image": [photo.data for photo in photos]}
        columns |= {"captions": [list(photo.texts) for photo in photos]} if texts else {}
        if name == "partly":
            columns["captions"][0] = []
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


def run(place: Path, sae: Path | str, *others: str, images: str = "said.parquet", tower: str = squares.NAME) -> Any:
    arguments = [str(sae), "--images", str(place / images), "--tower", str(place / tower), "--keep", "6", *others]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_the_command_makes_sheet_page_scores_and_names(tmp_path: Path, place: Path) -> None:
    squares.sae().save(tmp_path / "sae")
    done = run(place, tmp_path / "sae", "-o", str(tmp_path / "out"), "--top", "3", "--page", "4", "--batch", "5")
    assert done.exit_code == 0, done.output
    assert Image.open(tmp_path / "out" / "concepts.png").size[0] > 600
    data = page_data(tmp_path / "out" / "concepts.html")
    assert [one["latent"] for one in data["concepts"]] == [4, 3, 2, 0]
    assert SAE.load(tmp_path / "sae").names == {0: "red", 2: "green", 3: "blue"}
    assert Evidence.load(tmp_path / "sae" / "evidence.safetensors").photos == 24
    assert "1 never fired" in done.stdout
    assert re.search(r"3 +blue +6.25% +33.3%", done.stdout)
    again = run(place, tmp_path / "sae", "--latents", "3,0", "--rank", "lift", "--batch", "5")
    assert again.exit_code == 0, again.output
    assert [one["latent"] for one in page_data(tmp_path / "sae" / "concepts.html")["concepts"]] == [0, 3]


def test_another_judge_may_be_asked(tmp_path: Path, place: Path) -> None:
    squares.sae().save(tmp_path / "sae")
    judged = run(place, tmp_path / "sae", "--judge", str(place / squares.NAME), "--judge-block", "1", "--pool", "max")
    assert judged.exit_code == 0, judged.output
    evidence = Evidence.load(tmp_path / "sae" / "evidence.safetensors")
    assert evidence.about["judge"] == f"CLS token of {squares.NAME}, block 1"
    assert evidence.about["pool"] == "max"
    assert len(evidence.monosemanticity.judged) == 3, "one is silent, and one fires on all photos alike"


def test_photos_without_words_leave_concepts_unnamed(tmp_path: Path, place: Path) -> None:
    squares.sae().save(tmp_path / "sae")
    done = run(place, tmp_path / "sae", images="silent.parquet")
    assert done.exit_code == 0, done.output
    assert "no captions or labels, so concepts stay unnamed" in done.stderr
    assert SAE.load(tmp_path / "sae").names == {}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rank", "beauty"], "--rank must be usage, monosemanticity or lift, got 'beauty'."),
        (["--pool", "sum"], "--pool must be mean or max, got 'sum'."),
        (["--padding", "round"], "--padding must be crop or square, got 'round'."),
        (["--latents", "3,x"], "--latents takes whole numbers with commas, such as 3,17; got '3,x'."),
        (["--latents", "3,9"], "--latents asks for 9, and this SAE has 5 latents, numbered from 0."),
        (["--judge-block", "1"], "Say which one: --judge TOWER."),
        (["--keep", "24"], "The 24 strongest photos of each concept are compared with the others, and there are 24"),
        (["--limit", "5"], "and there are 5 in all."),
        (["--images", "nowhere"], "nowhere"),
        (["--tower", "./nowhere"], "There is no folder './nowhere'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, place: Path, options: list[str], told: str) -> None:
    squares.sae().save(tmp_path / "sae")
    failed = run(place, tmp_path / "sae", *options)
    assert isinstance(failed.exception, TorinoError), failed.output
    assert told in str(failed.exception)


def test_what_does_not_fit_is_said_in_a_sentence(tmp_path: Path, place: Path) -> None:
    squares.sae().described(block=1).save(tmp_path / "other")
    told = run(place, tmp_path / "other", "--tower", str(place / squares.NAME))
    assert told.exit_code == 0, "the card says which block to tap"
    squares.sae().described(encoder="openai/clip").save(tmp_path / "sae")
    assert "reads 8-wide tokens of openai/clip, block -1; these are" in str(run(place, tmp_path / "sae").exception)
    squares.sae().save(tmp_path / "sae")
    assert "--rank lift takes names" in str(
        run(place, tmp_path / "sae", "--rank", "lift", images="silent.parquet").exception
    )
    partly = run(place, tmp_path / "sae", "--rank", "lift", images="partly.parquet")
    assert partly.exit_code == 0, "the first photo has no caption, but the others do"
    assert "say where to write what is found: -o FOLDER" in str(run(place, "example").exception)
    (tmp_path / "file").write_text("")
    blocked = run(place, tmp_path / "sae", "-o", str(tmp_path / "file"))
    assert "Choose another folder: -o FOLDER" in str(blocked.exception)
