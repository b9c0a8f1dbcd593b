"""Build the lab's benchmarks from photos that were not trained on.

Seven consist of real questions or captions about real photos: POPE, VQA v2, OK-VQA, VSR, DAQUAR, scene text and
captions. Four are generated, with exact and balanced answers: collages of photos, small shapes or signs drawn over
photos, and clips of eight frames made from photos.
The same files and the same seed give the same questions.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

from PIL import Image

from torino.core.errors import BadFile, unknown_name
from torino.core.extras import optional_import
from torino.datasets.images import Picture
from torino_lab import pictures
from torino_lab.catalog import TASKS, LabTask
from torino_lab.clips import pan_clips, scene_clips, shape_clips
from torino_lab.corpus import ON_PHOTO, Corpus, read_photos
from torino_lab.questions import ImageQuestion
from torino_lab.selection import ImageQuestions, Item, select_pairs, select_questions
from torino_lab.training.generated import american
from torino_lab.training.questions import tidy, tidy_question

SEED = 2026
Half = Literal["choose", "report"]
CAPTION_PROMPT = "Describe the photo in one sentence."
CAPTION_PHOTOS = 300
GRIDS = ((1, 2), (2, 1), (2, 2), (2, 2), (2, 3), (3, 2))
KINDS = {
    "Lab-Collage": {"cell": "cell", "which": "which-cell", "presence": "cell-presence", "scene": "cell-scene"},
    "Lab-Small": {"where": "small", "shape": "shape", "color": "shape-colour", "presence": "shape-presence"},
    "Lab-Signs": {"read": "text", "presence": "text-presence"},
    "Lab-Clips": {
        "presence": "clip-presence",
        "order": "clip-order",
        "count": "clip-count",
        "when": "clip-when",
        "appear": "clip-appear",
        "shapes": "clip-shapes",
        "pan": "clip-pan",
    },
}
"""The kind of generated question in each part of a benchmark."""


CLIP_MAKERS = {"appear": shape_clips, "shapes": shape_clips, "pan": pan_clips}
"""What makes the clips of some parts; those of the others are scenes."""


def in_half(photo: Picture, half: Half | None) -> bool:
    """Return whether a photo, given as the bytes of its file, belongs to a half of the photos."""
    if half is None:
        return True
    assert isinstance(photo, bytes)
    return (hashlib.sha256(photo).digest()[0] % 2 == 0) == (half == "choose")


def draw_photos(items: Sequence[Item], photos: int, seed: int) -> list[Item]:
    """Return all questions about some photos, drawn at random."""
    images = list(dict.fromkeys(id(item.image) for item in items))
    chosen = set(Random(f"{seed}:photos").sample(images, min(photos, len(images))))
    return [item for item in items if id(item.image) in chosen]


class TaskBuilder:
    """Build the benchmarks.

    Parameters
    ----------
    data : Path
        Folder with the parquet files of dev photos (see :mod:`torino_lab.catalog`).
    seed : int
        Of the generated benchmarks.
    scale : float
        Number of questions of the generated benchmarks, relative to the default.
    half : {"choose", "report"}, optional
        Use only one half of the photos: those on which settings may be chosen, or those on which results are reported.
        The hash of a photo's file decides. By default all photos.
    photos : int, optional
        Use at most this many photos of each real benchmark, drawn at random, with all of their questions.

    Examples
    --------
    >>> items = TaskBuilder(Path("data")).make("Lab-POPE")  # doctest: +SKIP
    """

    def __init__(
        self,
        data: Path,
        *,
        seed: int = SEED,
        scale: float = 1.0,
        half: Half | None = None,
        photos: int | None = None,
    ) -> None:
        self.data, self.seed, self.scale, self.half, self.photos = data, seed, scale, half, photos
        self._corpora: dict[tuple[str, ...], Corpus] = {}

    def make(self, name: str) -> list[Item]:
        """Return all questions of a benchmark."""
        if name not in TASKS:
            raise unknown_name("lab benchmark", name, TASKS)
        benchmark = TASKS[name]
        if benchmark.parts is not None:
            return self._generated(benchmark)
        rows = [row for file in benchmark.files for row in self._rows(file)]
        items = _captions(rows) if benchmark.kind == "caption" else _asked(rows, benchmark)
        return items if self.photos is None else draw_photos(items, self.photos, self.seed)

    def _rows(self, file: str) -> list[dict[str, Any]]:
        with optional_import("Parquet files need", "torino[lab]"):
            import pyarrow.parquet as pq

        path = self.data / f"{file}.parquet"
        if not path.is_file():
            raise BadFile(f"There is no file {path}. Give the folder with the lab's parquet files.")
        return [row for row in pq.read_table(path).to_pylist() if in_half(row["image"], self.half)]

    # -------------------------------------------------------------- generated

    def _generated(self, benchmark: LabTask) -> list[Item]:
        rng = Random(f"{self.seed}:{benchmark.name}")
        draw = {"Lab-Collage": _collages, "Lab-Small": _small, "Lab-Signs": _signs, "Lab-Clips": scene_clips}
        corpus = self._corpus(benchmark.files)
        items: list[Item] = []
        for part, count in (benchmark.parts or {}).items():
            total = max(2, round(count * self.scale))
            make = CLIP_MAKERS.get(part, draw[benchmark.name])
            source, kind = make(corpus, rng), KINDS[benchmark.name][part]
            if part == "presence":
                pairs = ((image, [q for q in questions if q.kind == kind]) for image, questions in source)
                items += select_pairs(pairs, part, total // 2)
            else:
                items += select_questions(source, (kind,), part, total, rng, per_image=3)
        return [_american(item) for item in items]

    def _corpus(self, files: tuple[str, ...]) -> Corpus:
        if files not in self._corpora:
            photos = read_photos([self.data / f"{file}.parquet" for file in files])
            self._corpora[files] = Corpus([photo for photo in photos if in_half(photo[1], self.half)])
        return self._corpora[files]


def _asked(rows: Sequence[dict[str, Any]], benchmark: LabTask) -> list[Item]:
    """Return the questions of a benchmark's origins; all their answers count."""
    items: list[Item] = []
    for row in rows:
        for text, answers, source in zip(row["questions"], row["answers"], row["sources"], strict=True):
            if not source.startswith(benchmark.sources):
                continue
            category = (
                source.partition("-")[2].replace("+", ",") if benchmark.kind == "pope" else _category(text, answers[0])
            )
            question = ImageQuestion(source, tidy_question(text), answers[0])
            items.append(Item(row["image"], question, category, tuple(answers) if benchmark.kind == "vqa" else ()))
    return items


def _category(text: str, answer: str) -> str:
    """Return the kind of a question, as VQA v2 groups them: by its answer."""
    if answer.lower() in {"yes", "no"}:
        return "yes/no"
    return "number" if answer.isdigit() or text.lower().startswith("how many") else "other"


def _captions(rows: Sequence[dict[str, Any]]) -> list[Item]:
    question = ImageQuestion("caption", CAPTION_PROMPT, "")
    items = [
        Item(row["image"], question, "caption", tuple(tidy(text) for text in row["captions"] if text.strip()))
        for row in rows
        if row["captions"]
    ]
    return items[:CAPTION_PHOTOS]


def _collages(corpus: Corpus, rng: Random) -> Iterator[ImageQuestions]:
    while True:
        image, cells = corpus.collages.make(rng, rng.choice(GRIDS))
        yield image, corpus.collages.ask(cells, rng)


def _small(corpus: Corpus, rng: Random) -> Iterator[ImageQuestions]:
    while True:
        yield pictures.small_shapes(_background(corpus, rng), rng)


def _signs(corpus: Corpus, rng: Random) -> Iterator[ImageQuestions]:
    while True:
        yield pictures.sign_scene(_background(corpus, rng), rng)


def _background(corpus: Corpus, rng: Random) -> Image.Image | None:
    """Return a photo to draw over, or None for a plain background."""
    return corpus.crop_photo(rng.randrange(len(corpus.facts))) if rng.random() < ON_PHOTO else None


def _american(item: Item) -> Item:
    question = item.question
    return Item(
        item.image, ImageQuestion(question.kind, american(question.text), american(question.answer)), item.category
    )


def encode_image(image: Image.Image | bytes, quality: int = 92) -> bytes:
    """Return the bytes of an image file; photos that are files already stay as they are."""
    if isinstance(image, bytes):
        return image
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling=0)
    return file.getvalue()
