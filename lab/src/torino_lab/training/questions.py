"""Training questions: what is asked about each photo, read from parquet files and rebalanced.

Each row of a source is one photo with captions, or questions with human answers. A photo yields a list of
:class:`Question`; the trainer draws some of them each time the photo comes up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from torino.core.extras import optional_import

SHORT = "Answer the question using a single word or phrase."
CAPTION_PROMPTS = (
    "Describe the photo in one sentence.",
    "Provide a one-sentence caption for the provided image.",
    "What does the photo show?",
    "Describe this image.",
)
TEXT_PROMPTS = (
    "What word is written here?",
    "What does the text say?",
    "What is written in the image?",
    "What text is in the image?",
)
PRESENCE_PROMPTS = (
    "Is there {} in the image?",
    "Is there {} in the photo?",
    "Can you see {} in the image?",
)


@dataclass(frozen=True)
class Question:
    """A question about one photo.

    Parameters
    ----------
    kind : str
        ``caption``, ``yesno``, ``number``, ``open``, ``text``, ``relation``, ``presence``, or the kind of a generated
        image (``collage``, ``small``, ``sign``, ``shapes``).
    text : str
        The question as asked.
    answers : tuple of str
        Accepted answers, the consensus first; captions have all of theirs.
    source : str
        Where it comes from, as the data names it.
    """

    kind: str
    text: str
    answers: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Photo:
    """A training photo: its place in the sources and everything that can be asked about it."""

    source: str
    row: int
    questions: tuple[Question, ...]


def read_photos(files: Sequence[Path]) -> list[Photo]:
    """Read all rows of parquet files, in order, with their questions."""
    with optional_import("Parquet files need", "torino[lab]"):
        import pyarrow.parquet as pq

    photos: list[Photo] = []
    for file in files:
        have = pq.read_schema(file).names
        columns = [name for name in ("captions", "questions", "answers", "sources") if name in have]
        rows = pq.read_table(file, columns=columns).to_pylist()
        for number, row in enumerate(rows):
            photos.append(Photo(file.stem, number, tuple(_questions(row, file.stem))))
    return photos


def _questions(row: dict[str, list], source: str) -> Iterable[Question]:
    captions = tuple(tidy(text) for text in row.get("captions") or () if text.strip())
    if captions and not source.startswith("imagenet"):
        yield Question("caption", "", captions, source)
    asked = zip(row.get("questions") or (), row.get("answers") or (), row.get("sources") or (), strict=True)
    for text, answers, origin in asked:
        consensus = tuple(_by_count(answers))
        if consensus and text.strip():
            yield Question(_kind(consensus[0], origin), tidy_question(text), consensus, origin)


def _by_count(answers: Sequence[str]) -> list[str]:
    """Distinct answers, most frequent first; equal counts keep their order."""
    counts = Counter(answer.strip() for answer in answers if answer.strip())
    return [answer for answer, _ in counts.most_common()]


def _kind(answer: str, source: str) -> str:
    if source.startswith("icdar"):
        return "text"
    if source == "vsr":
        return "relation"
    if source.startswith("generated-"):
        return source.removeprefix("generated-").partition(":")[0]
    if answer.lower() in {"yes", "no"}:
        return "yesno"
    return "number" if re.fullmatch(r"\d+", answer) else "open"


def tidy(caption: str) -> str:
    """Write a caption as a sentence: capital first letter, one full stop, no space before punctuation."""
    text = re.sub(r"\s+([.,;:!?'’])", r"\1", " ".join(caption.replace('"', "").split())).rstrip(" .")
    return text[:1].upper() + text[1:] + "."


def tidy_question(text: str) -> str:
    """Remove stray spaces before punctuation."""
    return re.sub(r"\s+([.,;:!?'’])", r"\1", " ".join(text.split()))


# ---------------------------------------------------------------------- questions about presence, from captions

THINGS = [
    "person",
    "man",
    "woman",
    "boy",
    "girl",
    "child",
    "baby",
    "dog",
    "cat",
    "horse",
    "cow",
    "sheep",
    "bird",
    "elephant",
    "bear",
    "zebra",
    "giraffe",
    "bicycle",
    "bike",
    "car",
    "motorcycle",
    "airplane",
    "plane",
    "bus",
    "train",
    "truck",
    "boat",
    "traffic-light",
    "fire-hydrant",
    "stop-sign",
    "bench",
    "backpack",
    "umbrella",
    "handbag",
    "tie",
    "suitcase",
    "frisbee",
    "skis",
    "snowboard",
    "ball",
    "kite",
    "baseball-bat",
    "skateboard",
    "surfboard",
    "tennis-racket",
    "bottle",
    "cup",
    "glass",
    "fork",
    "knife",
    "spoon",
    "bowl",
    "banana",
    "apple",
    "sandwich",
    "orange",
    "broccoli",
    "carrot",
    "pizza",
    "donut",
    "cake",
    "chair",
    "couch",
    "bed",
    "table",
    "toilet",
    "tv",
    "television",
    "laptop",
    "mouse",
    "remote",
    "keyboard",
    "phone",
    "microwave",
    "oven",
    "toaster",
    "sink",
    "refrigerator",
    "book",
    "clock",
    "vase",
    "scissors",
    "teddy-bear",
    "toothbrush",
    "hat",
    "shirt",
    "helmet",
    "tree",
    "mountain",
    "beach",
    "water",
    "grass",
    "snow",
    "sand",
    "rock",
    "street",
    "building",
    "house",
    "fence",
    "wall",
    "window",
    "door",
    "car-seat",
    "swing",
    "slide",
    "rope",
    "flag",
    "sign",
    "flower",
    "ocean",
    "lake",
    "river",
    "pool",
]
_SAME = [
    {"person", "man", "woman", "boy", "girl", "child", "baby"},
    {"bicycle", "bike"},
    {"airplane", "plane"},
    {"tv", "television"},
    {"ocean", "lake", "river", "water", "pool", "beach"},
    {"building", "house"},
    {"sand", "beach"},
]
_PEOPLE = "person people man men woman women boy boys girl girls child children kid kids baby player guy lady"
_PEOPLE_WORDS = frozenset(_PEOPLE.split())


def mentioned(captions: Sequence[str]) -> set[str]:
    """Return the :data:`THINGS` that captions mention, singular or plural."""
    text = " " + re.sub(r"[^a-z ]", " ", " ".join(captions).lower()) + " "
    found = {thing for thing in THINGS if re.search(rf" {thing.replace('-', ' ')}(s|es)? ", text)}
    if _PEOPLE_WORDS & set(text.split()):
        found.add("person")
    return found


def with_article(thing: str) -> str:
    """Put the indefinite article before a noun, where it takes one."""
    words = thing.replace("-", " ")
    if words in {"water", "grass", "snow", "sand", "skis", "scissors", "broccoli"}:
        return words
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def add_presence(photos: Sequence[Photo], seed: int, each: int = 3) -> list[Photo]:
    """Add questions about what is in captioned photos, as many with "yes" as with "no".

    Half of the absent things are drawn by how often they appear with one that is present, as POPE's adversarial list
    does, the others by how often they appear at all.
    """
    rng = Random(f"{seed}:presence")
    things = [
        mentioned(question.answers) if (question := _caption_of(photo)) is not None else set() for photo in photos
    ]
    count = Counter(thing for found in things for thing in found)
    together: dict[str, Counter[str]] = {thing: Counter() for thing in THINGS}
    for found in things:
        for thing in found:
            together[thing].update(found - {thing})
    result: list[Photo] = []
    for photo, found in zip(photos, things, strict=True):
        if not found:
            result.append(photo)
            continue
        near = set().union(*(group for group in _SAME if group & found)) | found
        present = sorted(found)
        rng.shuffle(present)
        added: list[Question] = []
        for thing in present[:each]:
            added.append(_presence(thing, "yes", rng))
            table = together[rng.choice(present)] if rng.random() < 0.5 else count
            absent = {other: weight for other, weight in table.items() if other not in near}
            if absent:
                other = rng.choices(list(absent), weights=list(absent.values()))[0]
                added.append(_presence(other, "no", rng))
                near.add(other)
        result.append(Photo(photo.source, photo.row, (*photo.questions, *added)))
    return result


def _caption_of(photo: Photo) -> Question | None:
    return next((question for question in photo.questions if question.kind == "caption"), None)


def _presence(thing: str, answer: str, rng: Random) -> Question:
    prompt = PRESENCE_PROMPTS[0] if rng.random() < 0.6 else rng.choice(PRESENCE_PROMPTS)
    return Question("presence", prompt.format(with_article(thing)), (answer,), "captions")


# ---------------------------------------------------------------------- drawing questions


def draw(photo: Photo, most: int, rng: Random, weights: dict[tuple[str, str], float]) -> list[tuple[str, str, str]]:
    """Draw up to ``most`` questions about a photo as (kind, prompt, answer).

    ``weights`` has the chance of keeping a question of each (kind, answer), which evens out "no" against "yes" and
    limits the share of numbers.
    """
    chosen: list[tuple[str, str, str]] = []
    order = list(photo.questions)
    rng.shuffle(order)
    for question in order:
        if len(chosen) == most:
            break
        key = (question.kind, question.answers[0])
        if rng.random() >= weights.get(key, weights.get((question.kind, ""), 1.0)):
            continue
        chosen.append(phrase(question, rng))
    if not chosen and order:
        chosen.append(phrase(order[0], rng))
    return chosen


def phrase(question: Question, rng: Random) -> tuple[str, str, str]:
    """Word a question and choose its answer; short answers are asked with and without LLaVA's instruction."""
    if question.kind == "caption":
        return "caption", rng.choice(CAPTION_PROMPTS), rng.choice(question.answers)
    text = rng.choice(TEXT_PROMPTS) if question.kind == "text" else question.text
    if rng.random() < 0.5:
        text = f"{text}\n{SHORT}"
    return question.kind, text, question.answers[0]


def keep_weights(photos: Sequence[Photo]) -> dict[tuple[str, str], float]:
    """Return the chance of keeping a question, by kind and answer.

    "yes" and "no" come out equally often within yes/no questions and within relations; numbers are kept to about half
    of their share, the most frequent ones less.
    """
    counts = Counter((q.kind, q.answers[0]) for photo in photos for q in photo.questions)
    weights: dict[tuple[str, str], float] = {}
    for kind in ("yesno", "relation"):
        yes, no = counts[kind, "yes"], counts[kind, "no"]
        if yes and no:
            weights[kind, "yes"], weights[kind, "no"] = min(1.0, no / yes), min(1.0, yes / no)
    numbers = {key: n for key, n in counts.items() if key[0] == "number"}
    if numbers:
        typical = sorted(numbers.values(), reverse=True)[min(3, len(numbers) - 1)]
        weights |= {key: min(0.6, max(0.3, typical / n)) for key, n in numbers.items()}
    return weights
