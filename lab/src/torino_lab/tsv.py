"""Write the lab's benchmarks as TSV files in VLMEvalKit's layout, and compute the score of constant answers."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torino.core.io import write_atomic
from torino.datasets.video import Video
from torino_lab.selection import Item
from torino_lab.tasks import encode_image

if TYPE_CHECKING:
    from torino.evaluation.tasks import Task

COMMON_ANSWERS = 50  # candidates for the best constant answer


# ------------------------------------------------------------------ files


def write_tsv(path: Path, items: Sequence[Item]) -> None:
    """Write a benchmark; a repeated image is given by the index of its first row.

    The frames of videos are written into a folder beside the file, with its name.
    """
    columns = ["index", "image", "question", "answer", "category", "split"]
    if any(isinstance(item.image, Video) for item in items):
        columns.insert(1, "video_path")
    first_rows: dict[int, str] = {}
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", delimiter="\t", lineterminator="\n")
    writer.writeheader()
    for number, item in enumerate(items):
        index = str(number)
        row = {"index": index, "question": item.question.stem, "category": item.category, "split": "dev"}
        if isinstance(item.image, Video):
            first = first_rows.get(id(item.image), index)
            row["video_path"] = f"{path.stem}/{int(first):04d}"
            if first == index:
                write_frames(path.parent / row["video_path"], item.image)
        else:
            row["image"] = first_rows.get(id(item.image)) or base64.b64encode(encode_image(item.image)).decode()
        first_rows.setdefault(id(item.image), index)
        row["answer"] = json.dumps(item.answers, ensure_ascii=False) if item.answers else item.question.answer
        writer.writerow(row)

    def write(target: Path) -> None:
        target.write_text(text.getvalue(), encoding="utf-8")

    write_atomic(path, write)


def write_frames(folder: Path, video: Video) -> None:
    """Write the frames of a video as numbered JPEG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(video.frames):
        content = encode_image(frame)
        write_atomic(folder / f"{number:03d}.jpg", lambda target, content=content: target.write_bytes(content))


def fingerprint(items: Iterable[Item]) -> str:
    """Return a hash of all questions and answers; pixels are excluded, because image decoders differ."""
    digest = hashlib.sha256()
    for item in items:
        fields = [item.category, item.question.text, item.question.answer, *item.answers]
        digest.update(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------ constant answers


def majority_score(task: Task) -> tuple[float, str]:
    """Return the best score that one answer to all questions reaches, and that answer.

    The answer is chosen with knowledge of the correct answers, so it is a little better than a majority learned
    elsewhere.
    """
    counts = Counter(sample.answers[0] for sample in task)
    scored = [
        (task.score([{"index": sample.index, "prediction": answer} for sample in task]).value, answer)
        for answer, _ in counts.most_common(COMMON_ANSWERS)
    ]
    return max(scored)
