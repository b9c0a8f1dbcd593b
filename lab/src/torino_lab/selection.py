"""Select the questions of a benchmark so that no answer and no letter is correct more often than necessary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from PIL import Image

from torino.datasets.video import Video
from torino_lab.questions import LETTERS, ImageQuestion

POOL_FACTOR = 2  # candidates generated for each selected question
MAX_TRIES = 40  # images inspected for each candidate
ImageQuestions = tuple[Image.Image | Video, Sequence[ImageQuestion]]


@dataclass(frozen=True)
class Item:
    """A question of a benchmark about an image or a video; several items may share it.

    ``answers`` are the answers of several people if the scoring rule uses them, otherwise empty.
    """

    image: Image.Image | bytes | Video
    question: ImageQuestion
    category: str
    answers: tuple[str, ...] = ()


def select_questions(
    source: Iterable[ImageQuestions],
    kinds: Sequence[str],
    category: str,
    total: int,
    rng: Random,
    *,
    per_image: int = 1,
    prefix: str = "",
) -> list[Item]:
    """Collect questions of some kinds, at most ``per_image`` of an image, and balance their answers."""
    pool: list[Item] = []
    for image, questions in islice(source, MAX_TRIES * POOL_FACTOR * total):
        candidates = [question for question in questions if question.kind in kinds and question.stem.startswith(prefix)]
        chosen = rng.sample(candidates, min(per_image, len(candidates)))
        pool += [Item(image, question, category) for question in chosen]
        if len(pool) >= POOL_FACTOR * total:
            break
    return balance_answers(pool, total, rng)


def select_pairs(source: Iterable[ImageQuestions], category: str, total: int) -> list[Item]:
    """Collect images with one question whose answer is yes and one whose answer is no."""
    items: list[Item] = []
    for image, questions in islice(source, MAX_TRIES * POOL_FACTOR * total):
        yes, no = (
            next((question for question in questions if question.answer == answer), None) for answer in ("yes", "no")
        )
        if yes and no:
            items += [Item(image, yes, category), Item(image, no, category)]
        if len(items) >= 2 * total:
            break
    return items


def balance_answers(pool: Sequence[Item], total: int, rng: Random) -> list[Item]:
    """Choose items so that no answer is more frequent than necessary; for choices, the text of the option counts.

    The first items of each answer are taken, so that parts which share images share the first ones.
    """
    groups: dict[str, list[Item]] = {}
    for item in pool:
        groups.setdefault(_correct_text(item.question), []).append(item)
    answers = rng.sample(list(groups), len(groups))
    chosen: list[Item] = []
    for rank in range(max(map(len, groups.values()), default=0)):
        chosen += [groups[answer][rank] for answer in answers if rank < len(groups[answer])]
    return chosen[:total]


def _correct_text(question: ImageQuestion) -> str:
    return question.options[LETTERS.index(question.answer)] if question.options else question.answer
