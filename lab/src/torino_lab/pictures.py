"""Draw images with known answers: small shapes, signs and scenes of shapes.

Each function returns an image and questions about it, and uses only the random generator that it is given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw, ImageFont

from torino_lab.questions import ImageQuestion, make_choice
from torino_lab.words import COLORS, NUMBERS, SHAPES, SIGN_WORDS

SIDE = 336
SCALE = 2  # images are drawn larger and scaled down, which smooths edges
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
SHAPE_COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black", "white")
BACKGROUNDS = (
    (250, 250, 250),
    (15, 15, 15),
    (205, 205, 205),
    (70, 70, 70),
    (215, 230, 245),
    (240, 232, 210),
    (200, 220, 195),
)
SIGN_COLORS = (
    *(("white", "black"), ("black", "white"), ("yellow", "black"), ("red", "white"), ("blue", "white")),
    *(("green", "white"), ("orange", "black"), ("purple", "white")),
)
"""Colors of a sign and of its text."""
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")

DrawnImage = tuple[Image.Image, list[ImageQuestion]]


@dataclass(frozen=True)
class Shape:
    """A shape of one color; ``x``, ``y`` and ``radius`` are in pixels of the final image."""

    color: str
    form: str
    x: int
    y: int
    radius: int

    @property
    def name(self) -> str:
        """Color and form, such as ``red circle``."""
        return f"{self.color} {self.form}"

    @property
    def place(self) -> str:
        """Its zone of the image, see :func:`zone`."""
        return zone(self.x, self.y)


def zone(x: float, y: float) -> str:
    """Return which of nine parts of the image a point is in, such as ``top left`` or ``middle``.

    Examples
    --------
    >>> zone(10, 10), zone(168, 168), zone(168, 300), zone(300, 168)
    ('top left', 'middle', 'bottom middle', 'middle right')
    """
    row, column = ROWS[min(2, int(y * 3 / SIDE))], COLUMNS[min(2, int(x * 3 / SIDE))]
    return "middle" if row == column == "middle" else f"{row} {column}"


def zones() -> list[str]:
    """Return all nine zones, row by row."""
    return [zone(SIDE * (column + 0.5) / 3, SIDE * (row + 0.5) / 3) for row in range(3) for column in range(3)]


# ------------------------------------------------------------------ drawing


def draw_shapes(shapes: Iterable[Shape], background: Image.Image | tuple[int, int, int]) -> Image.Image:
    """Draw shapes on a plain background, or on a photo, where each gets a black or white rim."""
    photo = isinstance(background, Image.Image)
    size = (SIDE * SCALE, SIDE * SCALE)
    image = background.resize(size, Image.Resampling.BICUBIC) if photo else Image.new("RGB", size, background)
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        if photo:
            dark = sum(RGB[shape.color]) < 380
            pen.polygon(_outline(shape, 5), fill=RGB["white" if dark else "black"])
        pen.polygon(_outline(shape, 0), fill=RGB[shape.color])
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _outline(shape: Shape, rim: int) -> list[tuple[float, float]]:
    radius = (shape.radius + rim) * SCALE
    x, y = shape.x * SCALE, shape.y * SCALE
    if shape.form == "cross":
        arm = (shape.radius * 0.36 + rim) * SCALE
        corners = [(-arm, -radius), (arm, -radius), (arm, -arm), (radius, -arm), (radius, arm), (arm, arm)]
        corners += [(arm, radius), (-arm, radius), (-arm, arm), (-radius, arm), (-radius, -arm), (-arm, -arm)]
        return [(x + dx, y + dy) for dx, dy in corners]
    count, turn = _CORNERS[shape.form]
    radius *= 1.15 if shape.form in ("triangle", "square") else 1.0  # so that all forms look equally large
    wide = 0.72 if shape.form == "diamond" else 1.0
    points: list[tuple[float, float]] = []
    for corner in range(count):
        angle = math.pi * (2 * corner / count + turn)
        reach = radius * (0.45 if shape.form == "star" and corner % 2 else 1.0)
        points.append((x + reach * wide * math.sin(angle), y + reach * math.cos(angle)))
    return points


_CORNERS = {"circle": (48, 0.0), "square": (4, 0.25), "triangle": (3, 1.0), "star": (10, 1.0), "diamond": (4, 0.0)}


def _plain(colors: Iterable[str], rng: Random) -> tuple[int, int, int]:
    """Choose a background on which all colors are visible."""
    used = [RGB[color] for color in colors]
    candidates = [background for background in BACKGROUNDS if all(math.dist(background, color) > 110 for color in used)]
    return rng.choice(candidates) if candidates else (150, 160, 150)


# ------------------------------------------------------------------ shared questions


def _ask_shape_presence(shapes: Sequence[Shape], rng: Random) -> ImageQuestion:
    """Ask whether a shape is present; an absent one differs in color or form from a present one."""
    shape = rng.choice(shapes)
    present = {(other.color, other.form) for other in shapes}
    color, form, answer = shape.color, shape.form, "yes"
    if rng.random() < 0.5:
        answer = "no"
        candidates = [
            (c, f)
            for c in SHAPE_COLORS
            for f in SHAPES
            if (c, f) not in present and (c == shape.color or f == shape.form)
        ]
        mixed = [
            (c, f) for c, f in candidates if any(o.color == c for o in shapes) and any(o.form == f for o in shapes)
        ]
        color, form = rng.choice(mixed if mixed and rng.random() < 0.5 else candidates)
    article = "an" if color[0] in "aeiou" else "a"
    return ImageQuestion("shape-presence", f"Is there {article} {color} {form}?", answer)


def _ask_side(first: Shape, second: Shape, rng: Random) -> ImageQuestion | None:
    """Ask whether a shape is left of, right of, above or below another, if the distance is clear."""
    across, down = first.x - second.x, first.y - second.y
    candidates = [("left of", "right of", across)] if abs(across) > 45 else []
    candidates += [("above", "below", down)] if abs(down) > 45 else []
    if not candidates:
        return None
    before, after, distance = rng.choice(candidates)
    word = rng.choice((before, after))
    return ImageQuestion(
        "relation",
        f"Is the {first.name} {word} the {second.name}?",
        "yes" if (distance < 0) == (word == before) else "no",
    )


def _ask_color_and_form(shapes: Sequence[Shape], rng: Random) -> list[ImageQuestion]:
    """Ask for the color of a form, and the form of a color, that occurs once."""
    forms, colors = Counter(shape.form for shape in shapes), Counter(shape.color for shape in shapes)
    questions: list[ImageQuestion] = []
    for shape in shapes:
        if forms[shape.form] == 1:
            questions.append(ImageQuestion("shape-colour", f"What colour is the {shape.form}?", shape.color))
            wrong = rng.sample([color for color in SHAPE_COLORS if color != shape.color], 3)
            if rng.random() < 0.25:
                questions.append(make_choice("choice", f"What colour is the {shape.form}?", shape.color, wrong, rng))
            elif rng.random() < 0.15:
                texts = [COLORS[color] for color in (shape.color, *wrong)]
                questions.append(
                    make_choice("choice-zh", f"{SHAPES[shape.form]}是什么颜色？", texts[0], texts[1:], rng)
                )
        if colors[shape.color] == 1:
            questions.append(ImageQuestion("shape", f"Which shape is {shape.color}?", shape.form))
            wrong = rng.sample([form for form in SHAPES if form != shape.form], 3)
            if rng.random() < 0.25:
                questions.append(make_choice("choice", f"Which shape is {shape.color}?", shape.form, wrong, rng))
            elif rng.random() < 0.15:
                texts = [SHAPES[form] for form in (shape.form, *wrong)]
                questions.append(
                    make_choice("choice-zh", f"{COLORS[shape.color]}的是什么形状？", texts[0], texts[1:], rng)
                )
    return questions


# ------------------------------------------------------------------ small shapes


def small_shapes(photo: Image.Image | None, rng: Random) -> DrawnImage:
    """Draw one to three shapes of 28 to 60 pixels on a photo or a plain background; ask for color, form and place."""
    count = rng.choices((1, 2, 3), (5, 3, 2))[0]
    colors, forms = rng.sample(SHAPE_COLORS, count), rng.sample(list(SHAPES), count)
    shapes: list[Shape] = []
    for index, cell in enumerate(rng.sample(range(9), count)):
        radius = rng.randint(14, 30)
        x, y = (int(SIDE * (part + 0.5) / 3) + rng.randint(-22, 22) for part in (cell % 3, cell // 3))
        shapes.append(Shape(colors[index], forms[index], x, y, radius))
    image = draw_shapes(shapes, photo if photo else _plain(colors, rng))
    questions = _ask_color_and_form(shapes, rng)
    for shape in shapes:
        questions.append(ImageQuestion("small", f"Where is the {shape.form}?", shape.place))
        if rng.random() < 0.3:
            wrong = rng.sample([place for place in zones() if place != shape.place], 3)
            questions.append(make_choice("choice", f"Where is the {shape.form}?", shape.place, wrong, rng))
    questions += [_ask_shape_presence(shapes, rng) for _ in range(3)]
    questions += [ImageQuestion("small-count", "How many shapes are there?", NUMBERS[count])]
    for first in shapes:
        for second in shapes:
            if first != second and rng.random() < 0.5 and (side := _ask_side(first, second, rng)):
                questions.append(side)
    rng.shuffle(questions)
    return image, questions


# ------------------------------------------------------------------ signs


@dataclass(frozen=True)
class Sign:
    """A sign with a word or a number; ``where`` is empty if it is the only one."""

    text: str
    plate: str
    ink: str
    box: tuple[int, int, int, int]
    where: str


def sign_scene(photo: Image.Image | None, rng: Random) -> DrawnImage:
    """Draw one sign, or two beside or above each other; ask what they say."""
    layout = rng.choices(("one", "across", "down"), (5, 3, 2))[0]
    plates = rng.sample(SIGN_COLORS, 2)
    texts = rng.sample(SIGN_WORDS, 2)
    texts = [str(rng.randint(10, 99)) if rng.random() < 0.3 else text for text in texts]
    placed: list[Sign] = []
    image = (photo or Image.new("RGB", (SIDE, SIDE), _plain([plates[0][0], plates[1][0]], rng))).copy()
    for index, text in enumerate(texts[: 1 if layout == "one" else 2]):
        where = {"one": "", "across": ("left", "right")[index], "down": ("top", "bottom")[index]}[layout]
        room = (SIDE // 2 - 14 if layout == "across" else SIDE - 30, 140 if layout == "down" else 200)
        font, width, height = _fit_font(text.upper(), room, rng)
        shown = text.upper() if rng.random() < 0.6 else text
        x = rng.randint(6, SIDE - width - 6) if layout != "across" else index * SIDE // 2 + (SIDE // 2 - width) // 2
        top, low = {
            "one": (6, SIDE - height - 6),
            "across": (70, SIDE - height - 70),
            "down": (6, SIDE // 2 - height - 4),
        }[layout]
        y = rng.randint(top, max(top, low)) + (index * SIDE // 2 if layout == "down" else 0)
        pen = ImageDraw.Draw(image)
        box = (x, y, x + width, y + height)
        pen.rounded_rectangle(box, 8, RGB[plates[index][0]], RGB[plates[index][1]], 3)
        pen.text((x + width / 2, y + height / 2), shown, RGB[plates[index][1]], font, anchor="mm")
        placed.append(Sign(text, *plates[index], box, where))
    return image, _ask_signs(placed, rng)


def _fit_font(
    text: str, room: tuple[int, int], rng: Random
) -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, int, int]:
    """Return the largest font whose sign fits into the room, and the width and height of the sign."""
    size = rng.randint(48, 110)
    while True:
        font = ImageFont.load_default(size=size)
        left, top, right, bottom = font.getbbox(text)
        width, height = int(right - left) + 26, int((bottom - top) * 1.25) + 22
        if (width <= room[0] and height <= room[1]) or size <= 30:
            return font, width, height
        size -= 4


def _ask_signs(placed: Sequence[Sign], rng: Random) -> list[ImageQuestion]:
    questions = [ImageQuestion("sign-count", "How many signs are there?", NUMBERS[len(placed)])]
    for sign in placed:
        name = f"{sign.where} sign".strip()
        questions.append(ImageQuestion("text", f"What does the {name} say?", sign.text))
        questions.append(ImageQuestion("sign-colour", f"What colour is the {name}?", sign.plate))
        alike = [word for word in SIGN_WORDS if word != sign.text] if sign.text.isalpha() else []
        alike = alike or [str(number) for number in range(10, 100) if str(number) != sign.text]
        other = next(
            (neighbor.text for neighbor in placed if neighbor is not sign and rng.random() < 0.5), rng.choice(alike)
        )
        text, answer = (sign.text, "yes") if rng.random() < 0.5 else (other, "no")
        questions.append(
            ImageQuestion("text-presence", f"Does the {name} say {text}?", answer if text != sign.text else "yes")
        )
        kind = "word" if sign.text.isalpha() else "number"
        questions.append(ImageQuestion("sign-kind", f"Is there a word or a number on the {name}?", kind))
        wrong = rng.sample(alike, 3)
        if rng.random() < 0.7:
            questions.append(make_choice("choice", f"What is written on the {name}?", sign.text, wrong, rng))
        if not sign.where and rng.random() < 0.4:
            questions.append(make_choice("choice-zh", "牌子上写着什么？", sign.text, wrong, rng))
        if not sign.where:
            middle = (sign.box[1] + sign.box[3]) / 2
            questions.append(ImageQuestion("sign-place", "Where is the sign?", ROWS[min(2, int(middle * 3 / SIDE))]))
    rng.shuffle(questions)
    return questions


# ------------------------------------------------------------------ scenes of shapes


def shape_scene(rng: Random) -> DrawnImage:
    """Draw one to six shapes on a plain background; ask for counts, colors, forms and sides."""
    count = rng.randint(1, 6)
    palette, forms = rng.sample(SHAPE_COLORS, rng.randint(2, 4)), rng.sample(list(SHAPES), rng.randint(2, 4))
    placed: list[Shape] = []
    for _ in range(400):
        radius = rng.choice((rng.randint(20, 27), rng.randint(36, 46)))
        x, y = rng.randint(radius + 8, SIDE - radius - 8), rng.randint(radius + 8, SIDE - radius - 8)
        shape = Shape(rng.choice(palette), rng.choice(forms), x, y, radius)
        apart = all(math.dist((x, y), (o.x, o.y)) > (radius + o.radius) * 1.2 + 6 for o in placed)
        if apart and all(o.name != shape.name for o in placed) and len(placed) < count:
            placed.append(shape)
    image = draw_shapes(placed, _plain((shape.color for shape in placed), rng))
    questions = _ask_color_and_form(placed, rng)
    rng.shuffle(questions)
    questions = (
        questions[:5] + _ask_counts(placed, palette, forms, rng) + [_ask_shape_presence(placed, rng) for _ in range(3)]
    )
    for first, second in (rng.sample(placed, 2) for _ in range(3 if len(placed) > 1 else 0)):
        if side := _ask_side(first, second, rng):
            questions.append(side)
        if abs(first.radius - second.radius) > 8:
            bigger = "yes" if first.radius > second.radius else "no"
            questions.append(ImageQuestion("size", f"Is the {first.name} larger than the {second.name}?", bigger))
    rng.shuffle(questions)
    return image, questions


def _ask_counts(
    placed: Sequence[Shape], palette: Sequence[str], forms: Sequence[str], rng: Random
) -> list[ImageQuestion]:
    questions = [ImageQuestion("shape-count", "How many shapes are there?", NUMBERS[len(placed)])]
    form, color = rng.choice(forms), rng.choice(palette)
    plural = "crosses" if form == "cross" else f"{form}s"
    number = sum(shape.form == form for shape in placed)
    questions.append(ImageQuestion("shape-count", f"How many {plural} are there?", NUMBERS[number]))
    number = sum(shape.color == color for shape in placed)
    questions.append(ImageQuestion("shape-count", f"How many {color} shapes are there?", NUMBERS[number]))
    if rng.random() < 0.3:
        wrong = rng.sample([word for word in NUMBERS[1:7] if word != NUMBERS[len(placed)]], 3)
        questions.append(make_choice("choice", "How many shapes are there?", NUMBERS[len(placed)], wrong, rng))
    return questions


# ------------------------------------------------------------------ charts
