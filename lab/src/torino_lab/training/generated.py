"""Generated training images: what real data lacks is drawn from training photos and shapes.

Collages of photos (where is what), small shapes (fine detail), signs (text) and drawn scenes (colour, form, count), as
a parquet file with the columns of the other sources.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from random import Random

from torino.core.extras import optional_import
from torino.core.io import write_atomic
from torino_lab.corpus import CaptionedPhoto, Corpus
from torino_lab.questions import ImageQuestion

COUNTS = {"collage": 1600, "small": 900, "sign": 900, "shapes": 400}
MOST_QUESTIONS = 12
QUALITY = 92
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def write_generated(photos: Sequence[CaptionedPhoto], file: Path, seed: int, scale: float = 1.0) -> None:
    """Draw images with questions and write them to a parquet file.

    Parameters
    ----------
    photos : sequence of (name, bytes, captions)
        Training photos.
    file : Path
    seed : int
    scale : float
        Number of images, relative to :data:`COUNTS`.
    """
    with optional_import("Parquet files need", "torino[lab]"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    corpus = Corpus(photos)
    rows: dict[str, list[object]] = {
        name: [] for name in ("file", "image", "captions", "questions", "answers", "sources")
    }
    for kind, count in COUNTS.items():
        for number in range(max(1, round(count * scale))):
            image, ask = corpus.make_image(kind, Random(f"{seed}:{kind}:{number}"))
            asked: dict[str, ImageQuestion] = {}
            for turn in range(3):  # several sets of questions about one image, each once
                asked |= {
                    question.text: question
                    for question in ask(Random(f"{seed}:{kind}:{number}:{turn}"))
                    if not question.options and question.kind != "caption"
                }
            chosen = list(asked.values())[:MOST_QUESTIONS]
            data = io.BytesIO()
            image.save(data, "JPEG", quality=QUALITY, subsampling=0)
            rows["file"].append(f"generated/{kind}-{number}.jpg")
            rows["image"].append(data.getvalue())
            rows["captions"].append([])
            rows["questions"].append([american(question.text) for question in chosen])
            rows["answers"].append([[american(question.answer)] for question in chosen])
            rows["sources"].append([f"generated-{kind}:{question.kind}" for question in chosen])

    def write(target: Path) -> None:
        pq.write_table(pa.table(rows), target)

    write_atomic(file, write)


def american(text: str) -> str:
    """Write a question or an answer as VQA v2 does: American spelling, numbers in digits.

    Examples
    --------
    >>> american("What colour is it?"), american("grey"), american("two")
    ('What color is it?', 'gray', '2')
    """
    if text in NUMBERS:
        return str(NUMBERS.index(text))
    return text.replace("colour", "color").replace("grey", "gray")
