"""Draw docs/images/question.jpg: one photo, three questions, and what torino-q keeps for each of them.

The words that each token is relevant to are written to research/results/question-figure.json.

python scripts/draw_question.py
"""

from __future__ import annotations

import argparse
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from torino import make
from torino.cli._common import load_sae
from torino.core.io import write_json
from torino.datasets.bundled import example_folder
from torino.evaluation.latency.probes import machine, versions
from torino.viz.draw import draw_reduction, save_picture
from torino.viz.figures import truncate_text
from torino.vlm import load_vlm

PHOTO = "coffee"
QUESTIONS = ("What is in the photo?", "What color is the cup?", "What is the table made of?")
SIDE, GAP, HEAD, FOOT = 300, 12, 34, 52
INK, MUTED, RED = (28, 30, 34), (112, 117, 125), (220, 40, 40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--sae", default="lab")
    parser.add_argument("--photo", default=PHOTO, help="bundled photo (default: %(default)s)")
    parser.add_argument("--questions", nargs="+", default=list(QUESTIONS))
    parser.add_argument("--budget", type=int, default=32)
    root = Path(__file__).parents[1]
    parser.add_argument("--picture", type=Path, default=root / "docs" / "images" / "question.jpg")
    parser.add_argument("--json", type=Path, default=root / "research" / "results" / "question-figure.json")
    args = parser.parse_args()
    vlm = load_vlm(args.model)
    reducer = make("torino-q", sae=load_sae(args.sae), budget=args.budget)
    encoded = vlm.encode(example_folder() / "photos" / f"{args.photo}.jpg", [reducer])
    columns, results = list[Image.Image](), list[dict[str, object]]()
    for question in args.questions:
        answer = vlm.answer(encoded.with_question(question), reducer, max_new_tokens=12)
        plan, text = answer.reduction, answer.text.strip()
        words = Counter(word for asked in plan.words for word in asked)
        photo = answer.seen[0]
        drawn = draw_reduction(plan, photo, style="outlined", side=SIDE).resize((SIDE, SIDE))
        rows, cols = plan.grid
        pen = ImageDraw.Draw(drawn)
        for role, anchor in zip(plan.role, plan.anchor.tolist(), strict=True):
            if role == "question":
                row, column = divmod(anchor, cols)
                box = (column * SIDE / cols, row * SIDE / rows, (column + 1) * SIDE / cols, (row + 1) * SIDE / rows)
                pen.rectangle(tuple(map(round, box)), outline=RED, width=2)
        columns.append(label(drawn, question, text, words, plan.role.count("question")))
        kept = {"question": question, "answer": text, "tokens": len(plan), "anchors": plan.anchor.tolist()}
        results.append({**kept, "roles": list(plan.role), "words": [list(asked) for asked in plan.words]})
    page = Image.new("RGB", (GAP + len(columns) * (SIDE + GAP), HEAD + SIDE + FOOT), (255, 255, 255))
    for number, column in enumerate(columns):
        page.paste(column, (GAP + number * (SIDE + GAP), 0))
    save_picture(page, args.picture)
    facts = {"command": "python scripts/draw_question.py", "model": args.model, "photo": args.photo, "seed": None}
    facts |= {"method": reducer.spec, "results": results, "hardware": machine(), "versions": versions()}
    write_json(args.json, {**facts, "date": datetime.now(UTC).date().isoformat()})
    print(f"Drew {args.picture.name}.")


def label(drawn: Image.Image, question: str, answer: str, words: Counter[str], asked: int) -> Image.Image:
    """Put the question over a picture, and the answer and the words that tokens are relevant to below it."""
    column = Image.new("RGB", (SIDE, HEAD + SIDE + FOOT), (255, 255, 255))
    column.paste(drawn, (0, HEAD))
    pen, large, small = ImageDraw.Draw(column), ImageFont.load_default(16), ImageFont.load_default(13)
    pen.text((0, 8), truncate_text(question, large, SIDE), INK, large)
    relevant = ", ".join(f'"{word}" {count}' for word, count in words.most_common())
    why = f"{asked} tokens by the question; relevant to {relevant}" if relevant else "no word stands out: as torino-x"
    pen.text((0, HEAD + SIDE + 6), truncate_text(f"Answer: {answer}", small, SIDE), INK, small)
    pen.text((0, HEAD + SIDE + 26), truncate_text(why, small, SIDE), MUTED, small)
    return column


if __name__ == "__main__":
    main()
