"""Extract facts from the captions of a photo: things, actions, scene, colors, counts and people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torino_lab.words import (
    ACTIONS,
    AMBIGUOUS_COLORS,
    COLOR_WORDS,
    COLORED_CLOTHES,
    COLORED_THINGS,
    COLORS,
    NUMBERS,
    PHRASES,
    SCENES,
    THINGS,
    Word,
    parse_words,
    tokens,
)


@dataclass(frozen=True)
class Facts:
    """Facts that the captions of a photo state, with the number of captions that state them."""

    captions: tuple[str, ...]
    words: frozenset[str]
    things: Mapping[str, int]
    actions: Mapping[str, int]
    scenes: Mapping[str, int]
    colors: Mapping[str, tuple[str, int]]
    counts: Mapping[str, int]
    who: str | None

    def lacks(self, word: Word) -> bool:
        """Return whether a thing is absent: no caption mentions it or makes its absence doubtful."""
        return not (self.words & word.words or self.words & word.hidden)

    def main(self, min_captions: int = 3) -> list[str]:
        """Return the things that most captions mention, people last."""
        names = [name for name, times in self.things.items() if times >= min_captions]
        return sorted(names, key=lambda name: (THINGS[name].group == "person", -self.things[name], name))

    def place(self) -> str | None:
        """Return the scene that at least two captions agree on, if no caption names another."""
        return single_key(self.scenes) if max(self.scenes.values(), default=0) >= 2 else None

    def doing(self) -> str | None:
        """Return the action that captions agree on."""
        ranked = sorted(self.actions.items(), key=lambda item: -item[1])
        if not ranked or ranked[0][1] < 2:
            return None
        second = ranked[1][1] if len(ranked) > 1 else 0
        return ranked[0][0] if ranked[0][1] >= second + 2 else None


def single_key(counted: Mapping[str, int]) -> str | None:
    """Return the only key, or None if there are several or none."""
    return next(iter(counted)) if len(counted) == 1 else None


# ------------------------------------------------------------------ reading captions


def read_facts(captions: Sequence[str]) -> Facts:
    """Extract the facts of one photo from its captions.

    Examples
    --------
    >>> facts = read_facts(["Two brown dogs run .", "Two dogs run on the snow .", "A pair of brown dogs in snow"])
    >>> facts.things["dog"], facts.colors["dog"], facts.counts["dog"], facts.who
    (3, ('brown', 2), 2, 'nobody')
    """
    lines = [_join_phrases(tokens(caption)) for caption in captions]
    sets = [frozenset(line) for line in lines]
    words = frozenset[str]().union(*sets)
    things, actions = _mentions(sets, _THINGS), _mentions(sets, _ACTIONS)
    if 2 * things.get("person", 0) < len(captions):  # a dog with a baseball does not play baseball
        actions = {name: times for name, times in actions.items() if not name.startswith("playing ")}
    return Facts(
        captions=tuple(" ".join(caption.lower().split()).rstrip(" .!") for caption in captions),
        words=words,
        things=things,
        actions=actions,
        scenes=_mentions(sets, _SCENES),
        colors=_colors(lines),
        counts={name: count for name in ("dog", "person") if (count := _count(lines, name)) is not None},
        who=_who(sets, words),
    )


def _join_phrases(words: Sequence[str]) -> list[str]:
    """Replace pairs of words that have a meaning of their own."""
    joined: list[str] = []
    for word in words:
        if joined and (meaning := PHRASES.get(f"{joined[-1]} {word}")):
            joined[-1] = meaning
        else:
            joined.append(word)
    return joined


def _index(table: Mapping[str, Word]) -> dict[str, tuple[str, ...]]:
    """Map each word of a caption to the names that it mentions."""
    names: dict[str, tuple[str, ...]] = {}
    for name, entry in table.items():
        for word in entry.words:
            names[word] = (*names.get(word, ()), name)
    return names


_THINGS, _ACTIONS, _SCENES = _index(THINGS), _index(ACTIONS), _index(SCENES)


def _mentions(sets: Sequence[frozenset[str]], index: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for line in sets:
        counted.update({name for word in line for name in index.get(word, ())})
    return dict(sorted(counted.items()))  # sets have another order in every process


_COLORED = {
    **{word: name for name, words in COLORED_CLOTHES.items() for word in words.split()},
    **{word: name for name in COLORED_THINGS for word in THINGS[name].words},
}


def _colors(lines: Sequence[Sequence[str]]) -> dict[str, tuple[str, int]]:
    """Return the colors of things: the color before a thing, if all captions that name one agree."""
    before: dict[str, list[str]] = {}
    for line in lines:
        for place, word in enumerate(line):
            if word not in _COLORED:
                continue
            near = line[max(0, place - 4) : place]
            stop = max((i for i, other in enumerate(near) if other in _BREAKS or other in _COLORED), default=-1)
            before.setdefault(_COLORED[word], []).extend(
                COLOR_WORDS.get(other, "unsure")
                for other in near[stop + 1 :]
                if other in COLOR_WORDS or other in AMBIGUOUS_COLORS
            )
    return {
        name: (colors[0], len(colors))
        for name, colors in before.items()
        if colors and len(set(colors)) == 1 and colors[0] in COLORS
    }


_BREAKS = parse_words("in on with wearing wears of by near to at the a an his her their is are has holding")
_PLURAL = parse_words("dogs puppies greyhounds terriers animals")
_MANY = parse_words("people men women boys girls children kids guys ladies adults players friends teenagers males")
_MORE = parse_words("another other others two three four five six several group many crowd each pair some both")
_SINGLE = parse_words("man woman boy girl child kid person guy lady toddler baby")


def _count(lines: Sequence[Sequence[str]], name: str) -> int | None:
    """Return the number of dogs or people, if at least two captions state it and none states another."""
    many = _PLURAL if name == "dog" else _MANY
    single = frozenset({"dog", "puppy"}) if name == "dog" else _SINGLE
    stated: list[int] = []
    singular = 0
    for line in lines:
        numbers = [
            NUMBERS.index(word)
            for place, word in enumerate(line)
            if word in NUMBERS[2:6] and any(other in many for other in line[place + 1 : place + 4])
        ]
        alone = sum(word in single for word in line)
        if len(numbers) == 1 and not (name == "person" and alone):
            stated.append(numbers[0])
        elif numbers:
            return None
        elif alone == 1 and not (set(line) & (many | _MORE)) and not (name == "person" and set(line) & _OTHERS):
            singular += 1
        elif alone or set(line) & many:
            stated.append(0)  # an unknown other number
    numbers_stated = {number for number in stated if number}
    if singular >= 4 and not stated:
        return 1
    return numbers_stated.pop() if len(numbers_stated) == 1 and sum(map(bool, stated)) >= 2 and not singular else None


_OTHERS = parse_words("crowd crowds group family couple team teams friends audience spectators onlookers people")

_CROWD = parse_words("people crowd crowds group audience spectators")


def _who(sets: Sequence[frozenset[str]], words: frozenset[str]) -> str | None:
    if not (words & THINGS["person"].words or words & THINGS["person"].hidden):
        return "nobody"
    mentions = {name: sum(bool(line & THINGS[name].words) for line in sets) for name in ("man", "woman", "boy", "girl")}
    kinds = [name for name, times in mentions.items() if times]
    plural = {"man": "men guys males", "woman": "women ladies females", "boy": "boys", "girl": "girls"}
    if len(kinds) == 1 and mentions[kinds[0]] >= 3:
        kind = kinds[0]
        several = sum(bool(line & parse_words(plural[kind])) for line in sets)
        if several == 0 and not words & (_OTHERS | _MANY):
            return kind
        return THINGS[kind].plural if several >= 3 else None
    crowd = sum(bool(line & _CROWD) for line in sets)
    return "people" if crowd >= 3 and len(kinds) != 1 else None
