"""Ask the lab's model twenty questions about the bundled photos, and to describe each photo; write the answers as JSON.

The questions and the answers that count as right were fixed before the model was asked. Each question is answered with
all tokens and with the tokens that a method keeps.

Examples
--------
::

    python lab/scripts/twenty_questions.py -o research/results/lab-questions.json
    python lab/scripts/twenty_questions.py --method torino-x --budget 43 -o questions.json
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

from torino.core.io import write_json
from torino.datasets.bundled import PHOTOS, example_folder
from torino.evaluation.latency.probes import machine, versions
from torino.serving.settings import ReductionSettings
from torino.vlm import load_vlm

QUESTIONS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "astronaut": [
        ("Is there a person in the photo?", ("yes",)),
        ("What color is the suit?", ("orange",)),
        ("Is the woman smiling?", ("yes",)),
        ("Is there a dog in the photo?", ("no",)),
        ("What is on the left of the woman?", ("flag", "american flag", "us flag")),
    ],
    "coffee": [
        ("What is in the cup?", ("coffee", "espresso")),
        ("What color is the saucer?", ("red", "orange", "red and white")),
        ("Is there a spoon in the photo?", ("yes",)),
        ("What is the table made of?", ("wood", "wooden")),
        ("How many cups are there?", ("1", "one")),
    ],
    "chelsea": [
        ("What animal is this?", ("cat", "kitten")),
        ("What color are the eyes?", ("green", "yellow")),
        ("Is the cat sleeping?", ("no",)),
        ("Is there a car in the photo?", ("no",)),
        ("How many eyes can be seen?", ("2", "two")),
    ],
    "rocket": [
        ("What is in the middle of the photo?", ("rocket", "spaceship", "missile", "spacecraft")),
        ("What color is the sky?", ("blue",)),
        ("Is it daytime?", ("no",)),
        ("Are there people in the photo?", ("no",)),
        ("How many towers are there?", ("2", "two", "3", "three")),
    ],
}
DESCRIBE = "Describe the photo in one sentence."


def is_right(answer: str, accepted: tuple[str, ...]) -> bool:
    """Return whether the answer, without case, articles and punctuation, is one of the accepted ones."""
    words = re.sub(r"[^\w ]", "", answer.lower()).split()
    return " ".join(word for word in words if word not in {"a", "an", "the"}) in accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--method", default="torino-m", help="method for the reduced answers (default: %(default)s)")
    add("--budget", type=int, default=43, help="its tokens (default: %(default)s, 22 %%)")
    add("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    settings = ReductionSettings(args.method, sae="lab", budget=args.budget)
    vlm, reducer = load_vlm("lab"), settings.build()
    rows: list[dict[str, Any]] = []
    captions: list[dict[str, str]] = []
    for photo in PHOTOS:
        path = example_folder() / "photos" / f"{photo}.jpg"
        for question, accepted in QUESTIONS[photo]:
            inputs = vlm.inputs(path, question)
            full, reduced = (vlm.answer(inputs, one, max_new_tokens=16).text.strip() for one in (None, reducer))
            rows.append(
                {
                    "photo": photo,
                    "question": question,
                    "accepted": list(accepted),
                    "all tokens": full,
                    "all tokens right": is_right(full, accepted),
                    "reduced": reduced,
                    "reduced right": is_right(reduced, accepted),
                }
            )
            print(f"{photo}: {question} {full!r}, reduced {reduced!r}", flush=True)
        inputs = vlm.inputs(path, DESCRIBE)
        full, reduced = (vlm.answer(inputs, one, max_new_tokens=40).text.strip() for one in (None, reducer))
        captions.append({"photo": photo, "all tokens": full, "reduced": reduced})
        print(f"{photo}: {full!r}, reduced {reduced!r}", flush=True)
    write_json(
        args.output,
        {
            "format": "torino-results/1",
            "name": args.output.stem,
            "title": "Twenty questions about the bundled photos",
            "report": None,
            "notes": ["The questions were fixed before the model was asked. Shown in docs/lab.md; there is no report."],
            "command": f"python lab/scripts/twenty_questions.py --method {args.method} --budget {args.budget}",
            "date": time.strftime("%Y-%m-%d"),
            "hardware": machine(),
            "versions": versions(),
            "method": args.method,
            "budget": args.budget,
            "rows": rows,
            "descriptions": captions,
        },
    )


if __name__ == "__main__":
    main()
