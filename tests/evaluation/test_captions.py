"""CIDEr-D and ROUGE-L against slow transcriptions of their formulas, and the tasks that use them."""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from torino.evaluation.captions import CaptionScorer, split_words
from torino.evaluation.tasks import open_task

WORDS = ["a", "the", "dog", "cat", "man", "red", "blue", "runs", "sits", "on", "grass", "street", "with", "ball", "two"]


def slow_cider(caption: str, references: list[list[str]], image: int) -> float:
    """CIDEr-D by its definition (Vedantam et al. 2015, section 4): ngrams of 1 to 4 words, sigma 6, clipped counts."""

    def ngrams(text: str, n: int) -> Counter[str]:
        words = text.lower().rstrip(".").split()
        return Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))

    total = 0.0
    for n in range(1, 5):
        document = Counter(gram for texts in references for gram in {g for text in texts for g in ngrams(text, n)})

        def vector(text: str, n: int = n, document: Counter[str] = document) -> dict[str, float]:
            return {g: c * math.log(len(references) / max(1, document[g])) for g, c in ngrams(text, n).items()}

        own = vector(caption)
        for text in references[image]:
            other = vector(text)
            dot = sum(min(own.get(g, 0.0), value) * value for g, value in other.items())
            norm = math.sqrt(sum(v * v for v in own.values()) * sum(v * v for v in other.values()))
            gap = ngrams(caption, 2).total() - ngrams(text, 2).total()  # COCO's code counts bigrams
            total += math.exp(-(gap**2) / 72) * (dot / norm if norm else 0.0) / len(references[image])
    return 10 * total / 4


def slow_lcs(a: list[str], b: list[str]) -> int:
    if not a or not b:
        return 0
    return 1 + slow_lcs(a[:-1], b[:-1]) if a[-1] == b[-1] else max(slow_lcs(a[:-1], b), slow_lcs(a, b[:-1]))


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_slow_transcriptions(seed: int) -> None:
    rng = Random(seed)

    def sentence() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 7))) + rng.choice(["", "."])

    references = [[sentence() for _ in range(rng.randint(1, 5))] for _ in range(6)]
    scorer = CaptionScorer(references)
    for image, texts in enumerate(references):
        for caption in (sentence(), texts[0]):
            assert scorer.cider(image, caption) == pytest.approx(slow_cider(caption, references, image), abs=1e-12)
            words = split_words(caption)
            common = [(slow_lcs(words, split_words(text)), len(split_words(text))) for text in texts]
            precision = max(c / len(words) for c, _ in common)
            recall = max(c / n for c, n in common)
            expected = 2.44 * precision * recall / (recall + 1.44 * precision) if precision and recall else 0.0
            assert scorer.rouge(image, caption) == pytest.approx(expected)


def test_degenerate_captions_score_nothing() -> None:
    scorer = CaptionScorer([["A dog."], []])
    assert (scorer.cider(0, ""), scorer.rouge(0, "")) == (0.0, 0.0)
    assert (scorer.cider(1, "A dog."), scorer.rouge(1, "A dog.")) == (0.0, 0.0)
    assert scorer.cider(0, "!?") == 0.0


def test_a_caption_task_is_scored_by_cider_and_rouge(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    pixels = base64.b64encode(file.getvalue()).decode()
    references = [["A dog runs on grass.", "The dog runs."], ["Two men with a ball."], ["A red bus in a street."]]
    lines = [
        f"{n}\t{pixels}\tDescribe the photo.\t{json.dumps(texts).replace(chr(9), ' ')}"
        for n, texts in enumerate(references)
    ]
    path = tmp_path / "captions.tsv"
    path.write_text("index\timage\tquestion\tanswer\n" + "\n".join(lines) + "\n", encoding="utf-8")
    task = open_task(path, kind="caption")
    assert [sample.answers for sample in task] == [tuple(texts) for texts in references]
    scorer = CaptionScorer(references)
    rows = [{"index": str(n), "prediction": texts[0]} for n, texts in enumerate(references)]
    score = task.score(rows)
    assert score.metric == "CIDEr-D"
    assert score.value == pytest.approx(100 * sum(scorer.cider(n, t[0]) for n, t in enumerate(references)) / 3)
    assert score.parts["ROUGE-L"] == pytest.approx(100.0)
    assert task.score([*rows[:2], {"index": "2", "prediction": ""}]).value < score.value
    part = task.score(rows[:1], partial=True)
    assert part.value == pytest.approx(100 * scorer.cider(0, references[0][0])), (
        "document frequencies are of all photos"
    )
    assert task.for_model(None).prompt(task[0]) == "Describe the photo."
