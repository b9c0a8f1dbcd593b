"""Clips of the lab: what they show, questions with known answers, and their files."""

from __future__ import annotations

import io
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image
from torino_lab.clips import COUNTS, LENGTHS, SECONDS, THIRDS, ask_scenes, pan_clips, scene_clips, shape_clips
from torino_lab.corpus import Corpus
from torino_lab.facts import read_facts
from torino_lab.selection import Item
from torino_lab.tsv import write_tsv

from tests.support.lab_photos import PHOTOS
from torino.evaluation import VideoRef, open_task


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(PHOTOS)


def test_questions_about_scenes_have_the_right_answers() -> None:
    known = ["dog", "boat", "horse", "guitar", "car"]
    kinds: set[str] = set()
    for trial in range(60):
        rng = Random(trial)
        lengths = rng.choice(LENGTHS[rng.choice(list(LENGTHS))])
        labels = rng.sample(known, len(lengths))
        facts = [read_facts([f"A {label} on the left"] * 5) for label in labels]
        starts = np.cumsum([0, *lengths])
        for question in ask_scenes(labels, facts, known, lengths, rng):
            kinds.add(question.kind)
            named = [label for label in labels if label in question.text]
            if question.kind == "clip-order":
                assert question.answer == min(named, key=labels.index)
                assert len(named) == 2
            elif question.kind == "clip-count":
                assert question.answer == COUNTS[len(labels) - 1]
            elif question.kind == "clip-presence":
                assert (question.answer == "yes") == bool(named)
            else:
                position = labels.index(named[0])
                middle = (starts[position] + starts[position + 1]) / 2
                assert question.answer == THIRDS[int(middle / SECONDS * 3)]
    assert len(kinds) == 4


def test_things_that_another_scene_may_show_are_not_asked_for() -> None:
    dog = read_facts(["A dog runs"] * 5)
    both = read_facts(["A boat and a dog"] + ["A boat"] * 4)  # one caption mentions the dog
    for trial in range(20):
        asked = ask_scenes(["dog", "boat"], [dog, both], ["boat", "dog", "horse"], (4, 4), Random(trial))
        assert not any(question.kind == "clip-order" for question in asked)
        assert not any(question.kind == "clip-when" and "dog" in question.text for question in asked)
        assert all("horse" in question.text for question in asked if question.answer == "no")


def test_cuts_are_where_the_scenes_change(corpus: Corpus) -> None:
    for clip, questions in islice(scene_clips(corpus, Random(0)), 6):
        assert len(clip) == SECONDS
        assert clip.times == tuple(range(SECONDS))
        frames = [np.asarray(frame, float) for frame in clip.frames]
        change = [np.abs(a - b).mean() for a, b in pairwise(frames)]
        count = next(question.answer for question in questions if question.kind == "clip-count")
        assert sum(value > 0 for value in change) >= COUNTS.index(count)


def test_shapes_appear_and_stay(corpus: Corpus) -> None:
    for clip, questions in islice(shape_clips(corpus, Random(1)), 6):
        frames = [np.asarray(frame) for frame in clip.frames]
        changes = sum(not np.array_equal(a, b) for a, b in pairwise(frames))
        assert changes == 1 + COUNTS.index(questions[1].answer)
        changed = (frames[0] != frames[-1]).any(-1)
        assert 0.005 < changed.mean() < 0.3


def test_pans_move_in_the_direction_of_their_answer() -> None:
    rough = Image.fromarray(np.random.default_rng(0).integers(0, 256, (33, 50, 3), dtype=np.uint8))
    file = io.BytesIO()
    rough.resize((500, 330)).save(file, "PNG")
    corpus = Corpus([("rough.png", file.getvalue(), PHOTOS[0][2])])
    for clip, (question,) in islice(pan_clips(corpus, Random(2)), 4):
        first, second = (np.asarray(frame.convert("L"), float) for frame in clip.frames[:2])
        errors = {}
        for shift in range(-40, 41):
            a = first[:, max(0, shift) : first.shape[1] + min(0, shift)]
            b = second[:, max(0, -shift) : second.shape[1] + min(0, -shift)]
            errors[shift] = np.abs(a - b).mean()
        best = min(errors, key=lambda shift: errors[shift])  # the picture moves against the camera
        assert (best > 0) == (question.answer == "right")


def test_frames_are_written_once_and_read_again(corpus: Corpus, tmp_path: Path) -> None:
    clip, questions = next(scene_clips(corpus, Random(3)))
    write_tsv(tmp_path / "Lab-Clips.tsv", [Item(clip, question, "any") for question in questions])
    assert len(list((tmp_path / "Lab-Clips").iterdir())) == 1
    task = open_task(tmp_path / "Lab-Clips.tsv")
    assert task.kind == "exact"
    assert len({sample.image.key for sample in task}) == 1
    video = task.samples[0].image
    assert isinstance(video, VideoRef)
    opened = video.read()
    assert len(opened) == SECONDS
    assert np.abs(np.asarray(opened.frames[0], float) - np.asarray(clip.frames[0], float)).mean() < 4
