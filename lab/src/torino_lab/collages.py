"""Collages of one to nine photos, with questions about single cells: what only some of the tokens can answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from PIL import Image

from torino.core.errors import BadParameter
from torino_lab.facts import Facts
from torino_lab.pictures import SIDE
from torino_lab.questions import Asker, Question, choice, draw, named
from torino_lab.words import NUMBERS, PLACES_CHINESE, SCENES, THINGS

GRIDS = {(1, 1): 1, (1, 2): 3, (2, 1): 3, (2, 2): 6, (2, 3): 3, (3, 2): 3, (3, 3): 5}
"""Rows and columns, with how often they come."""
GUTTERS = ((255, 255, 255), (0, 0, 0), (128, 128, 128))
OBJECTS = (
    *("horse", "bird", "dog", "motorcycle", "bike", "boat", "car", "surfboard", "snowboard", "skateboard"),
    *("swing", "slide", "guitar", "fountain"),
)
RARE = ("cat", "cow", "sheep", "bus", "truck", "train")  # objects as well, but too few photos show them to be learned
SURROUNDINGS = ("pool", "snow", "beach", "mountain", "forest", "street", "water", "grass")
PEOPLE = ("child", "person")
NAMED = 3  # captions that must mention a thing before a cell is named after it
CUT = 1.7  # how much larger than fits a photo may be scaled to fill its cell; what sticks out is cut


@dataclass(frozen=True)
class Cell:
    """One photo of a collage: where it is, what it is named after, and what its captions say."""

    place: str
    row: int
    column: int
    label: str
    facts: Facts


def label(facts: Facts) -> str | None:
    """What to call a photo: the object most captions mention; without one its surroundings, without any its people.

    Examples
    --------
    >>> from torino_lab.facts import read_facts
    >>> label(read_facts(["A man rides a bike down the street"] * 3)), label(read_facts(["A man on a street"] * 3))
    ('bike', 'street')
    """
    objects = [name for name in (*OBJECTS, *RARE) if facts.things.get(name, 0) >= 2]
    if objects:
        sure = len(objects) == 1 and facts.things[objects[0]] >= NAMED and objects[0] not in RARE
        return objects[0] if sure else None
    for name in (*SURROUNDINGS, *PEOPLE):
        if facts.things.get(name, 0) >= NAMED:
            return name
    return None


def at(place: str) -> str:
    """A place with its preposition.

    Examples
    --------
    >>> at("left"), at("top"), at("top left")
    ('on the left', 'at the top', 'in the top left')
    """
    word = {"left": "on", "right": "on", "top": "at", "bottom": "at"}.get(place, "in")
    return f"{word} the {place}"


def places(rows: int, columns: int) -> list[str]:
    """Names of the cells, row by row.

    Examples
    --------
    >>> places(1, 2), places(2, 2)[1], places(3, 3)[4], places(3, 2)[2]
    (['left', 'right'], 'top right', 'middle', 'middle left')
    """
    down = {1: ("",), 2: ("top", "bottom"), 3: ("top", "middle", "bottom")}[rows]
    across = {1: ("",), 2: ("left", "right"), 3: ("left", "middle", "right")}[columns]
    named = [f"{row} {column}".strip() for row in down for column in across]
    return ["middle" if name in ("", "middle middle") else name for name in named]


def lay(photos: Sequence[Image.Image], rows: int, columns: int, rng: Random) -> Image.Image:
    """Put photos into the cells of a grid, each cut to its cell from the middle, with a gutter between."""
    gutter, colour = rng.randint(2, 6), rng.choice(GUTTERS)
    picture = Image.new("RGB", (SIDE, SIDE), colour)
    for index, photo in enumerate(photos):
        row, column = divmod(index, columns)
        left, top = column * SIDE // columns, row * SIDE // rows
        right, bottom = (column + 1) * SIDE // columns, (row + 1) * SIDE // rows
        inset = gutter // 2 if rows * columns > 1 else 0
        size = (right - left - 2 * inset, bottom - top - 2 * inset)
        shown = _filled(photo, size) if len(photos) > 1 else cover(photo, size)
        middle = (left + right - shown.width) // 2, (top + bottom - shown.height) // 2
        picture.paste(shown, middle)
    return picture


def cover(photo: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale a photo until it covers a size, and cut what sticks out on both sides alike."""
    width, height = photo.size
    scale = max(size[0] / width, size[1] / height)
    return _scaled(photo, scale, size)


def _filled(photo: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale a photo to fill a cell, but not so far that much of it would be cut."""
    across, down = size[0] / photo.width, size[1] / photo.height
    return _scaled(photo, min(max(across, down), CUT * min(across, down)), size)


def _scaled(photo: Image.Image, scale: float, size: tuple[int, int]) -> Image.Image:
    width, height = (max(1, int(side * scale + 1e-6)) for side in photo.size)  # down, as image processors do
    left, top = max(0, (width - size[0]) // 2), max(0, (height - size[1]) // 2)
    box = (left, top, min(width, left + size[0]), min(height, top + size[1]))
    return photo.resize((width, height), Image.Resampling.BICUBIC).crop(box)


class Collages:
    """Makes collages of photos whose captions agree on what they show.

    Parameters
    ----------
    facts : sequence of Facts
        Of the photos, in their order.
    asker : Asker
    open_photo : callable
        Gives the photo of an index.
    """

    def __init__(self, facts: Sequence[Facts], asker: Asker, open_photo: Callable[[int], Image.Image]) -> None:
        self._facts, self._asker, self._open = facts, asker, open_photo
        self.labelled: dict[str, list[int]] = {}
        for index, photo in enumerate(facts):
            if name := label(photo):
                self.labelled.setdefault(name, []).append(index)
        self._weights = {name: len(found) ** 0.5 for name, found in sorted(self.labelled.items())}

    def make(self, rng: Random, grid: tuple[int, int] | None = None) -> tuple[Image.Image, list[Cell]]:
        """Draw the grid, then for each cell a label, then a photo with that label; a quarter of them again."""
        rows, columns = grid or rng.choices(list(GRIDS), list(GRIDS.values()))[0]
        count = rows * columns
        names = draw(self._weights, count, rng)
        if not names:
            raise BadParameter(
                "Collages need photos whose captions agree on one thing, and there is none. Give more photos, each "
                f"with at least {NAMED} captions."
            )
        names += rng.choices(names, k=count - len(names))
        for index in range(1, count):
            if rng.random() < 0.25:
                names[index] = names[rng.randrange(index)]
        chosen: list[int] = []
        for name in names:
            able = [photo for photo in self.labelled[name] if photo not in chosen]
            chosen.append(rng.choice(able or self.labelled[name]))
        cells = [
            Cell(place, *divmod(index, columns), name, self._facts[photo])
            for index, (place, name, photo) in enumerate(zip(places(rows, columns), names, chosen, strict=True))
        ]
        return lay([self._open(photo) for photo in chosen], rows, columns, rng), cells

    def ask(self, cells: Sequence[Cell], rng: Random) -> list[Question]:
        """Questions about a collage, those about cells first."""
        asked: list[Question] = []
        for cell in rng.sample(list(cells), min(4, len(cells))):
            asked += self.about_cell(cell, cells, rng)
        asked += self.about_all(cells, rng)
        if len(cells) == 1:
            asked += self._asker.ask(cells[0].facts, rng, 0.6)
        rng.shuffle(asked)
        return asked

    # -------------------------------------------------------------- kinds of questions

    def about_cell(self, cell: Cell, cells: Sequence[Cell], rng: Random) -> list[Question]:
        """What is in one cell."""
        where = at(cell.place)
        others = tuple(name for name in cell.facts.main() if name != cell.label)
        asked = [Question("cell", rng.choice(("What is {}?", "What do you see {}?")).format(where), cell.label, others)]
        asked += [self._presence(cell, cells, rng) for _ in range(2)]
        if "dog" in cell.facts.colours and cell.label == "dog":
            asked.append(Question("cell-colour", f"What colour is the dog {where}?", cell.facts.colours["dog"][0]))
        if (place := cell.facts.place()) and place != cell.label:
            asked.append(Question("cell-scene", f"Where was the photo {where} taken?", SCENES[place].name))
        wrong = self._others(cell, cells, rng)
        if len(wrong) == 3 and rng.random() < 0.4:
            if rng.random() < 0.3:
                texts = [THINGS[name].chinese for name in (cell.label, *wrong)]
                asked.append(choice("choice-zh", f"{PLACES_CHINESE[cell.place]}是什么？", texts[0], texts[1:], rng))
            else:
                asked.append(choice("choice", f"What is {where}?", cell.label, wrong, rng))
        return asked

    def _presence(self, cell: Cell, cells: Sequence[Cell], rng: Random) -> Question:
        """Is there … in this cell? A no is mostly something that another cell shows."""
        name, answer = rng.choice((cell.label, *(one for one in cell.facts.main(4) if one in self._weights))), "yes"
        if rng.random() < 0.5 and (wrong := self._others(cell, cells, rng)):
            name, answer = wrong[0], "no"
        return Question("cell-presence", f"Is there {named(name)} {at(cell.place)}?", answer)

    def _others(self, cell: Cell, cells: Sequence[Cell], rng: Random) -> list[str]:
        """Three things that the cell lacks, those of other cells first."""
        able = [name for name in self._weights if cell.facts.lacks(THINGS[name])]
        near = {other.label for other in cells}
        rng.shuffle(able)
        return sorted(able, key=lambda name: name not in near)[:3]

    def about_all(self, cells: Sequence[Cell], rng: Random) -> list[Question]:
        """How many photos, which shows a thing, how cells lie to each other."""
        asked = [Question("photos", "How many photos are there?", NUMBERS[len(cells)])]
        sure = {name: self._shown(name, cells) for name in dict.fromkeys(cell.label for cell in cells)}
        for name, where in rng.sample(list(sure.items()), len(sure)):
            if where is None:
                continue
            number = len(where)
            asked.append(Question("photos-of", f"How many photos show {named(name)}?", NUMBERS[number]))
            if number == 1 and len(cells) > 1:
                asked.append(Question("which-cell", f"Which photo shows {named(name)}?", where[0].place))
                if rng.random() < 0.3 and len(cells) > 3:
                    wrong = rng.sample([cell.place for cell in cells if cell is not where[0]], 3)
                    asked.append(choice("choice", f"Which photo shows {named(name)}?", where[0].place, wrong, rng))
        single = [where[0] for where in sure.values() if where and len(where) == 1]
        for _ in range(3 if len(single) > 1 else 0):
            one, other = rng.sample(single, 2)
            asked += relation(one, other, rng)
        return asked

    def _shown(self, name: str, cells: Sequence[Cell]) -> list[Cell] | None:
        """The cells that show a thing; None if the captions of one leave it open."""
        shown = [cell for cell in cells if cell.facts.things.get(name, 0) >= 2]
        rest = [cell for cell in cells if cell not in shown]
        return shown if all(cell.facts.lacks(THINGS[name]) for cell in rest) else None


def relation(one: Cell, other: Cell, rng: Random) -> list[Question]:
    """Is the one left of, right of, above or below the other? For cells of one row or one column, and slanting ones."""
    able: list[tuple[str, str, int]] = []
    if one.column != other.column:
        able.append(("left of", "right of", one.column - other.column))
    if one.row != other.row:
        able.append(("above", "below", one.row - other.row))
    before, after, distance = rng.choice(able)
    word = rng.choice((before, after))
    answer = "yes" if (distance < 0) == (word == before) else "no"
    return [Question("relation", f"Is the {one.label} {word} the {other.label}?", answer)]
