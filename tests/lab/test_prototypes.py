"""Word prototypes in CLIP's joint space."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torino_lab.prototypes import JointSpace, Prototypes, areas, fit_prototypes, question_words
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from torino import VisualTokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=12,
    )
    place = tmp_path_factory.mktemp("clip")
    CLIPVisionModelWithProjection(config).save_pretrained(place)
    return place


def test_image_embedding_is_that_of_clip(folder: Path) -> None:
    model = CLIPVisionModelWithProjection.from_pretrained(folder).eval()
    with torch.inference_mode():
        out = model(torch.randn(3, 3, 16, 16), output_hidden_states=True)
        expected = torch.nn.functional.normalize(out.image_embeds, dim=-1)
        embedding = JointSpace(folder, torch.float32).image(out.hidden_states[-2])
    assert torch.allclose(embedding, expected, atol=1e-5)


def test_words_are_found_where_they_are(folder: Path, tmp_path: Path) -> None:
    space = JointSpace(folder, torch.float32)
    torch.manual_seed(1)
    kinds = torch.randn(3, 16) * 3  # what a patch of dog, cat and nothing looks like
    shown = torch.randint(3, (240,))
    patches = kinds[shown] + 0.2 * torch.randn(240, 16)
    texts = [
        frozenset({("dog", "cat", "thing")[n], f"rare{i}"}) | ({"noise"} if i % 2 else set())
        for i, n in enumerate(shown)
    ]
    # One patch per photo, so the projected patch is the embedding of the photo.
    embeddings = space.patches(patches)
    prototypes = fit_prototypes(
        space, embeddings[:200], texts[:200], patches, heldout=(embeddings[200:], texts[200:]), exclude=["thing"]
    )
    assert set(prototypes.words) == {"dog", "cat"}  # noise is not recognised, rare words are too rare
    scores = prototypes.score(VisualTokens(kinds.repeat(2, 1)[:4], (2, 2)))
    assert prototypes.words[int(scores[0].argmax())] == "dog"
    assert prototypes.words[int(scores[1].argmax())] == "cat"
    only = prototypes.without(lambda word: word == "dog")
    assert only.words == ("cat",)
    of_cat = only.score(VisualTokens(kinds[:1], (1, 1)))[0, 0]
    assert torch.allclose(of_cat, scores[0, prototypes.words.index("cat")], atol=1e-5)
    prototypes.save(tmp_path / "words.safetensors")
    loaded = Prototypes.load(tmp_path / "words.safetensors", space)
    assert loaded.words == prototypes.words
    assert torch.allclose(loaded.score(VisualTokens(kinds[:1], (1, 1))), scores[:1], atol=0.05)


def test_area_under_the_curve() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.8, 0.9], [0.1, 0.5]])
    labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert areas(scores, labels).tolist() == [1.0, 0.0]


def test_yes_no_questions_name_nothing() -> None:
    questions = ["Is there a cat?", "What animal is it?", "What is it?", "Are they red?"]
    answers = [["no"], ["dog", "puppy"], [], ["red"]]
    assert question_words(questions, answers) == ["What animal is it? dog"]
