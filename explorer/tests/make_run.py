"""Write a small task about the bundled photos and evaluate the lab model on it, for the tests of the explorer.

python tests/make_run.py FOLDER
"""

from __future__ import annotations

import base64
import csv
import sys
from pathlib import Path

from torino.datasets.bundled import example_folder
from torino.evaluation.runner import RunPlan, evaluate
from torino.evaluation.tasks import open_task
from torino.vlm import load_vlm
from torino.vlm.loading import quiet_loading
from torino.vlm.saes import load_encoder

QUESTIONS = [
    ("astronaut", "What color is the suit?", "orange"),
    ("astronaut", "Is there a <b>dog</b> in the photo?", "no"),
    ("coffee", "What is in the cup?", "coffee"),
    ("chelsea", "What animal is this?", "cat"),
    ("chelsea", "What color is the cat?", "orange"),
    ("rocket", "Is it night?", "yes"),
]


def main() -> None:
    """Write the task and the run."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "photos.tsv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["index", "image", "question", "answer"])
        for number, (photo, question, answer) in enumerate(QUESTIONS):
            image = base64.b64encode((example_folder() / "photos" / f"{photo}.jpg").read_bytes()).decode()
            writer.writerow([number, image, question, answer])
    with quiet_loading():
        vlm = load_vlm("lab")
    plan = RunPlan(["torino-m", "random"], dynamic=[], fixed=[8], seeds=1)
    evaluate(
        folder / "run", vlm=vlm, tasks=[open_task(folder / "photos.tsv")], plan=plan, saes={"lab": load_encoder("lab")}
    )


if __name__ == "__main__":
    main()
