"""What the captions of a photo say of it: things, actions, place, colours, counts, and who is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torino_lab.words import (
    ACTIONS,
    COLOUR_WORDS,
    COLOURED_CLOTHES,
    COLOURED_THINGS,
    COLOURS,
    DOUBTFUL_COLOURS,
    NUMBERS,
    PHRASES,
    SCENES,
    THINGS,
    Word,
    as_set,
    tokens,
)


@dataclass(frozen=True)
class Facts:
    """What the captions of a photo say, and how many of them say it."""

    captions: tuple[str, ...]
    words: frozenset[str]
    things: Mapping[str, int]
    actions: Mapping[str, int]
    scenes: Mapping[str, int]
    colours: Mapping[str, tuple[str, int]]
    counts: Mapping[str, int]
    who: str | None

    def lacks(self, word: Word) -> bool:
        """Whether no caption mentions a thing, nor anything it may hide behind."""
        return not (self.words & word.words or self.words & word.hidden)

    def main(self, least: int = 3) -> list[str]:
        """Things that most captions mention, people last."""
        found = [name for name, times in self.things.items() if times >= least]
        return sorted(found, key=lambda name: (THINGS[name].group == "person", -self.things[name], name))

    def place(self) -> str | None:
        """The one scene that two captions or more agree on, if none names another."""
        return only(self.scenes) if max(self.scenes.values(), default=0) >= 2 else None

    def doing(self) -> str | None:
        """The action that captions agree on."""
        ranked = sorted(self.actions.items(), key=lambda item: -item[1])
        if not ranked or ranked[0][1] < 2:
            return None
        second = ranked[1][1] if len(ranked) > 1 else 0
        return ranked[0][0] if ranked[0][1] >= second + 2 else None


def only(counted: Mapping[str, int]) -> str | None:
    """The key, if there is a single one."""
    return next(iter(counted)) if len(counted) == 1 else None


# ------------------------------------------------------------------ reading captions


def read_facts(captions: Sequence[str]) -> Facts:
    """Read what captions say of one photo.

    Examples
    --------
    >>> facts = read_facts(["Two brown dogs run .", "Two dogs run on the snow .", "A pair of brown dogs in snow"])
    >>> facts.things["dog"], facts.colours["dog"], facts.counts["dog"], facts.who
    (3, ('brown', 2), 2, 'nobody')
    """
    lines = [_joined(tokens(caption)) for caption in captions]
    sets = [frozenset(line) for line in lines]
    words = frozenset[str]().union(*sets)
    things, actions = _mentions(sets, _THINGS), _mentions(sets, _ACTIONS)
    if 2 * things.get("person", 0) < len(captions):  # a dog with a baseball does not play it
        actions = {name: times for name, times in actions.items() if not name.startswith("playing ")}
    return Facts(
        captions=tuple(" ".join(caption.lower().split()).rstrip(" .!") for caption in captions),
        words=words,
        things=things,
        actions=actions,
        scenes=_mentions(sets, _SCENES),
        colours=_colours(lines),
        counts={name: count for name in ("dog", "person") if (count := _count(lines, name)) is not None},
        who=_who(sets, words),
    )


def _joined(words: Sequence[str]) -> list[str]:
    """Replace pairs of words that mean one thing by what they mean."""
    joined: list[str] = []
    for word in words:
        if joined and (meant := PHRASES.get(f"{joined[-1]} {word}")):
            joined[-1] = meant
        else:
            joined.append(word)
    return joined


def _index(table: Mapping[str, Word]) -> dict[str, tuple[str, ...]]:
    """Word of a caption to the names it mentions."""
    found: dict[str, tuple[str, ...]] = {}
    for name, entry in table.items():
        for word in entry.words:
            found[word] = (*found.get(word, ()), name)
    return found


_THINGS, _ACTIONS, _SCENES = _index(THINGS), _index(ACTIONS), _index(SCENES)


def _mentions(sets: Sequence[frozenset[str]], index: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for line in sets:
        counted.update({name for word in line for name in index.get(word, ())})
    return dict(sorted(counted.items()))  # sorted: the order of a set is not the same in every process


_COLOURED = {
    **{word: name for name, words in COLOURED_CLOTHES.items() for word in words.split()},
    **{word: name for name in COLOURED_THINGS for word in THINGS[name].words},
}


def _colours(lines: Sequence[Sequence[str]]) -> dict[str, tuple[str, int]]:
    """Colours that stand before a thing: one colour in every caption that names any, else none."""
    found: dict[str, list[str]] = {}
    for line in lines:
        for place, word in enumerate(line):
            if word not in _COLOURED:
                continue
            near = line[max(0, place - 4) : place]
            stop = max((i for i, other in enumerate(near) if other in _BREAKS or other in _COLOURED), default=-1)
            found.setdefault(_COLOURED[word], []).extend(
                COLOUR_WORDS.get(other, "unsure")
                for other in near[stop + 1 :]
                if other in COLOUR_WORDS or other in DOUBTFUL_COLOURS
            )
    return {
        name: (colours[0], len(colours))
        for name, colours in found.items()
        if colours and len(set(colours)) == 1 and colours[0] in COLOURS
    }


_BREAKS = as_set("in on with wearing wears of by near to at the a an his her their is are has holding")
_PLURAL = as_set("dogs puppies greyhounds terriers animals")
_MANY = as_set("people men women boys girls children kids guys ladies adults players friends teenagers males")
_MORE = as_set("another other others two three four five six several group many crowd each pair some both")
_SINGLE = as_set("man woman boy girl child kid person guy lady toddler baby")


def _count(lines: Sequence[Sequence[str]], name: str) -> int | None:
    """How many dogs, or people, if at least two captions give that number and none gives another."""
    many = _PLURAL if name == "dog" else _MANY
    single = frozenset({"dog", "puppy"}) if name == "dog" else _SINGLE
    said: list[int] = []
    ones = 0
    for line in lines:
        numbers = [
            NUMBERS.index(word)
            for place, word in enumerate(line)
            if word in NUMBERS[2:6] and any(other in many for other in line[place + 1 : place + 4])
        ]
        alone = sum(word in single for word in line)
        if len(numbers) == 1 and not (name == "person" and alone):
            said.append(numbers[0])
        elif numbers:
            return None
        elif alone == 1 and not (set(line) & (many | _MORE)) and not (name == "person" and set(line) & _OTHERS):
            ones += 1
        elif alone or set(line) & many:
            said.append(0)  # some other number, unknown
    known = {number for number in said if number}
    if ones >= 4 and not said:
        return 1
    return known.pop() if len(known) == 1 and sum(map(bool, said)) >= 2 and not ones else None


_OTHERS = as_set("crowd crowds group family couple team teams friends audience spectators onlookers people")

_CROWD = as_set("people crowd crowds group audience spectators")


def _who(sets: Sequence[frozenset[str]], words: frozenset[str]) -> str | None:
    if not (words & THINGS["person"].words or words & THINGS["person"].hidden):
        return "nobody"
    named = {name: sum(bool(line & THINGS[name].words) for line in sets) for name in ("man", "woman", "boy", "girl")}
    kinds = [name for name, times in named.items() if times]
    plural = {"man": "men guys males", "woman": "women ladies females", "boy": "boys", "girl": "girls"}
    if len(kinds) == 1 and named[kinds[0]] >= 3:
        kind = kinds[0]
        several = sum(bool(line & as_set(plural[kind])) for line in sets)
        if several == 0 and not words & (_OTHERS | _MANY):
            return kind
        return THINGS[kind].plural if several >= 3 else None
    crowd = sum(bool(line & as_set("people crowd crowds group audience spectators")) for line in sets)
    return "people" if crowd >= 3 and len(kinds) != 1 else None
