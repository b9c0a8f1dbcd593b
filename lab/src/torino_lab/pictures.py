"""Pictures drawn on the fly with known answers: small shapes, signs to read, scenes of shapes, bar charts.

Each generator returns the picture and questions about it; it draws everything from the generator it is given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw, ImageFont

from torino_lab.questions import Question, choice
from torino_lab.words import COLOURS, NUMBERS, SHAPES, SIGN_WORDS

SIDE = 336
SCALE = 2  # drawn larger and scaled down, so that edges are smooth
RGB = {
    "red": (215, 35, 35),
    "orange": (245, 135, 15),
    "yellow": (248, 220, 40),
    "green": (30, 150, 60),
    "blue": (35, 75, 215),
    "purple": (130, 45, 175),
    "pink": (250, 150, 195),
    "brown": (125, 75, 35),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
    "grey": (128, 128, 128),
}
PAINTS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black", "white")
GROUNDS = (
    (250, 250, 250),
    (15, 15, 15),
    (205, 205, 205),
    (70, 70, 70),
    (215, 230, 245),
    (240, 232, 210),
    (200, 220, 195),
)
PLATES = (
    *(("white", "black"), ("black", "white"), ("yellow", "black"), ("red", "white"), ("blue", "white")),
    *(("green", "white"), ("orange", "black"), ("purple", "white")),
)
"""Colours of a sign and of what is written on it."""
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
TOPICS = {"rain": "week", "snow": "week", "milk": "cow", "bread": "shop", "fish": "boat"}

Drawn = tuple[Image.Image, list[Question]]


@dataclass(frozen=True)
class Shape:
    """A shape of one colour; ``x``, ``y`` and ``radius`` in pixels of the finished picture."""

    colour: str
    form: str
    x: int
    y: int
    radius: int

    @property
    def name(self) -> str:
        """Such as ``red circle``."""
        return f"{self.colour} {self.form}"

    @property
    def place(self) -> str:
        """Which of nine parts of the picture it lies in."""
        return zone(self.x, self.y)


def zone(x: float, y: float) -> str:
    """One of nine parts of the picture, such as ``top left``; the one in the middle is ``middle``.

    Examples
    --------
    >>> zone(10, 10), zone(168, 168), zone(168, 300), zone(300, 168)
    ('top left', 'middle', 'bottom middle', 'middle right')
    """
    row, column = ROWS[min(2, int(y * 3 / SIDE))], COLUMNS[min(2, int(x * 3 / SIDE))]
    return "middle" if row == column == "middle" else f"{row} {column}"


def zones() -> list[str]:
    """All nine, row by row."""
    return [zone(SIDE * (column + 0.5) / 3, SIDE * (row + 0.5) / 3) for row in range(3) for column in range(3)]


# ------------------------------------------------------------------ drawing


def paint(shapes: Iterable[Shape], ground: Image.Image | tuple[int, int, int]) -> Image.Image:
    """Draw shapes on a photo, where each gets a rim of black and white, or on plain ground."""
    photo = isinstance(ground, Image.Image)
    size = (SIDE * SCALE, SIDE * SCALE)
    picture = ground.resize(size, Image.Resampling.BICUBIC) if photo else Image.new("RGB", size, ground)
    pen = ImageDraw.Draw(picture)
    for shape in shapes:
        if photo:
            dark = sum(RGB[shape.colour]) < 380
            pen.polygon(_outline(shape, 5), fill=RGB["white" if dark else "black"])
        pen.polygon(_outline(shape, 0), fill=RGB[shape.colour])
    return picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _outline(shape: Shape, rim: int) -> list[tuple[float, float]]:
    radius = (shape.radius + rim) * SCALE
    x, y = shape.x * SCALE, shape.y * SCALE
    if shape.form == "cross":
        arm = (shape.radius * 0.36 + rim) * SCALE
        corners = [(-arm, -radius), (arm, -radius), (arm, -arm), (radius, -arm), (radius, arm), (arm, arm)]
        corners += [(arm, radius), (-arm, radius), (-arm, arm), (-radius, arm), (-radius, -arm), (-arm, -arm)]
        return [(x + dx, y + dy) for dx, dy in corners]
    count, turn = _CORNERS[shape.form]
    radius *= 1.15 if shape.form in ("triangle", "square") else 1.0  # so that all look about as large
    wide = 0.72 if shape.form == "diamond" else 1.0
    points: list[tuple[float, float]] = []
    for corner in range(count):
        angle = math.pi * (2 * corner / count + turn)
        reach = radius * (0.45 if shape.form == "star" and corner % 2 else 1.0)
        points.append((x + reach * wide * math.sin(angle), y + reach * math.cos(angle)))
    return points


_CORNERS = {"circle": (48, 0.0), "square": (4, 0.25), "triangle": (3, 1.0), "star": (10, 1.0), "diamond": (4, 0.0)}


def _plain(colours: Iterable[str], rng: Random) -> tuple[int, int, int]:
    """A ground that none of the colours drowns in."""
    used = [RGB[colour] for colour in colours]
    able = [ground for ground in GROUNDS if all(math.dist(ground, colour) > 110 for colour in used)]
    return rng.choice(able) if able else (150, 160, 150)


# ------------------------------------------------------------------ questions that several share


def _is_there(shapes: Sequence[Shape], rng: Random) -> Question:
    """Is there a red circle? A no differs in colour or in form from one that is there."""
    shape = rng.choice(shapes)
    there = {(other.colour, other.form) for other in shapes}
    colour, form, answer = shape.colour, shape.form, "yes"
    if rng.random() < 0.5:
        answer = "no"
        able = [
            (c, f) for c in PAINTS for f in SHAPES if (c, f) not in there and (c == shape.colour or f == shape.form)
        ]
        seen = [(c, f) for c, f in able if any(o.colour == c for o in shapes) and any(o.form == f for o in shapes)]
        colour, form = rng.choice(seen if seen and rng.random() < 0.5 else able)
    article = "an" if colour[0] in "aeiou" else "a"
    return Question("shape-presence", f"Is there {article} {colour} {form}?", answer)


def _side(one: Shape, other: Shape, rng: Random) -> Question | None:
    """Is the one left of, right of, above or below the other? Only where it is plain to see."""
    across, down = one.x - other.x, one.y - other.y
    able = [("left of", "right of", across)] if abs(across) > 45 else []
    able += [("above", "below", down)] if abs(down) > 45 else []
    if not able:
        return None
    before, after, distance = rng.choice(able)
    word = rng.choice((before, after))
    return Question(
        "relation",
        f"Is the {one.name} {word} the {other.name}?",
        "yes" if (distance < 0) == (word == before) else "no",
    )


def _colour_and_form(shapes: Sequence[Shape], rng: Random) -> list[Question]:
    """Colour of a form that is there once, form of a colour that is there once."""
    forms, colours = Counter(shape.form for shape in shapes), Counter(shape.colour for shape in shapes)
    asked: list[Question] = []
    for shape in shapes:
        if forms[shape.form] == 1:
            asked.append(Question("shape-colour", f"What colour is the {shape.form}?", shape.colour))
            wrong = rng.sample([colour for colour in PAINTS if colour != shape.colour], 3)
            if rng.random() < 0.25:
                asked.append(choice("choice", f"What colour is the {shape.form}?", shape.colour, wrong, rng))
            elif rng.random() < 0.15:
                texts = [COLOURS[colour] for colour in (shape.colour, *wrong)]
                asked.append(choice("choice-zh", f"{SHAPES[shape.form]}是什么颜色？", texts[0], texts[1:], rng))
        if colours[shape.colour] == 1:
            asked.append(Question("shape", f"Which shape is {shape.colour}?", shape.form))
            wrong = rng.sample([form for form in SHAPES if form != shape.form], 3)
            if rng.random() < 0.25:
                asked.append(choice("choice", f"Which shape is {shape.colour}?", shape.form, wrong, rng))
            elif rng.random() < 0.15:
                texts = [SHAPES[form] for form in (shape.form, *wrong)]
                asked.append(choice("choice-zh", f"{COLOURS[shape.colour]}的是什么形状？", texts[0], texts[1:], rng))
    return asked


# ------------------------------------------------------------------ small shapes


def small(photo: Image.Image | None, rng: Random) -> Drawn:
    """One to three small shapes, 28 to 60 pixels across, on a photo or on plain ground: colour, form, where."""
    count = rng.choices((1, 2, 3), (5, 3, 2))[0]
    colours, forms = rng.sample(PAINTS, count), rng.sample(list(SHAPES), count)
    shapes: list[Shape] = []
    for index, cell in enumerate(rng.sample(range(9), count)):
        radius = rng.randint(14, 30)
        x, y = (int(SIDE * (part + 0.5) / 3) + rng.randint(-22, 22) for part in (cell % 3, cell // 3))
        shapes.append(Shape(colours[index], forms[index], x, y, radius))
    picture = paint(shapes, photo if photo else _plain(colours, rng))
    asked = _colour_and_form(shapes, rng)
    for shape in shapes:
        asked.append(Question("small", f"Where is the {shape.form}?", shape.place))
        if rng.random() < 0.3:
            wrong = rng.sample([place for place in zones() if place != shape.place], 3)
            asked.append(choice("choice", f"Where is the {shape.form}?", shape.place, wrong, rng))
    asked += [_is_there(shapes, rng) for _ in range(3)]
    asked += [Question("small-count", "How many shapes are there?", NUMBERS[count])]
    for one in shapes:
        for other in shapes:
            if one != other and rng.random() < 0.5 and (side := _side(one, other, rng)):
                asked.append(side)
    rng.shuffle(asked)
    return picture, asked


# ------------------------------------------------------------------ signs


@dataclass(frozen=True)
class Sign:
    """A plate with a word or a number on it; ``where`` is empty if it is the only one."""

    text: str
    plate: str
    ink: str
    box: tuple[int, int, int, int]
    where: str


def signs(photo: Image.Image | None, rng: Random) -> Drawn:
    """One plate to read, or two side by side or one above the other."""
    layout = rng.choices(("one", "across", "down"), (5, 3, 2))[0]
    plates = rng.sample(PLATES, 2)
    texts = rng.sample(SIGN_WORDS, 2)
    texts = [str(rng.randint(10, 99)) if rng.random() < 0.3 else text for text in texts]
    found: list[Sign] = []
    picture = (photo or Image.new("RGB", (SIDE, SIDE), _plain([plates[0][0], plates[1][0]], rng))).copy()
    for index, text in enumerate(texts[: 1 if layout == "one" else 2]):
        where = {"one": "", "across": ("left", "right")[index], "down": ("top", "bottom")[index]}[layout]
        room = (SIDE // 2 - 14 if layout == "across" else SIDE - 30, 140 if layout == "down" else 200)
        font, width, height = _fitted(text.upper(), room, rng)
        shown = text.upper() if rng.random() < 0.6 else text
        x = rng.randint(6, SIDE - width - 6) if layout != "across" else index * SIDE // 2 + (SIDE // 2 - width) // 2
        top, low = {
            "one": (6, SIDE - height - 6),
            "across": (70, SIDE - height - 70),
            "down": (6, SIDE // 2 - height - 4),
        }[layout]
        y = rng.randint(top, max(top, low)) + (index * SIDE // 2 if layout == "down" else 0)
        pen = ImageDraw.Draw(picture)
        box = (x, y, x + width, y + height)
        pen.rounded_rectangle(box, 8, RGB[plates[index][0]], RGB[plates[index][1]], 3)
        pen.text((x + width / 2, y + height / 2), shown, RGB[plates[index][1]], font, anchor="mm")
        found.append(Sign(text, *plates[index], box, where))
    return picture, _about_signs(found, rng)


def _fitted(
    text: str, room: tuple[int, int], rng: Random
) -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, int, int]:
    """A font that fills no more than the room, with the width and height of the plate."""
    size = rng.randint(48, 110)
    while True:
        font = ImageFont.load_default(size=size)
        left, top, right, bottom = font.getbbox(text)
        width, height = int(right - left) + 26, int((bottom - top) * 1.25) + 22
        if (width <= room[0] and height <= room[1]) or size <= 30:
            return font, width, height
        size -= 4


def _about_signs(found: Sequence[Sign], rng: Random) -> list[Question]:
    asked = [Question("sign-count", "How many signs are there?", NUMBERS[len(found)])]
    for sign in found:
        name = f"{sign.where} sign".strip()
        asked.append(Question("text", f"What does the {name} say?", sign.text))
        asked.append(Question("sign-colour", f"What colour is the {name}?", sign.plate))
        alike = [word for word in SIGN_WORDS if word != sign.text] if sign.text.isalpha() else []
        alike = alike or [str(number) for number in range(10, 100) if str(number) != sign.text]
        other = next((one.text for one in found if one is not sign and rng.random() < 0.5), rng.choice(alike))
        said, answer = (sign.text, "yes") if rng.random() < 0.5 else (other, "no")
        asked.append(Question("text-presence", f"Does the {name} say {said}?", answer if said != sign.text else "yes"))
        kind = "word" if sign.text.isalpha() else "number"
        asked.append(Question("sign-kind", f"Is there a word or a number on the {name}?", kind))
        wrong = rng.sample(alike, 3)
        if rng.random() < 0.7:
            asked.append(choice("choice", f"What is written on the {name}?", sign.text, wrong, rng))
        if not sign.where and rng.random() < 0.4:
            asked.append(choice("choice-zh", "牌子上写着什么？", sign.text, wrong, rng))
        if not sign.where:
            middle = (sign.box[1] + sign.box[3]) / 2
            asked.append(Question("sign-place", "Where is the sign?", ROWS[min(2, int(middle * 3 / SIDE))]))
    rng.shuffle(asked)
    return asked


# ------------------------------------------------------------------ scenes of shapes


def shapes(rng: Random) -> Drawn:
    """One to six shapes on plain ground: counts, colours, forms, sides."""
    count = rng.randint(1, 6)
    some, forms = rng.sample(PAINTS, rng.randint(2, 4)), rng.sample(list(SHAPES), rng.randint(2, 4))
    position_mode: list[Shape] = []
    for _ in range(400):
        radius = rng.choice((rng.randint(20, 27), rng.randint(36, 46)))
        x, y = rng.randint(radius + 8, SIDE - radius - 8), rng.randint(radius + 8, SIDE - radius - 8)
        shape = Shape(rng.choice(some), rng.choice(forms), x, y, radius)
        apart = all(math.dist((x, y), (o.x, o.y)) > (radius + o.radius) * 1.2 + 6 for o in position_mode)
        if apart and all(o.name != shape.name for o in position_mode) and len(position_mode) < count:
            position_mode.append(shape)
    picture = paint(position_mode, _plain((shape.colour for shape in position_mode), rng))
    asked = _colour_and_form(position_mode, rng)
    rng.shuffle(asked)
    asked = asked[:5] + _counts(position_mode, some, forms, rng) + [_is_there(position_mode, rng) for _ in range(3)]
    for one, other in (rng.sample(position_mode, 2) for _ in range(3 if len(position_mode) > 1 else 0)):
        if side := _side(one, other, rng):
            asked.append(side)
        if abs(one.radius - other.radius) > 8:
            bigger = "yes" if one.radius > other.radius else "no"
            asked.append(Question("size", f"Is the {one.name} larger than the {other.name}?", bigger))
    rng.shuffle(asked)
    return picture, asked


def _counts(position_mode: Sequence[Shape], some: Sequence[str], forms: Sequence[str], rng: Random) -> list[Question]:
    asked = [Question("shape-count", "How many shapes are there?", NUMBERS[len(position_mode)])]
    form, colour = rng.choice(forms), rng.choice(some)
    plural = "crosses" if form == "cross" else f"{form}s"
    number = sum(shape.form == form for shape in position_mode)
    asked.append(Question("shape-count", f"How many {plural} are there?", NUMBERS[number]))
    number = sum(shape.colour == colour for shape in position_mode)
    asked.append(Question("shape-count", f"How many {colour} shapes are there?", NUMBERS[number]))
    if rng.random() < 0.3:
        wrong = rng.sample([word for word in NUMBERS[1:7] if word != NUMBERS[len(position_mode)]], 3)
        asked.append(choice("choice", "How many shapes are there?", NUMBERS[len(position_mode)], wrong, rng))
    return asked


# ------------------------------------------------------------------ charts


def bars(rng: Random) -> Drawn:
    """Three to five bars of different colours and heights: the tallest, the shortest, which is taller, how many."""
    count = rng.randint(3, 5)
    colours = rng.sample(PAINTS, count)
    heights = [40 + 48 * step + rng.randint(0, 14) for step in rng.sample(range(6), count)]
    ground = _plain(colours, rng)
    picture = Image.new("RGB", (SIDE, SIDE), ground)
    pen = ImageDraw.Draw(picture)
    ink = RGB["black"] if sum(ground) > 380 else RGB["white"]
    step, base = (SIDE - 30) // count, SIDE - 14
    for index, (colour, height) in enumerate(zip(colours, heights, strict=True)):
        left = 20 + index * step + step // 8
        pen.rectangle((left, base - height, left + step * 3 // 4, base), RGB[colour])
    pen.line((14, 10, 14, base, SIDE - 10, base), ink, 3)
    ranked = [colour for _, colour in sorted(zip(heights, colours, strict=True))]
    asked = [
        Question("bar", "Which bar is the tallest?", ranked[-1]),
        Question("bar", "Which bar is the shortest?", ranked[0]),
        Question("bar-place", "What colour is the left bar?", colours[0]),
        Question("bar-place", "What colour is the right bar?", colours[-1]),
        Question("bar-count", "How many bars are there?", NUMBERS[count]),
    ]
    for one, other in (rng.sample(range(count), 2) for _ in range(3)):
        taller = "yes" if heights[one] > heights[other] else "no"
        asked.append(Question("bar-order", f"Is the {colours[one]} bar taller than the {colours[other]} bar?", taller))
    topic = rng.choice(list(TOPICS))
    for word, right in rng.sample((("most", ranked[-1]), ("least", ranked[0])), 2):
        wrong = rng.sample([colour for colour in colours if colour != right], min(3, count - 1))
        hint = f"The bars show the {topic} of each {TOPICS[topic]}."
        asked.append(choice("choice-hint", f"Which bar shows the {word} {topic}?", right, wrong, rng, hint))
    rng.shuffle(asked)
    return picture, asked
