"""What a model meant: answers in the form in which VQA compares them, yes or no, and the option of a multiple choice.

Normal form and yes or no follow VLMEvalKit where it decides. Options are read more closely than it does: the article in
"A man is …" is no choice of option A, nor is a letter that is denied or that stands in the text of another option, and
a letter that leads or is announced goes before others. What stays unclear is None, and counts as wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from unicodedata import normalize

_SIGNS = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = ("a", "an", "the")
_COUNTED = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {word: str(number) for number, word in enumerate(_COUNTED)} | {"none": "0"}
# The contractions that the VQA scorer knows; it mends each where exactly one apostrophe is missing.
_CONTRACTIONS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't
    not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll
    somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
    there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll
    what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's
    won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
_MENDED = {
    word[:at] + word[at + 1 :]: word for word in _CONTRACTIONS.split() for at in range(len(word)) if word[at] == "'"
}
_MENDED["somebody'd"] = "somebodyd"  # a slip of the official table, kept since scores are compared by it

_UNSURE = ("sure", "certain", "clear", "know", "tell", "determine", "say", "able", "possible")
_CHINESE_NO = re.compile(r"^(?:不(?!知道|清楚|确定|能确定|一定|好说)|否|没有?|并非|错)")
_CHINESE_YES = re.compile(r"^(?:是(?!否)|有(?!没有)|对|正确)")

_LETTER = re.compile(r"(?<![A-Za-z0-9'’])(?<![A-Za-z0-9]-)(?<![A-Z]\.)([A-Z])(?![A-Za-z0-9'’]|-[A-Za-z0-9])")
_LEADING = re.compile(r"""^[\s("'*#<{【「\[]*([A-Za-z])(?:[ "'*」]*[).:,;>}\]】、。!?*]+|["'*」 ]*(?:\n|$))""")
_ANNOUNCED = (
    r"(?:(?i:\b(?:answer|option|choice|choose|select|pick)(?:ed|s)?\b)"
    r"(?i:\s|[:*\"'(\[]|\b(?:is|are|be|would|should|the|correct|best|right|letter|option|choice|answer)\b){0,12}"
    r"|(?:答案|选项|选择|应选|选)(?:\s|[是为应选:(\[【]){0,6})"
)
_CUE = re.compile(_ANNOUNCED + r"([A-Z])(?![A-Za-z0-9'’])")
_SMALL_CUE = re.compile(_ANNOUNCED + r"([a-z])[)\]】*\"'.。\s]*$")  # nothing follows, so it is not the article
_BESIDE = re.compile(r"[)\]\"'*]*\s*(?:and|or|&|/|和|或|、)\s*[(\[\"'*]*([A-Z])(?![A-Za-z0-9'’])")
_NOT_BEFORE = re.compile(
    r"(?i:(?:\bnot|n't|n’t|\bneither|\bnor|\brather than|\binstead of|\bexcept)\s+"
    r"(?:be\s+|a\s+|an\s+|the\s+|option\s+|answer\s+)*[(\"'*]*|(?:不是|不选|而非|并非|不应选)\s*[(（]?)$"
)
_NOT_AFTER = re.compile(
    r"(?i:^[)\"'*.]*\s*(?:(?:is|are)\s*(?:not|n't)|isn't|is\s+(?:wrong|incorrect)|不对|错误|不正确))"
)
# A single A before a small letter is the article, unless the sentence goes on as one about option A does.
_AFTER_OPTION = re.compile(r"(?:is|are|was|because|since|as|and|or|but|would|for|which)\b")
_LISTED = re.compile(r"^[\s).,;:]*(?:and|or|&|/|和|或|,|、)?[\s(]*([A-Z])(?![A-Za-z0-9'’])")
LONG = 30  # words; in a longer answer a letter by itself counts only near its beginning or end
_NEAR = 40  # characters before or after a letter that can deny it
_SENTENCE = 60  # characters; an answer no longer may be a sentence that names its option
_MOST = 6000  # characters of an answer that are read, half of them at its end


def normalise(text: str) -> str:
    """An answer as VQA compares it: small letters, numbers as figures, no punctuation and no articles.

    Examples
    --------
    >>> normalise("The two dogs."), normalise("1,000"), normalise("dont-know")
    ('2 dogs', '1000', "don't know")
    """
    words = [_NUMBERS.get(word, word) for word in _unmarked(text.replace("\n", " ").replace("\t", " ").strip().lower())]
    return " ".join(_MENDED.get(word, word) for word in words if word not in _ARTICLES)


def yes_or_no(text: str) -> str | None:
    """``"yes"``, ``"no"`` or None, as the answer says.

    Exactly one of the two words anywhere decides. Where both stand, the first word decides if it is one of them; where
    neither does, a negation that is no doubt is a no, and Chinese answers are read by how they begin.

    Examples
    --------
    >>> [yes_or_no(text) for text in ("Yes, there is", "no.", "There is not any dog.", "I am not sure", "")]
    ['yes', 'no', 'no', None, None]
    """
    bare = re.sub(r"[*:“”…]", " ", normalize("NFKC", text).lower())  # marks that models set around the word
    words = [word.strip("'‘’") for word in _unmarked(bare)]
    said = {"yes", "no"}.intersection(words)
    if len(said) == 1:
        return said.pop()
    if said:
        both = re.search(r"\b(?:yes|no)\s*(?:/|or)\s*(?:yes|no)\b", text.lower())
        return words[0] if words[0] in said and not both else None
    if any(word == "not" or word.endswith(("n't", "n’t")) or word == "cannot" for word in words):
        return None if any(word in _UNSURE for word in words) else "no"
    chinese = normalize("NFKC", text).strip()
    return "no" if _CHINESE_NO.match(chinese) else "yes" if _CHINESE_YES.match(chinese) else None


def option_of(text: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that the answer chooses, or None where it chooses none or several.

    Tried in this order: the text of one option and nothing else; a letter at the beginning, as in ``(B).`` or
    ``B. dog``; a letter that is announced, as in ``the answer is B`` or ``选B``; a letter by itself that is neither
    denied nor the article; the text of one option within the answer.

    Examples
    --------
    >>> animals = {"A": "cat", "B": "dog"}
    >>> [option_of(text, animals) for text in ("(B).", "A dog is there", "not A but B", "答案是（Ｂ）", "cat or dog")]
    ['B', 'B', 'B', 'B', None]
    """
    text = normalize("NFKC", text).strip()
    if not text:
        return None
    if len(text) > _MOST:
        text = f"{text[: _MOST // 2]}\n{text[-_MOST // 2 :]}"
    texts = {letter: _flat(one) for letter, one in options.items()}
    same = [letter for letter, one in texts.items() if one == _flat(text) and len(one) > 1]
    if len(same) == 1:
        return same[0]
    leading = _leading(text, texts)
    if leading is not None:
        return leading
    announced = {match[1] for match in _CUE.finditer(text) if _chooses(text, match.start(1), texts)}
    announced |= {match[1] for match in _beside(text) if _chooses(text, match.start(1), texts)}
    small = _SMALL_CUE.search(text)
    if small and small[1].upper() in texts and not announced:
        announced = {small[1].upper()}
    if announced:
        return announced.pop() if len(announced) == 1 else None
    within = _texts_within(text, texts)
    letters = _letters(text, texts, [span for spans in within.values() for span in spans])
    if letters:
        return letters.pop() if len(letters) == 1 else None
    return next(iter(within)) if len(within) == 1 else None


def _unmarked(text: str) -> list[str]:
    """The words of a text without punctuation, by the rule of the VQA scorer."""
    number = re.search(r"\d,\d", text)
    bare = text
    for sign in _SIGNS:
        beside = number or f"{sign} " in text or f" {sign}" in text
        bare = bare.replace(sign, "" if beside else " ")
    return re.sub(r"\.(?!\d)", "", bare).split()


def _flat(text: str) -> str:
    return " ".join(normalize("NFKC", text).casefold().strip().rstrip(".。").split())


def _leading(text: str, texts: Mapping[str, str]) -> str | None:
    """The letter that the answer begins with, if it stands for an option there."""
    match = _LEADING.match(text)
    if match is None or match[1].upper() not in texts:
        return None
    rest = text[match.end() :]
    if match[1].islower() and rest.strip() and not re.search(r"[).:]", match[0]):
        return None
    listed = _LISTED.match(text[match.end(1) :])
    if listed and listed[1] in texts and listed[1] != match[1]:
        return None  # "A, B": two are named
    return match[1].upper()


def _chooses(text: str, at: int, texts: Mapping[str, str]) -> bool:
    """Whether the letter at this place stands for an option and is not denied."""
    if text[at] not in texts or _denied(text, at) or _NOT_AFTER.search(text[at + 1 : at + _NEAR]):
        return False
    word = re.match(r"\s+([A-Za-z]\w+)", text[at + 1 :])
    return text[at] not in "AI" or word is None or _AFTER_OPTION.match(word[1]) is not None


def _beside(text: str) -> Iterator[re.Match[str]]:
    """Letters that stand beside one that is announced, as in ``the answer is A or B``."""
    for match in _CUE.finditer(text):
        if other := _BESIDE.match(text, match.end(1)):
            yield other


def _denied(text: str, at: int) -> bool:
    return _NOT_BEFORE.search(text[max(0, at - _NEAR) : at]) is not None


def _letters(text: str, texts: Mapping[str, str], taken: list[tuple[int, int]]) -> set[str]:
    """The letters that stand by themselves for options, outside the texts of options."""
    words = [match.start() for match in re.finditer(r"\S+", text)]
    long = len(words) > LONG
    found: set[str] = set()
    for match in _LETTER.finditer(text):
        at = match.start(1)
        if any(a <= at < b for a, b in taken) or not _chooses(text, at, texts):
            continue
        if long and words[2] < at < words[-5] and text[at - 1] != "(":
            continue
        found.add(match[1])
    return found


def _texts_within(text: str, texts: Mapping[str, str]) -> dict[str, list[tuple[int, int]]]:
    """The options whose text stands in the answer, with the places; a text inside a longer one found does not count."""
    if len(text) > max(_SENTENCE, 2 * sum(map(len, texts.values()))):
        return {}  # so long an answer talks about the options rather than choosing one
    found: dict[str, list[tuple[int, int]]] = {}
    for letter, one in texts.items():
        if len(one) < 2 and not one.isdigit():
            continue
        pattern = r"\s+".join(map(re.escape, one.split()))
        edges = (r"(?<!\w)" if one[:1].isascii() else "", r"(?!\w)" if one[-1:].isascii() else "")
        spans = [
            match.span()
            for match in re.finditer(edges[0] + pattern + edges[1], text, re.IGNORECASE)
            if not _denied(text, match.start())
        ]
        if spans:
            found[letter] = spans
    covered = [span for spans in found.values() for span in spans]

    def free(span: tuple[int, int]) -> bool:
        return not any(a <= span[0] and span[1] <= b and (a, b) != span for a, b in covered)

    kept = {letter: [span for span in spans if free(span)] for letter, spans in found.items()}
    return {letter: spans for letter, spans in kept.items() if spans}
