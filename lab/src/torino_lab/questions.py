"""Write questions about a photo from its captions.

A thing that no caption mentions may still be visible, so absence is only asserted if no caption contains a word that
makes it doubtful.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from torino_lab.facts import Facts, single_key
from torino_lab.words import ACTIONS, COLORS, NUMBERS, SCENES, THINGS, Word, tokens

LETTERS = "ABCD"
UNCOUNTABLE = frozenset({"snow", "water", "sand", "grass", "fire", "bubbles", "sunglasses"})  # these take no article
SPORTS = ("skateboarding", "surfing", "skiing", "snowboarding", "climbing", "swimming", "riding a bike")
PRESENCE_QUESTIONS = 3.4  # scale of the number of presence questions, see QuestionMaker._presence_rates
WORD_BUDGET = 150  # words of all questions and answers about an image
MAX_QUESTIONS = 14  # questions about an image
MIN_QUESTIONS = 9  # with fewer, presence questions are added
MIN_WORD_COUNT = 5  # occurrences in all captions that a word of a target caption needs
MAX_CAPTION_WORDS = 16  # longest target caption


@dataclass(frozen=True)
class ImageQuestion:
    """A question about an image.

    Attributes
    ----------
    kind : str
        For example ``"presence"``, ``"colour"``, ``"choice"`` or ``"cell"``.
    text : str
        The question as it stands in the prompt, with its hint and options.
    answer : str
        The expected answer: short and in lower case, or the upper-case letter of a choice.
    answers : tuple of str
        Other correct answers.
    options : tuple of str
        Options of a choice, in the order of their letters.
    hint : str
        Text above the question.
    """

    kind: str
    text: str
    answer: str
    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    hint: str = ""

    @property
    def stem(self) -> str:
        """The question without hint and options."""
        return self.text.removeprefix(f"{self.hint}\n").split("\nA. ")[0]

    @property
    def size(self) -> int:
        """Number of words in question and answer; each Chinese character counts as one."""
        text = f"{self.text} {self.answer}"
        return len(text.split()) + sum("\u4e00" <= character <= "\u9fff" for character in text)


# ------------------------------------------------------------------ helpers


def with_article(name: str) -> str:
    """Return a thing with its article.

    Examples
    --------
    >>> with_article("dog"), with_article("umbrella"), with_article("snow")
    ('a dog', 'an umbrella', 'snow')
    """
    return name if name in UNCOUNTABLE else f"an {name}" if name[0] in "aeiou" else f"a {name}"


def join_options(stem: str, options: Sequence[str], hint: str = "") -> str:
    r"""Write hint, question and options below each other.

    Examples
    --------
    >>> join_options("Which?", ["cup", "dog"])
    'Which?\nA. cup\nB. dog'
    """
    lines = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    return f"{hint}\n{stem}\n{lines}" if hint else f"{stem}\n{lines}"


def make_choice(kind: str, stem: str, correct: str, wrong: Sequence[str], rng: Random, hint: str = "") -> ImageQuestion:
    """Write a question with the correct option and the first three wrong ones, in random order."""
    options = [correct, *wrong[:3]]
    rng.shuffle(options)
    answer = LETTERS[options.index(correct)]
    return ImageQuestion(kind, join_options(stem, options, hint), answer, options=tuple(options), hint=hint)


def fit_budget(
    questions: Iterable[ImageQuestion], rng: Random, budget: int = WORD_BUDGET, limit: int = MAX_QUESTIONS
) -> tuple[ImageQuestion, ...]:
    """Take questions in order while they fit into the budget, without repetitions, and shuffle them."""
    taken: dict[str, ImageQuestion] = {}
    words = 0
    for question in questions:
        if question.text not in taken and len(taken) < limit and words + question.size <= budget:
            taken[question.text] = question
            words += question.size
    fitting = list(taken.values())
    rng.shuffle(fitting)
    return tuple(fitting)


def weighted_sample(weights: Mapping[str, float], count: int, rng: Random) -> list[str]:
    """Draw keys without replacement, with probabilities proportional to their weights."""
    keyed = [(math.log(1 - rng.random()) / weight, name) for name, weight in weights.items() if weight > 0]
    return [name for _, name in sorted(keyed, reverse=True)[:count]]


class QuestionMaker:
    """Write questions about photos, using how often things occur, alone and together, in all photos.

    Parameters
    ----------
    facts : sequence of Facts
        Facts of all photos.
    """

    def __init__(self, facts: Sequence[Facts]) -> None:
        self.thing_counts = Counter(name for photo in facts for name, times in photo.things.items() if times >= 2)
        self.action_counts = Counter(name for photo in facts for name, times in photo.actions.items() if times >= 2)
        self.scene_counts = Counter(place for photo in facts if (place := photo.place()))
        self.cooccurrence = Counter(
            (name, other)
            for photo in facts
            for name in photo.things
            for other, times in photo.things.items()
            if times >= 2 and name != other
        )
        lines = Counter(word for photo in facts for caption in photo.captions for word in tokens(caption))
        self.vocabulary = frozenset(word for word, times in lines.items() if times >= MIN_WORD_COUNT)
        self._yes, self._no = self._presence_rates(facts, THINGS, self.thing_counts)
        self._yes_action, self._no_action = self._presence_rates(facts, ACTIONS, self.action_counts)

    def _presence_rates(
        self, facts: Sequence[Facts], table: Mapping[str, Word], counts: Mapping[str, int]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the probabilities of asking about a thing where it is present and absent, balanced over all photos."""
        lacking = dict.fromkeys(counts, 0.0)
        for photo in facts:
            for name in counts:
                if photo.lacks(table[name]):
                    lacking[name] += self.plausibility(photo, name)
        yes: dict[str, float] = {}
        no: dict[str, float] = {}
        for name, times in counts.items():
            if lacking[name]:
                number = min(PRESENCE_QUESTIONS * times**0.8, times, lacking[name] / 2)
                yes[name], no[name] = number / times, number / lacking[name]
        return yes, no

    def plausibility(self, facts: Facts, name: str) -> float:
        """Return how strongly the contents of a photo suggest a thing, from 0.5 (not at all) to 2."""
        present = [thing for thing, times in facts.things.items() if times >= 2]
        shares = [self.cooccurrence[thing, name] / (self.thing_counts[thing] + 5) for thing in present]
        return 0.5 + min(1.5, 6 * max(shares, default=0.0))

    def present(self, facts: Facts, count: int, rng: Random, min_captions: int = 2) -> list[str]:
        """Draw things that captions agree on, preferring rare ones."""
        weights = {name: self._yes.get(name, 0.0) for name, times in facts.things.items() if times >= min_captions}
        return weighted_sample(weights, count, rng)

    # -------------------------------------------------------------- kinds of questions

    def presence(self, facts: Facts, rng: Random, limit: int = 5) -> list[ImageQuestion]:
        """Ask whether things are in the photo; yes and no are balanced for each thing over all photos."""
        questions: list[ImageQuestion] = []
        for name, answer in self._sample_presence(facts, facts.things, THINGS, self._yes, self._no, rng):
            stem = rng.choice(("Is there {} in the photo?", "Do you see {}?"))
            questions.append(ImageQuestion("presence", stem.format(with_article(name)), answer))
        return questions[:limit]

    def action_presence(self, facts: Facts, rng: Random, limit: int = 2) -> list[ImageQuestion]:
        """Ask whether the photo shows an action."""
        sampled = self._sample_presence(facts, facts.actions, ACTIONS, self._yes_action, self._no_action, rng)
        return [ImageQuestion("action", f"Does the photo show {name}?", answer) for name, answer in sampled[:limit]]

    def _sample_presence(
        self,
        facts: Facts,
        mentions: Mapping[str, int],
        table: Mapping[str, Word],
        yes: Mapping[str, float],
        no: Mapping[str, float],
        rng: Random,
    ) -> list[tuple[str, str]]:
        sampled: list[tuple[str, str]] = []
        for name, word in table.items():
            present = mentions.get(name, 0) >= 2
            if present or facts.lacks(word):
                chance = yes.get(name, 0.0) if present else no.get(name, 0.0) * self.plausibility(facts, name)
                if rng.random() < chance:
                    sampled.append((name, "yes" if present else "no"))
        rng.shuffle(sampled)
        return sampled

    def about(self, facts: Facts, rng: Random) -> list[ImageQuestion]:
        """Ask for kind, people, color, count, place and action, each if the captions agree."""
        questions: list[ImageQuestion] = []
        questions += self.kind(facts, rng)
        if facts.who and (facts.who != "nobody" or rng.random() < 0.4):
            questions.append(ImageQuestion("who", rng.choice(("Who is in the photo?", "Who do you see?")), facts.who))
        for name, (color, _) in sorted(facts.colors.items()):
            questions.append(ImageQuestion("colour", f"What colour is the {name}?", color))
        for name, number in facts.counts.items():
            if number > 1 or rng.random() < 0.4:
                questions.append(
                    ImageQuestion("count", f"How many {THINGS[name].plural} are in the photo?", NUMBERS[number])
                )
        if place := facts.place():
            questions.append(ImageQuestion("scene", rng.choice(("Where is this?", "What place is this?")), place))
        if action := facts.doing():
            questions.append(ImageQuestion("doing", _ask_doing(facts), action))
        return questions

    def kind(self, facts: Facts, rng: Random) -> list[ImageQuestion]:
        """Ask which animal, vehicle or sport the photo shows."""
        questions: list[ImageQuestion] = []
        for group in ("animal", "vehicle"):
            members = [name for name, word in THINGS.items() if word.group == group]
            present = [name for name in members if name in facts.things]
            if len(present) == 1 and facts.things[present[0]] >= 3 and (present[0] != "dog" or rng.random() < 0.5):
                questions.append(ImageQuestion("kind", f"What {group} is in the photo?", present[0]))
            elif not present and rng.random() < 0.12 and all(facts.lacks(THINGS[name]) for name in members):
                questions.append(ImageQuestion("kind", f"What {group} is in the photo?", "none"))
        sports = {name: n for name, n in facts.actions.items() if name in SPORTS or name.startswith("playing ")}
        if (
            (sport := single_key(sports))
            and sports[sport] >= 3
            and sport not in ("climbing", "swimming", "playing guitar")
        ):
            questions.append(ImageQuestion("kind", "What sport is this?", sport.removeprefix("playing ")))
        return questions

    def choices(self, facts: Facts, rng: Random, chinese: bool = False, min_captions: int = 3) -> list[ImageQuestion]:
        """Write one choice about a thing, an action, a place and a color, each if the captions allow it."""
        questions: list[ImageQuestion] = []
        name = "choice-zh" if chinese else "choice"

        def add(stem: str, correct: Word, wrong: Iterable[Word]) -> None:
            texts = [word.chinese if chinese else word.name for word in (correct, *wrong)]
            if len(texts) == 4:
                questions.append(make_choice(name, stem, texts[0], texts[1:], rng))

        if things := self.present(facts, 1, rng, min_captions):
            weights = {
                name: self._no.get(name, 0.0) * self.plausibility(facts, name)
                for name, word in THINGS.items()
                if facts.lacks(word)
            }
            wrong = weighted_sample(weights, 3, rng)
            stem = (
                "图中有什么？" if chinese else rng.choice(("What is in the photo?", "Which of these is in the photo?"))
            )
            add(stem, THINGS[things[0]], [THINGS[other] for other in wrong])
        if action := facts.doing():
            candidates = {
                other: self.action_counts[other] ** 0.5 for other, word in ACTIONS.items() if facts.lacks(word)
            }
            stem = "图中在做什么？" if chinese else "What is happening in the photo?"
            add(stem, ACTIONS[action], [ACTIONS[other] for other in weighted_sample(candidates, 3, rng)])
        if place := facts.place():
            candidates = {other: self.scene_counts[other] for other in SCENES if _is_other_scene(facts, place, other)}
            stem = "这是哪里？" if chinese else "Where was the photo taken?"
            add(stem, SCENES[place], [SCENES[other] for other in weighted_sample(candidates, 3, rng)])
        if "dog" in facts.colors and facts.colors["dog"][1] >= 2:
            color = facts.colors["dog"][0]
            candidates = [other for other in COLORS if other != color and other not in facts.words]
            others = sorted(
                rng.sample(candidates, len(candidates)), key=lambda other: other not in ("brown", "black", "white")
            )[:3]
            stem = "狗是什么颜色？" if chinese else "What colour is the dog?"
            texts = [COLORS[c] if chinese else c for c in (color, *others)]
            questions.append(make_choice(name, stem, texts[0], texts[1:], rng))
        rng.shuffle(questions)
        return questions

    def caption(self, facts: Facts, rng: Random) -> list[ImageQuestion]:
        """Ask for a description; the answer is a caption that is short and has only common words."""
        candidates = [text for text in facts.captions if self._is_learnable(text)]
        return (
            [ImageQuestion("caption", "Describe the photo.", rng.choice(candidates), tuple(candidates))]
            if candidates
            else []
        )

    def _is_learnable(self, caption: str) -> bool:
        words = caption.split()
        return 4 <= len(words) <= MAX_CAPTION_WORDS and all(word == "," or word in self.vocabulary for word in words)

    def ask(self, facts: Facts, rng: Random, share: float = 1.0) -> tuple[ImageQuestion, ...]:
        """Ask all kinds of questions about a photo, within a share of the budget."""
        questions: list[ImageQuestion] = self.caption(facts, rng) if share == 1.0 else []
        questions += self.choices(facts, rng, chinese=True)[:1] if rng.random() < 0.35 * share else []
        rest: list[Callable[[], list[ImageQuestion]]] = [
            lambda: self.presence(facts, rng, 8 if share == 1.0 else 2),
            lambda: self.action_presence(facts, rng, 2 if share == 1.0 else 1),
            lambda: self.about(facts, rng),
            lambda: self.choices(facts, rng)[:2],
        ]
        others = [question for make in rest for question in make()]
        rng.shuffle(others)
        limit = max(1, round(MAX_QUESTIONS * share))
        for _ in range(6):
            if len(questions) + len(others) < MIN_QUESTIONS * share:
                others += self.presence(facts, rng, 2)
        return fit_budget([*questions, *others], rng, int(WORD_BUDGET * share), limit)


_NEAR = {  # scenes that may be visible together
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


def _is_other_scene(facts: Facts, place: str, other: str) -> bool:
    return other != place and not facts.words & SCENES[other].words and other not in _NEAR.get(place, "").split()


def _ask_doing(facts: Facts) -> str:
    if facts.who in ("man", "woman", "boy", "girl"):
        return f"What is the {facts.who} doing?"
    if facts.who == "nobody" and "dog" in facts.things:
        return "What is the dog doing?"
    return "What are they doing?"
