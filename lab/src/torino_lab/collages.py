"""Make collages of one to nine photos, with questions about single cells that only some tokens can answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from PIL import Image

from torino.core.errors import BadParameter
from torino_lab.facts import Facts
from torino_lab.pictures import SIDE
from torino_lab.questions import ImageQuestion, QuestionMaker, make_choice, weighted_sample, with_article
from torino_lab.words import NUMBERS, PLACES_CHINESE, SCENES, THINGS

GRIDS = {(1, 1): 1, (1, 2): 3, (2, 1): 3, (2, 2): 6, (2, 3): 3, (3, 2): 3, (3, 3): 5}
"""Grids as (rows, columns), with their relative frequency."""
GUTTERS = ((255, 255, 255), (0, 0, 0), (128, 128, 128))
OBJECTS = (
    *("horse", "bird", "dog", "motorcycle", "bike", "boat", "car", "surfboard", "snowboard", "skateboard"),
    *("swing", "slide", "guitar", "fountain"),
)
RARE = ("cat", "cow", "sheep", "bus", "truck", "train")  # too few photos show these to learn them
SURROUNDINGS = ("pool", "snow", "beach", "mountain", "forest", "street", "water", "grass")
PEOPLE = ("child", "person")
MIN_LABEL_CAPTIONS = 3  # captions that must mention the label of a photo
MAX_OVERSCALE = 1.7  # largest scale of a photo that fills its cell, relative to one that fits into it


@dataclass(frozen=True)
class CollageCell:
    """A photo of a collage: its place, its label, and the facts of its captions."""

    place: str
    row: int
    column: int
    label: str
    facts: Facts


def choose_label(facts: Facts) -> str | None:
    """Return the label of a photo: the object that its captions mention, otherwise its surroundings or its people.

    Examples
    --------
    >>> from torino_lab.facts import read_facts
    >>> choose_label(read_facts(["A man rides a bike down the street"] * 3))
    'bike'
    >>> choose_label(read_facts(["A man on a street"] * 3))
    'street'
    """
    objects = [name for name in (*OBJECTS, *RARE) if facts.things.get(name, 0) >= 2]
    if objects:
        certain = len(objects) == 1 and facts.things[objects[0]] >= MIN_LABEL_CAPTIONS and objects[0] not in RARE
        return objects[0] if certain else None
    for name in (*SURROUNDINGS, *PEOPLE):
        if facts.things.get(name, 0) >= MIN_LABEL_CAPTIONS:
            return name
    return None


def with_preposition(place: str) -> str:
    """Return a place with its preposition.

    Examples
    --------
    >>> with_preposition("left"), with_preposition("top"), with_preposition("top left")
    ('on the left', 'at the top', 'in the top left')
    """
    word = {"left": "on", "right": "on", "top": "at", "bottom": "at"}.get(place, "in")
    return f"{word} the {place}"


def cell_places(rows: int, columns: int) -> list[str]:
    """Return the names of the cells, row by row.

    Examples
    --------
    >>> cell_places(1, 2), cell_places(2, 2)[1], cell_places(3, 3)[4], cell_places(3, 2)[2]
    (['left', 'right'], 'top right', 'middle', 'middle left')
    """
    down = {1: ("",), 2: ("top", "bottom"), 3: ("top", "middle", "bottom")}[rows]
    across = {1: ("",), 2: ("left", "right"), 3: ("left", "middle", "right")}[columns]
    names = [f"{row} {column}".strip() for row in down for column in across]
    return ["middle" if name in ("", "middle middle") else name for name in names]


def make_grid_image(photos: Sequence[Image.Image], rows: int, columns: int, rng: Random) -> Image.Image:
    """Arrange photos in a grid with gutters; each is cropped to its cell around its center."""
    gutter, color = rng.randint(2, 6), rng.choice(GUTTERS)
    image = Image.new("RGB", (SIDE, SIDE), color)
    for index, photo in enumerate(photos):
        row, column = divmod(index, columns)
        left, top = column * SIDE // columns, row * SIDE // rows
        right, bottom = (column + 1) * SIDE // columns, (row + 1) * SIDE // rows
        inset = gutter // 2 if rows * columns > 1 else 0
        size = (right - left - 2 * inset, bottom - top - 2 * inset)
        shown = _fill_cell(photo, size) if len(photos) > 1 else scale_and_crop(photo, size)
        middle = (left + right - shown.width) // 2, (top + bottom - shown.height) // 2
        image.paste(shown, middle)
    return image


def scale_and_crop(photo: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale a photo to cover a size and crop it around its center."""
    width, height = photo.size
    scale = max(size[0] / width, size[1] / height)
    return _scale(photo, scale, size)


def _fill_cell(photo: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale a photo to fill a cell, up to a limit on what is cropped."""
    across, down = size[0] / photo.width, size[1] / photo.height
    return _scale(photo, min(max(across, down), MAX_OVERSCALE * min(across, down)), size)


def _scale(photo: Image.Image, scale: float, size: tuple[int, int]) -> Image.Image:
    width, height = (max(1, int(side * scale + 1e-6)) for side in photo.size)  # rounded down, as image processors do
    left, top = max(0, (width - size[0]) // 2), max(0, (height - size[1]) // 2)
    box = (left, top, min(width, left + size[0]), min(height, top + size[1]))
    return photo.resize((width, height), Image.Resampling.BICUBIC).crop(box)


class Collages:
    """Make collages of photos whose captions agree on a label.

    Parameters
    ----------
    facts : sequence of Facts
        Facts of the photos, in order.
    question_maker : QuestionMaker
    open_photo : callable
        Returns the photo of an index.
    """

    def __init__(
        self, facts: Sequence[Facts], question_maker: QuestionMaker, open_photo: Callable[[int], Image.Image]
    ) -> None:
        self._facts, self._question_maker, self._open = facts, question_maker, open_photo
        self.photos_by_label: dict[str, list[int]] = {}
        for index, photo in enumerate(facts):
            if name := choose_label(photo):
                self.photos_by_label.setdefault(name, []).append(index)
        self._weights = {name: len(photos) ** 0.5 for name, photos in sorted(self.photos_by_label.items())}

    def make(self, rng: Random, grid: tuple[int, int] | None = None) -> tuple[Image.Image, list[CollageCell]]:
        """Draw a grid and, for each cell, a label and a photo with it; a quarter of the labels are repeated."""
        rows, columns = grid or rng.choices(list(GRIDS), list(GRIDS.values()))[0]
        count = rows * columns
        names = weighted_sample(self._weights, count, rng)
        if not names:
            raise BadParameter(
                "Collages need photos whose captions agree on a label, and there are none. Give more photos, each "
                f"with at least {MIN_LABEL_CAPTIONS} captions."
            )
        names += rng.choices(names, k=count - len(names))
        for index in range(1, count):
            if rng.random() < 0.25:
                names[index] = names[rng.randrange(index)]
        chosen: list[int] = []
        for name in names:
            candidates = [photo for photo in self.photos_by_label[name] if photo not in chosen]
            chosen.append(rng.choice(candidates or self.photos_by_label[name]))
        cells = [
            CollageCell(place, *divmod(index, columns), name, self._facts[photo])
            for index, (place, name, photo) in enumerate(zip(cell_places(rows, columns), names, chosen, strict=True))
        ]
        return make_grid_image([self._open(photo) for photo in chosen], rows, columns, rng), cells

    def ask(self, cells: Sequence[CollageCell], rng: Random) -> list[ImageQuestion]:
        """Ask about cells and about the whole collage."""
        questions: list[ImageQuestion] = []
        for cell in rng.sample(list(cells), min(4, len(cells))):
            questions += self.about_cell(cell, cells, rng)
        questions += self.about_all(cells, rng)
        if len(cells) == 1:
            questions += self._question_maker.ask(cells[0].facts, rng, 0.6)
        rng.shuffle(questions)
        return questions

    # -------------------------------------------------------------- kinds of questions

    def about_cell(self, cell: CollageCell, cells: Sequence[CollageCell], rng: Random) -> list[ImageQuestion]:
        """Ask about one cell."""
        where = with_preposition(cell.place)
        others = tuple(name for name in cell.facts.main() if name != cell.label)
        questions = [
            ImageQuestion("cell", rng.choice(("What is {}?", "What do you see {}?")).format(where), cell.label, others)
        ]
        questions += [self._presence(cell, cells, rng) for _ in range(2)]
        if "dog" in cell.facts.colors and cell.label == "dog":
            questions.append(
                ImageQuestion("cell-colour", f"What colour is the dog {where}?", cell.facts.colors["dog"][0])
            )
        if (place := cell.facts.place()) and place != cell.label:
            questions.append(ImageQuestion("cell-scene", f"Where was the photo {where} taken?", SCENES[place].name))
        wrong = self._others(cell, cells, rng)
        if len(wrong) == 3 and rng.random() < 0.4:
            if rng.random() < 0.3:
                texts = [THINGS[name].chinese for name in (cell.label, *wrong)]
                questions.append(
                    make_choice("choice-zh", f"{PLACES_CHINESE[cell.place]}是什么？", texts[0], texts[1:], rng)
                )
            else:
                questions.append(make_choice("choice", f"What is {where}?", cell.label, wrong, rng))
        return questions

    def _presence(self, cell: CollageCell, cells: Sequence[CollageCell], rng: Random) -> ImageQuestion:
        """Ask whether a thing is in this cell; an absent thing is mostly in another cell."""
        name, answer = (
            rng.choice((cell.label, *(thing for thing in cell.facts.main(4) if thing in self._weights))),
            "yes",
        )
        if rng.random() < 0.5 and (wrong := self._others(cell, cells, rng)):
            name, answer = wrong[0], "no"
        return ImageQuestion("cell-presence", f"Is there {with_article(name)} {with_preposition(cell.place)}?", answer)

    def _others(self, cell: CollageCell, cells: Sequence[CollageCell], rng: Random) -> list[str]:
        """Return three things that the cell lacks, those of other cells first."""
        candidates = [name for name in self._weights if cell.facts.lacks(THINGS[name])]
        near = {other.label for other in cells}
        rng.shuffle(candidates)
        return sorted(candidates, key=lambda name: name not in near)[:3]

    def about_all(self, cells: Sequence[CollageCell], rng: Random) -> list[ImageQuestion]:
        """Ask for the number of photos, which of them shows a thing, and how cells are arranged."""
        questions = [ImageQuestion("photos", "How many photos are there?", NUMBERS[len(cells)])]
        sure = {name: self._shown(name, cells) for name in dict.fromkeys(cell.label for cell in cells)}
        for name, where in rng.sample(list(sure.items()), len(sure)):
            if where is None:
                continue
            number = len(where)
            questions.append(ImageQuestion("photos-of", f"How many photos show {with_article(name)}?", NUMBERS[number]))
            if number == 1 and len(cells) > 1:
                questions.append(
                    ImageQuestion("which-cell", f"Which photo shows {with_article(name)}?", where[0].place)
                )
                if rng.random() < 0.3 and len(cells) > 3:
                    wrong = rng.sample([cell.place for cell in cells if cell is not where[0]], 3)
                    questions.append(
                        make_choice("choice", f"Which photo shows {with_article(name)}?", where[0].place, wrong, rng)
                    )
        single = [where[0] for where in sure.values() if where and len(where) == 1]
        for _ in range(3 if len(single) > 1 else 0):
            first, second = rng.sample(single, 2)
            questions += ask_relation(first, second, rng)
        return questions

    def _shown(self, name: str, cells: Sequence[CollageCell]) -> list[CollageCell] | None:
        """Return the cells that show a thing; None if the captions of a cell are inconclusive."""
        shown = [cell for cell in cells if cell.facts.things.get(name, 0) >= 2]
        rest = [cell for cell in cells if cell not in shown]
        return shown if all(cell.facts.lacks(THINGS[name]) for cell in rest) else None


def ask_relation(first: CollageCell, second: CollageCell, rng: Random) -> list[ImageQuestion]:
    """Ask whether a cell is left of, right of, above or below another."""
    candidates: list[tuple[str, str, int]] = []
    if first.column != second.column:
        candidates.append(("left of", "right of", first.column - second.column))
    if first.row != second.row:
        candidates.append(("above", "below", first.row - second.row))
    before, after, distance = rng.choice(candidates)
    word = rng.choice((before, after))
    answer = "yes" if (distance < 0) == (word == before) else "no"
    return [ImageQuestion("relation", f"Is the {first.label} {word} the {second.label}?", answer)]
