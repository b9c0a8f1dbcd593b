"""Extract answers from model output: VQA-normalized text, yes or no, and the option of a multiple choice.

Normalization and yes or no agree with VLMEvalKit wherever it returns a result. Options are extracted more carefully:
the article in "A man is …" is not option A, and neither is a negated letter or a letter within the text of another
option. A leading or announced letter takes precedence over others. Ambiguous answers give None and count as wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from unicodedata import normalize

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = ("a", "an", "the")
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS)} | {"none": "0"}
# The contractions of the VQA scorer, which restores a single missing apostrophe.
_CONTRACTIONS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't
    not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll
    somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
    there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll
    what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's
    won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
_RESTORED = {
    word[:at] + word[at + 1 :]: word for word in _CONTRACTIONS.split() for at in range(len(word)) if word[at] == "'"
}
_RESTORED["somebody'd"] = "somebodyd"  # an error in the official table, kept so that scores stay comparable

_UNCERTAIN = ("sure", "certain", "clear", "know", "tell", "determine", "say", "able", "possible")
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
_SMALL_CUE = re.compile(_ANNOUNCED + r"([a-z])[)\]】*\"'.。\s]*$")  # nothing follows, so it is not an article
_BESIDE = re.compile(r"[)\]\"'*]*\s*(?:and|or|&|/|和|或|、)\s*[(\[\"'*]*([A-Z])(?![A-Za-z0-9'’])")
_NOT_BEFORE = re.compile(
    r"(?i:(?:\bnot|n't|n’t|\bneither|\bnor|\brather than|\binstead of|\bexcept)\s+"
    r"(?:be\s+|a\s+|an\s+|the\s+|option\s+|answer\s+)*[(\"'*]*|(?:不是|不选|而非|并非|不应选)\s*[(（]?)$"
)
_NOT_AFTER = re.compile(
    r"(?i:^[)\"'*.]*\s*(?:(?:is|are)\s*(?:not|n't)|isn't|is\s+(?:wrong|incorrect)|不对|错误|不正确))"
)
# A single A before a lowercase word is an article, unless the sentence continues as one about option A.
_AFTER_OPTION = re.compile(r"(?:is|are|was|because|since|as|and|or|but|would|for|which)\b")
_LISTED = re.compile(r"^[\s).,;:]*(?:and|or|&|/|和|或|,|、)?[\s(]*([A-Z])(?![A-Za-z0-9'’])")
MAX_WORDS = 30  # in a longer answer a single letter counts only near the beginning or end
_CONTEXT = 40  # characters before or after a letter in which a negation is recognized
_MAX_SENTENCE = 60  # characters of an answer that may be a sentence containing its option
_MAX_CHARS = 6000  # characters of an answer that are read, half of them at the end


def normalize_answer(text: str) -> str:
    """Normalize an answer as VQA does: lowercase, digits for number words, no punctuation and no articles.

    Examples
    --------
    >>> normalize_answer("The two dogs."), normalize_answer("1,000"), normalize_answer("dont-know")
    ('2 dogs', '1000', "don't know")
    """
    words = [_DIGITS.get(word, word) for word in _split_words(re.sub(r"[\n\t]", " ", text).strip().lower())]
    return " ".join(_RESTORED.get(word, word) for word in words if word not in _ARTICLES)


def extract_yes_no(text: str) -> str | None:
    """Return ``"yes"``, ``"no"`` or None.

    If only one of the two words occurs, it decides. If both occur, the first word of the answer decides if it is one
    of them. If neither occurs, a negation without an expression of doubt is a no, and Chinese answers are read by
    their beginning.

    Examples
    --------
    >>> [extract_yes_no(text) for text in ("Yes, there is", "no.", "There is not any dog.", "I am not sure", "")]
    ['yes', 'no', 'no', None, None]
    """
    bare = re.sub(r"[*:“”…]", " ", normalize("NFKC", text).lower())  # formatting around the word
    words = [word.strip("'‘’") for word in _split_words(bare)]
    matches = {"yes", "no"}.intersection(words)
    if len(matches) == 1:
        return matches.pop()
    if matches:
        alternatives = re.search(r"\b(?:yes|no)\s*(?:/|or)\s*(?:yes|no)\b", text.lower())
        return words[0] if words[0] in matches and not alternatives else None
    if any(word == "not" or word.endswith(("n't", "n’t")) or word == "cannot" for word in words):
        return None if any(word in _UNCERTAIN for word in words) else "no"
    chinese = normalize("NFKC", text).strip()
    return "no" if _CHINESE_NO.match(chinese) else "yes" if _CHINESE_YES.match(chinese) else None


def extract_option(text: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the option that the answer chooses, or None if it chooses none or several.

    Tried in this order: an answer that is the text of one option; a letter at the beginning, as in ``(B).`` or
    ``B. dog``; an announced letter, as in ``the answer is B`` or ``选B``; a single letter that is neither negated nor
    an article; the text of one option within the answer.

    Examples
    --------
    >>> animals = {"A": "cat", "B": "dog"}
    >>> answers = ("(B).", "A dog is there", "not A but B", "答案是（Ｂ）", "cat or dog")
    >>> [extract_option(text, animals) for text in answers]
    ['B', 'B', 'B', 'B', None]
    """
    text = normalize("NFKC", text).strip()
    if not text:
        return None
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS // 2]}\n{text[-_MAX_CHARS // 2 :]}"
    texts = {letter: _fold(option) for letter, option in options.items()}
    equal = [letter for letter, option in texts.items() if option == _fold(text) and len(option) > 1]
    if len(equal) == 1:
        return equal[0]
    leading = _find_leading(text, texts)
    if leading is not None:
        return leading
    announced = {match[1] for match in _CUE.finditer(text) if _is_choice(text, match.start(1), texts)}
    announced |= {match[1] for match in _find_beside(text) if _is_choice(text, match.start(1), texts)}
    lowercase = _SMALL_CUE.search(text)
    if lowercase and lowercase[1].upper() in texts and not announced:
        announced = {lowercase[1].upper()}
    if announced:
        return announced.pop() if len(announced) == 1 else None
    within = _find_texts(text, texts)
    letters = _find_letters(text, texts, [span for spans in within.values() for span in spans])
    if letters:
        return letters.pop() if len(letters) == 1 else None
    return next(iter(within)) if len(within) == 1 else None


def _split_words(text: str) -> list[str]:
    """Return the words of a text without punctuation, by the rule of the VQA scorer."""
    number = re.search(r"\d,\d", text)
    bare = text
    for mark in _PUNCTUATION:
        spaced = number or f"{mark} " in text or f" {mark}" in text
        bare = bare.replace(mark, "" if spaced else " ")
    return re.sub(r"\.(?!\d)", "", bare).split()


def _fold(text: str) -> str:
    return " ".join(normalize("NFKC", text).casefold().strip().rstrip(".。").split())


def _find_leading(text: str, texts: Mapping[str, str]) -> str | None:
    """Return the letter that the answer begins with, if it stands for an option."""
    match = _LEADING.match(text)
    if match is None or match[1].upper() not in texts:
        return None
    rest = text[match.end() :]
    if match[1].islower() and rest.strip() and not re.search(r"[).:]", match[0]):
        return None
    listed = _LISTED.match(text[match.end(1) :])
    if listed and listed[1] in texts and listed[1] != match[1]:
        return None  # "A, B" names two options
    return match[1].upper()


def _is_choice(text: str, position: int, texts: Mapping[str, str]) -> bool:
    """Return whether the letter at this position stands for an option and is not negated."""
    letter, rest = text[position], text[position + 1 :]
    if letter not in texts or _is_negated(text, position) or _NOT_AFTER.search(rest[: _CONTEXT - 1]):
        return False
    word = re.match(r"\s+([A-Za-z]\w+)", rest)
    return letter not in "AI" or word is None or _AFTER_OPTION.match(word[1]) is not None


def _find_beside(text: str) -> Iterator[re.Match[str]]:
    """Yield letters next to an announced one, as in ``the answer is A or B``."""
    for match in _CUE.finditer(text):
        if other := _BESIDE.match(text, match.end(1)):
            yield other


def _is_negated(text: str, position: int) -> bool:
    return _NOT_BEFORE.search(text[max(0, position - _CONTEXT) : position]) is not None


def _find_letters(text: str, texts: Mapping[str, str], taken: list[tuple[int, int]]) -> set[str]:
    """Return the single letters that stand for options, outside the texts of options."""
    words = [match.start() for match in re.finditer(r"\S+", text)]
    long = len(words) > MAX_WORDS
    letters: set[str] = set()
    for match in _LETTER.finditer(text):
        position = match.start(1)
        if any(a <= position < b for a, b in taken) or not _is_choice(text, position, texts):
            continue
        if long and words[2] < position < words[-5] and text[position - 1] != "(":
            continue
        letters.add(match[1])
    return letters


def _find_texts(text: str, texts: Mapping[str, str]) -> dict[str, list[tuple[int, int]]]:
    """Return the spans of option texts within the answer; a text inside a longer matching one does not count."""
    if len(text) > max(_MAX_SENTENCE, 2 * sum(map(len, texts.values()))):
        return {}  # such a long answer discusses the options instead of choosing one
    matches: dict[str, list[tuple[int, int]]] = {}
    for letter, option in texts.items():
        if len(option) < 2 and not option.isdigit():
            continue
        pattern = r"\s+".join(map(re.escape, option.split()))
        edges = (r"(?<!\w)" if option[:1].isascii() else "", r"(?!\w)" if option[-1:].isascii() else "")
        spans = [
            match.span()
            for match in re.finditer(edges[0] + pattern + edges[1], text, re.IGNORECASE)
            if not _is_negated(text, match.start())
        ]
        if spans:
            matches[letter] = spans
    all_spans = [span for spans in matches.values() for span in spans]

    def is_outermost(span: tuple[int, int]) -> bool:
        return not any(a <= span[0] and span[1] <= b and (a, b) != span for a, b in all_spans)

    outermost = {letter: [span for span in spans if is_outermost(span)] for letter, spans in matches.items()}
    return {letter: spans for letter, spans in outermost.items() if spans}
