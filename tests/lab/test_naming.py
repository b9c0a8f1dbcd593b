"""Names of the lab's concepts from patches, collages and pixels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torino_lab import naming
from torino_lab.naming import CollageEvidence, Mentions, choose_name, names_nothing

from torino.interpret.low_level import LowLevelName
from torino.interpret.patch_naming import Candidate, PatchName
from torino.sae.formats.native import write_names

CANDIDATES = (Candidate("dog", 3.0, 0.8), Candidate("puppy", 2.5, 0.5), Candidate("fur", 2.0, 0.4))
WORD = PatchName("dog", 0.8, CANDIDATES, 9)
BLUE = LowLevelName("blue", "color", 0.9, 5.0)


def test_words_come_before_pixels_and_collages_choose_among_candidates() -> None:
    name = choose_name(WORD, CANDIDATES, BLUE, None, 9)
    assert name is not None
    assert (name.name, name.kind, name.confidence) == ("dog", "thing", 0.8)
    name = choose_name(WORD, CANDIDATES, None, "puppy", 9)
    assert name is not None
    assert (name.name, name.confidence, name.collage) == ("puppy", 0.5, "puppy")
    assert [item.word for item in name.candidates] == ["puppy", "dog", "fur"]
    name = choose_name(WORD, CANDIDATES, None, "boat", 9)
    assert name is not None
    assert name.name == "dog", "a label that is no candidate changes nothing"
    name = choose_name(None, CANDIDATES, BLUE, "dog", 9)
    assert name is not None
    assert (name.name, name.kind) == ("blue", "color")
    assert choose_name(None, CANDIDATES, None, "dog", 9) is None
    name = choose_name(WORD, CANDIDATES, BLUE, "dog", 9, artifact=0.9)
    assert name is not None
    assert (name.name, name.kind, name.confidence) == ("high-norm token", "artifact", 0.9)


def test_cells_of_a_collage_cover_the_grid_once() -> None:
    for grid in naming.COLLAGE_GRIDS:
        cells = [naming._cell_patches(place, grid) for place in range(grid[0] * grid[1])]
        assert torch.equal(torch.stack(cells).sum(0), torch.ones(196, dtype=torch.int64))
    right = naming._cell_patches(1, (1, 2)).reshape(14, 14)
    assert right[:, 7:].all()
    assert not right[:, :7].any()


def test_a_label_needs_most_of_the_activation_and_more_than_its_share() -> None:
    share = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.45, 0.55]])
    evidence = CollageEvidence(("cat", "dog"), share, torch.tensor([0.9, 0.1]))
    assert [evidence.label(latent) for latent in range(3)] == [None, "dog", "dog"]
    assert CollageEvidence(("cat", "dog"), share, torch.tensor([0.5, 0.5])).label(0) is None


def test_activities_name_nothing() -> None:
    assert names_nothing("running")
    assert names_nothing("day")
    assert names_nothing("man's")
    assert not names_nothing("building")
    assert not names_nothing("dog")


def test_low_level_names_are_shown_in_brackets(tmp_path: Path) -> None:
    from torino import SAE

    sae = SAE(torch.eye(4), torch.zeros(4), torch.eye(4), torch.zeros(4), kind="relu")
    sae.save(tmp_path)
    names = {0: choose_name(None, (), BLUE, None, 5), 2: choose_name(WORD, CANDIDATES, None, None, 5)}
    write_names(tmp_path, {latent: name.entry() for latent, name in names.items() if name}, 4)
    assert SAE.load(tmp_path).names == {0: "(blue)", 2: "dog"}


@pytest.mark.parametrize("count", [5, 1000])
def test_photos_are_picked_from_all_sources_without_repetition(count: int) -> None:
    class Source:
        rows = 40

    picks = naming.pick_photos([Source(), Source()], count, seed=0)  # type: ignore[list-item]
    assert len(picks) == len(set(picks)) == min(count, 80)
    assert picks == naming.pick_photos([Source(), Source()], count, seed=0)  # type: ignore[list-item]


def test_mentions_tell_frequent_latents_from_specific_ones() -> None:
    mentions = Mentions(3, ["dog", "tower"])
    for photo in range(20):
        words = {"dog"} if photo < 5 else {"tower"}
        mentions.add(torch.tensor([0, 1, 1]) if photo < 5 else torch.tensor([1]), words)
    mentions.add(torch.tensor([0]), set())  # no texts: ignored
    assert not mentions.contradict(0, "dog")
    assert mentions.contradict(0, "tower")
    assert mentions.contradict(1, "dog")
    assert mentions.contradict(1, "tower")
    mentions.add(torch.tensor([2]), {"dog"})
    assert not mentions.contradict(2, "tower")  # one photo says nothing
