"""Questions about one photo, taken from what five people wrote under it, with care for what they did not write."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from torino_lab.facts import Facts, only
from torino_lab.words import ACTIONS, COLOURS, NUMBERS, SCENES, THINGS, Word, tokens

LETTERS = "ABCD"
MASS = frozenset({"snow", "water", "sand", "grass", "fire", "bubbles", "sunglasses"})  # no article
SPORTS = ("skateboarding", "surfing", "skiing", "snowboarding", "climbing", "swimming", "riding a bike")
ASKED = 3.4  # how many presence questions there are; see Asker._even
BUDGET = 150  # words of questions and answers about one picture
MOST = 14  # questions about one picture
FEWEST = 9  # below it more presence is asked for
SEEN = 5  # times a word must occur in all captions before the model is taught to write it
LONGEST = 16  # words of a caption


@dataclass(frozen=True)
class Question:
    """One question about one picture.

    Attributes
    ----------
    kind : str
        Such as ``"presence"``, ``"colour"``, ``"choice"``, ``"cell"``.
    text : str
        What is asked, options included, ready for the prompt.
    answer : str
        What the model should say: short, in lower case; the letter of a choice in upper case.
    answers : tuple of str
        Further answers that are right.
    options : tuple of str
        Of a choice, in the order of their letters.
    hint : str
        What stands above the question.
    """

    kind: str
    text: str
    answer: str
    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    hint: str = ""

    @property
    def stem(self) -> str:
        """The question without its hint and its options."""
        return self.text.removeprefix(f"{self.hint}\n").split("\nA. ")[0]

    @property
    def size(self) -> int:
        """Words of question and answer; Chinese signs count one each."""
        text = f"{self.text} {self.answer}"
        return len(text.split()) + sum("\u4e00" <= sign <= "\u9fff" for sign in text)


# ------------------------------------------------------------------ making questions


def named(name: str) -> str:
    """A thing with its article.

    Examples
    --------
    >>> named("dog"), named("umbrella"), named("snow")
    ('a dog', 'an umbrella', 'snow')
    """
    return name if name in MASS else f"an {name}" if name[0] in "aeiou" else f"a {name}"


def choice(kind: str, stem: str, right: str, wrong: Sequence[str], rng: Random, hint: str = "") -> Question:
    """A question with options A to D; of ``wrong`` the first three are taken."""
    options = [right, *wrong[:3]]
    rng.shuffle(options)
    lines = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    text = f"{hint}\n{stem}\n{lines}" if hint else f"{stem}\n{lines}"
    return Question(kind, text, LETTERS[options.index(right)], options=tuple(options), hint=hint)


def fit(questions: Iterable[Question], rng: Random, budget: int = BUDGET, most: int = MOST) -> tuple[Question, ...]:
    """As many of the questions, in a random order and none twice, as fit into the budget; the first weigh most."""
    taken: dict[str, Question] = {}
    words = 0
    for question in questions:
        if question.text not in taken and len(taken) < most and words + question.size <= budget:
            taken[question.text] = question
            words += question.size
    found = list(taken.values())
    rng.shuffle(found)
    return tuple(found)


def draw(weights: Mapping[str, float], count: int, rng: Random) -> list[str]:
    """Draw different keys, each with its weight."""
    keyed = [(math.log(1 - rng.random()) / weight, name) for name, weight in weights.items() if weight > 0]
    return [name for _, name in sorted(keyed, reverse=True)[:count]]


class Asker:
    """Asks about photos; knows how often, and beside what, the training photos show a thing.

    Parameters
    ----------
    facts : sequence of Facts
        Of all training photos.
    """

    def __init__(self, facts: Sequence[Facts]) -> None:
        self.often = Counter(name for photo in facts for name, times in photo.things.items() if times >= 2)
        self.acted = Counter(name for photo in facts for name, times in photo.actions.items() if times >= 2)
        self.position_mode = Counter(place for photo in facts if (place := photo.place()))
        self.beside = Counter(
            (one, other)
            for photo in facts
            for one in photo.things
            for other, times in photo.things.items()
            if times >= 2 and one != other
        )
        lines = Counter(word for photo in facts for caption in photo.captions for word in tokens(caption))
        self.known = frozenset(word for word, times in lines.items() if times >= SEEN)
        self._yes, self._no = self._even(facts, THINGS, self.often)
        self._yes_acted, self._no_acted = self._even(facts, ACTIONS, self.acted)

    def _even(
        self, facts: Sequence[Facts], table: Mapping[str, Word], often: Mapping[str, int]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """How likely a thing is asked for where it is and where it is not: as many yes as no over all photos."""
        lacking = dict.fromkeys(often, 0.0)
        for photo in facts:
            for name in often:
                if photo.lacks(table[name]):
                    lacking[name] += self.tempting(photo, name)
        yes: dict[str, float] = {}
        no: dict[str, float] = {}
        for name, times in often.items():
            if lacking[name]:
                asked = min(ASKED * times**0.8, times, lacking[name] / 2)
                yes[name], no[name] = asked / times, asked / lacking[name]
        return yes, no

    def tempting(self, facts: Facts, name: str) -> float:
        """How strongly what is on the photo suggests a thing: 0.5 for not at all, up to 2."""
        here = [one for one, times in facts.things.items() if times >= 2]
        shares = [self.beside[one, name] / (self.often[one] + 5) for one in here]
        return 0.5 + min(1.5, 6 * max(shares, default=0.0))

    # -------------------------------------------------------------- negatives

    def absent(self, facts: Facts, how: str, count: int, rng: Random) -> list[str]:
        """Things that no caption mentions nor hides, by chance, by how common they are, or by what is there."""
        able = {name: self.often[name] for name, word in THINGS.items() if self.often[name] and facts.lacks(word)}
        if how == "adversarial":
            here = [name for name, times in facts.things.items() if times >= 2]
            weights = {
                name: max((self.beside[one, name] / math.sqrt(self.often[one] + 1) for one in here), default=0.0) ** 1.5
                for name in able
            }
            if any(weights.values()):
                return draw(weights, count, rng)
        power = 0.5 if how == "random" else 1.0
        return draw({name: often**power for name, often in able.items()}, count, rng)

    def present(self, facts: Facts, count: int, rng: Random, least: int = 2) -> list[str]:
        """Things that captions agree on, the rarer ones first to be asked for."""
        found = {name: self._yes.get(name, 0.0) for name, times in facts.things.items() if times >= least}
        return draw(found, count, rng)

    # -------------------------------------------------------------- kinds of questions

    def presence(self, facts: Facts, rng: Random, most: int = 5) -> list[Question]:
        """Is there …? Yes and no are even for each thing over all photos, so no answer gives away the next."""
        asked: list[Question] = []
        for name, answer in self._tossed(facts, facts.things, THINGS, self._yes, self._no, rng):
            stem = rng.choice(("Is there {} in the photo?", "Do you see {}?"))
            asked.append(Question("presence", stem.format(named(name)), answer))
        return asked[:most]

    def happening(self, facts: Facts, rng: Random, most: int = 2) -> list[Question]:
        """Whether the photo shows an action."""
        found = self._tossed(facts, facts.actions, ACTIONS, self._yes_acted, self._no_acted, rng)
        return [Question("action", f"Does the photo show {name}?", answer) for name, answer in found[:most]]

    def _tossed(
        self,
        facts: Facts,
        said: Mapping[str, int],
        table: Mapping[str, Word],
        yes: Mapping[str, float],
        no: Mapping[str, float],
        rng: Random,
    ) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for name, word in table.items():
            there = said.get(name, 0) >= 2
            if there or facts.lacks(word):
                chance = yes.get(name, 0.0) if there else no.get(name, 0.0) * self.tempting(facts, name)
                if rng.random() < chance:
                    found.append((name, "yes" if there else "no"))
        rng.shuffle(found)
        return found

    def about(self, facts: Facts, rng: Random) -> list[Question]:
        """Kind, who, colour, count, place and action, each where the captions agree."""
        asked: list[Question] = []
        asked += self.kind(facts, rng)
        if facts.who and (facts.who != "nobody" or rng.random() < 0.4):
            asked.append(Question("who", rng.choice(("Who is in the photo?", "Who do you see?")), facts.who))
        for name, (colour, _) in sorted(facts.colours.items()):
            asked.append(Question("colour", f"What colour is the {name}?", colour))
        for name, number in facts.counts.items():
            if number > 1 or rng.random() < 0.4:
                asked.append(Question("count", f"How many {THINGS[name].plural} are in the photo?", NUMBERS[number]))
        if place := facts.place():
            asked.append(Question("scene", rng.choice(("Where is this?", "What place is this?")), place))
        if action := facts.doing():
            asked.append(Question("doing", _doing(facts), action))
        return asked

    def kind(self, facts: Facts, rng: Random) -> list[Question]:
        """Which animal, which vehicle, which sport."""
        asked: list[Question] = []
        for group in ("animal", "vehicle"):
            able = [name for name, word in THINGS.items() if word.group == group]
            here = [name for name in able if name in facts.things]
            if len(here) == 1 and facts.things[here[0]] >= 3 and (here[0] != "dog" or rng.random() < 0.5):
                asked.append(Question("kind", f"What {group} is in the photo?", here[0]))
            elif not here and rng.random() < 0.12 and all(facts.lacks(THINGS[name]) for name in able):
                asked.append(Question("kind", f"What {group} is in the photo?", "none"))
        sports = {name: n for name, n in facts.actions.items() if name in SPORTS or name.startswith("playing ")}
        if (sport := only(sports)) and sports[sport] >= 3 and sport not in ("climbing", "swimming", "playing guitar"):
            asked.append(Question("kind", "What sport is this?", sport.removeprefix("playing ")))
        return asked

    def choices(self, facts: Facts, rng: Random, chinese: bool = False, least: int = 3) -> list[Question]:
        """One choice of each sort that the captions allow: thing, action, place, colour."""
        asked: list[Question] = []
        name = "choice-zh" if chinese else "choice"

        def add(stem: str, right: Word, wrong: Iterable[Word]) -> None:
            texts = [word.chinese if chinese else word.name for word in (right, *wrong)]
            if len(texts) == 4:
                asked.append(choice(name, stem, texts[0], texts[1:], rng))

        if things := self.present(facts, 1, rng, least):
            weights = {
                name: self._no.get(name, 0.0) * self.tempting(facts, name)
                for name, word in THINGS.items()
                if facts.lacks(word)
            }
            wrong = draw(weights, 3, rng)
            stem = (
                "图中有什么？" if chinese else rng.choice(("What is in the photo?", "Which of these is in the photo?"))
            )
            add(stem, THINGS[things[0]], [THINGS[other] for other in wrong])
        if action := facts.doing():
            able = {other: self.acted[other] ** 0.5 for other, word in ACTIONS.items() if facts.lacks(word)}
            stem = "图中在做什么？" if chinese else "What is happening in the photo?"
            add(stem, ACTIONS[action], [ACTIONS[other] for other in draw(able, 3, rng)])
        if place := facts.place():
            able = {other: self.position_mode[other] for other in SCENES if _elsewhere(facts, place, other)}
            stem = "这是哪里？" if chinese else "Where was the photo taken?"
            add(stem, SCENES[place], [SCENES[other] for other in draw(able, 3, rng)])
        if "dog" in facts.colours and facts.colours["dog"][1] >= 2:
            colour = facts.colours["dog"][0]
            able = [other for other in COLOURS if other != colour and other not in facts.words]
            others = sorted(rng.sample(able, len(able)), key=lambda other: other not in ("brown", "black", "white"))[:3]
            stem = "狗是什么颜色？" if chinese else "What colour is the dog?"
            texts = [COLOURS[c] if chinese else c for c in (colour, *others)]
            asked.append(choice(name, stem, texts[0], texts[1:], rng))
        rng.shuffle(asked)
        return asked

    def caption(self, facts: Facts, rng: Random) -> list[Question]:
        """One of the captions, if it is short and all its words are common enough to be learned."""
        able = [text for text in facts.captions if self._plain(text)]
        return [Question("caption", "Describe the photo.", rng.choice(able), tuple(able))] if able else []

    def _plain(self, caption: str) -> bool:
        words = caption.split()
        return 4 <= len(words) <= LONGEST and all(word == "," or word in self.known for word in words)

    def ask(self, facts: Facts, rng: Random, share: float = 1.0) -> tuple[Question, ...]:
        """All sorts of questions about a photo, within the budget; ``share`` of it where other things are asked too."""
        asked: list[Question] = self.caption(facts, rng) if share == 1.0 else []
        asked += self.choices(facts, rng, chinese=True)[:1] if rng.random() < 0.35 * share else []
        rest: list[Callable[[], list[Question]]] = [
            lambda: self.presence(facts, rng, 8 if share == 1.0 else 2),
            lambda: self.happening(facts, rng, 2 if share == 1.0 else 1),
            lambda: self.about(facts, rng),
            lambda: self.choices(facts, rng)[:2],
        ]
        others = [question for make in rest for question in make()]
        rng.shuffle(others)
        most = max(1, round(MOST * share))
        for _ in range(6):
            if len(asked) + len(others) < FEWEST * share:
                others += self.presence(facts, rng, 2)
        return fit([*asked, *others], rng, int(BUDGET * share), most)


_NEAR = {  # places that a photo of one may show as well
    "beach": "sea lake river",
    "sea": "beach lake",
    "lake": "river sea pool beach",
    "river": "lake sea forest",
    "forest": "grass mountain river",
    "mountain": "snow forest desert",
    "snow": "mountain",
    "grass": "playground",
    "street": "track",
    "stage": "indoors",
    "desert": "beach mountain",
    "pool": "lake",
}


def _elsewhere(facts: Facts, place: str, other: str) -> bool:
    return other != place and not facts.words & SCENES[other].words and other not in _NEAR.get(place, "").split()


def _doing(facts: Facts) -> str:
    if facts.who in ("man", "woman", "boy", "girl"):
        return f"What is the {facts.who} doing?"
    if facts.who == "nobody" and "dog" in facts.things:
        return "What is the dog doing?"
    return "What are they doing?"
