"""Concepts are named by the captions of their top photos, and the names are stored next to the SAE."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from tests.support import colored_squares as squares
from torino import SAE, Reduction
from torino.core.errors import BadParameter
from torino.core.explanation import concept_names
from torino.interpret import TopActivations, collect_top_activations, name_concepts, save_names
from torino.interpret.naming import _significance, _singularize
from torino.interpret.photos import PhotoReader
from torino.interpret.top_activations import FILE
from torino.reducers import KeepShare, make


@pytest.fixture(scope="module")
def activations() -> TopActivations:
    reader = PhotoReader(squares.make_photos(), squares.make_tower())
    return collect_top_activations(squares.make_sae(), reader, keep=6)


def test_concepts_get_the_words_of_their_photos(activations: TopActivations) -> None:
    photos = squares.make_photos().photos
    names = name_concepts(activations, [photo.texts for photo in photos])
    assert {latent: names[latent].name for latent in names} == {0: "red", 2: "green", 3: "blue"}
    red = names[0]
    assert (red.count, red.photos) == (6, 6)
    assert red.lift == 3.0
    assert red.words == (("red", red.lift),)
    assert name_concepts(activations, [photo.texts[::-1] for photo in photos]) == names


def test_equally_significant_words_form_one_name(activations: TopActivations) -> None:
    texts = [("A dog runs.",) if i % 3 else ("Old ships at sea",) for i in range(24)]
    names = name_concepts(activations, texts)
    assert names[0].name == "old, sea"
    assert [word for word, _ in names[0].words] == ["old", "sea", "ships"]
    assert 2 not in names, "two thirds of all photos contain dog, so it is not over-represented"


def test_rare_words_are_no_names(activations: TopActivations) -> None:
    texts: list[tuple[str, ...]] = [("The wall",)] * 24
    texts[0], texts[3] = ("zebra",), ("zebra",)
    assert name_concepts(activations, texts) == {}


def test_significance_is_the_hypergeometric_tail() -> None:
    generator = torch.Generator().manual_seed(0)
    contains = torch.arange(20) < 7  # 7 of 20 photos contain the word; 5 are drawn
    draws = torch.stack([contains[torch.randperm(20, generator=generator)[:5]].sum() for _ in range(4000)])
    for count in (1, 2, 3, 4):
        assert 10 ** -_significance(count, 7, 5, 20) == pytest.approx(float((draws >= count).double().mean()), abs=0.02)
    assert 10 ** -_significance(5, 7, 5, 20) == pytest.approx(21 / 15504)


def test_plurals_count_as_their_singular(activations: TopActivations) -> None:
    known = {"dog", "bus", "baby", "glass", "cape", "cap", "horse", "box"}
    words = ["dogs", "buses", "babies", "glass", "glasses", "capes", "horses", "boxes", "men", "cats", "bus"]
    assert [_singularize(word, known) for word in words] == [
        *["dog", "bus", "baby", "glass", "glass", "cape", "horse", "box", "man", "cats", "bus"]
    ]
    texts = [(f"{'dogs' if i % 2 else 'dog'}",) if i % 3 == 0 else ("wall",) for i in range(24)]
    name = name_concepts(activations, texts)[0]
    assert (name.name, name.count) == ("dog", 6)


def test_invalid_texts_are_refused(activations: TopActivations) -> None:
    with pytest.raises(BadParameter, match="of 24 photos, but texts of 2 photos were given"):
        name_concepts(activations, [(), ()])
    with pytest.raises(BadParameter, match="None of the photos has a caption or label"):
        name_concepts(activations, [()] * 24)


def test_names_are_saved_and_loaded_with_the_sae(tmp_path: Path, activations: TopActivations) -> None:
    names = name_concepts(activations, [photo.texts for photo in squares.make_photos().photos])
    squares.make_sae().save(tmp_path)
    assert SAE.load(tmp_path).names == {}
    activations.save(tmp_path / FILE)
    save_names(tmp_path, names, activations)
    loaded = SAE.load(tmp_path)
    assert loaded.names == {0: "red", 2: "green", 3: "blue"}
    content = json.loads((tmp_path / "names.json").read_text())
    assert content["names"]["0"] == {
        "name": "red", "lift": 3.0, "count": 6, "photos": 6, "words": [["red", 3.0]]
    }  # fmt: skip
    assert content["made_from"]["photos"] == "colored squares"
    loaded.save(tmp_path / "again", dtype=torch.float16)
    assert SAE.load(tmp_path / "again").names == loaded.names
    loaded.export(tmp_path / "exported", "saelens")
    save_names(tmp_path / "exported", names, activations)
    assert SAE.load(tmp_path / "exported").names == loaded.names


def test_names_of_other_weights_are_ignored(tmp_path: Path, activations: TopActivations) -> None:
    names = name_concepts(activations, [photo.texts for photo in squares.make_photos().photos])
    squares.make_sae().save(tmp_path)
    save_names(tmp_path, names, activations)
    content = (tmp_path / "names.json").read_text()
    squares.make_tied_sae(5, 8).save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SAE.load(tmp_path).names == {}, "saving other weights removes the names"
    (tmp_path / "names.json").write_text(content)
    with pytest.warns(UserWarning, match=r"other weights.* The names are ignored"):
        assert SAE.load(tmp_path).names == {}
    for broken in ("{", '{"format": "torino-names/1"}', '{"format": "torino-names/1", "names": {"x": {"name": "a"}}}'):
        (tmp_path / "names.json").write_text(broken)
        with pytest.warns(UserWarning, match="The names are ignored"):
            assert SAE.load(tmp_path).names == {}
    (tmp_path / "names.json").write_text('["of something else"]')
    with pytest.warns(UserWarning, match="must be an object"):
        assert SAE.load(tmp_path).names == {}


def test_matryoshka_levels_keep_their_names() -> None:
    sae = SAE(torch.eye(4), groups=(2, 2))
    sae.names = {0: "red", 3: "blue"}
    assert sae.first(1).names == {0: "red"}


def test_explanations_use_the_names_of_the_sae() -> None:
    sae = squares.make_sae()
    sae.names = {0: "red"}
    reducer = make("torino-m", sae=sae, k=1, delta=1)
    tokens = squares.make_tower().encode(squares.make_photos().photos[0].data)[0]
    plan: Reduction = reducer.plan(tokens)
    token = int((plan.concept == 0).nonzero()[0, 0])
    for wrapped in (reducer, KeepShare(reducer, 0.5)):
        assert "concept is 0 (red)." in str(plan.explain(token, concept_names(wrapped)))
    assert concept_names(make("random", budget=3)) == {}
    assert concept_names(make("torino-m", sae=squares.make_sae())) == {}
