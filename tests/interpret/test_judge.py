"""Judging concepts: what fired, how alike it is, and what to call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import squares
import torch
from squares import reader, tokens
from torch import Tensor

from torino import SAE, Reduction
from torino.core.errors import BadFile, BadParameter, BadTokens, SAEMismatch
from torino.core.explanation import names_of
from torino.datasets import Gone
from torino.interpret import Evidence, Looked, Monosemanticity, gather, monosemanticity, name_concepts, save_names
from torino.interpret import running_stats as tally
from torino.interpret.naming import _singular, _surely
from torino.interpret.photos import Looking
from torino.interpret.top_activations import FILE, PARTIAL, View


def by_loops(activations: Tensor, embeddings: Tensor) -> list[float]:
    """The formula of the paper, pair by pair."""
    scores: list[float] = []
    photos, latents = activations.shape
    for latent in range(latents):
        a = activations[:, latent].double()
        span = a.max() - a.min()
        above = below = 0.0
        for n in range(photos):
            for m in range(photos):
                if n == m or span == 0:
                    continue
                weight = float((a[n] - a.min()) / span * (a[m] - a.min()) / span)
                similar = torch.nn.functional.cosine_similarity(embeddings[n].double(), embeddings[m].double(), dim=0)
                above += weight * float(similar)
                below += weight
        scores.append(above / below if below > 0 else float("nan"))
    return scores


def some(photos: int = 13, latents: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    activations = torch.rand(photos, latents, generator=source)
    activations *= torch.rand(photos, latents, generator=source) < 0.4
    activations[:, 1] = 0  # never fires
    activations[:, 2] = 0
    activations[5, 2] = 3.0  # fires once
    activations[:, 3] = 1 + torch.rand(photos, generator=source)  # fires everywhere
    activations[:, 4] = 2.0  # fires everywhere alike
    return activations, torch.randn(photos, 6, generator=source)


@pytest.mark.parametrize("seed", range(4))
def test_monosemanticity_is_the_formula_of_the_paper(seed: int) -> None:
    activations, embeddings = some(seed=seed)
    found = monosemanticity(activations, embeddings, chunk=5)
    torch.testing.assert_close(
        found.values, torch.tensor(by_loops(activations, embeddings), dtype=torch.float64), equal_nan=True
    )
    assert found.values.isnan().tolist() == [False, True, True, False, True, False, False]
    assert (found.silent, found.single) == (1, 2)
    judged = [score for score in by_loops(activations, embeddings) if score == score]
    assert found.mean == pytest.approx(sum(judged) / 4)
    assert found.median == pytest.approx(sum(sorted(judged)[1:3]) / 2)
    every = torch.cat([torch.ones(13, 1), torch.zeros(1, 1)])  # one photo that is left out sets the scale
    rest = monosemanticity(every, torch.cat([embeddings, embeddings[:1]]))
    assert found.chance == pytest.approx(float(rest.values))
    assert "4 latents judged, 1 never fired, 2 left no pair" in str(found)


def test_monosemanticity_goes_on_from_its_state() -> None:
    activations, embeddings = some()
    whole, part = Monosemanticity(7, 6), Monosemanticity(7, 6)
    whole.add(activations[:10], embeddings[:10])
    whole.add(activations[10:], embeddings[10:])
    part.add(activations[:10], embeddings[:10])
    state = {name: value.clone() for name, value in part.state().items()}
    part.add(activations[:3], embeddings[:3])  # what comes after the state is not in it
    resumed = Monosemanticity.of(state)
    resumed.add(activations[10:], embeddings[10:])
    assert torch.equal(resumed.scores().values.nan_to_num(9), whole.scores().values.nan_to_num(9))


def test_monosemanticity_says_what_is_wrong() -> None:
    activations, embeddings = some()
    with pytest.raises(BadParameter, match="13 photos take as many embeddings, got 12"):
        monosemanticity(activations, embeddings[:12])
    with pytest.raises(BadParameter, match="must not be negative"):
        monosemanticity(activations - 1, embeddings)
    with pytest.raises(BadTokens, match="zero or not finite"):
        monosemanticity(activations, embeddings * 0)
    with pytest.raises(BadParameter, match="compares photos with each other, and 1 was given"):
        monosemanticity(activations[:1], embeddings[:1])


# ---------------------------------------------------------------------- evidence


@pytest.mark.parametrize("waiting", [1, 40, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"kind": "topk", "k": 2}, {"kind": "batchtopk", "threshold": 1.5}])
def test_evidence_is_what_looking_at_everything_finds(
    monkeypatch: pytest.MonkeyPatch, waiting: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(tally, "WAITING", waiting)
    monkeypatch.setattr(tally, "ROOM", 30)  # three patches at a time
    images, sae = tokens(), reader(**options)
    found = gather(sae, Looked(images), keep=4, batch=5)
    z = torch.stack([sae.encode(image.patches) for image in images])
    assert (found.photos, found.patches, found.keep, found.latents) == (21, 126, 4, 9)
    assert torch.equal(found.fired_patches, (z > 0).sum((0, 1)))
    assert torch.equal(found.fired_photos, (z > 0).any(1).sum(0))
    torch.testing.assert_close(found.patch_share, (z > 0).double().mean((0, 1)))
    torch.testing.assert_close(found.photo_share, (z > 0).any(1).double().mean(0))
    torch.testing.assert_close(found.total, z.double().sum((0, 1)))
    torch.testing.assert_close(found.mean, z.double().sum((0, 1)) / (z > 0).sum((0, 1)).clamp(min=1))
    assert torch.equal(found.peak, z.amax((0, 1)))
    for latent in range(9):
        peaks = z[:, :, latent].amax(1).tolist()
        photos = sorted((i for i in range(21) if peaks[i] > 0), key=lambda i: (-peaks[i], i))[:4]
        assert found.photos_of(latent) == [(i, peaks[i]) for i in photos]
        fired = [(i, p, float(z[i, p, latent])) for i in range(21) for p in range(6) if z[i, p, latent] > 0]
        assert found.patches_of(latent) == sorted(fired, key=lambda one: (-one[2], one[0], one[1]))[:4]
        for place, photo in enumerate(photos):
            patches, values = found.map_of(latent, place)
            assert patches.tolist() == z[photo, :, latent].nonzero()[:, 0].tolist()
            assert torch.equal(values, z[photo, patches, latent])
    cls = torch.stack([image.cls for image in images if image.cls is not None])
    torch.testing.assert_close(
        found.monosemanticity.values, monosemanticity(z.double().mean(1), cls).values, equal_nan=True
    )
    strongest = gather(sae, Looked(images), keep=4, pool="max").monosemanticity
    torch.testing.assert_close(strongest.values, monosemanticity(z.amax(1), cls).values, equal_nan=True)
    given = gather(sae, Looked(images, cls.flip(0)), keep=4).monosemanticity
    torch.testing.assert_close(given.values, monosemanticity(z.double().mean(1), cls.flip(0)).values, equal_nan=True)


def same(one: Evidence, two: Evidence) -> None:
    """Equal to the last bit."""
    for name, value in vars(one).items():
        other = getattr(two, name)
        if isinstance(value, Tensor):
            assert value.dtype == other.dtype
            assert torch.equal(value, other), name
        elif name == "monosemanticity":
            assert torch.equal(value.values.nan_to_num(9), other.values.nan_to_num(9))
            assert (value.chance, value.silent, value.single) == (other.chance, other.silent, other.single)
        else:
            assert value == other, name


def test_evidence_comes_back_from_disk(tmp_path: Path) -> None:
    found = gather(reader(), Looked(tokens()), keep=4)
    same(found, Evidence.load(found.save(tmp_path / "evidence.safetensors")))
    (tmp_path / "other.safetensors").write_bytes((tmp_path / "evidence.safetensors").read_bytes()[:500])
    with pytest.raises(BadFile, match="not a readable"):
        Evidence.load(tmp_path / "other.safetensors")


class Falling(Looked):
    """Photos that fail at one of them, as a killed run does, and count how often they are asked for."""

    def __init__(self, *given: Any, at: int | None = None) -> None:
        super().__init__(*given)
        self.at, self.asked = at, 0

    def views(self, start: int, stop: int) -> list[View | str]:
        self.asked += 1
        if self.at is not None and start <= self.at < stop:
            raise KeyboardInterrupt
        return super().views(start, stop)


@pytest.mark.parametrize("at", [3, 12, 20])
def test_a_stopped_run_goes_on_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(tally, "WAITING", 20)
    whole = gather(reader(), Looked(tokens()), keep=4, batch=4)
    with pytest.raises(KeyboardInterrupt):
        gather(reader(), Falling(tokens(), at=at), keep=4, batch=4, into=tmp_path, every=0)
    assert (tmp_path / PARTIAL).is_file() == (at >= 4)
    photos = Falling(tokens())
    told: list[int] = []
    found = gather(
        reader(), photos, keep=4, batch=4, into=tmp_path, every=0, progress=lambda done, of: told.append(done)
    )
    assert photos.asked == 6 - at // 4, "what was done is not done again"
    assert told[-1] == 21
    same(whole, found)
    assert not (tmp_path / PARTIAL).exists()
    photos = Falling(tokens())
    same(whole, gather(reader(), photos, keep=4, batch=4, into=tmp_path))
    assert photos.asked == 0, "what is finished is read"


def test_evidence_of_something_else_is_gathered_anew(tmp_path: Path) -> None:
    gather(reader(), Looked(tokens()), keep=4, into=tmp_path)
    for sae, images, keep in ((reader(kind="topk", k=1), tokens(), 4), (reader(), tokens(seed=1), 4)):
        same(
            gather(sae, Looked(images), keep=keep, into=tmp_path),
            gather(sae, Looked(images), keep=keep),
        )
    with pytest.raises(KeyboardInterrupt):
        gather(reader(), Falling(tokens(), at=15), keep=4, batch=4, into=tmp_path, every=0)
    same(gather(reader(), Looked(tokens()), keep=5, into=tmp_path), gather(reader(), Looked(tokens()), keep=5))
    (tmp_path / FILE).write_bytes(b"broken")
    (tmp_path / PARTIAL).write_bytes(b"broken")
    same(gather(reader(), Looked(tokens()), keep=4, into=tmp_path), gather(reader(), Looked(tokens()), keep=4))


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    code = """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from squares import reader, tokens
        from torino.interpret import Looked, gather

        class Slow(Looked):
            def views(self, start, stop):
                if start >= 12:
                    print("waiting", flush=True)
                    time.sleep(60)
                return super().views(start, stop)

        gather(reader(), Slow(tokens()), keep=4, batch=4, into=Path(sys.argv[2]), every=0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(Path(__file__).parents[1] / "support"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "waiting\n"
        os.kill(run.pid, signal.SIGKILL)
    photos = Falling(tokens())
    found = gather(reader(), photos, keep=4, batch=4, into=tmp_path)
    assert photos.asked == 3
    same(gather(reader(), Looked(tokens()), keep=4, batch=4), found)


def test_gathering_says_what_is_wrong() -> None:
    with pytest.raises(BadParameter, match=r"the others, and there are 4 photos in all\. Give more than 4"):
        gather(reader(), Looked(tokens(4)), keep=4)
    with pytest.raises(BadParameter, match="pool must be 'mean' or 'max', got 'sum'"):
        gather(reader(), Looked(tokens()), pool="sum")  # type: ignore[arg-type]
    with pytest.raises(SAEMismatch, match="reads 4-wide tokens"):
        gather(reader(width=4), Looked(tokens()), keep=4)
    with pytest.raises(BadParameter, match="21 photos take as many embeddings, got 3"):
        Looked(tokens(), torch.ones(3, 2))


# ---------------------------------------------------------------------- a tower that looks


def test_planted_squares_are_found_where_they_are() -> None:
    photos = squares.squares()
    found = gather(squares.sae(), Looking(photos, squares.tower(), squares.tower(block=0)), keep=4, batch=7)
    assert found.fired_photos.tolist() == [8, 0, 8, 8, 24]
    assert found.fired_patches[:4].tolist() == [8, 0, 16, 24]
    assert found.monosemanticity.silent == 1
    for number, latent in enumerate(squares.LATENTS.values()):
        assert [photo for photo, _ in found.photos_of(latent)] == [number, number + 3, number + 6, number + 9]
        for place, (photo, value) in enumerate(found.photos_of(latent)):
            assert value == pytest.approx(1.0)
            assert found.map_of(latent, place)[0].tolist() == sorted((photo + i) % 16 for i in range(number + 1))
    assert found.about["judge"] == "CLS token of tiny-colours, block 0"


def test_photos_that_cannot_be_read_are_left_out_and_listed() -> None:
    photos = squares.squares()
    photos.photos[3] = squares.Photo("broken", b"no image")
    found = gather(squares.sae(), Looking(photos, squares.tower()), keep=4)
    assert list(found.skipped) == [3]
    assert "not an image" in found.skipped[3]
    assert found.photos == 23
    assert [photo for photo, _ in found.photos_of(0)] == [0, 6, 9, 12]
    assert found.grids[3].tolist() == [0, 0]
    names = name_concepts(found, Looking(photos, squares.tower()).texts())
    assert names[0].name == "red"
    photos.photos = [squares.Photo("broken", b"no image")] * 24
    with pytest.raises(
        BadTokens, match=r"Fewer than two of the 24 photos could be read\. The first one: .*not an image"
    ):
        gather(squares.sae(), Looking(photos, squares.tower()), keep=4)
    with pytest.raises(BadParameter, match="no photos to look at"):
        Looking(squares.Photos([]), squares.tower())


def test_a_photo_that_the_tower_refuses_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    photos, tower = squares.squares(), squares.tower()
    refused = Looking(photos, tower)._prepared(3).tobytes()
    real = tower.process

    def process(pictures: Any) -> Any:
        if any(picture.tobytes() == refused for picture in pictures):
            raise ValueError("a size that it was not made for")
        return real(pictures)

    monkeypatch.setattr(tower, "process", process)
    found = gather(squares.sae(), Looking(photos, tower), keep=4, batch=7)
    assert list(found.skipped) == [3]
    assert "refused an image: a size that it was not made for" in found.skipped[3]
    assert found.photos == 23


def test_photos_that_are_taken_away_stop_the_run(tmp_path: Path) -> None:
    """A disk that was pulled out is not a heap of broken photos, about which evidence would then be kept."""

    class Unplugged(squares.Photos):
        def __getitem__(self, index: int) -> Any:
            if index >= 10:
                raise Gone(Path("disk"))
            return super().__getitem__(index)

    looking = Looking(Unplugged(squares.squares().photos), squares.tower())
    with pytest.raises(Gone, match="disk was there"):
        gather(squares.sae(), looking, keep=4, batch=5, into=tmp_path)
    assert not (tmp_path / FILE).exists()
    with pytest.raises(Gone):
        looking.texts()


def test_a_caption_that_cannot_be_read_stops_no_other_photo() -> None:
    class Torn(squares.Photos):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise FileNotFoundError(2, "No such file or directory", "3.txt")
            return super().__getitem__(index)

    looking = Looking(Torn(squares.squares().photos), squares.tower())
    found = gather(squares.sae(), looking, keep=4)
    assert found.skipped == {3: "Photo 3 cannot be read: No such file or directory."}
    assert [number for number, texts in enumerate(looking.texts()) if not texts] == [3]


def test_another_tower_of_the_same_name_looks_anew(tmp_path: Path) -> None:
    before = gather(squares.sae(), Looking(squares.squares(), squares.tower()), keep=4, into=tmp_path)
    tower = squares.tower()
    with torch.no_grad():
        tower.model.get_parameter("embeddings.patch_embeddings.projection.weight").mul_(0.5)
    after = gather(squares.sae(), Looking(squares.squares(), tower), keep=4, into=tmp_path)
    assert before.about["tower"] == after.about["tower"]
    assert before.about["weights"] != after.about["weights"]
    assert not torch.equal(before.total, after.total)


# ---------------------------------------------------------------------- names


def evidence_of(sae: SAE | None = None, photos: squares.Photos | None = None, keep: int = 6) -> Evidence:
    return gather(sae or squares.sae(), Looking(photos or squares.squares(), squares.tower()), keep=keep)


def test_concepts_get_the_words_of_their_photos() -> None:
    photos = squares.squares()
    found = evidence_of()
    names = name_concepts(found, [photo.texts for photo in photos.photos])
    assert {latent: names[latent].name for latent in names} == {0: "red", 2: "green", 3: "blue"}
    red = names[0]
    assert (red.count, red.photos) == (6, 6)
    assert red.lift == 3.0
    assert red.words == (("red", red.lift),)
    assert name_concepts(found, [photo.texts[::-1] for photo in photos.photos]) == names


def test_a_name_takes_two_words_that_always_come_together() -> None:
    said = [("A dog runs.",) if i % 3 else ("Old ships at sea",) for i in range(24)]
    names = name_concepts(evidence_of(), said)
    assert names[0].name == "old, sea"
    assert [word for word, _ in names[0].words] == ["old", "sea", "ships"]
    assert 2 not in names, "two thirds of all photos say dog, so no concept stands out by it"


def test_rare_words_name_nothing() -> None:
    said: list[tuple[str, ...]] = [("The wall",)] * 24
    said[0], said[3] = ("zebra",), ("zebra",)
    assert name_concepts(evidence_of(), said) == {}


def test_how_likely_a_word_is_by_chance() -> None:
    source = torch.Generator().manual_seed(0)
    carried = torch.arange(20) < 7  # 7 of 20 photos carry the word; 5 are drawn
    draws = torch.stack([carried[torch.randperm(20, generator=source)[:5]].sum() for _ in range(4000)])
    for count in (1, 2, 3, 4):
        assert 10 ** -_surely(count, 7, 5, 20) == pytest.approx(float((draws >= count).double().mean()), abs=0.02)
    assert 10 ** -_surely(5, 7, 5, 20) == pytest.approx(21 / 15504)


def test_plurals_count_as_their_singular() -> None:
    known = {"dog", "bus", "baby", "glass", "cape", "cap", "horse", "box"}
    words = ["dogs", "buses", "babies", "glass", "glasses", "capes", "horses", "boxes", "men", "cats", "bus"]
    assert [_singular(word, known) for word in words] == [
        *["dog", "bus", "baby", "glass", "glass", "cape", "horse", "box", "man", "cats", "bus"]
    ]
    said = [(f"{'dogs' if i % 2 else 'dog'}",) if i % 3 == 0 else ("wall",) for i in range(24)]
    assert (name_concepts(evidence_of(), said)[0].name, name_concepts(evidence_of(), said)[0].count) == ("dog", 6)


def test_naming_says_what_is_wrong() -> None:
    with pytest.raises(BadParameter, match="about 24 photos, and texts of 2 were given"):
        name_concepts(evidence_of(), [(), ()])
    with pytest.raises(BadParameter, match="None of these photos has a caption or label"):
        name_concepts(evidence_of(), [()] * 24)


def test_names_lie_beside_the_sae_and_come_with_it(tmp_path: Path) -> None:
    sae, found = squares.sae(), evidence_of()
    names = name_concepts(found, [photo.texts for photo in squares.squares().photos])
    sae.save(tmp_path)
    assert SAE.load(tmp_path).names == {}
    found.save(tmp_path / FILE)
    save_names(tmp_path, names, found)
    loaded = SAE.load(tmp_path)
    assert loaded.names == {0: "red", 2: "green", 3: "blue"}
    held = json.loads((tmp_path / "names.json").read_text())
    assert held["names"]["0"] == {
        "name": "red", "lift": 3.0, "count": 6, "photos": 6, "words": [["red", 3.0]]
    }  # fmt: skip
    assert held["made_from"]["photos"] == "coloured squares"
    loaded.save(tmp_path / "again", dtype=torch.float16)
    assert SAE.load(tmp_path / "again").names == loaded.names
    loaded.export(tmp_path / "exported", "saelens")
    save_names(tmp_path / "exported", names, found)
    assert SAE.load(tmp_path / "exported").names == loaded.names


def test_names_of_other_weights_are_left_out(tmp_path: Path) -> None:
    found = evidence_of()
    names = name_concepts(found, [photo.texts for photo in squares.squares().photos])
    squares.sae().save(tmp_path)
    save_names(tmp_path, names, found)
    held = (tmp_path / "names.json").read_text()
    reader(5, 8).save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SAE.load(tmp_path).names == {}, "the old names went with the old weights"
    (tmp_path / "names.json").write_text(held)
    with pytest.warns(UserWarning, match="names the concepts of other weights. The names are left out"):
        assert SAE.load(tmp_path).names == {}
    for broken in ("{", '{"format": "torino-names/1"}', '{"format": "torino-names/1", "names": {"x": {"name": "a"}}}'):
        (tmp_path / "names.json").write_text(broken)
        with pytest.warns(UserWarning, match="The names are left out"):
            assert SAE.load(tmp_path).names == {}
    (tmp_path / "names.json").write_text('["of something else"]')
    with pytest.warns(UserWarning, match="not an object"):
        assert SAE.load(tmp_path).names == {}


def test_levels_keep_the_names_they_have() -> None:
    sae = SAE(torch.eye(4), groups=(2, 2))
    sae.names = {0: "red", 3: "blue"}
    assert sae.first(1).names == {0: "red"}


def test_stories_use_the_names_of_the_sae() -> None:
    from torino.reducers import make
    from torino.vlm.session import KeepShare

    sae = squares.sae()
    sae.names = {0: "red"}
    reducer = make("torino-m", sae=sae, k=1, delta=1)
    seen = squares.tower().look(squares.squares().photos[0].data)[0]
    plan: Reduction = reducer.plan(seen)
    token = int((plan.concept == 0).nonzero()[0, 0])
    for one in (reducer, KeepShare(reducer, 0.5)):
        assert "concept is 0 (red)." in str(plan.explain(token, names_of(one)))
    assert names_of(make("random", budget=3)) == {}
    assert names_of(make("torino-m", sae=squares.sae())) == {}
