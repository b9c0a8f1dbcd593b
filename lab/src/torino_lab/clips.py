"""Make clips of a few frames from photos, with questions over time whose answers are known.

A clip has eight frames, one per second. A clip of scenes has two to four shots of photos with different labels, with a
camera that holds still, moves or zooms, and cuts between them. In a clip with shapes, shapes appear one after another
over a photo and stay. In a pan, the camera moves over one wide photo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from PIL import Image, ImageDraw

from torino.core.errors import BadParameter
from torino.datasets.camera import Shot, Window, make_clip
from torino.datasets.video import Video
from torino_lab.corpus import Corpus
from torino_lab.facts import Facts
from torino_lab.pictures import SIDE
from torino_lab.questions import ImageQuestion, weighted_sample, with_article
from torino_lab.words import THINGS

SECONDS = 8
LENGTHS = {2: ((4, 4), (3, 5), (5, 3)), 3: ((2, 3, 3), (3, 2, 3), (3, 3, 2)), 4: ((2, 2, 2, 2),)}
"""Seconds of the shots of a clip, by their number."""
COUNTS = ("one", "two", "three", "four")
THIRDS = ("at the start", "in the middle", "at the end")
SHAPES = ("circle", "square", "triangle")
SHAPE_COLORS = ((214, 40, 40), (40, 90, 220), (240, 200, 30), (30, 150, 70))
NARROW = 0.6  # share of a photo that a moving camera sees
WIDE = 1.3  # smallest aspect ratio of a photo for a pan

ClipQuestions = tuple[Video, Sequence[ImageQuestion]]


def scene_clips(corpus: Corpus, rng: Random) -> Iterator[ClipQuestions]:
    """Yield clips of scenes, and questions about presence, order, number and time of the scenes."""
    photos = corpus.collages.photos_by_label
    weights = {label: len(indices) ** 0.5 for label, indices in sorted(photos.items())}
    if len(weights) < 2:
        raise BadParameter(
            f"Clips need photos of at least two labels on which their captions agree, and there are {len(weights)}."
        )
    while True:
        lengths = rng.choice(LENGTHS[rng.choice([count for count in LENGTHS if count <= len(weights)])])
        labels = weighted_sample(weights, len(lengths), rng)
        chosen = [rng.choice(photos[label]) for label in labels]
        shots = [
            Shot(corpus.crop_photo(photo), float(seconds), *_windows(rng))
            for photo, seconds in zip(chosen, lengths, strict=True)
        ]
        facts = [corpus.facts[photo] for photo in chosen]
        yield make_clip(shots, fps=1.0, side=SIDE), ask_scenes(labels, facts, sorted(weights), lengths, rng)


def ask_scenes(
    labels: Sequence[str], facts: Sequence[Facts], known: Sequence[str], lengths: Sequence[int], rng: Random
) -> list[ImageQuestion]:
    """Ask about the scenes of a clip.

    A thing is asked for only if its captions are conclusive: all scenes, or all but its own, surely lack it.

    Parameters
    ----------
    labels, facts : sequences
        The label of each scene, and the facts of its captions.
    known : sequence of str
        Labels that may be asked for although no scene shows them.
    lengths : sequence of int
        Seconds of each scene.

    Examples
    --------
    >>> from torino_lab.facts import read_facts
    >>> facts = [read_facts(["A dog runs"] * 5), read_facts(["A red boat"] * 5)]
    >>> asked = ask_scenes(["dog", "boat"], facts, ["boat", "dog", "horse"], (4, 4), Random(0))
    >>> sorted({question.kind for question in asked})
    ['clip-count', 'clip-order', 'clip-presence', 'clip-when']
    """
    questions = [
        ImageQuestion("clip-count", "How many different scenes does the video have?", COUNTS[len(labels) - 1]),
        ImageQuestion("clip-presence", f"Is there {with_article(rng.choice(labels))} in the video?", "yes"),
    ]
    if absent := [name for name in known if all(scene.lacks(THINGS[name]) for scene in facts)]:
        questions.append(
            ImageQuestion("clip-presence", f"Is there {with_article(rng.choice(absent))} in the video?", "no")
        )
    sure = [
        number
        for number, label in enumerate(labels)
        if all(scene.lacks(THINGS[label]) for other, scene in enumerate(facts) if other != number)
    ]
    if len(sure) > 1:
        pair = rng.sample(sure, 2)
        first, second = (f"the {labels[number]}" for number in pair)
        questions.append(
            ImageQuestion("clip-order", f"Which comes first in the video, {first} or {second}?", labels[min(pair)])
        )
    for number in sure:
        third = _third(sum(lengths[:number]), sum(lengths[: number + 1]))
        if third is not None:
            options = f"{THIRDS[0]}, {THIRDS[1]} or {THIRDS[2]}"
            text = f"When does the {labels[number]} appear, {options}?"
            questions.append(ImageQuestion("clip-when", text, THIRDS[third]))
    return questions


def shape_clips(corpus: Corpus, rng: Random) -> Iterator[ClipQuestions]:
    """Yield clips in which one to three shapes appear over a photo, and questions about the first and their number."""
    while True:
        photo = corpus.crop_photo(rng.randrange(len(corpus.facts)))
        shapes = rng.sample(SHAPES, rng.randint(1, len(SHAPES)))
        begins = sorted(rng.sample(range(1, SECONDS), len(shapes)))
        boxes = _places(len(shapes), rng)
        colors = rng.sample(SHAPE_COLORS, len(shapes))
        frames: list[Image.Image] = []
        for second in range(SECONDS):
            frame = photo.copy()
            pen = ImageDraw.Draw(frame)
            for shape, begin, box, color in zip(shapes, begins, boxes, colors, strict=True):
                if second >= begin:
                    _draw_shape(pen, shape, box, color)
            frames.append(frame)
        clip = Video(tuple(frames), tuple(float(second) for second in range(SECONDS)), float(SECONDS))
        yield (
            clip,
            [
                ImageQuestion("clip-appear", "Which shape appears first in the video?", shapes[0]),
                ImageQuestion("clip-shapes", "How many shapes appear in the video?", COUNTS[len(shapes) - 1]),
            ],
        )


def pan_clips(corpus: Corpus, rng: Random) -> Iterator[ClipQuestions]:
    """Yield clips in which the camera moves over one wide photo, and the question in which direction."""
    wide = [i for i in range(len(corpus.facts)) if _is_wide(corpus.open_photo(i))]
    if not wide:
        raise BadParameter(f"Pans need a photo that is at least {WIDE} times as wide as high, and there is none.")
    while True:
        photo = corpus.open_photo(rng.choice(wide))
        to_right = rng.random() < 0.5
        edge = photo.height / photo.width / 2  # the center of what the camera sees at the left end
        ends: tuple[Window, Window] = ((edge, 0.5, 1.0), (1 - edge, 0.5, 1.0))
        shot = Shot(photo, float(SECONDS), *(ends if to_right else ends[::-1]))
        question = "Does the camera move to the left or to the right?"
        answer = "right" if to_right else "left"
        yield make_clip([shot], fps=1.0, side=SIDE), [ImageQuestion("clip-pan", question, answer)]


def _third(begin: int, end: int) -> int | None:
    """Return the third of the clip that a shot lies in, or None if it lies in two alike."""
    overlaps = [min(end, (i + 1) * SECONDS / 3) - max(begin, i * SECONDS / 3) for i in range(3)]
    best = max(range(3), key=lambda i: overlaps[i])
    others = [max(overlap, 0.0) for i, overlap in enumerate(overlaps) if i != best]
    return best if overlaps[best] >= 1.5 * max(others) else None


def _windows(rng: Random) -> tuple[Window, Window]:
    """Return what the camera sees first and last: all of the photo, a part of it that moves, or a zoom."""
    kind = rng.choice(("still", "pan", "zoom"))
    if kind == "still":
        return (0.5, 0.5, 1.0), (0.5, 0.5, 1.0)
    if kind == "pan":
        left, right = (NARROW / 2, 0.5, NARROW), (1 - NARROW / 2, 0.5, NARROW)
        return (left, right) if rng.random() < 0.5 else (right, left)
    return (0.5, 0.5, 1.0), (0.5, 0.5, NARROW)


def _is_wide(photo: Image.Image) -> bool:
    return photo.width >= WIDE * photo.height


def _places(count: int, rng: Random) -> list[tuple[int, int, int, int]]:
    """Return boxes in different quarters of a frame."""
    side = SIDE // 4
    boxes: list[tuple[int, int, int, int]] = []
    for quarter in rng.sample(range(4), count):
        left = (quarter % 2) * SIDE // 2 + rng.randint(side // 4, SIDE // 2 - side - side // 4)
        top = (quarter // 2) * SIDE // 2 + rng.randint(side // 4, SIDE // 2 - side - side // 4)
        boxes.append((left, top, left + side, top + side))
    return boxes


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], color: tuple[int, int, int]
) -> None:
    left, top, right, bottom = box
    outline = (255, 255, 255)
    if shape == "circle":
        pen.ellipse(box, color, outline, 3)
    elif shape == "square":
        pen.rectangle(box, color, outline, 3)
    else:
        pen.polygon([((left + right) // 2, top), (right, bottom), (left, bottom)], color, outline, 3)
